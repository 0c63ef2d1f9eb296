"""Making of process groups (``init_process_group``) recorded as a wait of its members.

A rank that is stopped before its first collective holds the others up in `init_process_group`.
Without a sign that they wait, nothing could be said of a job that never came to its first call.
Only counters are written, of a row of its own for each set of members: slots belong to the source
of calls, which may be one without Python.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch.distributed import distributed_c10d

from ckptd.monitor.ring import MAKING, RingGroup, RingWriter

_HELPER = "_new_process_group_helper"
_MOST_ROWS = 64
"""Rows of the ring's table that this may take: the calls of the groups themselves need the others.
"""


class Making:
    """Writes into `ring` what the making of groups shows, from `install` until `remove`."""

    def __init__(self, ring: RingWriter, broken: Callable[[BaseException], None]) -> None:
        self.on = True
        self._ring = ring
        self._broken = broken
        self._rows: dict[tuple[int, ...], RingGroup | None] = {}
        self._before: Any = None

    def install(self) -> None:
        """Wrap what makes a group; a PyTorch without it is watched from its first call on."""
        before = getattr(distributed_c10d, _HELPER, None)
        if before is None:
            return

        @wraps(before)
        def made(size: Any, rank: Any, ranks: Any, *args: Any, **more: Any) -> Any:
            timeout = more.get("timeout")
            call = self._begin(size, rank, ranks, timeout) if self.on else None
            try:
                return before(size, rank, ranks, *args, **more)
            finally:
                self._end(call)

        self._before = before
        setattr(distributed_c10d, _HELPER, made)

    def remove(self) -> None:
        """Leave it as it was found; harmless again."""
        self.on = False
        if self._before is not None:
            setattr(distributed_c10d, _HELPER, self._before)
            self._before = None

    def _begin(
        self, size: Any, rank: Any, ranks: Any, timeout: Any
    ) -> tuple[RingGroup, int] | None:
        try:
            identity = self._ring.identity
            members = tuple(ranks) or tuple(range(identity.world))
            # Only members wait; of a world of another size it is unknown which ranks those are.
            if len(members) != size or size < 2 or identity.rank not in members:
                return None
            if members.index(identity.rank) != rank:
                return None
            row = self._row(members, timeout)
            if row is None:
                return None
            seq = row.enter(time.monotonic_ns())
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)
            return None
        return row, seq

    def _row(self, members: Sequence[int], timeout: Any) -> RingGroup | None:
        key = tuple(members)
        if key not in self._rows:
            if len(self._rows) >= _MOST_ROWS:
                return None
            text = f"{MAKING} {','.join(map(str, key))}".encode()
            ident = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") or 1
            me = key.index(self._ring.identity.rank)
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            self._rows[key] = self._ring.add_group(
                ident, len(key), me, key, MAKING, MAKING, timeout_s=seconds
            )
        return self._rows[key]

    def _end(self, call: tuple[RingGroup, int] | None) -> None:
        if call is not None and self.on:
            row, seq = call
            row.complete(seq, time.monotonic_ns())
