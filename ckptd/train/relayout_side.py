"""One side of a live move: a layout, and what this rank has of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ckptd.engine.relayout_memory import Memory
from ckptd.errors import MismatchError, UsageError
from ckptd.layout.lay.equation import Bound
from ckptd.layout.lay.local import local_tensors
from ckptd.layout.lay.observe import bind_sizes
from ckptd.layout.lay.stored import StoredForm
from ckptd.train.agree import Agreement
from ckptd.train.dtypes import local_tensor
from ckptd.train.laid import JobLayout, Laid, Seen
from ckptd.train.laid_loading import look
from ckptd.train.laid_program import LayoutSpec, Spelling
from ckptd.train.leaves import Leaves
from ckptd.train.relayout_memory import memory_of
from ckptd.types import DType, dtype_of

__all__ = ["Numbers", "Side", "memories", "numbers"]

Numbers = Sequence[tuple[DType, bytes] | None]
"""Numbers that follow a parameter, in the order of their names: type and bytes."""


@dataclass(eq=False)
class Side:
    """One of the two layouts, and what this rank has of it.

    `job` has the names of the state, `form` those of the program: both ends of a stream know only
    the latter.
    """

    laid: Laid
    job: JobLayout
    form: StoredForm
    state: Mapping[str, Any] | None
    leaves: Leaves

    @staticmethod
    def of(
        state: Mapping[str, Any] | None,
        layout: LayoutSpec,
        agreement: Agreement,
        ranks: Sequence[int] | None,
    ) -> Side:
        """Bind a layout to what this rank has; ranks outside it see no state. Collective."""
        world = agreement.board.world
        if ranks is None:
            ranks = range(Laid.mesh_world(layout))
        laid = Laid(layout, agreement, tuple(ranks))
        leaves = Leaves()

        def seen() -> Leaves:
            nonlocal leaves
            _check_roles(laid, state, ranks, world)
            leaves = Leaves() if state is None else _local(look(state))
            return leaves

        job = _stated(laid, seen) or laid.bind(seen)
        layout_ = replace(
            job.form.bound.layout,
            params=laid.resolved.params,
            state_names=laid.resolved.state_names,
        )
        return Side(laid, job, StoredForm(Bound(layout_, job.form.bound.sizes)), state, leaves)

    @cached_property
    def names(self) -> dict[str, str]:
        """Names in the state by names in the program, of everything that this rank has."""
        if self.laid.rank is None:
            return {}
        own = local_tensors(self.form, self.laid.rank)
        live = local_tensors(self.job.form, self.laid.rank)
        return {a.name: b.name for a, b in zip(own, live, strict=True)}

    def scalar(self, rule: int, indexes: tuple[int, ...], name: str) -> str:
        """Return the name in the state of a number that follows a parameter."""
        local = self.job.form.rules[rule].local_name(indexes)
        return self.job.spelling.states.replace("{state}", name).replace("{name}", local)


def _check_roles(
    laid: Laid, state: Mapping[str, Any] | None, ranks: Sequence[int], world: int
) -> None:
    """Raise `UsageError` unless ranks of the layout, and only those, bring a state."""
    if not set(ranks) <= set(range(world)) or len(set(ranks)) != len(ranks):
        raise UsageError(
            "not ranks of the process group",
            kind="lay-use",
            where=laid.program.layout,
            wanted=f"different ranks below {world}",
            found=list(ranks)[:16],
        )
    if (state is None) == (laid.rank is not None):
        raise UsageError(
            "a rank of a layout brings a state, and others bring None",
            kind="lay-use",
            where=laid.program.layout,
            found=f"{'no state' if state is None else 'a state'} on one that "
            f"{'is' if state is None else 'is not'} of the ranks {list(ranks)[:16]}",
        )


def _local(leaves: Leaves) -> Leaves:
    """Return leaves that are what this rank has of its tensors."""
    tensors = {n: replace(x, tensor=local_tensor(x.tensor)) for n, x in leaves.tensors.items()}
    return replace(leaves, tensors=tensors)


def _stated(laid: Laid, look_at: Callable[[], Leaves]) -> JobLayout | None:
    """Return the layout if the program says all sizes; the same answer on every rank."""
    try:
        bound = bind_sizes(laid.resolved, {})
    except MismatchError:
        return None
    spelling = laid.spelling(Seen.of(look_at(), whole=True)) or Spelling()
    return laid.job(replace(bound, layout=spelling.put_into(bound.layout)), spelling)


def memories(side: Side, leaves: Leaves, states: set[str]) -> dict[str, Memory]:
    """Return the memory of this rank's tensors, by their names in the program."""
    if side.laid.rank is None:
        return {}
    by_name = {n: x for x in leaves.tensors.values() for n in (x.name, *x.aliases)}
    flats = {n.rpartition(".flat.")[2]: x for n, x in by_name.items() if ".flat." in f".{n}"}
    names = side.names
    out = {}
    for tensor in local_tensors(side.form, side.laid.rank):
        leaf = by_name.get(names[tensor.name])
        if leaf is None and tensor.name.startswith("flat."):
            leaf = flats.get(tensor.name.removeprefix("flat."))
        if leaf is None or tensor.state not in states:
            continue
        local = local_tensor(leaf.tensor)
        if tuple(local.shape) != tensor.shape:
            raise MismatchError(
                "a tensor has another shape than the layout says",
                kind="lay-fit",
                where=names[tensor.name],
                wanted=tensor.shape,
                found=tuple(local.shape),
            )
        out[tensor.name] = memory_of(local, leaf.name)
    return out


def numbers(source: Side, names: Sequence[str]) -> dict[str, Numbers]:
    """Return the numbers that follow each parameter of this rank."""
    out: dict[str, Numbers] = {}
    for local, (rule, indexes) in source.job.tensors.items() if source.state is not None else ():
        found: list[tuple[DType, bytes] | None] = []
        for name in names:
            leaf = source.leaves.tensors.get(source.scalar(rule, indexes, name))
            if leaf is None or leaf.tensor.numel() != 1:
                found.append(None)
            else:
                memory = memory_of(leaf.tensor.reshape(1).contiguous().cpu(), leaf.name)
                raw = np.empty(memory.dtype.itemsize, dtype=np.uint8)
                memory.take_at(np.zeros(1, dtype=np.int64), raw)
                found.append((dtype_of(leaf.dtype), raw.tobytes()))
        out[source.form.name(local, "")] = found
    return out
