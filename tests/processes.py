"""Which processes live, as the kernel says."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["agents_in", "lives"]


def lives(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and is not yet waited for does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def agents_in(folder: Path) -> list[int]:
    """Return the node agents whose sockets lie in `folder`."""
    wanted = [b"ckptd.agent", str(folder).encode()]
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and lives(int(name)):
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if all(word in words for word in wanted):
                found.append(int(name))
    return found
