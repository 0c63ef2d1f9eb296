"""What an operator of c10d is, from its arguments: operation, group, size, root or peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed  # the operators are registered by this import

__all__ = ["CallKind", "call_kinds", "first_tensor", "nbytes"]

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
# has inputs that nobody else has, an uneven gather has the same outputs everywhere.
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
    bytes_: int = value.nbytes if value.layout is _STRIDED else -1
    return bytes_
