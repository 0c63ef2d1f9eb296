"""`LayoutProgram`: programs as a user names them: files, shipped ones, rules, inferred ones.

In it: sizes, drops and rules given besides; comparison of two programs; names from which a layout
is inferred, and those of optimizer states (`exp_avg`) and scales; largest program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from ckptd.base.grouping import by_key
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.format.words import TITLE
from ckptd.errors import MismatchError, NotFoundError, UsageError
from ckptd.lay.closed import found_sizes
from ckptd.lay.matching import state_pattern
from ckptd.lay.regions import box_parts
from ckptd.lay.resolve import Bound, Resolved, is_recipe, resolve
from ckptd.lay.ruleform import RuleForm
from ckptd.lay.stored import StoredForm, TensorKey
from ckptd.lay.syntax import library, parse, parse_statement, show, tree
from ckptd.reshard.elements import find
from ckptd.reshard.groups import groups_name, params_of, settings_above
from ckptd.types import Box


class _Reading(NamedTuple):
    """Meaning of a cell by a program; a cell of padding has none."""

    state: str
    family: str
    axes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        state = f"state {self.state} of " if self.state else ""
        return f"{state}{self.family} at {' '.join(f'{a}={n}' for a, n in self.axes)}".rstrip()


@dataclass(frozen=True)
class LayoutComparison:
    """Comparison of two programs on some stored tensors.

    Attributes
    ----------
    tensors
        How many of them the used program names.
    compared
        How many both programs describe by the same logical tensors.
    difference
        The first contradiction; the rest was then not compared.
    """

    tensors: int
    compared: int
    difference: MismatchError | None = None


def compare(kept: Bound, used: Bound, names: Iterable[str], hint: str) -> LayoutComparison:
    """Compare two programs that fit the same checkpoint.

    Logical tensors are the same where their names and axes are. A program that speaks of others,
    or leaves tensors out, does not contradict. Only the place of elements is looked at, not types,
    scales and other modifiers.

    Parameters
    ----------
    kept, used
        Both, bound to the checkpoint's tensors.
    names
        The tensors of the checkpoint.
    hint
        Of the error: how to insist.

    Raises
    ------
    UsageError
        Two tensors of one program have one name.
    """
    refined = {**kept.layout.refined, **used.layout.refined}
    sizes = {**kept.sizes, **used.sizes}
    both = _Both(StoredForm(kept, sizes, refined), StoredForm(used, sizes, refined), hint)
    tensors = compared = 0
    for name in names:
        mine = both.used.by_name.get(name)
        tensors += mine is not None
        other = both.kept.by_name.get(name)
        if mine is None or other is None:
            continue
        found = both.tensor(name, other, mine)
        if isinstance(found, MismatchError):
            return LayoutComparison(tensors, compared, found)
        compared += found
    return LayoutComparison(tensors, compared)


@dataclass(frozen=True, eq=False)
class _Both:
    """Two stored forms of one checkpoint."""

    kept: StoredForm
    used: StoredForm
    hint: str
    _known: dict[object, bool] = field(default_factory=dict)

    def tensor(self, name: str, kept: TensorKey, used: TensorKey) -> bool | MismatchError:
        """Return whether a tensor could be compared in full, or the difference."""
        alike = _numbers(self.kept, kept) == _numbers(self.used, used)
        key = (kept[0], kept[2], used[0], used[2])
        if alike and key in self._known:
            return self._known[key]
        found = self._cells(name, kept, used)
        if alike and not isinstance(found, MismatchError):
            self._known[key] = found
        return found

    def _cells(self, name: str, kept: TensorKey, used: TensorKey) -> bool | MismatchError:
        rules = self.kept.rules[kept[0]], self.used.rules[used[0]]
        cells = sorted({cell for rule in rules for cell in _telling(rule)})
        wanted, found = _readings(self.kept, kept, cells), _readings(self.used, used, cells)
        whole = True
        for cell in cells:
            a, b = wanted.get(cell), found.get(cell)
            if a == b:
                continue
            if self._contradict(a, b):
                at = np.unravel_index(cell, rules[1].shape)
                return MismatchError(
                    "the source layout given contradicts the one stored in the source",
                    kind="lay-fit",
                    where=f"{name}[{', '.join(map(str, at))}]",
                    wanted=_said(a, rules[0]),
                    found=_said(b, rules[1]),
                    hint=self.hint,
                )
            whole = False
        return whole

    def _contradict(self, a: _Reading | None, b: _Reading | None) -> bool:
        """Tell whether both programs know the logical tensors that they take a cell for."""
        layouts = self.kept.bound.layout, self.used.bound.layout
        for reading in (a, b):
            if reading is None:
                continue
            if not all(reading.family in layout.families for layout in layouts):
                return False
            if reading.state not in self.kept.states or reading.state not in self.used.states:
                return False
        if a is None or b is None or a.family != b.family:
            return True
        return a.state != b.state or {x for x, _ in a.axes} == {x for x, _ in b.axes}


def _numbers(form: StoredForm, key: TensorKey) -> Mapping[str, int]:
    return dict(zip(form.rules[key[0]].indexes, key[1], strict=True))


def _telling(rule: RuleForm) -> Iterator[int]:
    """Yield the cells of each lattice that say what all others are."""
    for part in box_parts(rule.dims, Box((0,) * len(rule.shape), rule.shape)).parts:
        if part.numel:
            runs = [r for r in part.runs if r.size > 1]
            yield part.start
            yield part.start + sum((r.size - 1) * r.stride for r in runs)
            yield from (part.start + r.stride for r in runs)


def _readings(form: StoredForm, key: TensorKey, cells: list[int]) -> dict[int, _Reading]:
    equation = form.rules[key[0]].equation
    positions = np.array(cells, dtype=np.int64)
    out = {}
    for found in find(equation, _numbers(form, key), positions, form.scope):
        for row, which in enumerate(found.which.tolist()):
            axes = tuple(sorted((a, int(n[row])) for a, n in found.axes.items()))
            out[cells[which]] = _Reading(key[2], found.family, axes)
    return out


def _said(reading: _Reading | None, rule: RuleForm) -> str:
    equation = rule.equation
    text = equation.text or show(equation.name)
    place = f"{equation.at.file}:{equation.at.line}  " if equation.at.line else ""
    return f"{'padding' if reading is None else reading}, by {place}{text}"


Item: TypeAlias = tree.Mesh | tree.Let | tree.Space | tree.Layout | tree.Reshard | tree.Use

MAX_BYTES = 1 << 20
_END = ".lay"
_GIVEN = "given"
_BESIDE = re.compile(r"\s*(mesh|space|let)\b")
"""Begins a statement that stands beside layouts, not in one."""


@dataclass(frozen=True)
class LayoutProgram:
    """A program and the layout in it that is meant.

    Attributes
    ----------
    file
        The program; empty for a shipped layout.
    layout
        Name of the layout.
    own
        Whether a checkpoint keeps it, or it was made from the checkpoint's names: what it does not
        speak of stays as it is.
    """

    file: tree.File
    layout: str
    own: bool = False

    def resolve(self) -> Resolved:
        """Look the layout up, once; raises as `ckptd.lay.resolve.resolve`."""
        return self._resolved

    @cached_property
    def _resolved(self) -> Resolved:
        return resolve([self.file], self.layout)

    @property
    def text(self) -> str:
        """The program as a checkpoint keeps it; `read_text` gives it back."""
        return f"# layout {self.layout}\n{show(self.file)}"

    def closed(self, bound: Bound) -> LayoutProgram:
        """Return the program with every size that was found for it: so it is kept."""
        return replace(self, file=tree.File((*found_sizes(bound), *self.file.items)))

    @property
    def is_recipe(self) -> bool:
        """Whether the layout says how things are cut and names no tensor."""
        return is_recipe(self._layout(), lambda use: self._used(use.name))

    def _layout(self) -> tree.Layout:
        return self._used(self.layout)

    def _used(self, name: str) -> tree.Layout:
        return _named(self.file, name) or _shipped_layout(name)

    def with_sizes(self, rules: Sequence[str]) -> LayoutProgram:
        """Return the program with those of some statements that fix a size."""
        return self.with_rules([r for r in rules if _fixes_size(r)])

    def with_drops(self, rules: Sequence[str]) -> LayoutProgram:
        """Return the program with those of some statements that leave tensors out."""
        return self.with_rules([r for r in rules if _is_drop(r)])

    def with_rules(self, rules: Sequence[str]) -> LayoutProgram:
        """Return the program with further statements.

        A mesh, space or ``let`` is put beside the layout, and replaces one of the same name (a
        size does not replace a refinement); other statements go into the layout, before its own;
        rules override those of one name.

        Raises
        ------
        UsageError
            ``lay-syntax``: one of them is not Lay.
        """
        items: list[Item] = []
        statements: list[tree.Statement] = []
        for number, text in enumerate(rules, 1):
            where = f"-e #{number}"
            if _BESIDE.match(text):
                items += parse(text, where).items
            else:
                statements.append(parse_statement(text, where))
        kept: list[Item] = [i for i in self.file.items if not _replaced(i, items)]
        items += kept
        if not statements:
            return replace(self, file=tree.File(tuple(items)))
        old = self._layout()
        if old not in items:
            items += _companions(self.layout, items)
        items = [i for i in items if i is not old and i != old]
        recipe = self.is_recipe
        inner = f"{old.name}.{_GIVEN}"
        while any(isinstance(i, tree.Layout) and i.name == inner for i in items):
            inner += f".{_GIVEN}"
        return replace(
            self, file=tree.File((*items, *_overridden(old, statements, inner, recipe=recipe)))
        )


def _overridden(
    old: tree.Layout, statements: Sequence[tree.Statement], name: str, *, recipe: bool
) -> tuple[tree.Layout, ...]:
    """Return a layout with further statements, which go before its own.

    Rules override those of a layout that is used, so the old rules move to a layout of their own.
    """
    if recipe:
        return (replace(old, statements=(*statements, *old.statements)),)
    inner = replace(old, name=name)
    # What a layout says besides its rules is not taken over by those that use it.
    besides = [
        s for s in old.statements if isinstance(s, tree.Flat | tree.Pipe | tree.Object | tree.Files)
    ]
    return inner, replace(old, statements=(*statements, tree.Use(inner.name), *besides))


def _replaced(item: object, by: Iterable[object]) -> bool:
    kinds = (tree.Mesh, tree.Let, tree.Space)
    return any(
        isinstance(item, kind) and isinstance(b, kind) and item.name == b.name
        for b in by
        for kind in kinds
        if _is_size(item) == _is_size(b)
    )


def _is_size(item: object) -> bool:
    """Tell a size from a refinement: ``let hd = 128`` and ``let hd = (two half)`` are both true."""
    return isinstance(item, tree.Let) and isinstance(
        item.value, tree.Number | tree.Arithmetic | tree.Size
    )


def _fixes_size(rule: str) -> bool:
    return _BESIDE.match(rule) is not None and any(map(_is_size, parse(rule, rule).items))


def _is_drop(rule: str) -> bool:
    if _BESIDE.match(rule):
        return False
    said = parse_statement(rule, rule)
    return isinstance(said, tree.Rule) and any(isinstance(m, tree.Drop) for m in said.modifiers)


def other_sizes(kept: LayoutProgram, used: LayoutProgram) -> list[str]:
    """Return what a program says of sizes in place of another one, for people.

    Parameters
    ----------
    kept
        A program.
    used
        The same with statements put in.
    """
    mine = {i.name: i for i in used.file.items if isinstance(i, tree.Let) and _is_size(i)}
    old = [i for i in kept.file.items if isinstance(i, tree.Let) and _is_size(i)]
    return [
        f"{show(mine[let.name])} in place of the kept {show(let)}"
        for let in old
        if let.name in mine and mine[let.name].value != let.value
    ]


def _companions(
    layout: str, have: Sequence[object]
) -> list[tree.Mesh | tree.Let | tree.Space | tree.Use]:
    """Return what a shipped layout has beside it, where the program does not have it."""
    found = [
        i
        for i in library.load(layout).items
        if isinstance(i, tree.Mesh | tree.Let | tree.Space | tree.Use)
    ]
    return [i for i in found if i not in have and not _replaced(i, have)]


def _named(file: tree.File, name: str) -> tree.Layout | None:
    return next((i for i in file.items if isinstance(i, tree.Layout) and i.name == name), None)


def _shipped_layout(name: str) -> tree.Layout:
    layouts = [i for i in library.load(name).items if isinstance(i, tree.Layout)]
    return next((i for i in layouts if i.name == name), layouts[0])


def wrapped(recipe: LayoutProgram, base: LayoutProgram) -> LayoutProgram:
    """Return a layout with the tensors of `base`, which is on no mesh, cut as a recipe says.

    It keeps what it needs of both: meshes of the recipe, layouts and spaces of the base.
    """
    old = recipe._layout()
    new = tree.Layout(
        f"{recipe.layout}.{base.layout}", "", old.meshes, (tree.Use(base.layout), *old.statements)
    )
    needed = _reachable(base.file, base.layout)
    parts = _reachable(recipe.file, recipe.layout) - {recipe.layout}
    items: list[Item] = [
        i
        for i in recipe.file.items
        if (not isinstance(i, tree.Layout) or i.name in parts) and not isinstance(i, tree.Reshard)
    ]
    items += _own_companions(recipe, items)
    for item in base.file.items:
        is_other = isinstance(item, tree.Layout) and item.name not in needed
        if is_other or isinstance(item, tree.Mesh | tree.Reshard) or _replaced(item, items):
            continue
        items.append(item)
    return LayoutProgram(tree.File((*items, new)), new.name)


def _reachable(file: tree.File, layout: str) -> set[str]:
    """Return the names of a layout and of all that it uses."""
    found: set[str] = set()
    todo = [layout]
    while todo:
        name = todo.pop()
        known = _named(file, name)
        if name not in found and known is not None:
            found.add(name)
            todo += [s.name for s in known.statements if isinstance(s, tree.Use)]
    return found


def _own_companions(
    program: LayoutProgram, have: Sequence[object]
) -> list[tree.Mesh | tree.Let | tree.Space | tree.Use]:
    if _named(program.file, program.layout) is not None:
        return []
    return _companions(program.layout, have)


def read_program(spec: str, side: str, choose: Callable[[tree.Reshard], str]) -> LayoutProgram:
    """Read what a user names.

    Parameters
    ----------
    spec
        A ``.lay`` file, perhaps with ``:layout``, or the name of a shipped layout.
    side
        The option, for errors.
    choose
        Which side of a ``reshard`` statement is meant.

    Raises
    ------
    NotFoundError
        Kind ``not-found``: no such file.
    UsageError
        ``lay-syntax``, ``lay-rule``: not a program, no such layout, or several.
    """
    program, named = read_file(spec)
    if named or not program.file.items:
        return program
    return LayoutProgram(program.file, _the_layout(program.file, spec, side, choose))


def read_file(spec: str) -> tuple[LayoutProgram, str]:
    """Read what a user names; return the program, and the layout if it is named.

    Raises
    ------
    NotFoundError, UsageError
        As `read_program`.
    """
    path, colon, name = spec.rpartition(":")
    if not (colon and path.endswith(_END)):
        path, name = spec, ""
    if not path.endswith(_END):
        library.load(spec)
        return LayoutProgram(tree.File(()), spec), spec
    return LayoutProgram(_parse(path), name), name


def layout_names(file: tree.File) -> list[str]:
    """Return the names of all layouts of a program, in order."""
    return [i.name for i in file.items if isinstance(i, tree.Layout)]


def _parse(path: str) -> tree.File:
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise NotFoundError(
            "the program does not exist",
            where=path,
            hint="a .lay file, or a shipped layout: " + ", ".join(library.names()),
        ) from None
    except OSError as error:
        raise UsageError("a program cannot be read", where=path, found=error.strerror) from None
    if len(raw) > MAX_BYTES:
        raise UsageError("a program is too long", where=path, wanted=MAX_BYTES, found=len(raw))
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError("a program is not UTF-8", where=path, found=str(error)) from None
    return parse(text, path)


def _the_layout(
    file: tree.File, path: str, side: str, choose: Callable[[tree.Reshard], str]
) -> str:
    """Return the layout that a program is about."""
    layouts = [i for i in file.items if isinstance(i, tree.Layout)]
    runs = {choose(i) for i in file.items if isinstance(i, tree.Reshard)}
    if len(runs) == 1:
        return runs.pop()
    used = {s.name for i in layouts for s in i.statements if isinstance(s, tree.Use)}
    names = [i.name for i in layouts if i.name not in used] or [i.name for i in layouts]
    if len(names) != 1:
        raise UsageError(
            "the program has several layouts: name one",
            kind="lay-rule",
            where=f"{side} {path}",
            wanted=" or ".join(f"{path}:{n}" for n in names) or "a layout in it",
        )
    return names[0]


def read_text(text: str, where: str) -> LayoutProgram:
    """Read a program that `Program.text` made.

    Raises
    ------
    UsageError
        ``lay-syntax``, ``lay-rule``: it is something else.
    """
    title = TITLE.match(text)
    file = parse(text, where)
    if title is not None:
        return LayoutProgram(file, title[1])
    return LayoutProgram(file, _the_layout(file, where, "lay", lambda run: run.target))


NAME = "stored"
"""Of the layout and of its space."""

_SHORT = {"exp_avg": "m", "exp_avg_sq": "s", "master": "w"}
"""Short names that recipes speak of."""
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
_SPELLINGS = "names."
"""Begins the names of shipped recipes that say how states are named; the first that fits counts."""
_MODEL = "model."
"""Section of the model, where several have the same names."""
_EMPTY = re.compile(r"^\.|\.\.|\.$")
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a whole component of a dotted name

Shape = tuple[int, ...]


def infer(
    shapes: Mapping[str, Shape],
    *,
    has_sections: bool = True,
    objects: Sequence[ObjectEntry] = (),
) -> LayoutProgram:
    """Return the layout of some stored tensors, on no mesh.

    It does not speak of what is called neither as parameters are nor as what follows them, and of
    what follows a parameter in a shape of its own.

    Parameters
    ----------
    shapes
        Shape of each tensor by name.
    has_sections
        Whether a name that begins with ``model.`` is in a section of that name.
    objects
        Those beside the tensors: groups of an optimizer say what its parameters are called.
    """
    found = _followed(shapes, objects) or _Followed(_bare(shapes, has_sections=has_sections))
    stored, others = found.stored, found.followers | found.apart
    params = {stored.bare(n): s for n, s in shapes.items() if n not in others}
    families, rules = [], []
    for number, (name, shape) in enumerate(_grouped(params)):
        atoms = tuple(f"d{number}_{i}" for i in range(len(shape)))
        text = "".join(part.text if isinstance(part, tree.Text) else "0" for part in name.parts)
        family = _dotted(number, params) if _EMPTY.search(text) else name
        families.append(tree.SpaceTensor(family, atoms))
        rules.append(tree.Rule(name, family, tuple(tree.Atom(a) for a in atoms)))
    space = tree.Space(
        NAME,
        tuple(families),
        tuple(
            tree.FollowedState(_SHORT.get(s, s), s)
            for s in _with_known(found.states, found.scalars)
        ),
        tuple(tree.Scalar(s) for s in found.scalars),
    )
    said = (stored.statement,) if stored.statement != tree.Stored() else ()
    return LayoutProgram(
        tree.File((space, tree.Layout(NAME, NAME, (), (*said, *rules)))), NAME, own=True
    )


def _dotted(number: int, params: Iterable[str]) -> tree.Name:
    """Return what to call a logical tensor instead of a name with empty components.

    In a space these do not count, so that several names would be one.
    """
    stem = "dotted"
    while any(name.partition(".")[0] == stem for name in params):
        stem += "_"
    return tree.Name((tree.Text(f"{stem}.{number}"),))


def _bare(shapes: Mapping[str, Shape], *, has_sections: bool) -> _Spelling:
    """Return how parameters are called where nothing follows them."""
    model = _Spelling(tree.Stored(_spellings()[0].statement.params))
    in_model = has_sections and shapes and all(map(model.is_param, shapes))
    return model if in_model else _Spelling(tree.Stored())


def moment(names: Iterable[str]) -> str | None:
    """Return the first name that an optimizer gives to a state, and hardly a model to a weight."""
    return next((n for n in names if n.rpartition(".")[2] in _MOMENTS), None)


@dataclass(frozen=True)
class _Spelling:
    """How a ``stored`` statement names parameters and what follows them."""

    statement: tree.Stored

    def is_param(self, name: str) -> bool:
        """Whether a name may be a parameter's."""
        return name.startswith(self._before) and name.endswith(self._after)

    def bare(self, name: str) -> str:
        """Return the name of a parameter as rules have it."""
        return name.removeprefix(self._before).removesuffix(self._after)

    def follower(self, name: str) -> tuple[str, str] | None:
        """Return the parameter that a state or a scalar follows, as it is stored, and its name.

        The name is the one that it has in a space.
        """
        match = self._states.fullmatch(name)
        if match is None:
            return None
        param = self.statement.params.replace("{name}", match["name"])
        return param, self._names.get(match["state"], match["state"])

    @cached_property
    def _names(self) -> dict[str, str]:
        long = {short: name for name, short in _SHORT.items()}
        return {s.stored: long.get(s.name, s.name) for s in self.statement.renamed}

    @property
    def _before(self) -> str:
        return self.statement.params.partition("{name}")[0]

    @property
    def _after(self) -> str:
        return self.statement.params.partition("{name}")[2]

    @cached_property
    def _states(self) -> re.Pattern[str]:
        return state_pattern(self.statement.states)


@dataclass(frozen=True)
class _Followed:
    """Which stored tensors follow others, and what they are called.

    Attributes
    ----------
    apart
        Tensors that are neither parameters nor states, or states of another shape.
    known
        How many parameters groups of the optimizer name.
    """

    stored: _Spelling
    states: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    followers: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    known: int = 0

    @property
    def count(self) -> int:
        """How many names it explains."""
        return len(self.followers) + self.known


def _followed(shapes: Mapping[str, Shape], objects: Sequence[ObjectEntry]) -> _Followed | None:
    """Find the states and scalars that follow parameters, by the spelling that explains most.

    None where nothing follows anything, and groups name no parameter.
    """
    spellings = dict.fromkeys((*_spellings(), *_of_groups(shapes, objects)))
    found = [_following(shapes, spelling, objects) for spelling in spellings]
    fitting = [f for f in found if f is not None]
    return max(fitting, key=lambda f: f.count, default=None)


def _of_groups(shapes: Mapping[str, Shape], objects: Sequence[ObjectEntry]) -> list[_Spelling]:
    """Return how an optimizer spells names whose groups are called as in no shipped spelling.

    None if there are several optimizers, as one layout speaks of one, or if several models have
    the names of its parameters.
    """
    tops = {
        o.name.removesuffix(".groups"): "{name}.{state}"
        for o in objects
        if o.kind == "groups" and o.name.endswith(".groups")
    }
    between = ".param_groups."
    tops |= {
        o.name.partition(between)[0]: "state.{name}.{state}" for o in objects if between in o.name
    }
    if len(tops) != 1:
        return []
    ((top, states),) = tops.items()
    template = f"{top}.{states}"
    first = next(iter(params_of(objects, groups_name(template), None)), "")
    before = {n.removesuffix(first) for n in shapes if first and n.endswith(first)}
    sections = {b for b in before if not b or (b.endswith(".") and b.count(".") == 1)}
    sections = sections & {_MODEL} or sections
    spellings = [_Spelling(tree.Stored(f"{s}{{name}}", template)) for s in sections]
    return spellings if len(spellings) == 1 else []


@cache
def _spellings() -> tuple[_Spelling, ...]:
    """Return the spellings that are shipped."""
    names = [n for n in library.names() if n.startswith(_SPELLINGS)]
    said = (s for n in names for s in _shipped_layout(n).statements if isinstance(s, tree.Stored))
    return tuple(_Spelling(s) for s in said if s.names is None)


def _with_known(states: Sequence[str], scalars: Sequence[str]) -> list[str]:
    """Add the states that recipes speak of: one that no tensor has costs nothing."""
    if not states:
        return []
    return [*states, *(s for s in _SHORT if s not in states and s not in scalars)]


def _following(
    shapes: Mapping[str, Shape], spelling: _Spelling, objects: Sequence[ObjectEntry]
) -> _Followed | None:
    states: dict[str, None] = {}
    scalars: dict[str, None] = {}
    either: dict[str, None] = {}
    followers, apart = set(), set()
    groups = groups_name(spelling.statement.states)
    settings = settings_above(groups)
    for name, shape in shapes.items():
        followed = spelling.follower(name)
        param = shapes.get(followed[0]) if followed else None
        if followed is not None and param is not None:
            if shape not in (param, ()):
                apart.add(name)
                continue
            # That of a parameter without dimensions may be either.
            kind = states if shape else scalars if param else either
            kind[followed[1]] = None
            followers.add(name)
        elif not spelling.is_param(name) or name.startswith(settings):
            apart.add(name)
    for state in either:
        if state not in states and state not in scalars:
            (states if state in _SHORT else scalars)[state] = None
    if states.keys() & scalars.keys():
        return None
    named = params_of(objects, groups, {spelling.bare(n) for n in shapes if spelling.is_param(n)})
    known = sum(spelling.statement.params.replace("{name}", n) in shapes for n in named)
    if not states and not known:
        return None
    return _Followed(
        spelling, list(states), list(scalars), frozenset(followers), frozenset(apart), known
    )


def _grouped(params: Mapping[str, Shape]) -> Iterator[tuple[tree.Name, Shape]]:
    """Yield a name pattern for each group of alike tensors."""
    groups = by_key(((_NUMBER.sub("0", name), shape), name) for name, shape in params.items())
    kinds: dict[str, int] = {}
    for pattern, _ in groups:
        kinds[pattern] = kinds.get(pattern, 0) + 1
    first: dict[int, int] = {}
    for (pattern, shape), names in groups.items():
        extents = _extents(names) if kinds[pattern] == 1 and len(names) > 1 else None
        if extents is not None:
            yield _pattern(names[0], _axes(extents, first)), shape
        else:
            for name in names:
                yield tree.Name((tree.Text(name),)), shape


def _axes(extents: Sequence[int], first: dict[int, int]) -> list[str]:
    """Return an axis for each number in a name: one of another length is another axis.

    An encoder and a decoder may have different numbers of layers.
    """
    return [
        f"i{k}" if first.setdefault(k, extent) == extent else f"i{k}_{extent}"
        for k, extent in enumerate(extents)
    ]


def _extents(names: Sequence[str]) -> list[int] | None:
    """Return how many numbers there are at each place, if names have all combinations of them."""
    found = [tuple(_NUMBER.findall(n)) for n in names]
    if any(t != str(int(t)) for numbers in found for t in numbers):
        return None
    numbers = {tuple(map(int, f)) for f in found}
    extents = [max(column) + 1 for column in zip(*numbers, strict=True)]
    size = 1
    for n in extents:
        size *= n
    # The product is built only where it is as long as the list of names is.
    full = size == len(names) and numbers == set(product(*map(range, extents)))
    return extents if full else None


def _pattern(name: str, axes: Sequence[str]) -> tree.Name:
    """Return a name with an index for each component that is a number."""
    parts: list[tree.NamePart] = []
    at = 0
    for number, found in enumerate(_NUMBER.finditer(name)):
        parts += [tree.Text(name[at : found.start()]), tree.NameIndex(axes[number])]
        at = found.end()
    return tree.Name(tree.join([*parts, tree.Text(name[at:])]))
