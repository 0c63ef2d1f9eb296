"""How much memory this process may still use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_bytes"]

_CGROUP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping: of the machine or the container.

    Page cache counts as available, since the kernel gives it back.
    """
    import psutil  # 15 ms that listing a folder need not pay

    machine = int(psutil.virtual_memory().available)
    return min([machine, *_rooms()])


def _rooms() -> Iterator[int]:
    """Yield the room below the memory limit of this control group and of those around it."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "")
            yield from _walk(_CGROUP, own, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _walk(_CGROUP / "memory", own, *names)


def _walk(top: Path, own: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """Go from the own group up to `top`, where a container's mount begins."""
    folder = top / own.lstrip("/")
    if not folder.exists():  # the path is the host's, the mount is the container's
        folder = top
    while True:
        room = _room(folder, limit, usage, prefix)
        if room is not None:
            yield room
        if folder == top or top not in folder.parents:
            return
        folder = folder.parent


def _room(folder: Path, limit: str, usage: str, prefix: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        if most == "max" or int(most) >= _NO_LIMIT:
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        return max(0, int(most) - used + cache)
    except (OSError, ValueError):
        return None
