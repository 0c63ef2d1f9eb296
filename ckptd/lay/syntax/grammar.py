"""Grammar of statements and modifiers, as a table for reading and writing.

From a declaration follow how the node is read and how it is written. The same grammar for people:
``docs/reference/lay.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ckptd.lay.syntax import expressions, tree
from ckptd.lay.syntax.lexer import Scanner, SourceLine, quote
from ckptd.lay.syntax.pieces import (
    AnyOrder,
    Field,
    Form,
    FormChoice,
    Marks,
    OptionalParts,
    Pair,
    Syntax,
    byte_size,
    count,
    decimal,
    dotted,
    integer,
    integers,
    label,
    one_of,
    separated,
    several,
    show_count,
    string,
    word,
    words,
)

Item: TypeAlias = tree.Mesh | tree.Let | tree.Space | tree.Layout | tree.Reshard | tree.Use
Shown: TypeAlias = (
    tree.File
    | Item
    | tree.MeshAxis
    | tree.SpaceTensor
    | tree.FollowedState
    | tree.Scalar
    | tree.Statement
    | tree.FlatGroup
    | tree.Dim
    | tree.Branch
    | tree.Value
    | tree.Name
    | tree.NamePart
    | tree.Modifier
)
"""Everything that a program is made of."""

B = TypeVar("B", tree.Layout, tree.Space)


def show(node: Shown) -> str:
    """Return the text of a part of a program.

    Parameters
    ----------
    node
        Any node. Parsing its text as what it is gives an equal node, if every word in it is one
        (axes, tags and the like: a letter or ``_``, then letters, digits and ``_``).

    Returns
    -------
    str
        One line, or several for a `Space`, a `Layout` and a `File`, which ends with a line end.
    """
    form = expressions.FORMS.get(type(node))
    if form is None:
        raise TypeError(f"{type(node).__name__} is not part of a program")
    return form.show(node)


# --- modifiers ----------------------------------------------------------------------------------


def _take_range(s: Scanner) -> tree.Range:
    what = "numbers: 5, 0..2, 3.., or 1../2"
    start, end = s.peek().start, _range_end(what)
    first = end.take(s)
    if not s.accept(".."):
        return tree.Range(first, first)
    last = end.take(s) if s.peek().kind == "number" or s.at("(") else None
    step = count("a step: 1../2").take(s) if s.accept("/") else 1
    falls = isinstance(first, int) and isinstance(last, int) and last < first
    if not step or falls:
        raise s.fail(f"{what}; the last is not below the first", start=start, end=s.pos)
    return tree.Range(first, last, step)


def _range_end(what: str) -> Syntax[int | tree.Value]:
    """Return the piece of a number; or of a value, which stands in parentheses."""

    def take(s: Scanner) -> int | tree.Value:
        if not s.at("("):
            return number.take(s)
        s.open("(")
        found = expressions.VALUE.take(s)
        s.close(")", "after the value")
        return found.value if isinstance(found, tree.Number) else found

    def show(end: int | tree.Value) -> str:
        return show_count(end) if isinstance(end, int) else f"({expressions.VALUE.show(end)})"

    number = count(what)
    return Pair(take, show)


def _show_range(found: tree.Range) -> str:
    shown = _range_end("").show
    if found.last == found.first and found.step == 1:
        return shown(found.first)
    end = "" if found.last is None else shown(found.last)
    return f"{shown(found.first)}..{end}" + (f"/{found.step}" if found.step > 1 else "")


def _take_ranges(s: Scanner) -> tuple[tree.Range, ...]:
    if not s.at("["):
        return (_take_range(s),)
    s.open("[")
    ranges = [_take_range(s)]
    while not s.at("]"):
        s.accept(",")
        ranges.append(_take_range(s))
    s.close("]")
    return tuple(ranges)


def _show_ranges(ranges: Sequence[tree.Range]) -> str:
    # An end that is left open would take the next number.
    shown = " ".join(map(_show_range, ranges)).replace(".. ", ".., ")
    return shown if len(ranges) == 1 else f"[{shown}]"


_COORDINATE = integer("a coordinate: a whole number or last")
_FOR = Form(
    tree.For,
    "for ",
    Field("axis", word("an index of the name: for l=0..2")),
    Marks("=", "and its numbers: for l=0..2"),
    Field("ranges", Pair(_take_ranges, _show_ranges)),
)
_ALIAS = Form(tree.Alias, "alias")
_REPLICAS = Form(tree.Replicas, Field("kind", one_of("same", "any")))
_AVERAGE = Form(
    tree.Average,
    Field("kind", one_of("avg", "sum")),
    Marks("(", "after avg or sum"),
    Field("axis", word("the mesh axis to combine over")),
    ")",
)
_MODIFIER: FormChoice[tree.Modifier] = FormChoice(
    _ALIAS,
    _FOR,
    Form(tree.Drop, "drop"),
    Form(
        tree.Cast,
        "cast",
        Marks("(", "after cast"),
        Field("dtype", word("a type: bfloat16, float32, ...")),
        ")",
    ),
    Form(
        tree.Quantized,
        "q",
        Marks("(", "after q"),
        Field("dtype", word("a type: float8_e4m3fn, int8, ...")),
        Marks(", ", "and the block: [128 128]"),
        Field("block", integers("the lengths of a block", show_count)),
        Marks(", ", "and scale={name}_scale"),
        "scale=",
        Field("scale", expressions.name("the name of the scales")),
        OptionalParts(" as ", Field("kind", word("a type: float8_e8m0fnu, uint8, ..."))),
        OptionalParts(
            Marks(", overall="),
            Field("overall", expressions.name("the name of the scale of all scales")),
        ),
        ")",
    ),
    Form(
        tree.Affine,
        "affine",
        Marks("(", "after affine"),
        Field("scale", decimal("a number")),
        Marks(", ", "and what is added"),
        Field("shift", decimal("a number")),
        ")",
    ),
    Form(
        tree.On,
        "on ",
        Field("axis", word("a mesh axis: on pp=0")),
        Marks("=", "and a coordinate: on pp=0, on pp=last"),
        Field(
            "coordinate",
            Pair(lambda s: "last" if s.accept("last") else _COORDINATE.take(s), str),
        ),
    ),
    Form(
        tree.FollowRows,
        "follow ",
        Marks("rows", "after follow"),
        Marks("(", "and the name of the tensor to follow"),
        Field("name", expressions.NAME),
        ")",
    ),
    same=_REPLICAS,
    any=_REPLICAS,
    avg=_AVERAGE,
    sum=_AVERAGE,
    what="a modifier: same, cast(bfloat16), on pp=0, ...",
)
MODIFIERS = several(_MODIFIER, _MODIFIER.is_ahead)
_TAIL = Field("modifiers", several(_MODIFIER, _MODIFIER.is_ahead, lead=" "))

# --- rules --------------------------------------------------------------------------------------


def _is_reference(s: Scanner, mark: str = "[") -> bool:
    """Whether the word that comes next is itself a name: ``drop[h]``, ``flat = E[h]``."""
    back = s.pos
    expressions.NAME.take(s)
    found = s.at(mark)
    s.pos = back
    return found


Right: TypeAlias = tuple[tree.Name | None, tuple[tree.Dim, ...], tuple[tree.Modifier, ...]]
"""Reference, dimensions and modifiers of a rule."""


def _take_right(s: Scanner) -> Right:
    if s.at("drop", "follow") and not _is_reference(s):
        return None, (), MODIFIERS.take(s)
    first: tuple[tree.Modifier, ...] = ()
    if s.at("alias") and not _is_reference(s):
        first = (_ALIAS.take(s),)
    reference = _REFERENCE.take(s)
    shape = expressions.DIMS.take(s) if s.at("[") or not first else ()
    return reference, shape, (*first, *MODIFIERS.take(s))


def _show_right(right: Right) -> str:
    reference, dims, modifiers = right
    if reference is None:
        return MODIFIERS.show(modifiers)
    alias = bool(modifiers) and isinstance(modifiers[0], tree.Alias)
    shape = expressions.DIMS.show(dims) if dims or not alias else ""
    text = f"{'alias ' if alias else ''}{expressions.show_name(reference)}{shape}"
    return text + _TAIL.piece.show(modifiers[alias:])


_REFERENCE = expressions.name("the logical tensor: L{l}.q[...], or drop")
RULE = Form(
    tree.Rule,
    Field("name", expressions.name("the name of a tensor")),
    Marks(" = ", "after the name"),
    Field("reference dims modifiers", Pair(_take_right, _show_right)),
)

# --- the other statements of a layout -----------------------------------------------------------


def _take_cut(s: Scanner) -> tuple[str, tree.Contiguous]:
    at = s.peek().start
    cuts = expressions.SPLITS.take(s)
    if len(cuts) != 1:
        raise s.fail("one mesh axis to cut the buffer over: @dp", start=at, end=max(s.pos, at + 1))
    axis, how = cuts[0]
    if isinstance(how, tree.Assigned):
        wanted = "parts of the buffer that follow each other: even, ceil, bal or [widths]"
        raise s.fail(wanted, start=at, end=s.pos)
    return axis, how


def _take_group(s: Scanner) -> tuple[str, tree.Name | None, int]:
    kind = _GROUP_KIND.take(s)
    if kind == "bucket":
        return kind, None, _BUCKET.take(s)
    if kind == "each":
        return kind, None, 0
    found = None
    if kind == "group" or s.at("("):
        s.open("(", "and the names that share a buffer")
        found = expressions.NAME.take(s)
        s.close(")")
    full = kind == "parts" and s.peek().kind == "number"
    return kind, found, _BUCKET.take(s) if full else 0


def _show_group(group: tuple[str, tree.Name | None, int]) -> str:
    kind, found, elements = group
    names = f"({expressions.show_name(found)})" if found else ""
    full = kind == "bucket" or (kind == "parts" and elements)
    return f"{kind}{names}{f' {show_count(elements)}' if full else ''}"


_GROUP_KIND = one_of("group", "each", "bucket", "parts", behind=" after flat")
_BUCKET = count("the number of elements of a bucket")
_GROUP = Form(tree.FlatGroup, Field("kind name elements", Pair(_take_group, _show_group)))
_CALLED = Pair(expressions.NAME.take, lambda found: expressions.show_name(found, quoted=True))
_SOME_STATES = separated(word("a state: params, m, s, w or *"), ",")
_STATES_OF = Pair(lambda s: ("*",) if s.accept("*") else _SOME_STATES.take(s), ",".join)


def _take_change(s: Scanner) -> tuple[str, str]:
    change = _CHANGE.take(s)
    if change != "reduce":
        return change, ""
    s.expect("=", "and the name of a reduction")
    return change, s.word("the name of a reduction")


_CHANGE = one_of("error", "drop", "reseed", "reduce", wanted="error, drop, reseed or reduce=...")


def _take_axis_cuts(s: Scanner) -> tuple[str, ...]:
    cuts: list[str] = []
    while s.accept("@"):
        cuts.append(s.word("a mesh axis"))
    if not cuts:
        raise s.fail("'@' and a mesh axis")
    return tuple(cuts)


_StoredParts: TypeAlias = tuple[str, str, tuple[tree.FollowedState, ...], tree.Name | None]


def _take_stored(s: Scanner) -> _StoredParts:
    params, states = tree.Stored().params, tree.Stored().states
    start = s.peek().start
    if s.peek().kind == "string":
        params = s.string("")
    elif not s.at("states"):
        raise s.fail('names in checkpoints: stored "{name}" states "optim.{name}.{state}"')
    if not s.accept("states"):
        return params, states, (), None
    states = s.string("the names of states in quotes")
    if s.accept("with"):
        return params, states, STATES.take(s), None
    if not s.accept("of"):
        return params, states, (), None
    if params != tree.Stored().params:
        raise s.fail("states alone before 'of'", start=start, end=s.pos)
    return params, states, (), expressions.NAME.take(s)


def _show_stored(found: _StoredParts) -> str:
    default = tree.Stored()
    more = f" with {STATES.show(found[2])}" if found[2] else ""
    more += f" of {expressions.show_name(found[3])}" if found[3] else ""
    states = "" if found[1] == default.states and not more else f" states {quote(found[1])}"
    params = "" if found[0] == default.params and states else f" {quote(found[0])}"
    return params + states + more


_USE = Form(tree.Use, "use ", Field("name", dotted("the name of a layout or space")))
STATEMENTS: dict[str, Form[Any]] = {
    "use": _USE,
    "default": Form(tree.Default, "default ", Field("dims", expressions.DIMS), _TAIL),
    "flat": Form(
        tree.Flat,
        "flat ",
        Field("group", _GROUP),
        " ",
        Field("split", Pair(_take_cut, lambda cut: expressions.SPLITS.show((cut,)))),
        Marks(" of ", "and the states: params, m, s, w or *"),
        Field("states", _STATES_OF),
        AnyOrder(
            OptionalParts(" order ", Field("order", one_of("module", "reverse", "robin"))),
            OptionalParts(" start", Marks("/", "after start"), Field("start", expressions.VALUE)),
            OptionalParts(" end", Marks("/", "after end"), Field("end", expressions.VALUE)),
            OptionalParts(" as ", Field("called", _CALLED)),
        ),
        _TAIL,
    ),
    "pipe": Form(
        tree.Pipe,
        "pipe ",
        Field("axis", word("the axis of layers: pipe l@pp")),
        Field("splits", Pair(_take_axis_cuts, lambda cuts: "".join(f"@{m}" for m in cuts))),
        " ",
        Field("stages", string('the stages in quotes: "Et*3|(tt|)*29,m|L"')),
    ),
    "obj": Form(
        tree.Object,
        "obj ",
        Field("name", label("the name of an object")),
        Marks("[", "and the mesh axes that it differs on"),
        Field("axes", words("a mesh axis")),
        "] ",
        Marks("on-change ", "in on-change, and what to do"),
        Field(
            "on_change reduce",
            Pair(_take_change, lambda c: "=".join(c) if c[0] == "reduce" else c[0]),
        ),
    ),
    "files": Form(tree.Files, "files ", Field("name", expressions.FILE_NAME)),
    "stored": Form(
        tree.Stored,
        "stored",
        Field("params states renamed names", Pair(_take_stored, _show_stored)),
    ),
}
"""By keyword; besides these there are rules."""


def _statement(s: Scanner) -> Syntax[Any]:
    """Return the piece of the statement that stands next."""
    token = s.peek()
    # A rule may have a keyword for its name: ``flat = E[h]``.
    if token.kind != "word" or _is_reference(s, "="):
        return RULE
    if token.text in STATEMENTS:
        return STATEMENTS[token.text]
    near = get_close_matches(token.text, STATEMENTS, n=1)
    if near:
        raise s.fail("a statement", start=token.start, end=token.end, hint=f"{near[0]}?")
    expressions.NAME.take(s)
    hint = f"a layout holds rules (name = reference[dims]) and {', '.join(STATEMENTS)}"
    raise s.fail("'=' after the name", hint=hint)


STATEMENT: Syntax[tree.Statement] = Pair(lambda s: _statement(s).take(s), show)

# --- lines of a space ---------------------------------------------------------------------------


def _conditions_ahead(s: Scanner) -> bool:
    """Whether ``for`` follows, and no tensor that is called so: ``for[h]``."""
    if not s.at("for"):
        return False
    back = s.pos
    s.take()
    found = s.peek().kind == "word"
    s.pos = back
    return found


def _take_family_name(s: Scanner) -> tree.Name:
    start = s.peek().start
    short = s.at(".")
    found = expressions.name("a tensor: L{l}.q[kv rep hd h]").take(s)
    if short:
        found = tree.Name(tree.join((*_prefix(s, start), *found.parts)), at=found.at)
    s.family = found
    return found


def _prefix(s: Scanner, start: int) -> tuple[tree.NamePart, ...]:
    """Return the name of the family before up to its last dot: what ``.k`` goes on from."""
    parts = list(s.family.parts) if s.family else []
    while parts:
        last = parts.pop()
        if isinstance(last, tree.Text) and "." in last.text:
            return (*parts, tree.Text(last.text[: last.text.rindex(".")]))
    hint = "a name that begins with a dot goes on from the tensor before it"
    raise s.fail("the whole name", start=start, end=s.pos, hint=hint)


def _show_family_name(found: tree.Name) -> str:
    # A bare name that begins with a dot goes on from the family before it.
    first = found.parts[0]
    return expressions.show_name(
        found, quoted=isinstance(first, tree.Text) and first.text.startswith(".")
    )


def _take_state(s: Scanner) -> tuple[str, str]:
    short = s.word("a state: m=exp_avg")
    return short, _STORED_STATE.take(s) if s.accept("=") else short


def _show_state(state: tuple[str, str]) -> str:
    short, stored = state
    return short if short == stored else f"{short}={_STORED_STATE.show(stored)}"


_STORED_STATE = label("the name of the state in checkpoints")
_STATE = Form(tree.FollowedState, Field("name stored", Pair(_take_state, _show_state)))
STATES = separated(_STATE, ",", ", ")


def _take_follow(s: Scanner) -> tuple[tree.FollowedState, ...]:
    s.expect("follow")
    return STATES.take(s)


_FOLLOW = Pair(_take_follow, lambda states: f"follow {STATES.show(states)}")
FAMILY = Form(
    tree.SpaceTensor,
    Field("name", Pair(_take_family_name, _show_family_name)),
    Marks("[", "and the axes of the tensor"),
    Field("atoms", words("an axis, or ']'")),
    "]",
    Field("only", several(_FOR, _conditions_ahead, lead=" ")),
)
_LET = Form(
    tree.Let,
    "let ",
    Field("name", word("a name: let kv = 8")),
    Marks(" = ", "and what it means"),
    Field("value", expressions.LET),
)
SCALAR = Form(
    tree.Scalar,
    "scalar ",
    Field("name", word("the name of a scalar: step(param)")),
    OptionalParts("(", Field("per", one_of("param", "group", "global")), Marks(")"), always=True),
)
_LINES: dict[str, Syntax[Any]] = {"follow": _FOLLOW, "scalar": SCALAR, "let": _LET}
"""Of spaces, by keyword; besides these there are tensors."""


def _line_of_space(s: Scanner) -> Syntax[Any]:
    """Return the piece of the line that stands next."""
    keyword = s.peek().text if s.at(*_LINES) else ""
    # A tensor may have a keyword for its name: ``let[h]``.
    if not keyword or _is_reference(s):
        return FAMILY
    return _LINES[keyword]


# --- blocks -------------------------------------------------------------------------------------

_INDENT = "  "


class BlockForm(Syntax[B]):
    """A node whose statements stand on lines of their own, between braces.

    Parameters
    ----------
    what
        What it is, for errors.
    head
        The form of the first line, up to the brace.
    line
        Returns the piece of the line that stands next.
    put
        Returns a node with what its lines hold.
    lines
        Returns the lines of a node, each with its piece.
    ended
        Whether a line end or ``;`` has to end each line; a ``let`` ends so in any block.
    """

    def __init__(
        self,
        what: str,
        head: Form[B],
        line: Callable[[Scanner], Syntax[Any]],
        put: Callable[[B, Sequence[Any]], B],
        lines: Callable[[B], list[str]],
        *,
        ended: bool,
    ) -> None:
        self.node: type[B] = head.node
        self.keyword = head.keyword
        self.put: Callable[[B, Sequence[Any]], B] = put
        self._head: Form[B] = head
        self._lines: Callable[[B], list[str]] = lines
        self._what, self._line, self._ended = what, line, ended

    def take(self, s: Scanner) -> B:
        """Take the block and note its lines."""
        start = s.peek().start
        node = self._head.take(s)
        s.skip_lines()
        s.expect("{", f"and what the {self._what} holds")
        opening = f"{self._head.show(node)} {{"
        s.lines.append(SourceLine(start, s.pos, "open", lambda: opening))
        s.family = None
        found: list[Any] = []
        s.skip_lines()
        while not s.at("}"):
            if s.peek().kind == "end":
                hint = f"{node.name} begins in line {s.line_of(start)}"
                raise s.fail(f"'}}' at the end of the {self._what}", hint=hint)
            found.append(_take_line(s, piece := self._line(s)))
            if self._ended or piece is _LET:
                s.end_line("}")
            s.skip_lines()
        token = s.take()
        s.lines.append(SourceLine(token.start, token.end, "close", lambda: "}"))
        return replace(self.put(node, found), at=s.position(start))

    def show(self, value: B) -> str:
        """Return the text of the block, in several lines."""
        return f"{self._head.show(value)} {{\n{_indented(self._lines(value))}}}"


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"{_INDENT}{line}\n" for line in lines)


def _take_line(s: Scanner, piece: Syntax[Any]) -> Any:
    start = s.peek().start
    node = piece.take(s)
    s.lines.append(SourceLine(start, s.pos, "statement", partial(piece.show, node)))
    return node


def _put_space(space: tree.Space, lines: Sequence[Any]) -> tree.Space:
    # A line of states has several.
    found = [node for line in lines for node in (line if isinstance(line, tuple) else (line,))]
    return replace(
        space,
        families=tuple(x for x in found if isinstance(x, tree.SpaceTensor)),
        states=tuple(x for x in found if isinstance(x, tree.FollowedState)),
        scalars=tuple(x for x in found if isinstance(x, tree.Scalar)),
        lets=tuple(x for x in found if isinstance(x, tree.Let)),
    )


def _lines_of_space(space: tree.Space) -> list[str]:
    follow = [_FOLLOW.show(space.states)] if space.states else []
    return [*map(show, space.families), *follow, *map(show, space.scalars), *map(show, space.lets)]


_SOME_MESHES = separated(word("the name of a mesh, or none"), ",", ", ")
_MESHES = Pair(
    lambda s: () if s.accept("none") else _SOME_MESHES.take(s),
    lambda meshes: _SOME_MESHES.show(meshes) or "none",
)
SPACE = BlockForm(
    "space",
    Form(tree.Space, "space ", Field("name", dotted("the name of a space"))),
    _line_of_space,
    _put_space,
    _lines_of_space,
    ended=False,
)
_LAYOUT = BlockForm(
    "layout",
    Form(
        tree.Layout,
        "layout ",
        Field("name", dotted("the name of a layout")),
        OptionalParts(" of ", Field("space", dotted("the name of a space"))),
        Marks(" on ", "and a mesh, or on none"),
        Field("meshes", _MESHES),
    ),
    _statement,
    lambda layout, found: replace(layout, statements=tuple(found)),
    lambda layout: list(map(show, layout.statements)),
    ended=True,
)

# --- programs -----------------------------------------------------------------------------------


def _axis_ahead(s: Scanner) -> bool:
    return s.peek().kind == "word" and not s.at("local")


def _take_axis(s: Scanner) -> tree.MeshAxis:
    s.check_depth()
    return _AXIS.take(s)


_AXES: Syntax[tuple[tree.MeshAxis, ...]] = several(Pair(_take_axis, show), _axis_ahead, least=1)
_AXIS: Form[tree.MeshAxis] = Form(
    tree.MeshAxis,
    Field("name", word("an axis: tp:8", but="local")),
    Marks(":", "and the length of the axis"),
    Field("extent", integer("the length of the axis")),
    OptionalParts(
        "=",
        Marks("(", "and the finer axes: tp:8=(tk:4 tr:2)"),
        Field("parts", _AXES),
        Marks(")"),
    ),
)
_NO_MESH = "another name: 'none' means no mesh"
ITEMS: dict[str, Form[Any] | BlockForm[Any]] = {
    "mesh": Form(
        tree.Mesh,
        "mesh ",
        Field("name", word("the name of a mesh", but="none", hint=_NO_MESH)),
        Marks(" = ", "and its axes: mesh M = pp:2 tp:4"),
        Field("axes", _AXES),
        OptionalParts(" local ", Field("local", _AXES)),
    ),
    "let": _LET,
    "use": _USE,
    "space": SPACE,
    "layout": _LAYOUT,
    "reshard": Form(
        tree.Reshard,
        "reshard ",
        Field("source", dotted("the name of a layout")),
        Marks(" -> ", "and the layout to change to"),
        Field("target", dotted("the name of a layout")),
        OptionalParts(" via ", Field("via", one_of("disk", "memory", "peer")), always=True),
        OptionalParts(" budget ", Field("budget", byte_size())),
    ),
}
"""By keyword."""


def _take_item(s: Scanner) -> Item:
    token = s.peek()
    piece = ITEMS.get(token.text) if token.kind == "word" else None
    if piece is None:
        brace = token.text == "}"
        hint = "a '}' too many?" if brace else "rules stand in a layout: layout L on M {"
        raise s.fail("mesh, let, space, layout, reshard or use", hint=hint)
    item: Item = piece.take(s) if isinstance(piece, BlockForm) else _take_line(s, piece)
    return item


def _take_file(s: Scanner) -> tree.File:
    items: list[Item] = []
    s.skip_lines()
    while s.peek().kind != "end":
        items.append(_take_item(s))
        s.end_line()
    return tree.File(tuple(items))


def _show_file(file: tree.File) -> str:
    """Return a program: blocks stand apart, single lines stand together."""
    out: list[str] = []
    before = None
    for item in file.items:
        block = isinstance(item, tree.Space | tree.Layout)
        if out and (block or isinstance(before, tree.Space | tree.Layout)):
            out.append("")
        out.append(show(item))
        before = item
    return "\n".join([*out, ""]) if out else ""


ITEM: Syntax[Item] = Pair(_take_item, show)
FILE = Pair(_take_file, _show_file)

expressions.FORMS[tree.File] = FILE
for _form in (
    *ITEMS.values(),
    *STATEMENTS.values(),
    *_LINES.values(),
    *_MODIFIER.forms.values(),
    *(RULE, FAMILY, _STATE, _GROUP, _AXIS),
):
    if isinstance(_form, Form | BlockForm):
        expressions.FORMS[_form.node] = _form
