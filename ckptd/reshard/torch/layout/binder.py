"""`BoundLayout`: a job's layout, bound to the shapes that its ranks hold; messages between ranks.

In it: which replica writes which tensor, so that all write alike much; refusals of shapes and of
states that differ between ranks, and their hints.

Sizes follow from the shapes of all ranks, so ranks tell each other theirs once: a digest a rank,
and each distinct description to all. From then on every rank knows what all others hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np

from ckptd.base.digest import digest_hex
from ckptd.base.grouping import by_key
from ckptd.base.runtime.ranks import error_fields, posted
from ckptd.base.torch.ranks import Agreement
from ckptd.base.torch.tensors import is_dtensor
from ckptd.checkpoint.torch.layouts import LayoutSpec
from ckptd.checkpoint.torch.state.leaves import Leaves
from ckptd.decoding import json_decoder, msgpack_decoder
from ckptd.errors import CkptdError, MismatchError, UsageError
from ckptd.lay.bind import bind_ranks, bind_stored
from ckptd.lay.local import BoundTensor, local_tensors
from ckptd.lay.matching import Matcher, NameTemplates
from ckptd.lay.places import free_ranges
from ckptd.lay.replicated import ReplicatedParts
from ckptd.lay.resolve import Bound, Resolved
from ckptd.lay.stored import StoredForm, StoredTensor
from ckptd.reshard.layouts import LayoutProgram
from ckptd.reshard.torch.layout.common import CommonParts
from ckptd.reshard.torch.layout.program import Spelling, read_layout, spelling_of

_Key = tuple[int, tuple[int, ...], str]


@dataclass(frozen=True, eq=False)
class Writers:
    """Spreads the stored tensors of a layout over the ranks that hold replicas.

    A pure function of the layout: all ranks come to the same. A tensor's pieces are all written
    at one coordinate of the axes that hold replicas of it; each tensor goes where least was given
    so far.
    """

    form: StoredForm

    def shift(self, stored: StoredTensor) -> int:
        """Return how far from the lowest holders the ranks are that write a tensor."""
        return self._shifts[(stored.rule, stored.indexes, self._flat_axis(stored))]

    def _flat_axis(self, stored: StoredTensor) -> str:
        flat = self.form.packing.flat_of(stored.rule, stored.indexes, stored.state)
        return "" if flat is None else self.form.bound.layout.flats[flat].split[0]

    @cached_property
    def _shifts(self) -> Mapping[_Key, int]:
        out: dict[_Key, int] = {}
        given: dict[tuple[tuple[int, int], ...], np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
        for rule in self.form.stored_rules:
            if not rule.plain:
                continue
            for indexes in rule.tensors():
                for axis in self._axes(rule.number, indexes):
                    free = free_ranges(self.form.mesh, rule.axes | ({axis} if axis else set()))
                    if not free:
                        continue
                    loads = given.setdefault(
                        tuple(free), np.zeros(math.prod(n for _, n in free), dtype=np.float64)
                    )
                    number = int(loads.argmin())
                    loads[number] += math.prod(rule.shape)
                    out[rule.number, indexes, axis] = _shift(number, free)
        return _Zeros(out)

    def _axes(self, rule: int, indexes: tuple[int, ...]) -> dict[str, None]:
        """Return the axes of the flats that a tensor's states lie in; empty for none."""
        flats = (self.form.packing.flat_of(rule, indexes, s) for s in self.form.states)
        layout = self.form.bound.layout
        return dict.fromkeys("" if f is None else layout.flats[f].split[0] for f in flats)


class _Zeros(dict[_Key, int]):
    """Zero for what is not there: tensors whose holders are not a plain product."""

    def __missing__(self, key: _Key) -> int:
        return 0


def _shift(number: int, free: list[tuple[int, int]]) -> int:
    out = 0
    for stride, count in free:
        number, digit = divmod(number, count)
        out += digit * stride
    return out


_groups = json_decoder(dict[str, tuple[int, ...]])

_FLAT = re.compile(r"(?:.*\.)?(flat\.[0-9]+\.[^.]+)")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class NameKind:
    """Kind of a name of the state, by the layout.

    Attributes
    ----------
    tensor
        The tensor or buffer of this rank.
    scalar
        For a number that follows a parameter: rule and indexes of the parameter, and its own
        name.
    dropped
        The layout leaves it out.
    """

    tensor: BoundTensor | None = None
    scalar: tuple[int, tuple[int, ...], str] | None = None
    dropped: bool = False


@dataclass(frozen=True, eq=False)
class JobLayout:
    """A layout, bound to the tensors of a job, as one rank sees it.

    Attributes
    ----------
    program
        With the names that checkpoints have.
    form
        Its stored form.
    spelling
        How names are made.
    rank
        Of this process in the layout; 0 where it has no mesh, -1 where it is not in it.
    """

    program: LayoutProgram
    form: StoredForm
    spelling: Spelling
    rank: int

    @cached_property
    def kept(self) -> str:
        """The program as a checkpoint keeps it: with the sizes that were found."""
        return self.program.closed(self.form.bound).text

    @property
    def whole(self) -> bool:
        """Whether it speaks of whole tensors, not of what ranks hold."""
        return self.form.bound.layout.mesh is None

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """Coordinates of this rank."""
        return self.form.mesh.coordinates(self.rank)

    @cached_property
    def writers(self) -> Writers:
        """Writers of the stored tensors."""
        return Writers(self.form)

    @cached_property
    def replicated(self) -> ReplicatedParts:
        """Which parts of the stored tensors several ranks hold."""
        return ReplicatedParts(self.form)

    @cached_property
    def common(self) -> CommonParts:
        """The parts of tensors that other ranks hold as well."""
        return CommonParts(self.replicated, self.coordinates, self.rank)

    @cached_property
    def local(self) -> Mapping[str, BoundTensor]:
        """Everything that this rank holds, by name."""
        return {t.name: t for t in local_tensors(self.form, self.rank)}

    @cached_property
    def tensors(self) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Rule and indexes of each parameter that this rank has something of, by its own name."""
        pairs = self.form.packing.on_rank(self.rank)
        return {self.form.rules[rule].local_name(at): (rule, at) for rule, at in pairs}

    @cached_property
    def _templates(self) -> NameTemplates:
        return NameTemplates(self.form.bound.layout)

    @cached_property
    def _matcher(self) -> Matcher:
        return Matcher(self.form.bound.layout, stored=self.whole)

    def kind(self, name: str) -> NameKind:
        """Return what a name of this rank's state is.

        Raises
        ------
        MismatchError
            ``lay-fit``: a state of one of the layout's parameters that its space does not know.
        """
        flat = _FLAT.fullmatch(name)
        found = self.local.get(name) or (self.local.get(flat[1]) if flat else None)
        if found is not None:
            return NameKind(tensor=found)
        undressed = self._templates.take(name)
        if undressed is None:
            self._check_state(name)
            return NameKind()
        if undressed.scalar and undressed.name in self.tensors:
            rule, indexes = self.tensors[undressed.name]
            return NameKind(scalar=(rule, indexes, undressed.state))
        match = self._matcher.match(undressed.name, self.coordinates)
        if match is not None and match.equation == -1:
            return NameKind(dropped=True)
        self._check_state(name)
        return NameKind()

    def _check_state(self, name: str) -> None:
        before = self.spelling.states.partition("{name}")[0]
        inner, _, state = name.removeprefix(before).rpartition(".")
        if not name.startswith(before) or inner not in self.tensors:
            return
        layout = self.form.bound.layout
        raise MismatchError(
            "a parameter has a state that the layout does not declare",
            kind="lay-fit",
            where=name,
            wanted=", ".join([s.stored for s in layout.states] + [s.name for s in layout.scalars]),
            found=state,
            hint=f"in space {layout.space}: `follow x={state}` for a tensor like the parameter, "
            f"`scalar {state}(param)` for a number",
        )


@dataclass(frozen=True)
class SeenNames:
    """Names of one rank's state: plain tensors, and the sections of optimizers.

    `optimizers` tells for each section whether parameters are named without that of the module.
    """

    shapes: Mapping[str, Shape]
    optimizers: tuple[tuple[str, bool], ...] = ()

    @staticmethod
    def of(leaves: Leaves, *, whole: bool) -> SeenNames:
        """Return the names of a state's leaves; DTensors only where tensors are `whole`."""
        shapes: dict[str, Shape] = {}
        for leaf in leaves.tensors.values():
            if whole or not is_dtensor(leaf.tensor):
                for name in (leaf.name, *leaf.aliases):
                    shapes[name] = leaf.shape
        in_module = any(leaf.kind == "param" for leaf in leaves.tensors.values())
        groups = [o.name for o in leaves.objects.values() if o.kind == "groups"]
        return SeenNames(shapes, tuple((n.removesuffix(".groups"), in_module) for n in groups))


class _Post(msgspec.Struct, frozen=True):
    """Message of a rank to all others."""

    params: str | None
    states: str | None
    shapes: dict[str, Shape]


_posts = msgpack_decoder(_Post)


@dataclass
class BoundLayout:
    """Binds a layout to the states of one job.

    Parameters
    ----------
    layout
        See `ckptd.reshard.torch.layout.program.read_layout`.
    agreement
        Of the job.
    ranks
        Which ranks of the job are the ranks of the layout; all of them, in order, when None.
    quantized
        Whether it may have quantized tensors.
    """

    layout: LayoutSpec
    agreement: Agreement
    ranks: Sequence[int] | None = None
    quantized: bool = False
    _bound: JobLayout | None = field(default=None, init=False)
    _known: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.change(self.layout)

    def change(self, layout: LayoutSpec) -> None:
        """Bind another layout from now on; every rank does it between the same two calls.

        Raises
        ------
        UsageError
            As `read_layout`; kind ``lay-use``: it is for another number of ranks.
        """
        program = read_layout(layout, quantized=self.quantized)
        resolved = program.resolve()
        mesh, world = resolved.mesh, self.agreement.board.world
        if self.ranks is None:
            self.ranks = range(world)
        world = len(self.ranks)
        if mesh is not None and mesh.world != world:
            raise UsageError(
                "the layout is for another number of ranks",
                kind="lay-use",
                where=program.layout,
                wanted=f"{mesh.world} ranks, as its mesh has",
                found=f"{world} ranks in this job",
            )
        # Nothing above has changed what is bound: one that is refused leaves the old one.
        self.layout, self._bound, self._known = layout, None, ""
        self._program, self._resolved = program, resolved

    @staticmethod
    def mesh_world(layout: LayoutSpec) -> int:
        """Return the number of ranks that a layout is for; 1 where it has no mesh."""
        mesh = read_layout(layout).resolve().mesh
        return mesh.world if mesh is not None else 1

    @property
    def program(self) -> LayoutProgram:
        """The program, as it was given."""
        return self._program

    @property
    def resolved(self) -> Resolved:
        """The layout, looked up."""
        return self._resolved

    @property
    def rank(self) -> int | None:
        """Rank of this process in the layout; None where it is in none."""
        mine, ranks = self.agreement.board.rank, self.ranks or ()
        if self.whole:
            return 0 if mine in ranks else None
        return ranks.index(mine) if mine in ranks else None

    @property
    def whole(self) -> bool:
        """Whether it speaks of whole tensors, not of what ranks hold."""
        return self._resolved.mesh is None

    def bind(self, look: Callable[[], Leaves]) -> JobLayout:
        """Return the layout of a state. All ranks call it; they talk when theirs changed.

        Parameters
        ----------
        look
            Returns the leaves of the state. What it raises, every rank raises.

        Raises
        ------
        UsageError, MismatchError
            On every rank: the layout does not fit what some rank has.
        """
        problem: CkptdError | None = None
        post = b""
        try:
            leaves = look()
            post = msgspec.msgpack.encode(self._post(SeenNames.of(leaves, whole=self.whole)))
        except CkptdError as error:
            problem = error
        own = digest_hex(post)
        if self._bound is None or problem is not None or own != self._known:
            posts = self._exchange(own, post, problem)
            self._bound = self._bind(posts)
            self._known = own
        return self._bound

    # --- what ranks tell each other -------------------------------------------------------------

    def spelling(self, seen: SeenNames) -> Spelling | None:
        """Return how a state's names begin; None when no rule matches any."""
        return spelling_of(self._resolved, seen.shapes, seen.optimizers, stored=self.whole)

    def _post(self, seen: SeenNames) -> _Post:
        found = self.spelling(seen)
        if found is None or self.rank is None:
            return _Post(None, None, {})
        resolved = found.put_into(self._resolved)
        templates, matcher = NameTemplates(resolved), Matcher(resolved, stored=self.whole)
        mesh, rank = self._resolved.mesh, self.rank
        at = mesh.coordinates(rank) if mesh and rank is not None else None
        shapes = {}
        for name, shape in seen.shapes.items():
            undressed = templates.take(name)
            if undressed is None or undressed.state or undressed.scalar:
                continue
            match = matcher.match(undressed.name, at)
            if match is not None and match.equation >= 0:
                shapes[name] = shape
        return _Post(found.params, found.states, shapes)

    def _exchange(
        self, own: str, post: bytes, problem: CkptdError | None
    ) -> dict[tuple[int, ...], _Post]:
        """Return what all ranks have, by the ranks that have it."""
        board = self.agreement.board
        report = own.encode() if problem is None else b"!" + _encoded(problem)

        def tabulate(reports: list[bytes]) -> bytes:
            failed = next((r for r in reports if r.startswith(b"!")), None)
            if failed is not None:
                raise CkptdError.from_dict(posted(error_fields, failed[1:]))
            return msgspec.json.encode(by_key((d.decode(), r) for r, d in enumerate(reports)))

        raw = self.agreement.all_reports("layout", report, tabulate)
        table = posted(_groups, raw)
        if table[own][0] == board.rank and board.world > 1:
            board.set(f"layout/{own}", post)
        out = {}
        for digest, ranks in table.items():
            key = f"layout/{digest}"
            body = post if digest == own else self.agreement.wait(key, ranks[0], 600.0)
            out[ranks] = _posts.decode(body)
        return out

    # --- binding --------------------------------------------------------------------------------

    def _bind(self, posts: Mapping[tuple[int, ...], _Post]) -> JobLayout:
        spelling = _agreed(posts, self._program.layout)
        resolved = spelling.put_into(self._resolved)
        if resolved.mesh is None:
            union = {n: s for post in posts.values() for n, s in post.shapes.items()}
            bound = bind_stored(resolved, union)
        else:
            mine = self.ranks or ()
            by_rank = {
                mine.index(r): post.shapes
                for ranks, post in posts.items()
                for r in ranks
                if r in mine
            }
            bound = bind_ranks(resolved, dict(sorted(by_rank.items())))
        return self.job(bound, spelling)

    def job(self, bound: Bound, spelling: Spelling) -> JobLayout:
        """Return the layout as this rank sees it."""
        program = spelling.put_into_program(self._program)
        rank = self.rank
        return JobLayout(program, StoredForm(bound), spelling, -1 if rank is None else rank)


def _agreed(posts: Mapping[tuple[int, ...], _Post], layout: str) -> Spelling:
    """Return the one spelling of all ranks that have tensors of the layout."""
    found: dict[Spelling, Sequence[int]] = {}
    for ranks, post in posts.items():
        if post.params is not None and post.states is not None:
            found.setdefault(Spelling(post.params, post.states), ranks)
    if not found:
        raise MismatchError(
            "no tensor of the state matches a rule of the layout",
            kind="lay-fit",
            where=layout,
            wanted="the names of its rules, in a section of the state: {'model': {NAME: tensor}}",
        )
    if len(found) > 1:
        raise UsageError(
            "ranks keep the layout's tensors in different sections",
            kind="lay-use",
            where=layout,
            found="; ".join(f"{s.params} on rank {ranks[0]}" for s, ranks in found.items()),
        )
    return next(iter(found))


def _encoded(error: CkptdError) -> bytes:
    return msgspec.json.encode(error.to_dict())
