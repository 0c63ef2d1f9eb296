"""`ExpertMove`, `move_experts`: experts and their optimizer state move while a job trains.

In it: price of a move; which states cannot be moved.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch.utils.weak import WeakIdKeyDictionary

from ckptd.base.torch.ranks import Agreement, board_of
from ckptd.base.torch.tensors import dtype_name, is_dtensor, local_tensor
from ckptd.checkpoint.torch.layouts import LayoutSpec
from ckptd.checkpoint.torch.state.leaves import Leaves, TensorLeaf
from ckptd.checkpoint.torch.state.restore import look
from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, MismatchError, UsageError
from ckptd.lay.agree import agreed
from ckptd.lay.bind import bind_sizes
from ckptd.lay.copies import Composition
from ckptd.lay.live import Transfers
from ckptd.lay.local import BoundTensor, local_tensors
from ckptd.lay.resolve import Bound
from ckptd.lay.stored import StoredForm
from ckptd.reshard.live.memory import LentMemory, TensorMemory
from ckptd.reshard.live.move import BUFFERS, Mover, MoveReport, MoveWatch, message_bytes
from ckptd.reshard.live.placement import (
    Coordinates,
    ExpertPlacement,
    UnitKey,
    expert_forms,
    place_experts,
    tables_of,
    unit_key,
)
from ckptd.reshard.live.plan import MovePlan, Roles, make_plan
from ckptd.reshard.live.transport import Transport
from ckptd.reshard.torch.layout.program import read_layout
from ckptd.reshard.torch.relayout import (
    LoneTransport,
    Numbers,
    RelayoutSide,
    by_name,
    memories,
    memory_of,
    numbers,
    write_number,
)
from ckptd.reshard.torch.transport import TorchTransport
from ckptd.types import dtype_of

if TYPE_CHECKING:
    from ckptd.checkpoint.torch.checkpointer import Checkpointer


_placed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters of experts that were moved, and where the experts of each now lie."""
_LOST: Coordinates = ()
"""Where they lie after a move that broke off: some here, some there."""


def with_expert_placement(
    layout: LayoutSpec, placement: ExpertPlacement, *, experts: str = "e"
) -> str:
    """Return a layout program that is like another one, with the experts where a placement says.

    Parameters
    ----------
    layout
        See `ckptd.Checkpointer`. The rules of the experts stand in it: ``[e@ep f h]`` for a stack,
        ``experts.{#e@ep}`` for a list of modules.
    placement
        For each coordinate of the mesh axis that cuts the experts those that it has; or a mapping
        from numbers of layers to such lists, where the other layers stay as they are.
    experts
        The axis of experts in the space.

    Raises
    ------
    UsageError
        It leaves experts out or has some twice, or no rule cuts them.
    """
    return place_experts(read_layout(layout), placement, experts).text


def move_experts(
    state: MutableMapping[str, Any], layout: LayoutSpec, placement: ExpertPlacement, **options: Any
) -> ExpertMove:
    """Move experts between ranks, their optimizer state with them; see `ExpertMove`.

    Returns
    -------
    ExpertMove
        That has run: `layout` is the program from now on, `report` says what was done.
    """
    move = ExpertMove(state, layout, placement, **options)
    move.run()
    return move


@dataclass(frozen=True)
class ExpertPrice:
    """Cost of a move of experts.

    Attributes
    ----------
    experts
        How many change their coordinate, over all layers.
    bytes_in, bytes_out
        Bytes that this rank receives and sends.
    bytes_kept
        Bytes that this rank copies from its own memory to its own.
    most_bytes
        Most bytes that any rank receives or sends: they decide how long the move takes.
    all_bytes
        Bytes that all ranks send.
    staged_bytes
        Most memory that a rank takes besides the state, buffers included.
    parts
        In how many parts the move is made, so that it fits the budget.
    seconds
        How long it takes at the rate that was given; None without one.
    """

    experts: int
    bytes_in: int
    bytes_out: int
    bytes_kept: int
    most_bytes: int
    all_bytes: int
    staged_bytes: int
    parts: int
    seconds: float | None

    def to_dict(self) -> dict[str, int | float | None]:
        """Return it as JSON has it."""
        return asdict(self)


class _Told(msgspec.Struct, frozen=True):
    """Report of one rank on its experts."""

    bytes_in: int
    bytes_out: int
    states: dict[str, int]
    """Bytes of an element by state; parameters are the empty one."""
    partly: str = ""
    """A parameter that lacks states which others have."""


class _Agreed(msgspec.Struct, frozen=True):
    """Sums over the reports of all ranks."""

    most_bytes: int
    all_bytes: int
    states: dict[str, int]


_Given = tuple[str, str, bytes]
"""A number that follows a parameter: its name, its type, its bytes."""
_Taker = tuple[int, str]
"""A rank, and a tensor that it makes of what it receives."""

_told = json_decoder(_Told)
_agreed = json_decoder(_Agreed)
_given = json_decoder(list[_Given])
_given_to = json_decoder(list[tuple[_Given, list[_Taker]]])


class LiveTensor(LentMemory):
    """Memory of a tensor of the state, which is used from `open` to `close`.

    It can be planned with before that; it keeps no memory that the state has let go of.
    """

    def __init__(self, leaf: TensorLeaf) -> None:
        self.name = leaf.name
        self.origin = leaf.origin
        self.dtype = dtype_of(dtype_name(leaf.tensor.dtype, leaf.name), leaf.name)
        self.numel = leaf.local.numel()

    def open(self) -> None:
        """Find the memory."""
        self.lend(memory_of(local_tensor(self.origin.detach()), self.name))

    def close(self) -> None:
        """Drop the reference to the memory."""
        self.lend(None)

    @property
    def memory(self) -> TensorMemory:
        """The memory; raises `UsageError` before `open` and after `close`."""
        if self._lent is None:
            raise UsageError("memory is still in transfer", kind="closed", where=self.name)
        return self._lent


class StagedTensor(LiveTensor):
    """Memory of the new content of a tensor of the state, which is there from `open` to `close`."""

    def __init__(self, leaf: TensorLeaf, shape: tuple[int, ...]) -> None:
        super().__init__(leaf)
        self.shape = shape
        self.numel = math.prod(shape)
        self._new: torch.Tensor | None = None

    def open(self) -> None:
        """Take memory."""
        old = local_tensor(self.origin.detach())
        self._new = torch.empty(self.shape, dtype=old.dtype, device=old.device)
        self.lend(memory_of(self._new, self.name))

    def close(self) -> None:
        """Give the memory back."""
        super().close()
        self._new = None

    @property
    def gets_another_shape(self) -> bool:
        """Whether the live tensor has another shape than its new content."""
        return tuple(local_tensor(self.origin.detach()).shape) != self.shape

    def put_in_place(self) -> None:
        """Make what is here the content of the live tensor."""
        new, old = self._new, local_tensor(self.origin.detach())
        if new is None:
            raise UsageError("memory is still in transfer", kind="closed", where=self.name)
        if old.shape == new.shape:
            # In the memory that others may have views of.
            old.copy_(new)
        else:
            self.origin.data = new


@dataclass(eq=False)
class _Unit:
    """Tensors that move at once."""

    key: UnitKey
    most_numel: int
    """Elements on the rank that has most."""
    live: list[LiveTensor] = field(default_factory=list)
    staged: list[StagedTensor] = field(default_factory=list)

    @property
    def tensors(self) -> list[LiveTensor]:
        """All memory that is used for it."""
        return [*self.live, *self.staged]


class ExpertMove:
    """A move of experts between ranks: planned and priced when it is made, done by `run`.

    Every rank of the job makes it with the same arguments, and all of them run it, between two
    steps: after ``optimizer.step()`` and ``optimizer.zero_grad()``. Parameters stay the same
    objects, in the same optimizer; stacks get another number of experts where the placement says
    so. Each rank has its experts in rising order.

    Only what lies elsewhere afterwards travels, from the rank that has it to the rank that gets
    it. Where it does not fit the budget at once it is moved in parts.

    Parameters
    ----------
    state
        As for `ckptd.Checkpointer`: model and optimizer. It is changed in place by `run`.
    layout
        Where everything lies now. Its mesh is that of all ranks.
    placement, experts
        As for `ckptd.with_expert_placement`.
    budget_bytes
        Bound of the memory that the move takes besides the state: half for new tensors, half for
        buffers.
    bytes_per_s
        What a rank receives in a second, for the price: that of a move before (`report`).
    checkpointer
        Told of the new layout; what it has not copied yet is waited for.
    transport, process_group, timeout_s
        As for `ckptd.relayout`.

    Attributes
    ----------
    price
        What it costs.
    layout
        The program of the new placement, for everything that takes one from now on.
    report
        What was done; None before.

    Raises
    ------
    UsageError
        The placement leaves experts out or has some twice; what it asks for cannot be made in
        place; gradients are there. The experts do not lie where the layout says. The largest
        tensor does not fit it.
    CkptdError
        kind ``rank-died`` names a rank that is gone. Nothing was moved when this is raised here.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        layout: LayoutSpec,
        placement: ExpertPlacement,
        *,
        experts: str = "e",
        budget_bytes: int = 256 << 20,
        bytes_per_s: float | None = None,
        checkpointer: Checkpointer | None = None,
        transport: Transport | None = None,
        process_group: Any = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.report: MoveReport | None = None
        self._state = state
        self._budget_bytes = budget_bytes
        self._checkpointer = checkpointer
        self._transport = transport
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._board = board_of(process_group, timeout_s)
        self._agreement = Agreement(self._board, timeout_s)
        every = self._agreement.on_every_rank
        side = every(lambda: RelayoutSide.of(state, layout, self._agreement, None))
        self._plan = every(lambda: _Plan.of(side, placement, experts))
        every(lambda: self._plan.check_fresh(state))
        self.layout = self._plan.program
        told = self._agreement.all_reports("experts", self._plan.told(), _joined)
        found = _agreed.decode(told)
        self._groups, staged = every(lambda: self._grouped(found.states))
        sent, received, kept = self._plan.traffic
        self.price = ExpertPrice(
            self._plan.moved,
            received,
            sent,
            kept,
            found.most_bytes,
            found.all_bytes,
            staged,
            len(self._groups),
            None if bytes_per_s is None else found.most_bytes / bytes_per_s,
        )

    def _grouped(self, itemsizes: Mapping[str, int]) -> tuple[list[list[_Unit]], int]:
        """Return what is moved together, and the most memory that any rank takes for it."""
        room = self._budget_bytes // 2
        groups: list[list[_Unit]] = []
        left = most = taken = 0
        for unit in self._plan.units:
            nbytes = unit.most_numel * itemsizes.get(unit.key[2], 0)
            if nbytes > room:
                raise UsageError(
                    "the budget is too small for the experts of one layer",
                    where=f"{', '.join(unit.key[0])} {list(unit.key[1])}",
                    wanted=f"at least {2 * nbytes} bytes",
                    found=f"{self._budget_bytes} bytes",
                )
            if not groups or nbytes > left:
                groups.append([])
                left, taken = room, 0
            groups[-1].append(unit)
            left -= nbytes
            taken += nbytes
            most = max(most, taken)
        # Those that are made here have no buffers of their own.
        carrier = self._transport or LoneTransport()
        buffers = BUFFERS + carrier.buffers
        return groups, most + buffers * message_bytes(self._budget_bytes, carrier)

    def run(self) -> MoveReport:
        """Move the experts. Every rank calls it.

        Raises
        ------
        UsageError
            The state is not what was planned with, or the move has run.
        MismatchError
            kind ``lay-fit``: experts that become one tensor took different numbers of steps. As
            where it is a `UsageError`, nothing has moved.
        CkptdError
            As `ckptd.relayout`: the same on every rank, the first failure of any
            (`state_corrupted`). Its hint says how much of this rank's state lies in the new place;
            the rest is untouched.
        """
        leaves, values = self._agreement.on_every_rank(self._look)
        self._check_numbers(values)
        if self._checkpointer is not None:
            self._checkpointer.before_mutation()
        world = self._board.world
        carrier = self._transport or (
            TorchTransport(self._process_group, self._timeout_s) if world > 1 else LoneTransport()
        )
        total = MoveReport()
        done = 0
        try:
            limit = message_bytes(self._budget_bytes, carrier)
            carrier.begin(limit)
            for number in range(len(self._groups)):
                self._move(carrier, limit, number, leaves, values, total)
                done += 1
        except Exception as error:
            first = _explained(error)
            first.state_corrupted = True
            first.hint = (
                f"on rank {self._board.rank} {done} of {len(self._groups)} parts of the experts"
                " lie in their new places and the others as before; create the model again and "
                "load the last checkpoint into it"
            )
            # Both layouts are wrong for it now: a save by either would mix experts up in silence.
            self._plan.remember(lost=True)
            if self._checkpointer is not None:
                self._checkpointer.refuse_saves(first)
            if first is error:
                raise
            raise first from error
        finally:
            for unit in self._plan.units:
                for tensor in unit.tensors:
                    tensor.close()
            if self._transport is None:
                carrier.close()
        self._plan.remember()
        if self._checkpointer is not None:
            self._checkpointer.change_layout(self.layout)
        self.report = total
        return total

    def _look(self) -> tuple[dict[str, TensorLeaf], dict[str, Numbers]]:
        """Return the numbers that follow parameters, as `_Plan.values_of`, if all is as planned."""
        if self.report is not None:
            raise _stale("this move has run", "a plan that has not run", "one that has")
        self._plan.check_fresh(self._state)
        # They may have changed since the plan was made.
        return self._plan.values_of(self._state)

    def _check_numbers(self, values: Mapping[str, Numbers]) -> None:
        """Raise on every rank when experts with different numbers become one tensor of any."""
        given = self._plan.given(values)
        # Mostly all of them took the same steps: then tensors need not be compared one by one.
        report = msgspec.json.encode(list(given))
        if not self._agreement.all_reports("numbers", report, _alike):
            report = msgspec.json.encode(list(given.items()))
            self._agreement.all_reports("numbers by tensor", report, _compared)

    def _move(
        self,
        carrier: Transport,
        limit: int,
        number: int,
        leaves: Mapping[str, TensorLeaf],
        values: Mapping[str, Numbers],
        total: MoveReport,
    ) -> None:
        group = self._groups[number]
        tensors = [t for unit in group for t in unit.tensors]
        plan = self._plan
        watch = MoveWatch(self._board, f"experts/{number}", self._timeout_s)
        try:
            for tensor in tensors:
                tensor.open()
        except Exception as error:  # a device has no memory left, mostly: others must not wait
            raise watch.fail(_explained(error)) from error
        mover = Mover(
            carrier,
            limit,
            watch,
            plan.part(group),
            plan.transfers,
            plan.roles,
            values,
            len(plan.number_names),
        )
        done = mover.run()
        for unit in group:
            for staged in unit.staged:
                staged.put_in_place()
        plan.put_numbers(mover, leaves)
        for tensor in tensors:
            tensor.close()
        for name, value in asdict(done).items():
            old = getattr(total, name)
            setattr(total, name, max(old, value) if name == "staged_bytes" else old + value)


def _explained(error: Exception) -> CkptdError:
    """Return what all ranks raise for an error of one."""
    if isinstance(error, CkptdError):
        return error
    return CkptdError("experts could not be moved", kind="crashed", found=repr(error)[:500])


def _joined(reports: list[bytes]) -> bytes:
    """Return what follows from what all ranks say.

    Raises
    ------
    MismatchError
        kind ``lay-fit``: experts of some ranks have optimizer state, and others have none.
    """
    told = [_told.decode(r) for r in reports]
    states: dict[str, int] = {}
    for one in told:
        for state, itemsize in one.states.items():
            states[state] = max(itemsize, states.get(state, 0))
    for rank, one in enumerate(told):
        lacking = sorted(states.keys() - one.states.keys()) if one.states else []
        if one.partly or lacking:
            raise MismatchError(
                "some experts have optimizer state, and others have none",
                kind="lay-fit",
                where=f"rank {rank}" + (f", {one.partly}" if one.partly else ""),
                wanted=", ".join(s or "params" for s in sorted(states)),
                found=f"no {', '.join(lacking)}" if lacking else "some of them",
                hint="give the experts without tokens a gradient of zeros in one step",
            )
    most = max((max(t.bytes_in, t.bytes_out) for t in told), default=0)
    return msgspec.json.encode(_Agreed(most, sum(t.bytes_out for t in told), states))


def _alike(reports: list[bytes]) -> bytes:
    """Return whether each number has one value on all ranks: something, or nothing."""
    given = {g for r in reports for g in _given.decode(r)}
    return b"alike" if len({name for name, *_ in given}) == len(given) else b""


def _compared(reports: list[bytes]) -> bytes:
    """Return nothing if each tensor that is made gets one value of each number.

    Raises
    ------
    MismatchError
        kind ``lay-fit``: one gets different ones.
    """
    values: dict[tuple[str, _Taker], set[_Given]] = {}
    for report in reports:
        for given, takers in _given_to.decode(report):
            for taker in takers:
                values.setdefault((given[0], taker), set()).add(given)
    for (name, (rank, tensor)), found in sorted(values.items()):
        if len(found) > 1:
            raise MismatchError(
                "experts with different numbers become one tensor",
                kind="lay-fit",
                where=f"rank {rank}, {name} of {tensor}",
                wanted="one value",
                found=f"{len(found)} different values",
                hint="make all experts of a stack take the same steps",
            )
    return b""


def _stale(message: str, wanted: str, found: str, where: str | None = None) -> UsageError:
    return UsageError(
        message,
        where=where,
        wanted=wanted,
        found=found,
        hint="plan the move again, with the layout that the last move returned",
    )


def is_node_held(tensor: torch.Tensor) -> bool:
    """Whether something besides the tensor holds the node that accumulates its gradient.

    A graph does, and what has hooks on the node. Autograd makes a new node where none is held; one
    that is held is used again, and refuses gradients of another shape.
    """
    if not (tensor.is_leaf and tensor.requires_grad):
        return False

    def node() -> Any:
        with torch.enable_grad():
            view: Any = tensor.view_as(tensor)
        return view.grad_fn.next_functions[0][0]

    mark = "ckptd.held"
    node().metadata[mark] = True
    return bool(node().metadata.pop(mark, False))


class ExpertHome(NamedTuple):
    """Coordinates of a parameter's experts, before and after a move."""

    origin: torch.Tensor
    before: Coordinates
    after: Coordinates


@dataclass(eq=False)
class _Plan:
    """Tensors that this rank sends, receives and makes in a move."""

    experts: str
    program: str
    before: RelayoutSide
    after: RelayoutSide
    transfers: Transfers
    roles: Roles
    move: MovePlan
    units: list[_Unit]
    moved: int
    number_names: Sequence[str]
    homes: Mapping[str, ExpertHome]
    """Where the experts of each own parameter lie, by its name in the state."""
    states: Mapping[str, int]
    """Bytes of an element by state; parameters are the empty one."""
    partly: str
    """An own parameter that lacks states which others have; empty for none."""

    @staticmethod
    def of(side: RelayoutSide, placement: ExpertPlacement, experts: str) -> _Plan:
        """Plan the part of this rank."""
        bound = side.form.bound
        program = place_experts(side.laid.program, placement, experts, bound.sizes.get(experts))
        resolved = program.resolve()
        sizes = {a: n for a, n in bound.sizes.items() if a not in resolved.sizes}
        new = bind_sizes(resolved, sizes)
        old_tables, tables = tables_of(bound, experts), tables_of(new, experts)
        before = _side(side, expert_forms(bound, experts), side.leaves)
        after = _side(side, expert_forms(new, experts), side.leaves)
        forms = agreed(before.form.bound, after.form.bound)
        transfers = Transfers(Composition(*forms))
        rank = side.laid.rank or 0
        leaves = by_name(side.leaves)
        _check_names(before, after, rank)
        _check_leaves(before, after, leaves, rank)
        there = memories(before, side.leaves, set(before.form.states))
        units = _units(after.form, experts)
        sources: dict[str, TensorMemory] = {}
        targets: dict[str, TensorMemory] = {}
        for tensor in local_tensors(before.form, rank):
            if tensor.name in there:
                live = LiveTensor(leaves[before.names[tensor.name]])
                units[_key(before.form, tensor, experts)].live.append(live)
                sources[tensor.name] = live
        for tensor in local_tensors(after.form, rank):
            leaf = leaves.get(after.names[tensor.name])
            if leaf is not None:
                staged = StagedTensor(leaf, tensor.shape)
                units[_key(after.form, tensor, experts)].staged.append(staged)
                targets[tensor.name] = staged
        world = len(side.laid.ranks or ())
        roles = Roles(tuple(range(world)), tuple(range(world)))
        moved = make_plan(
            transfers,
            roles,
            rank,
            states=frozenset(before.form.states),
            sources=sources,
            targets=targets,
        )
        # What is kept holds no memory that a move would give back.
        return _Plan(
            experts,
            program.text,
            replace(before, leaves=Leaves()),
            replace(after, leaves=Leaves()),
            transfers,
            roles,
            moved,
            [units[k] for k in sorted(units)],
            _changed(bound, old_tables, new, tables),
            sorted(s.name for s in bound.layout.scalars),
            _homes(before, after, leaves, rank, experts),
            *_states_of(before, leaves, rank),
        )

    # --- what is said ---------------------------------------------------------------------------

    @cached_property
    def traffic(self) -> tuple[int, int, int]:
        """Bytes that are sent, received and kept."""
        me = self.before.laid.rank
        sent = received = kept = 0
        for peer, found in self.move.outgoing.items():
            n = sum(o.segment.numel * o.memory.dtype.itemsize for o in found if o.memory)
            sent, kept = (sent, kept + n) if peer == me else (sent + n, kept)
        for peer, arriving in self.move.incoming.items():
            if peer != me:
                sizes = (i.segment.numel * i.memory.dtype.itemsize for i in arriving if i.memory)
                received += sum(sizes)
        return sent, received, kept

    def told(self) -> bytes:
        """Return what this rank says to the others."""
        sent, received, _ = self.traffic
        return msgspec.json.encode(_Told(received, sent, dict(self.states), self.partly))

    # --- what is done ---------------------------------------------------------------------------

    def part(self, units: Sequence[_Unit]) -> MovePlan:
        """Return the plan for some units; both ends of a stream have them in the same order."""
        out = MovePlan()
        for unit in units:
            mine = self._parts.get(unit.key, MovePlan())
            for peer, outgoing in mine.outgoing.items():
                out.outgoing.setdefault(peer, []).extend(outgoing)
            for peer, incoming in mine.incoming.items():
                out.incoming.setdefault(peer, []).extend(incoming)
            out.fills += mine.fills
        return out

    @cached_property
    def _parts(self) -> dict[UnitKey, MovePlan]:
        """The plan by unit: a move in many parts looks at each segment once."""
        out: defaultdict[UnitKey, MovePlan] = defaultdict(MovePlan)
        for peer, outgoing in self.move.outgoing.items():
            for o in outgoing:
                key = _key(self.before.form, o.tensor, self.experts)
                out[key].outgoing.setdefault(peer, []).append(o)
        for peer, incoming in self.move.incoming.items():
            for i in incoming:
                key = _key(self.after.form, i.tensor, self.experts)
                out[key].incoming.setdefault(peer, []).append(i)
        for f in self.move.fills:
            out[self._fills[f.name]].fills.append(f)
        return dict(out)

    @cached_property
    def _fills(self) -> dict[str, UnitKey]:
        rank = self.after.laid.rank or 0
        form = self.after.form
        return {t.name: _key(form, t, self.experts) for t in local_tensors(form, rank)}

    def given(self, values: Mapping[str, Numbers]) -> dict[_Given, list[_Taker]]:
        """Return the numbers that this rank gives along, and the tensors that each becomes one of.

        `values` is by parameter.
        """
        out: dict[_Given, list[_Taker]] = {}
        for peer, found in self.move.outgoing.items():
            for outgoing in found:
                mine = values.get(outgoing.tensor.name, ()) if outgoing.memory else ()
                for name, number in zip(self.number_names, mine, strict=False):
                    if number:
                        dtype, raw = number
                        taker = peer, outgoing.segment.target
                        out.setdefault((name, dtype.name, raw), []).append(taker)
        return out

    def values_of(
        self, state: Mapping[str, Any]
    ) -> tuple[dict[str, TensorLeaf], dict[str, Numbers]]:
        """Return the numbers that follow parameters: as leaves, and by parameter."""
        found = look(state)
        names = {
            self.after.scalar(rule, indexes, scalar)
            for rule, indexes in self.after.job.tensors.values()
            for scalar in self.number_names
        }
        leaves = {n: x for n, x in by_name(found).items() if n in names}
        return leaves, numbers(replace(self.before, leaves=found), self.number_names)

    def put_numbers(self, mover: Mover, leaves: Mapping[str, TensorLeaf]) -> None:
        """Write the numbers that follow the parameters that were moved."""
        for local, (rule, indexes) in self.after.job.tensors.items():
            given = mover.taken_scalars.get(self.after.form.name(local, ""), [])
            for at, name in enumerate(self.number_names):
                leaf = leaves.get(self.after.scalar(rule, indexes, name))
                if leaf is not None:
                    # All that are there are alike.
                    write_number(leaf, next((v[at] for v in given if at < len(v) and v[at]), None))

    # --- whether it is still true ---------------------------------------------------------------

    def check_fresh(self, state: Mapping[str, Any]) -> None:
        """Raise unless the experts lie where the layout says, in the tensors of the plan.

        Raises
        ------
        UsageError
            Experts do not lie where the layout says, or the state is not what the move was planned
            with;: there are gradients.
        """
        live = by_name(look(state))
        for name, home in self.homes.items():
            known = _placed.get(home.origin)
            if known == _LOST:
                raise _stale(
                    "an earlier move of these experts failed",
                    "experts that all lie where the layout says",
                    "some in new places: create the model again and load the last checkpoint",
                    name,
                )
            if known is not None and known != home.before:
                raise _stale(
                    "the experts of a tensor do not lie where the layout says",
                    f"coordinates {_shown(known)}, where they were moved to",
                    f"coordinates {_shown(home.before)} in the layout",
                    name,
                )
            if home.origin.grad is not None:
                raise UsageError(
                    "experts with gradients cannot be moved: the gradients would be lost",
                    where=name,
                    wanted="no gradients",
                    found="a gradient",
                    hint="move after optimizer.step() and optimizer.zero_grad(set_to_none=True)",
                )
        for staged in chain.from_iterable(unit.staged for unit in self.units):
            if staged.gets_another_shape and is_node_held(staged.origin):
                raise UsageError(
                    "a parameter cannot change its number of experts while its gradient "
                    "accumulator, which keeps the old shape, is referenced",
                    where=staged.name,
                    wanted="no graph of an earlier step, and no hook of a wrapper such as DDP",
                    found="a referenced accumulator",
                    hint="del loss, or what else a forward returned; with a wrapper keep each "
                    "rank's number of experts",
                )
        for unit in self.units:
            for tensor in unit.live:
                found = live.get(tensor.name)
                if found is None or found.origin is not tensor.origin:
                    what = "none" if found is None else "another one"
                    raise _stale("the plan has another tensor", "the same", what, tensor.name)
                if found.local.numel() != tensor.numel:
                    raise _stale("a tensor has another size", "as planned", "another", tensor.name)

    def remember(self, *, lost: bool = False) -> None:
        """Keep where the experts now lie; `lost`: partly here and partly there."""
        for home in self.homes.values():
            _placed[home.origin] = _LOST if lost else home.after


def _key(form: StoredForm, tensor: BoundTensor, experts: str) -> UnitKey:
    piece = tensor.pieces[0]
    return unit_key(form, piece.rule, piece.indexes, tensor.state, experts)


def _shown(coordinates: Coordinates) -> str:
    more = " ..." if len(coordinates) > 16 else ""
    return " ".join(map(str, coordinates[:16])) + more


def _side(side: RelayoutSide, form: StoredForm, leaves: Leaves) -> RelayoutSide:
    """Return a side with nothing but experts, in the names of the program and of the state."""
    layout = side.job.spelling.put_into(form.bound.layout)
    job = replace(side.job, form=StoredForm(Bound(layout, form.bound.sizes)))
    return RelayoutSide(side.laid, job, form, side.state, leaves)


def _units(form: StoredForm, experts: str) -> dict[UnitKey, _Unit]:
    """Return everything that is moved, on whatever rank; the same on all of them."""
    most: dict[int, int] = {}
    for (number, _), found in tables_of(form.bound, experts).items():
        most[number] = max(Counter(found).values())
    out: dict[UnitKey, _Unit] = {}
    for rule in form.rules:
        numel = math.prod(int(h.lengths.max()) for h in rule.held)
        if experts in rule.indexes:
            numel *= most[rule.number]
        for indexes in rule.tensors():
            for state in form.states:
                key = unit_key(form, rule.number, indexes, state, experts)
                out.setdefault(key, _Unit(key, numel))
    return out


def _states_of(
    before: RelayoutSide, leaves: Mapping[str, TensorLeaf], rank: int
) -> tuple[dict[str, int], str]:
    """Return bytes of an element by state, and a parameter that lacks some of them."""
    states: dict[str, int] = {}
    by_tensor: dict[tuple[int, tuple[int, ...]], set[str]] = {}
    for tensor in local_tensors(before.form, rank):
        piece = tensor.pieces[0]
        mine = by_tensor.setdefault((piece.rule, piece.indexes), set())
        leaf = leaves.get(before.names[tensor.name])
        if leaf is not None:
            mine.add(tensor.state)
            states[tensor.state] = leaf.tensor.element_size()
    for (rule, indexes), found in by_tensor.items():
        if found != states.keys():
            return states, before.form.rules[rule].local_name(indexes)
    return states, ""


def _check_names(before: RelayoutSide, after: RelayoutSide, rank: int) -> None:
    """Raise `UsageError` where modules would have to come or go."""
    old, new = (
        {side.names[t.name] for t in local_tensors(side.form, rank) if not t.state}
        for side in (before, after)
    )
    if old != new:
        raise UsageError(
            "this placement does not fit the rank's modules",
            where=", ".join(sorted(old ^ new)[:4]),
            wanted=f"{len(new)} tensors of experts",
            found=f"{len(old)}, or others",
            hint="keep each rank's number of experts, or use stacks of experts, which can change "
            "in place; else create model and optimizer with the new placement, and fill them with "
            "ckptd.relayout and the layout that ckptd.with_expert_placement returns",
        )


def _check_leaves(
    before: RelayoutSide, after: RelayoutSide, leaves: Mapping[str, TensorLeaf], rank: int
) -> None:
    """Raise `UsageError` for tensors that cannot get another shape."""
    shapes = {before.names[t.name]: t.shape for t in local_tensors(before.form, rank)}
    for tensor in local_tensors(after.form, rank):
        name = after.names[tensor.name]
        leaf = leaves.get(name)
        if leaf is None or shapes.get(name) == tensor.shape:
            continue
        old = leaf.local
        alone = old.untyped_storage().nbytes() == old.numel() * old.element_size()
        if is_dtensor(leaf.origin) or leaf.kind == "ndarray" or not alone:
            raise UsageError(
                "a tensor cannot change its number of experts in place",
                where=name,
                wanted="a plain tensor with its own memory",
                found="a DTensor" if is_dtensor(leaf.origin) else "a view of other memory",
                hint="keep each rank's number of experts",
            )


def _changed(
    old: Bound,
    before: Mapping[tuple[int, int | None], Coordinates],
    new: Bound,
    after: Mapping[tuple[int, int | None], Coordinates],
) -> int:
    """Return how many experts change their coordinate, each counted once a layer."""

    def by_family(bound: Bound, tables: Mapping[Any, Coordinates]) -> dict[Any, Coordinates]:
        return {
            (f.name, layer): table
            for (rule, layer), table in tables.items()
            for f in bound.layout.equations[rule].families.values()
        }

    first, second = by_family(old, before), by_family(new, after)
    layers: dict[int | None, int] = {}
    for (name, layer), table in second.items():
        was = first.get((name, layer), table)
        n = sum(a != b for a, b in zip(was, table, strict=False))
        layers[layer] = max(n, layers.get(layer, 0))
    return sum(layers.values())


def _homes(
    before: RelayoutSide,
    after: RelayoutSide,
    leaves: Mapping[str, TensorLeaf],
    rank: int,
    experts: str,
) -> dict[str, ExpertHome]:
    """Return where the experts of each own parameter lie, and shall lie."""
    tables: dict[str, list[Coordinates]] = {}
    for side in (before, after):
        found = tables_of(side.form.bound, experts)
        for tensor in local_tensors(side.form, rank):
            if not tensor.state:
                piece = tensor.pieces[0]
                _, others, _ = unit_key(side.form, piece.rule, piece.indexes, "", experts)
                layer = others[0] if (piece.rule, None) not in found and others else None
                tables.setdefault(side.names[tensor.name], []).append(found[piece.rule, layer])
    return {n: ExpertHome(leaves[n].origin, *t) for n, t in tables.items() if n in leaves}
