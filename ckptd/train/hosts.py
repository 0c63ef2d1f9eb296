"""Which ranks share a host: those share reads."""

from __future__ import annotations

import os

import msgspec

from ckptd.decoding import json_decoder
from ckptd.engine.hostinfo import address_towards, host_id
from ckptd.train.agree import Agreement

__all__ = ["bind_address", "host_count", "host_id", "host_members"]

_members = json_decoder(dict[str, tuple[int, ...]])


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
    return _members.decode(raw)


def bind_address() -> str:
    """Return the address by which other nodes of the job reach this one; see `address_towards`."""
    return address_towards(os.environ.get("MASTER_ADDR", "localhost"))
