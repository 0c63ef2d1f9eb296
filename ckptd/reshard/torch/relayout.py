"""`relayout`: fills the live tensors of one layout from those of another, rank to rank.

In it: checks that source and target share no memory, and that all ranks pass the same sides;
optimizer state that the target lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import nn

from ckptd.base.grids.block import Block
from ckptd.base.torch.overlaps import overlapping
from ckptd.base.torch.ranks import Agreement, board_of
from ckptd.base.torch.tensors import as_bytes, dtype_name
from ckptd.checkpoint.torch.layouts import LayoutSpec
from ckptd.checkpoint.torch.state.leaves import Leaves, SavedNames, TensorLeaf
from ckptd.checkpoint.torch.state.modules import EXTRA, extra_states
from ckptd.checkpoint.torch.state.restore import apply_objects, look, prepare
from ckptd.checkpoint.torch.state.walk import walk
from ckptd.errors import CkptdError, MismatchError, UsageError
from ckptd.lay.agree import agreed
from ckptd.lay.bind import FilledGlobs, bind_sizes, filled_globs
from ckptd.lay.copies import Composition
from ckptd.lay.live import Transfers
from ckptd.lay.local import BoundTensor, local_tensors
from ckptd.lay.resolve import Bound, has_globs
from ckptd.lay.stored import StoredForm
from ckptd.reshard.live.memory import ArrayMemory, TensorMemory
from ckptd.reshard.live.move import Mover, MoveReport, MoveWatch, message_bytes
from ckptd.reshard.live.plan import MovePlan, Roles, make_plan
from ckptd.reshard.live.transport import Transport
from ckptd.reshard.torch.layout.binder import BoundLayout, JobLayout, SeenNames
from ckptd.reshard.torch.layout.loading import different_numbers
from ckptd.reshard.torch.layout.program import Spelling
from ckptd.reshard.torch.layout.saving import check_shape
from ckptd.reshard.torch.transport import TorchTransport
from ckptd.types import DType, dtype_of

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


def memory_of(tensor: torch.Tensor, name: str) -> TensorMemory:
    """Return a rank-local tensor as memory.

    Raises
    ------
    UsageError
        It is not contiguous.
    """
    lazy = tensor.is_conj() or tensor.is_neg()
    if not tensor.is_contiguous() or lazy:
        raise UsageError(
            "a tensor that is not contiguous cannot be moved",
            where=name,
            found=f"strides {tensor.stride()} of {tuple(tensor.shape)}",
            hint="move its contiguous() copy, and copy the result back",
        )
    dtype = dtype_of(dtype_name(tensor.dtype, name), name)
    if tensor.device.type == "cpu":
        return ArrayMemory(as_bytes(tensor), dtype)
    return TorchMemory(tensor, dtype)


class TorchMemory:
    """A contiguous tensor on any device, as `ckptd.reshard.live.memory.TensorMemory`."""

    def __init__(self, tensor: torch.Tensor, dtype: DType) -> None:
        self.dtype = dtype
        self.numel = tensor.numel()
        self._flat = tensor.reshape(-1)

    def take(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], out: U8) -> None:
        """See `ckptd.reshard.live.memory.TensorMemory`."""
        self._host(out).view(shape).copy_(self._part(start, shape, strides))

    def take_at(self, at: I64, out: U8) -> None:
        """See `ckptd.reshard.live.memory.TensorMemory`."""
        index = torch.from_numpy(at).to(self._flat.device)
        self._host(out).copy_(self._flat[index])

    def put(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], data: U8) -> None:
        """See `ckptd.reshard.live.memory.TensorMemory`."""
        self._part(start, shape, strides).copy_(self._host(data).view(shape))

    def copy_to(self, target: TensorMemory, block: Block) -> bool:
        """Enqueue the copy of a part into memory of the same type; False: not into this one."""
        if not isinstance(target, TorchMemory):
            return False
        to = target._part(block.target_start, block.shape, block.target_strides)
        to.copy_(self._part(block.source_start, block.shape, block.source_strides))
        return True

    def put_at(self, at: I64, data: U8) -> None:
        """See `ckptd.reshard.live.memory.TensorMemory`."""
        index = torch.from_numpy(at).to(self._flat.device)
        self._flat[index] = self._host(data).to(self._flat.device)

    def region(self) -> tuple[object, int, int]:
        """See `ckptd.reshard.live.memory.TensorMemory`."""
        start = self._flat.data_ptr()
        return str(self._flat.device), start, start + self.numel * self.dtype.itemsize

    def _part(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        return self._flat.as_strided(shape, strides, self._flat.storage_offset() + start)

    def _host(self, data: U8) -> torch.Tensor:
        return torch.from_numpy(data).view(self._flat.dtype)


def check_apart(sources: dict[str, TensorMemory], targets: dict[str, TensorMemory]) -> None:
    """Raise `UsageError` when something is both taken from and put into."""
    found = [(*m.region(), 0, n) for n, m in sources.items() if m.numel]
    found += [(*m.region(), 1, n) for n, m in targets.items() if m.numel]
    found.sort(key=lambda r: (str(r[0]), r[1]))
    ends: dict[tuple[str, int], tuple[int, str]] = {}
    for device, start, end, side, name in found:
        other = ends.get((str(device), 1 - side))
        if other is not None and other[0] > start:
            raise UsageError(
                "a tensor is both moved and filled",
                where=f"{name}, {other[1]}",
                hint="give the new tensors their own memory; free the old ones after the move",
            )
        known = ends.get((str(device), side))
        if known is None or known[0] < end:
            ends[(str(device), side)] = (end, name)


Numbers = Sequence[tuple[DType, bytes] | None]
"""Numbers that follow a parameter, in the order of their names: type and bytes."""


@dataclass(eq=False)
class RelayoutSide:
    """One of the two layouts, and what this rank has of it.

    `job` has the names of the state, `form` those of the program: both ends of a stream know only
    the latter.
    """

    laid: BoundLayout
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
        *,
        quantized: bool = False,
    ) -> RelayoutSide:
        """Bind a layout to what this rank has; ranks outside it see no state. Collective.

        With `quantized` it may have quantized tensors.
        """
        world = agreement.board.world
        if ranks is None:
            ranks = range(BoundLayout.mesh_world(layout))
        laid = BoundLayout(layout, agreement, tuple(ranks), quantized)
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
        return RelayoutSide(
            laid, job, StoredForm(Bound(layout_, job.form.bound.sizes)), state, leaves
        )

    @property
    def globs(self) -> tuple[FilledGlobs, ...]:
        """Texts that globs in names of the program matched."""
        return filled_globs(self.form.bound, self.laid.resolved)

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
    laid: BoundLayout, state: Mapping[str, Any] | None, ranks: Sequence[int], world: int
) -> None:
    """Raise `UsageError` unless ranks of the layout, and only those, bring a state."""
    if not set(ranks) <= set(range(world)) or len(set(ranks)) != len(ranks):
        raise UsageError(
            "invalid ranks of the process group",
            kind="lay-use",
            where=laid.program.layout,
            wanted=f"different ranks below {world}",
            found=list(ranks)[:16],
        )
    if (state is None) == (laid.rank is not None):
        raise UsageError(
            "some ranks of a layout pass a state, and others pass None",
            kind="lay-use",
            where=laid.program.layout,
            found=f"{'no state' if state is None else 'a state'} on one that "
            f"{'is' if state is None else 'is not'} of the ranks {list(ranks)[:16]}",
        )


def _local(leaves: Leaves) -> Leaves:
    """Return leaves that are what this rank has of its tensors."""
    tensors = {n: structs.replace(x, tensor=x.local) for n, x in leaves.tensors.items()}
    return structs.replace(leaves, tensors=tensors)


def _stated(laid: BoundLayout, look_at: Callable[[], Leaves]) -> JobLayout | None:
    """Return the layout if the program says all sizes and names; the same answer on every rank."""
    if any(has_globs(e.name) for e in laid.resolved.equations):
        return None
    try:
        bound = bind_sizes(laid.resolved, {})
    except MismatchError:
        return None
    spelling = laid.spelling(SeenNames.of(look_at(), whole=True)) or Spelling()
    return laid.job(replace(bound, layout=spelling.put_into(bound.layout)), spelling)


def by_name(leaves: Leaves) -> dict[str, TensorLeaf]:
    """Return tensors by all their names, aliases included."""
    return {n: x for x in leaves.tensors.values() for n in (x.name, *x.aliases)}


class BoundLocal(NamedTuple):
    """A tensor of this rank, and what the layout says of it; `local` is what the rank has of it."""

    laid: BoundTensor
    leaf: TensorLeaf
    local: torch.Tensor


def own_tensors(side: RelayoutSide, leaves: Leaves, states: set[str]) -> Iterator[BoundLocal]:
    """Yield this rank's tensors that are in `leaves`, as the program names them.

    Raises
    ------
    MismatchError
        ``lay-fit``: one has another shape than the layout says.
    """
    if side.laid.rank is None:
        return
    found = by_name(leaves)
    flats = {n.rpartition(".flat.")[2]: x for n, x in found.items() if ".flat." in f".{n}"}
    names = side.names
    for tensor in local_tensors(side.form, side.laid.rank):
        leaf = found.get(names[tensor.name])
        if leaf is None and tensor.name.startswith("flat."):
            leaf = flats.get(tensor.name.removeprefix("flat."))
        if leaf is None or tensor.state not in states:
            continue
        local = leaf.local
        check_shape(names[tensor.name], tensor.shape, tuple(local.shape))
        yield BoundLocal(tensor, leaf, local)


def check_filled(side: RelayoutSide, state: Mapping[str, Any], leaves: Leaves) -> None:
    """Raise `UsageError` where this rank's tensors cannot be filled by a live move.

    Two of them lie over one another, so that one memory would have two values; or
    they have extra state beside them, which would stay as it is: a layout names tensors alone.
    """
    names = tuple(side.names.values())
    found = {x.name: x for n in names if (x := leaves.tensor(n))}
    for group in overlapping(found.values()):
        raise UsageError(
            "tensors to fill share memory",
            where=", ".join(x.name for x in group[:8]),
            hint="give each tensor its own memory: tensor.clone()",
        )
    modules = (s for s in walk(state) if isinstance(s.value, nn.Module))
    for name, value in (e for s in modules for e in extra_states(s.value, s.place)):
        empty = value is None or (isinstance(value, torch.Tensor) and not value.numel())
        if not empty and any(n.startswith(name.removesuffix(EXTRA)) for n in names):
            raise UsageError(
                "a module has extra state, which a live move cannot fill",
                where=name,
                hint="save and load it; or move dict(module.named_parameters()), if the extra "
                "state may stay unchanged",
            )


def memories(side: RelayoutSide, leaves: Leaves, states: set[str]) -> dict[str, TensorMemory]:
    """Return the memory of this rank's tensors, by their names in the program."""
    own = own_tensors(side, leaves, states)
    return {x.laid.name: memory_of(x.local, x.leaf.name) for x in own}


def numbers(source: RelayoutSide, names: Sequence[str]) -> dict[str, Numbers]:
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
        Sampled elements are not where they must be.
    CkptdError
        kind ``rank-died`` names a rank that is gone. When one fails all raise (`state_corrupted`).
    """
    board = board_of(process_group, timeout_s)
    agreement = Agreement(board, timeout_s)
    every = agreement.on_every_rank
    source = every(lambda: RelayoutSide.of(source_state, source_layout, agreement, source_ranks))
    target = every(lambda: RelayoutSide.of(target_state, target_layout, agreement, target_ranks))
    # No rank makes connections for a move that another rank will not join.
    move = every(lambda: _Move.plan(source, target, board.rank, states))
    carrier = transport or (
        TorchTransport(process_group, timeout_s) if board.world > 1 else LoneTransport()
    )
    try:
        return move.run(carrier, budget_bytes, MoveWatch(board, "relayout", timeout_s))
    finally:
        if transport is None:
            carrier.close()


class LoneTransport:
    """The transport of one rank, which sends nothing."""

    rank, world, buffers = 0, 1, 0

    def begin(self, message_bytes: int) -> None:
        """See `ckptd.reshard.live.transport.Transport`."""

    def send(self, peer: int, data: Any) -> Any:
        """See `ckptd.reshard.live.transport.Transport`."""
        raise UsageError("no other rank", found=peer)

    receive = send

    def close(self) -> None:
        """See `ckptd.reshard.live.transport.Transport`."""


@dataclass(eq=False)
class _Move:
    """One move of one rank."""

    target: RelayoutSide
    transfers: Transfers
    roles: Roles
    scalar_names: Sequence[str]
    scalars: dict[str, Numbers]
    prepared: Leaves
    planned: MovePlan

    @staticmethod
    def plan(source: RelayoutSide, target: RelayoutSide, process: int, states: bool) -> _Move:
        """Look at both states; make what the target's optimizer lacks."""
        forms = agreed(source.form.bound, target.form.bound)
        transfers = Transfers(Composition(*forms))
        moved = forms[0].states.keys() & forms[1].states.keys() if states else {""}
        layouts = source.form.bound.layout, target.form.bound.layout
        names = [{s.name for s in x.scalars} for x in layouts]
        scalar_names = sorted(names[0] & names[1]) if states else []
        for path in source.leaves.paths:
            path.refuse_moved(source.names.values())
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

    def run(self, carrier: Transport, budget_bytes: int, watch: MoveWatch) -> MoveReport:
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
            ``lay-fit``: parameters with different numbers became one (`state_corrupted`).
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
                    raise different_numbers(name, found)
                write_number(leaf, found.pop())
                filled.add(name)
        by_leaf = {x.name for x in self.prepared.tensors.values() if _named(x) & filled}
        apply_objects(self.prepared, {}, {}, tensors=by_leaf)


def _named(leaf: TensorLeaf) -> set[str]:
    return {leaf.name, *leaf.aliases}


def write_number(leaf: TensorLeaf, value: tuple[DType, bytes] | None) -> None:
    """Write a number, in the type that the live one has."""
    if value is not None:
        found = np.frombuffer(value[1], dtype=np.uint8).view(value[0].numpy)
        leaf.local.fill_(found.astype(np.float64).item())


def _prepared(target: RelayoutSide, states: set[str], scalars: Sequence[str]) -> Leaves:
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
    leaves = prepare(target.state, SavedNames(wanted, live=True))
    check_filled(target, target.state, leaves)
    return leaves
