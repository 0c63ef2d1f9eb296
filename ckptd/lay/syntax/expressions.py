"""Grammar within a rule: sizes and functions, splits, dimensions, names, indexes, globs.

What stands in a rule is read letter by letter and by precedence, so most of it is said by pairs of
functions and not by forms.
"""

from __future__ import annotations

import re
from typing import Any

from ckptd.errors import UsageError
from ckptd.lay.syntax import tree
from ckptd.lay.syntax.lexer import MAX_DEPTH, Scanner, quote
from ckptd.lay.syntax.pieces import (
    RESERVED,
    Field,
    Form,
    Marks,
    OptionalParts,
    Pair,
    Syntax,
    decimal,
    integers,
    one_of,
    separated,
    several,
    show_count,
    whole,
    word,
)

# --- values -------------------------------------------------------------------------------------

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2}
_FUNCTIONS = ("lcm", "min", "max")


def _take_value(s: Scanner) -> tree.Value:
    start = s.peek().start
    found = _value(s)
    _check_height(s, found, start)
    return found


def _value(s: Scanner, inside: int = 1) -> tree.Value:
    """Take a value whose operators bind at least so strongly, from the left."""
    start = s.peek().start
    left = _factor(s) if inside > 2 else _value(s, inside + 1)
    while token := s.accept(*(o for o, own in _PRECEDENCE.items() if own == inside)):
        operator: Any = token.text
        left = tree.Arithmetic(operator, left, _value(s, inside + 1), at=s.position(start))
    return left


def _factor(s: Scanner) -> tree.Value:
    """Take a number, a name, a call or something in parentheses."""
    s.check_depth()
    token = s.peek()
    if token.kind == "number":
        found = whole(s, s.take(), "a whole number")
        return tree.Number(found, at=s.position(token.start))
    if s.at("("):
        s.open("(")
        inner = _value(s)
        s.close(")", "after the value")
        return inner
    if s.at(*_FUNCTIONS):
        return _call(s)
    if token.kind == "word" and token.text not in RESERVED:
        return tree.Size(s.take().text, at=s.position(token.start))
    raise s.fail("a value: a number, a size, '(' or lcm(, min(, max(")


def _call(s: Scanner) -> tree.Value:
    token = s.take()
    operator: Any = token.text
    s.open("(")
    left = _value(s)
    s.expect(",", f"between the arguments of {operator}")
    left = tree.Arithmetic(operator, left, _value(s), at=s.position(token.start))
    while s.accept(","):
        left = tree.Arithmetic(operator, left, _value(s), at=s.position(token.start))
    s.close(")", f"after the arguments of {operator}")
    return left


def _show_value(value: tree.Value, inside: int = 0) -> str:
    """Return a value; in parentheses where it binds looser than what it stands in."""
    if isinstance(value, tree.Number):
        return show_count(value.value)
    if isinstance(value, tree.Size):
        return value.name
    if value.operator not in _PRECEDENCE:
        return f"{value.operator}({_show_value(value.left)}, {_show_value(value.right)})"
    own = _PRECEDENCE[value.operator]
    blank = " " if own == 1 else ""
    sides = _show_value(value.left, own), value.operator, _show_value(value.right, own + 1)
    text = blank.join(sides)
    return f"({text})" if own < inside else text


VALUE = Pair(_take_value, _show_value)
_INNER_VALUE = Pair(_value, _show_value)

# --- splits -------------------------------------------------------------------------------------

_WIDTHS = integers("the widths of the parts")
_ASSIGNED = integers("the coordinate of each element")
_RULE = one_of(
    "even", "ceil", "bal", "at", wanted="how to split: even, ceil, bal, [widths] or at[coordinates]"
)


def _take_how(s: Scanner) -> tree.How:
    rule = "even"
    if s.accept(":"):
        if s.at("["):
            return tree.Widths(_WIDTHS.take(s))
        rule = _RULE.take(s)
        if rule == "at":
            return tree.Assigned(_ASSIGNED.take(s))
    if not s.accept("/"):
        return tree.Even(rule) if rule != "even" else tree.EVEN  # type: ignore[arg-type]
    start = s.peek().start
    grain = _factor(s)
    _check_height(s, grain, start)
    return tree.Even(rule, grain)  # type: ignore[arg-type]


def _show_how(how: tree.How) -> str:
    """Return how a split cuts: nothing for ``even``, else ``:ceil``, ``:[3 3 2]``, ``/128``."""
    if isinstance(how, tree.Assigned):
        return f":at{_ASSIGNED.show(how.coordinates)}"
    if isinstance(how, tree.Widths):
        return f":{_WIDTHS.show(how.widths)}"
    rule = "" if how.rule == "even" else f":{how.rule}"
    return rule if how.grain == tree.UNIT else f"{rule}/{_show_value(how.grain, 3)}"


_HOW = Pair(_take_how, _show_how)
_MESH_AXIS = word("a mesh axis")
_CUT: Syntax[tuple[str, tree.How]] = Pair(
    lambda s: (s.expect("@").text and _MESH_AXIS.take(s), _HOW.take(s)),
    lambda cut: f"@{cut[0]}{_show_how(cut[1])}",
)


def _take_splits(s: Scanner) -> tuple[tuple[str, tree.How], ...]:
    out = []
    while s.at("@"):
        out.append(_CUT.take(s))
    return tuple(out)


SPLITS = Pair(_take_splits, lambda cuts: "".join(map(_CUT.show, cuts)))

# --- dimensions ---------------------------------------------------------------------------------

_DIM = "a dimension: an axis, 1, '(' or pad("


def _take_dim(s: Scanner) -> tree.Dim:
    start = s.peek().start
    found = _dim(s)
    _check_height(s, found, start)
    return found


def _dim(s: Scanner) -> tree.Dim:
    start = s.peek().start
    found = _primary(s)
    while s.at("@"):
        found = _SPLIT.go_on(s, start, inner=found)
    return found


def _primary(s: Scanner) -> tree.Dim:
    s.check_depth()
    token = s.peek()
    if s.at("("):
        return (_SUM if _is_sum(s) else _PRODUCT).take(s)
    for form in (_PAD, _REST, _WILD):
        if s.at(form.keyword):
            return form.take(s)
    if token.kind == "number" and token.text == "1":
        s.take()
        return tree.One(at=s.position(token.start))
    if token.kind == "word" and token.text not in RESERVED:
        return _ATOM.take(s)
    hint = None
    if token.kind == "number":
        hint = "lengths need a name: write an axis here, and its size as `let axis = number`"
    raise s.fail(_DIM, hint=hint)


def _is_sum(s: Scanner) -> bool:
    """Whether a tag follows the parenthesis."""
    back = s.pos
    s.open("(")
    tagged = s.take().kind == "word" and s.at(":")
    s.pos = back
    s.brackets.pop()
    return tagged


def _is_part(s: Scanner) -> bool:
    if s.at("|"):
        raise s.fail("')'", hint="each part of a sum has a tag: (q:a|k:b)")
    return not s.at(")")


def _is_dim(s: Scanner) -> bool:
    if s.at("]"):
        return False
    if s.at(",", "}", ")") or s.peek().kind == "end":
        raise s.fail(f"{_DIM}, or ']'", hint="dimensions are separated by blanks")
    return True


def _show_dim(dim: tree.Dim) -> str:
    return FORMS[type(dim)].show(dim)


DIM = Pair(_take_dim, _show_dim)
_INNER = Pair(_dim, _show_dim)
_ATOM = Form(tree.Atom, Field("name", word(_DIM)))
_WILD = Form(tree.Wild, "_")
_REST = Form(tree.Rest, "...")
_SPLIT = Form(
    tree.Split, Field("inner", _INNER), "@", Field("axis", _MESH_AXIS), Field("how", _HOW)
)
_PRODUCT = Form(tree.Product, "(", Field("parts", several(_INNER, _is_part, least=1)), ")")
_BRANCH = Form(
    tree.Branch, Field("tag", word("a tag")), Marks(":", "after the tag"), Field("dim", _INNER)
)
_SUM = Form(
    tree.Sum,
    "(",
    Field("branches", separated(_BRANCH, "|")),
    Marks(")", "or '|' after a part of the sum"),
)
_PAD = Form(
    tree.Pad,
    "pad",
    Marks("(", "after pad"),
    Field("inner", _INNER),
    Marks(", ", "and the multiple to pad to"),
    Field("multiple", _INNER_VALUE),
    OptionalParts(", ", Field("fill", decimal("what to fill with, a number"))),
    Marks(")", "after pad"),
)
_LIST = several(DIM, _is_dim)


def _take_dims(s: Scanner) -> tuple[tree.Dim, ...]:
    s.open("[", "and the dimensions")
    found = _LIST.take(s)
    s.close("]")
    return found


DIMS = Pair(_take_dims, lambda dims: f"[{_LIST.show(dims)}]")


def _check_height(s: Scanner, node: tree.Dim | tree.Value, start: int) -> None:
    """Refuse a tree that is too high to walk by recursion: ``a@b@b...`` nests without brackets."""
    stack: list[tuple[tree.Dim | tree.Value, int]] = [(node, 1)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise s.fail(f"at most {MAX_DEPTH} levels of nesting", start=start, end=s.pos)
        stack += [(below, depth + 1) for below in _below(node)]


def _below(node: tree.Dim | tree.Value) -> tuple[tree.Dim | tree.Value, ...]:
    match node:
        case tree.Arithmetic():
            return (node.left, node.right)
        case tree.Split():
            return (
                (node.inner, node.how.grain) if isinstance(node.how, tree.Even) else (node.inner,)
            )
        case tree.Product():
            return node.parts
        case tree.Sum():
            return tuple(b.dim for b in node.branches)
        case tree.Pad():
            return (node.inner, node.multiple)
    return ()


# --- names --------------------------------------------------------------------------------------

_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
"""Characters of a name without quotes, besides ``*`` and braces."""

_PADDED = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*):0([1-9])d?\}")
"""An index in the name of a file."""
_INDEX = re.compile(r"\{(#?)([A-Za-z_][A-Za-z0-9_]*|0|[1-9][0-9]*)(?=[@}])")
_MAX_PARTS = 256


def name(what: str = "a name", *, padded: bool = False) -> Syntax[tree.Name]:
    """Return a name; `padded`: that of a file, in quotes, whose indexes may have digits."""
    return Pair(lambda s: _take_name(s, what, padded), lambda n: show_name(n, quoted=padded))


def _take_name(s: Scanner, what: str = "a name", padded: bool = False) -> tree.Name:
    token = s.peek()
    quoted = token.kind == "string"
    s.pos = token.start + quoted
    end = token.end - 1 if quoted else len(s.text)
    parts: list[tree.NamePart] = []
    while s.pos < end:
        part = _part(s, quoted, padded)
        if part is None:
            break
        parts.append(part)
        if len(parts) > _MAX_PARTS:
            raise s.fail(f"a name of at most {_MAX_PARTS} parts", start=token.start, end=s.pos)
    s.pos += quoted
    if not parts:
        s.pos = token.start
        raise s.fail(what)
    return tree.Name(tree.join(parts), at=s.position(token.start))


def _part(s: Scanner, quoted: bool, padded: bool) -> tree.NamePart | None:
    letter = s.text[s.pos]
    if letter == "*":
        return _glob(s)
    if letter == "{":
        match = _PADDED.match(s.text, s.pos) if padded else None
        if match is not None:
            start, s.pos = s.pos, match.end()
            return tree.NameIndex(match[1], width=int(match[2]), at=s.position(start))
        return _braces(s, quoted)
    if quoted:
        if letter == "}":
            raise s.fail(r"'\}'", start=s.pos, end=s.pos + 1, hint="no brace is open here")
        return _quoted_text(s, "{}*")
    match = _PLAIN.match(s.text, s.pos)
    if match is None:
        return None
    s.pos = match.end()
    return tree.Text(match[0])


def _quoted_text(s: Scanner, stop: str) -> tree.Text:
    out = []
    while s.text[s.pos] not in stop + '"':
        text, s.pos = s.character(s.pos)
        out.append(text)
    return tree.Text("".join(out))


def _glob(s: Scanner) -> tree.Glob:
    start = s.pos
    while s.text[s.pos : s.pos + 1] == "*":
        s.pos += 1
    if s.pos - start > 2:
        raise s.fail("'*' or '**'", start=start, end=s.pos)
    return tree.Glob(deep=s.pos - start == 2)


def _braces(s: Scanner, quoted: bool) -> tree.NamePart:
    start = s.pos
    match = _INDEX.match(s.text, start)
    if match is None:
        return _alternatives(s, quoted)
    s.pos = match.end()
    cuts = SPLITS.take(s)
    if (cuts or match[1]) and match[2][0].isdigit():
        raise s.fail("an axis: a number stands alone in its braces", start=start, end=s.pos)
    if s.peek().text != "}":
        raise s.fail("'}' or '@' in the index of a name")
    s.take()
    return tree.NameIndex(match[2], cuts, bool(match[1]), at=s.position(start))


def _alternatives(s: Scanner, quoted: bool) -> tree.Alternatives:
    start = s.pos
    texts: list[str] = []
    while not texts or s.text[s.pos : s.pos + 1] == ",":
        s.pos += 1
        texts.append(_alternative(s, quoted))
    if s.text[s.pos : s.pos + 1] != "}" or len(texts) < 2:
        raise s.fail(
            "an index such as {l}, {#l@pp} or alternatives such as {k,v}",
            start=start,
            end=s.pos + 1,
            hint="no blanks between the braces; other letters need quotes around the whole name",
        )
    s.pos += 1
    return tree.Alternatives(tuple(texts))


def _alternative(s: Scanner, quoted: bool) -> str:
    if quoted:
        return _quoted_text(s, "{},").text
    match = _PLAIN.match(s.text, s.pos)
    s.pos = match.end() if match else s.pos
    return match[0] if match else ""


def show_name(name: tree.Name, quoted: bool = False) -> str:
    """Return a name; in quotes if asked for or if it has letters that need them."""
    quoted = quoted or not all(map(_is_plain, name.parts))
    text = "".join(show_part(part, quoted) for part in name.parts)
    return f'"{text}"' if quoted else text


def _is_plain(part: tree.NamePart) -> bool:
    if isinstance(part, tree.Text):
        return _PLAIN.fullmatch(part.text) is not None
    texts = part.texts if isinstance(part, tree.Alternatives) else ()
    return all(not text or _PLAIN.fullmatch(text) for text in texts)


def show_part(part: tree.NamePart, quoted: bool = False) -> str:
    """Return a part of a name, as it stands within quotes or without."""
    match part:
        case tree.Text(text):
            return _escaped(text, "{}*") if quoted else text
        case tree.Glob(deep):
            return "**" if deep else "*"
        case tree.NameIndex(axis, cuts, local, width):
            digits = f":0{width}" if width else ""
            return f"{{{'#' if local else ''}{axis}{SPLITS.show(cuts)}{digits}}}"
        case tree.Alternatives(texts):
            shown = [_escaped(t, "{},*") if quoted else t for t in texts]
            return f"{{{','.join(shown)}}}"


def _escaped(text: str, special: str) -> str:
    return "".join(f"\\{c}" if c in special else c for c in quote(text)[1:-1])


NAME = name()
FILE_NAME = name("the name of a file in quotes", padded=True)

# --- what a let represents ----------------------------------------------------------------------


def _take_let(s: Scanner) -> tree.Dim | tree.Value | tree.Name:
    """Take a dimension, a value or a name.

    A digit, ``size``, ``lcm(``, ``min(``, ``max(`` begin a value; ``(``, ``[``, ``pad(`` or an
    axis with ``@`` a dimension, unless it only makes sense as a value; all else is a name.
    """
    token = s.peek()
    if token.kind == "number":
        return VALUE.take(s)
    if s.at("["):
        s.open("[")
        found = DIM.take(s)
        s.close("]", "after the dimension")
        return found
    if s.at("("):
        return _parenthesis(s)
    if s.at("size", "pad", *_FUNCTIONS):
        s.take()
        ahead = s.peek()
        called = s.at("(")
        s.pos = token.start
        if called and token.text != "size":
            return DIM.take(s) if token.text == "pad" else VALUE.take(s)
        # A value follows the word on the same line and after a blank.
        behind = s.text[ahead.start : ahead.start + 1] not in ("", "\n", ";", "}")
        if token.text == "size" and ahead.start > token.end and behind:
            s.take()
            return VALUE.take(s)
    return _let_name(s)


def _parenthesis(s: Scanner) -> tree.Dim | tree.Value:
    """Take what begins with ``(``: a product or sum such as ``(two half)``, or ``(a+b)*2``."""
    back, brackets = s.pos, list(s.brackets)
    try:
        found = DIM.take(s)
        if not s.at("*", "//", "+", "-"):
            return found
    except UsageError as error:
        reached = s.pos
        s.pos, s.brackets = back, list(brackets)
        try:
            return VALUE.take(s)
        except UsageError as other:
            raise (other if s.pos > reached else error) from None
    s.pos, s.brackets = back, list(brackets)
    return VALUE.take(s)


def _let_name(s: Scanner) -> tree.Dim | tree.Name:
    token = s.peek()
    what = "a name, a value or a dimension"
    found = _take_name(s, what)
    if s.at("@") and token.kind == "word":
        s.pos = token.start
        return DIM.take(s)
    if token.kind == "word" and (_is_multiplication(found) or s.at("+", "-", "//")):
        hint = "a value that begins with a name: size h*4"
        raise s.fail(what, start=token.start, end=s.pos, hint=hint)
    return found


def _is_multiplication(found: tree.Name) -> bool:
    """Whether neither dots nor indexes show that a name with a glob is one."""
    path = any(
        isinstance(p, tree.NameIndex) or (isinstance(p, tree.Text) and "." in p.text)
        for p in found.parts
    )
    return not path and any(isinstance(p, tree.Glob) for p in found.parts)


def _show_let(value: tree.Dim | tree.Value | tree.Name) -> str:
    """Return what a ``let`` represents, such that its beginning says which of the three it is."""
    if isinstance(value, tree.Value):
        text = _show_value(value)
        call = text.startswith(("lcm(", "min(", "max("))
        return text if text[0].isdigit() or text[0] == "(" or call else f"size {text}"
    if isinstance(value, tree.Name):
        return show_name(value, show_name(value)[0].isdigit() or _is_multiplication(value))
    text = _show_dim(value)
    return text if text[0] == "(" and text[-1] == ")" else f"[{text}]"


LET = Pair(_take_let, _show_let)

FORMS: dict[type, Syntax[Any]] = {
    **{f.node: f for f in (_ATOM, _WILD, _REST, _SPLIT, _PRODUCT, _SUM, _PAD, _BRANCH)},
    tree.One: Form(tree.One, "1"),
    **dict.fromkeys((tree.Number, tree.Size, tree.Arithmetic), VALUE),
    tree.Name: NAME,
    **dict.fromkeys(
        (tree.Text, tree.Glob, tree.NameIndex, tree.Alternatives), Pair[Any](_take_name, show_part)
    ),
}
"""How dimensions, values and names are written, by class."""
