"""Process groups, and the channels of point-to-point calls, as rows of the ring."""

from __future__ import annotations

import hashlib
import threading
import weakref
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckptd.monitor.ring import RingGroup, RingWriter
from ckptd.train.recorder_calls import CallKind

__all__ = ["Groups", "calls_so_far"]


class Groups:
    """Finds the row of a group; a group that is new gets one.

    Rows are known to other ranks by a hash of the group's name and ranks. PyTorch gives the names
    of destroyed groups away again, in the same order on all ranks, so a name is counted.

    A group that had made calls before this recorder saw it is named by their number as well. Ranks
    that began to record at the same point of the program find the same number, and their counts
    can be compared; a rank that began elsewhere has another group in the eyes of the diagnosis.
    """

    def __init__(self, ring: RingWriter, *, counted: bool = False) -> None:
        self._ring = ring
        # Counts are PyTorch's own, and not to be compared with those of a hook.
        self._counted = counted
        self._of: dict[str, tuple[Any, RingGroup | None]] = {}
        self._lock = threading.Lock()
        self._lives: dict[str, int] = {}
        self._earlier: dict[str, int] = {}
        self._channels: dict[tuple[str, int, int], RingGroup | None] = {}

    def row(self, kind: CallKind, group: Any, peer: int) -> RingGroup | None:
        """Return the row for a call; `peer` is the other rank of a point-to-point call."""
        if not kind.is_p2p:
            return self.of(group)
        me = group.rank()
        sends = kind.operator == "send"
        return self.channel(group, me if sends else peer, peer if sends else me)

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
            self._earlier.pop(name, None)
            for key in [k for k in self._channels if k[0] == name]:
                del self._channels[key]
        self._earlier[name] = 0 if self._counted else calls_so_far(group)
        ranks = _ranks(group)
        row = self._ring.add_group(
            _ident(self._name(name), ranks),
            group.size(),
            group.rank(),
            ranks,
            name,
            group.group_desc,
            timeout_s=_timeout_s(group),
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
            timeout_s=_timeout_s(group),
        )

    def _name(self, name: str) -> str:
        life, earlier = self._lives.get(name, 0), self._earlier.get(name, 0)
        began = "@counted" if self._counted else f"@{earlier}" if earlier else ""
        return name + (f"#{life}" if life else "") + began


def calls_so_far(group: Any) -> int:
    """Return how many collectives the group itself has counted; 0 if it does not count."""
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return 0


def _timeout_s(group: Any) -> float:
    """Return after how long the backend of a group gives a call up, in seconds; 0 if unknown."""
    found = 0.0
    with suppress(RuntimeError, AttributeError, TypeError):
        for device in group._device_types:
            options = group._get_backend(device).options
            found = max(found, options._timeout.total_seconds())
    return found


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
