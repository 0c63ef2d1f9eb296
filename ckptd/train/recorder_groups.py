"""Process groups, and the channels of point-to-point calls, as rows of the ring."""

from __future__ import annotations

import hashlib
import threading
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckptd.monitor.ring import RingGroup, RingWriter

__all__ = ["Groups"]


class Groups:
    """Finds the row of a group; a group that is new gets one.

    Rows are known to other ranks by a hash of the group's name and ranks. PyTorch gives the names
    of destroyed groups away again, in the same order on all ranks, so a name is counted.
    """

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._of: dict[str, tuple[Any, RingGroup | None]] = {}
        self._lock = threading.Lock()
        self._lives: dict[str, int] = {}
        self._channels: dict[tuple[str, int, int], RingGroup | None] = {}

    def of(self, group: Any) -> RingGroup | None:
        """Return the row for collectives of `group`; None when the table is full."""
        name = group.group_name
        known = self._of.get(name)
        if known is not None and known[0]() is group:
            return known[1]
        with self._lock:
            known = self._of.get(name)
            if known is not None and known[0]() is group:
                return known[1]  # another thread was faster
            return self._meet(group, name, known)

    def channel(self, group: Any, sender: int, receiver: int) -> RingGroup | None:
        """Return the row for calls from one rank of `group` to another, ranks of the group.

        A receiver that takes from anybody has a channel of its own, with `sender` -1.
        """
        self.of(group)  # notices that the name belongs to another group now
        key = (group.group_name, sender, receiver)
        if key not in self._channels:
            with self._lock:
                if key not in self._channels:
                    self._channels[key] = self._add_channel(group, sender, receiver)
        return self._channels[key]

    def _meet(
        self, group: Any, name: str, known: tuple[Any, RingGroup | None] | None
    ) -> RingGroup | None:
        if known is not None:
            if group not in distributed_c10d._world.pg_map:
                # Python keeps no hold of this one: the same group shows a new face at each call.
                return known[1]
            self._lives[name] = self._lives.get(name, 0) + 1
            for key in [k for k in self._channels if k[0] == name]:
                del self._channels[key]
        ranks = _ranks(group)
        row = self._ring.add_group(
            _ident(self._name(name), ranks),
            group.size(),
            group.rank(),
            ranks,
            name,
            group.group_desc,
        )
        self._of[name] = (weakref.ref(group), row)
        return row

    def _add_channel(self, group: Any, sender: int, receiver: int) -> RingGroup | None:
        name = group.group_name
        everybody = _ranks(group)
        ends = [r for r in (sender, receiver) if r >= 0]
        ranks = [everybody[r] for r in ends] if everybody else []
        return self._ring.add_group(
            _ident(f"{self._name(name)} {sender}>{receiver}", everybody),
            len(ends),
            ends.index(group.rank()) if group.rank() in ends else 0,
            ranks,
            f"{name} {sender}>{receiver}",
            "p2p",
        )

    def _name(self, name: str) -> str:
        life = self._lives.get(name, 0)
        return f"{name}#{life}" if life else name


def _ranks(group: Any) -> list[int]:
    """Return the global ranks of a group in order; empty if PyTorch cannot tell."""
    known = distributed_c10d._world.pg_group_ranks.get(group)
    if known:
        return sorted(known, key=known.__getitem__)
    if dist.is_initialized() and group.size() == dist.get_world_size():
        return list(range(group.size()))
    return []


def _ident(name: str, ranks: list[int]) -> int:
    text = f"{name} {','.join(map(str, ranks))}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") or 1
