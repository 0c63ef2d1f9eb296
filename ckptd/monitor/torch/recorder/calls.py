"""Facts of a collective from its arguments: operation, group, size, root, peer, call site."""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckptd.monitor.ring import RingGroup, RingWriter

_DEEPEST = 48
# Programs that make code as they run would else be held in memory with all of it.
_MOST_CODES = 4096
# Frames of these are not the user's: PyTorch itself, and the recorder.
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Sites:
    """Names call sites by a hash of file and line, the same on all ranks of one program."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._foreign: dict[str, bool] = {}
        self._hashes: dict[tuple[str, int], int] = {}
        # By the address of a code object, which is held so that no other gets it: that object, and
        # hashes by the place in it. To ask a frame for its line takes as long as its function is.
        self._places: dict[int, tuple[CodeType, dict[int, int]]] = {}

    def here(self, above: int = 1) -> int:
        """Return the hash of the nearest line that is the user's; 0 where there is none.

        Threads that only run PyTorch, as those of autograd, have none. `above` is how many of the
        frames that call this are known to be no user's.
        """
        frame = sys._getframe(above).f_back
        known = self._foreign
        for _ in range(_DEEPEST):
            if frame is None:
                return 0
            code = frame.f_code
            foreign = known.get(code.co_filename)
            if foreign is None:
                foreign = self.foreign(code.co_filename)
            if foreign:
                places = self._places.get(id(code))
                if places is not None:
                    site = places[1].get(frame.f_lasti)
                    if site is not None:
                        return site
                return self._place(code, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        return 0

    def _place(self, code: CodeType, at: int, line: int) -> int:
        """Return the hash of a line, and remember it by its place."""
        site = self.named(code.co_filename, line)
        if len(self._places) >= _MOST_CODES:
            self._places.clear()
        self._places.setdefault(id(code), (code, {}))[1][at] = site
        return site

    def foreign(self, file: str) -> bool:
        """Whether a file is the user's."""
        foreign = self._foreign.get(file)
        if foreign is None:
            foreign = self._foreign[file] = not file.startswith(_OURS)
        return foreign

    def named(self, file: str, line: int) -> int:
        """Return the hash of a line."""
        key = (file, line)
        code = self._hashes.get(key)
        if code is None:
            code = self._hashes[key] = self._ring.text(f"{file}:{line}")
        return code


_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "_allgather_base_": "all_gather_single",
    "allgather_into_tensor_coalesced_": "all_gather_single_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_single_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_": "reduce",
    "send": "p2p",
    "recv_": "p2p",
    "recv_any_source_": "p2p_any",
}

# Of several tensor arguments, the one whose size is the same on all ranks: the root of a scatter
# has inputs that no other rank has, an uneven gather has the same outputs everywhere.
_SECOND = {
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "gather_",
}
_WITHOUT_SIZE = {"barrier", "monitored_barrier_"}
_LISTS = (list, tuple)
_STRIDED = torch.strided


@dataclass(frozen=True, slots=True)
class CallKind:
    """Where the arguments of one operator are; -1 is nowhere.

    Attributes
    ----------
    operator
        Its name in ``torch.ops.c10d``.
    name
        The operation as the ring says it; both ends of a point-to-point call say the same.
    group, tensors, root, peer, splits, async_op, reduce
        Positions among the arguments.
    is_p2p
        Whether it has one sender and one receiver.
    may_vary
        Whether some calls of it have sizes of their own on each rank.
    texts
        The operation as the ring says it, by the number of its reduction; sums are plain.
    """

    operator: str
    name: str
    group: int
    tensors: int
    root: int
    peer: int
    splits: int
    async_op: int
    reduce: int
    is_p2p: bool
    may_vary: bool
    texts: tuple[str, ...]

    def text(self, args: tuple[Any, ...]) -> str:
        """Return the one of `texts` that a call with these arguments is."""
        if self.reduce < 0:
            return self.texts[0]
        # Looked up like this because each attribute of such an object costs a search.
        number = args[self.reduce]._get_method("op")()
        return self.texts[number] if 0 <= number < len(self.texts) else self.texts[0]

    @property
    def overload(self) -> Any:
        """The operator itself."""
        return getattr(torch.ops.c10d, self.operator).default

    def is_async(self, args: tuple[Any, ...]) -> bool:
        """Whether the caller did not ask to wait; PyTorch leaves out arguments that are default."""
        at = self.async_op
        return at >= 0 and (len(args) <= at or args[at] is not False)

    def is_variable(self, args: tuple[Any, ...]) -> bool:
        """Whether ranks may rightly state different sizes."""
        at = self.splits
        return self.operator == "alltoall_" or (at >= 0 and len(args) > at and bool(args[at]))


def call_kinds() -> list[CallKind]:
    """Return the operators of c10d that talk to other ranks, as this PyTorch has them."""
    return [_kind(name) for name in _NAMES if hasattr(torch.ops.c10d, name)]


def _kind(operator: str) -> CallKind:
    names = [a.name for a in getattr(torch.ops.c10d, operator).default._schema.arguments]

    def at(*wanted: str) -> int:
        return next((names.index(w) for w in wanted if w in names), -1)

    # Python can ask a reduction which one it is only where this PyTorch has a method for it.
    reduce = at("reduce_op") if "op" in torch.classes.c10d.ReduceOp()._method_names() else -1
    splits = at("output_split_sizes")
    return CallKind(
        operator=operator,
        name=_NAMES[operator],
        group=at("process_group"),
        tensors=-1 if operator in _WITHOUT_SIZE else int(operator in _SECOND),
        root=at("root_rank"),
        peer=at("dst", "src"),
        splits=splits,
        async_op=at("async_op"),
        reduce=reduce,
        is_p2p=_NAMES[operator].startswith("p2p"),
        may_vary=splits >= 0 or operator == "alltoall_",
        texts=_texts(_NAMES[operator]) if reduce >= 0 else (_NAMES[operator],),
    )


def _texts(name: str) -> tuple[str, ...]:
    numbers: Any = torch.distributed.ReduceOp.RedOpType.__members__
    ordered = sorted(numbers, key=lambda reduction: int(numbers[reduction]))
    return tuple(name if r == "SUM" else f"{name} {r.lower()}" for r in ordered)


def first_tensor(value: Any) -> Any:
    """Return the first tensor in nested lists; None if there is none."""
    while isinstance(value, _LISTS):
        if not value:
            return None
        value = value[0]
    return value


def nbytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all in nested lists of them; -1 if one is sparse."""
    if isinstance(value, _LISTS):
        if len(value) == 1:
            return nbytes(value[0])
        parts = [nbytes(v) for v in value]
        return -1 if -1 in parts else sum(parts)
    return value.nbytes if value.layout is _STRIDED else -1


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
