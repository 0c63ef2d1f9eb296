"""Which ranks share a host: those share reads."""

from __future__ import annotations

import socket

import msgspec

from ckptd.train.agree import Agreement

__all__ = ["host_count", "host_members"]


def host_members(agreement: Agreement) -> tuple[int, ...]:
    """Return the group ranks on this rank's host, rising. One round on the board."""
    return _hosts(agreement)[host_id()]


def host_count(agreement: Agreement) -> int:
    """Return the number of hosts of the group. One round on the board."""
    return len(_hosts(agreement))


def _hosts(agreement: Agreement) -> dict[str, tuple[int, ...]]:
    own = host_id()

    def tabulate(ids: list[bytes]) -> bytes:
        table: dict[str, list[int]] = {}
        for rank, name in enumerate(ids):
            table.setdefault(name.decode(), []).append(rank)
        return msgspec.json.encode(table)

    raw = agreement.all_reports("hosts", own.encode(), tabulate)
    return msgspec.json.decode(raw, type=dict[str, tuple[int, ...]])


def host_id() -> str:
    """Name the host as its processes see it: containers with their own names share nothing."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"
