"""`relayout`: the live tensors of one layout become those of another."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptd.engine.relayout import Mover, MoveReport, message_bytes
from ckptd.engine.relayout_plan import MovePlan, Roles, make_plan
from ckptd.engine.relayout_watch import Watch
from ckptd.engine.transport import Transport
from ckptd.errors import CkptdError, MismatchError, UsageError
from ckptd.layout.lay.agree import agreed
from ckptd.layout.lay.copies import Composition
from ckptd.layout.lay.live import Transfers
from ckptd.train.agree import Agreement
from ckptd.train.board import board_of
from ckptd.train.dtypes import dtype_name, local_tensor
from ckptd.train.laid_loading import look
from ckptd.train.laid_program import LayoutSpec
from ckptd.train.leaves import Leaves, SavedNames, TensorLeaf
from ckptd.train.relayout_memory import check_apart
from ckptd.train.relayout_side import Numbers, Side, memories, numbers
from ckptd.train.restore import apply_objects, prepare
from ckptd.train.transport_torch import TorchTransport
from ckptd.types import DType

__all__ = ["relayout"]


def relayout(
    source_state: Mapping[str, Any] | None,
    source_layout: LayoutSpec,
    target_state: MutableMapping[str, Any] | None,
    target_layout: LayoutSpec,
    transport: Transport | None = None,
    budget_bytes: int = 256 << 20,
    *,
    source_ranks: Sequence[int] | None = None,
    target_ranks: Sequence[int] | None = None,
    process_group: Any = None,
    states: bool = True,
    timeout_s: float = 300.0,
) -> MoveReport:
    """Fill the tensors of one layout from the live tensors of another, rank to rank.

    Every rank of `process_group` calls it with the same layouts and the same budget. Each computes
    its own sends and receives from the two programs. Where the programs do not say all sizes,
    ranks first tell each other the shapes that they have; nothing else is exchanged but data.

    Moved are parameters, optimizer states and the numbers that follow a parameter (``scalar`` of
    the space); hyperparameters and other objects are not. An optimizer that has not stepped gets
    its state. DTensors count as what this rank has of them.

    Parameters
    ----------
    source_state
        What this rank has; None where it is no rank of the source. It does not change.
    source_layout
        Its layout, on a mesh; see `ckptd.Checkpointer`.
    target_state
        What is filled, in memory of its own; None where this rank is no rank of the target.
    target_layout
        Its layout.
    transport
        How bytes travel; `TorchTransport` over `process_group` when None. It is closed at the end
        only if it was made here.
    budget_bytes
        Bound of the memory that the move takes besides the two states; half of it is for buffers.
    source_ranks, target_ranks
        Ranks of `process_group` by rank of the layout: the first ones when None. A rank may be in
        both, in one, or in none.
    process_group
        All ranks that take part; the default group when None.
    states
        False: parameters only.
    timeout_s
        Longest wait for one message of another rank, in seconds.

    Returns
    -------
    MoveReport
        What this rank did.

    Raises
    ------
    MismatchError
        The layouts do not fit the states, or each other.
    CorruptError
        kind ``witness``: sampled elements are not where they must be.
    CkptdError
        kind ``rank-died`` names a rank that is gone. When one fails all raise (`poisoned`).
    """
    board = board_of(process_group, timeout_s)
    agreement = Agreement(board, timeout_s)
    every = agreement.on_every_rank
    source = every(lambda: Side.of(source_state, source_layout, agreement, source_ranks))
    target = every(lambda: Side.of(target_state, target_layout, agreement, target_ranks))
    # Nobody makes connections for a move that some rank will not join.
    move = every(lambda: _Move.plan(source, target, board.rank, states))
    carrier = transport or (
        TorchTransport(process_group, timeout_s) if board.world > 1 else _Alone()
    )
    try:
        return move.run(carrier, budget_bytes, Watch(board, "relayout", timeout_s))
    finally:
        if transport is None:
            carrier.close()


class _Alone:
    """The transport of one rank, which sends nothing."""

    rank, world, buffers = 0, 1, 0

    def begin(self, message_bytes: int) -> None:
        """See `ckptd.engine.transport.Transport`."""

    def send(self, peer: int, data: Any) -> Any:
        """See `ckptd.engine.transport.Transport`."""
        raise UsageError("there is no other rank", kind="transport", found=peer)

    receive = send

    def close(self) -> None:
        """See `ckptd.engine.transport.Transport`."""


@dataclass(eq=False)
class _Move:
    """One move of one rank."""

    target: Side
    transfers: Transfers
    roles: Roles
    scalar_names: Sequence[str]
    scalars: dict[str, Numbers]
    prepared: Leaves
    planned: MovePlan

    @staticmethod
    def plan(source: Side, target: Side, process: int, states: bool) -> _Move:
        """Look at both states; make what the target's optimizer lacks."""
        forms = agreed(source.form.bound, target.form.bound)
        transfers = Transfers(Composition(*forms))
        moved = forms[0].states.keys() & forms[1].states.keys() if states else {""}
        layouts = source.form.bound.layout, target.form.bound.layout
        names = [{s.name for s in x.scalars} for x in layouts]
        scalar_names = sorted(names[0] & names[1]) if states else []
        prepared = _prepared(target, moved, scalar_names)
        sources = memories(source, source.leaves, moved)
        targets = memories(target, prepared, moved)
        check_apart(sources, targets)
        roles = Roles(tuple(source.laid.ranks or ()), tuple(target.laid.ranks or ()))
        found = make_plan(
            transfers,
            roles,
            process,
            states=frozenset(moved),
            sources=sources,
            targets=targets,
        )
        scalars = numbers(source, scalar_names)
        return _Move(target, transfers, roles, scalar_names, scalars, prepared, found)

    def run(self, carrier: Transport, budget_bytes: int, watch: Watch) -> MoveReport:
        """Do it."""
        try:
            limit = message_bytes(budget_bytes, carrier)
            carrier.begin(limit)
        except CkptdError as error:
            raise watch.fail(error) from None
        mover = Mover(
            carrier,
            limit,
            watch,
            self.planned,
            self.transfers,
            self.roles,
            self.scalars,
            len(self.scalar_names),
            self.finish,
            room=budget_bytes // 4,
        )
        return mover.run()

    def finish(self, mover: Mover) -> None:
        """Put numbers and made tensors into the target state.

        Raises
        ------
        MismatchError
            ``lay-fit``: parameters with different numbers became one (`poisoned`).
        """
        if self.target.state is None:
            return
        names = self.target.names
        filled = {names[n] for n in mover.filled}
        for local, (rule, indexes) in self.target.job.tensors.items():
            values = mover.taken_scalars.get(self.target.form.name(local, ""), [])
            for number, scalar in enumerate(self.scalar_names):
                name = self.target.scalar(rule, indexes, scalar)
                leaf = self.prepared.tensors.get(name)
                found = {v[number] for v in values if number < len(v)} - {None}
                if leaf is None or not found:
                    continue
                if len(found) > 1:
                    error = MismatchError(
                        "parameters with different numbers become one tensor",
                        kind="lay-fit",
                        where=name,
                    )
                    error.poisoned = True
                    raise error
                _write(leaf, found.pop())
                filled.add(name)
        by_leaf = {x.name for x in self.prepared.tensors.values() if _named(x) & filled}
        apply_objects(self.prepared, {}, {}, tensors=by_leaf)


def _named(leaf: TensorLeaf) -> set[str]:
    return {leaf.name, *leaf.aliases}


def _write(leaf: TensorLeaf, value: tuple[DType, bytes] | None) -> None:
    """Write a number, in the type that the live one has."""
    if value is not None:
        found = np.frombuffer(value[1], dtype=np.uint8).view(value[0].numpy)
        local_tensor(leaf.tensor).fill_(found.astype(np.float64).item())


def _prepared(target: Side, states: set[str], scalars: Sequence[str]) -> Leaves:
    """Return the leaves of the target state, with memory for optimizer state that it lacks."""
    if target.state is None:
        return Leaves()
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    whole = {n: x for x in look(target.state).tensors.values() for n in (x.name, *x.aliases)}
    job = target.job
    parameters = {
        (p.rule, p.indexes): t for t in job.local.values() for p in t.pieces[:1] if not t.state
    }
    for tensor in job.local.values():
        if tensor.state not in states or not tensor.pieces:
            continue
        parameter = parameters.get((tensor.pieces[0].rule, tensor.pieces[0].indexes))
        leaf = None if parameter is None else whole.get(parameter.name)
        # State that lies in buffers of its own is there, or is not ours to make.
        if parameter is not None and leaf is not None and parameter.shape == tensor.shape:
            wanted[tensor.name] = (dtype_name(leaf.tensor.dtype), tuple(leaf.tensor.shape))
    for rule, indexes in job.tensors.values():
        for scalar in scalars:
            wanted[target.scalar(rule, indexes, scalar)] = ("float32", ())
    return prepare(target.state, SavedNames(wanted))
