"""Prints the parts of a rule: values, dimensions, names, modifiers."""

from __future__ import annotations

from ckptd.layout.lay.dims import (
    EVEN,
    UNIT,
    Atom,
    Branch,
    Dim,
    How,
    Number,
    One,
    Pad,
    Product,
    Rest,
    Size,
    Split,
    Sum,
    Value,
    Widths,
    Wild,
)
from ckptd.layout.lay.lexer import quote
from ckptd.layout.lay.modifiers import (
    Affine,
    Alias,
    Average,
    Cast,
    Drop,
    FollowRows,
    For,
    Modifier,
    On,
    Quantized,
    Range,
    Replicas,
)
from ckptd.layout.lay.name import Alternatives, Glob, Index, Name, NamePart, Text
from ckptd.layout.lay.parser_name import PLAIN

__all__ = [
    "show_dim",
    "show_dims",
    "show_how",
    "show_modifier",
    "show_name",
    "show_number",
    "show_part",
    "show_value",
]

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2}


def show_number(value: int) -> str:
    """Return a whole number: millions as ``40e6``, so that nobody counts zeros."""
    for power in (9, 6):
        if value >= 10**power and value % 10**power == 0:
            return f"{value // 10**power}e{power}"
    return str(value)


def _show_float(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e6 else repr(value)


# --- values and dimensions ----------------------------------------------------------------------


def show_value(value: Value, inside: int = 0) -> str:
    """Return a value; in parentheses where it binds looser than what it stands in."""
    if isinstance(value, Number):
        return show_number(value.value)
    if isinstance(value, Size):
        return value.name
    if value.operator not in _PRECEDENCE:
        return f"{value.operator}({show_value(value.left)}, {show_value(value.right)})"
    own = _PRECEDENCE[value.operator]
    blank = " " if own == 1 else ""
    text = blank.join(
        (show_value(value.left, own), value.operator, show_value(value.right, own + 1))
    )
    return f"({text})" if own < inside else text


def show_how(how: How) -> str:
    """Return how a split cuts: nothing for ``even``, else ``:ceil``, ``:[3 3 2]``, ``/128``."""
    if isinstance(how, Widths):
        return f":[{' '.join(map(str, how.widths))}]"
    if how == EVEN:
        return ""
    rule = "" if how.rule == "even" else f":{how.rule}"
    return rule if how.grain == UNIT else f"{rule}/{show_value(how.grain, 3)}"


def show_dim(dim: Dim) -> str:
    """Return one dimension."""
    match dim:
        case Atom(name):
            return name
        case One():
            return "1"
        case Wild():
            return "_"
        case Rest():
            return "..."
        case Split(inner, axis, how):
            return f"{show_dim(inner)}@{axis}{show_how(how)}"
        case Product(parts):
            return f"({' '.join(map(show_dim, parts))})"
        case Sum(branches):
            return f"({'|'.join(map(show_branch, branches))})"
        case Pad(inner, multiple, fill):
            end = f", {_show_float(fill)}" if fill else ""
            return f"pad({show_dim(inner)}, {show_value(multiple)}{end})"


def show_branch(branch: Branch) -> str:
    """Return one part of a sum."""
    return f"{branch.tag}:{show_dim(branch.dim)}"


def show_dims(dims: tuple[Dim, ...]) -> str:
    """Return dimensions in brackets."""
    return f"[{' '.join(map(show_dim, dims))}]"


# --- names --------------------------------------------------------------------------------------


def show_name(name: Name, quoted: bool = False) -> str:
    """Return a name; in quotes if asked for or if it has letters that need them."""
    quoted = quoted or not all(map(_is_plain, name.parts))
    text = "".join(show_part(part, quoted) for part in name.parts)
    return f'"{text}"' if quoted else text


def _is_plain(part: NamePart) -> bool:
    if isinstance(part, Text):
        return PLAIN.fullmatch(part.text) is not None
    if isinstance(part, Alternatives):
        return all(not text or PLAIN.fullmatch(text) for text in part.texts)
    return True


def show_part(part: NamePart, quoted: bool = False) -> str:
    """Return a part of a name, as it stands within quotes or without."""
    match part:
        case Text(text):
            return _escaped(text, "{}*") if quoted else text
        case Glob(deep):
            return "**" if deep else "*"
        case Index(axis, splits, local, width):
            cuts = "".join(f"@{m}{show_how(how)}" for m, how in splits)
            digits = f":0{width}" if width else ""
            return f"{{{'#' if local else ''}{axis}{cuts}{digits}}}"
        case Alternatives(texts):
            shown = [_escaped(t, "{},*") if quoted else t for t in texts]
            return f"{{{','.join(shown)}}}"


def _escaped(text: str, special: str) -> str:
    return "".join(f"\\{c}" if c in special else c for c in quote(text)[1:-1])


# --- modifiers ----------------------------------------------------------------------------------


def show_modifier(modifier: Modifier) -> str:
    """Return one modifier."""
    match modifier:
        case Replicas(kind):
            return kind
        case Average(kind, axis):
            return f"{kind}({axis})"
        case Cast(dtype):
            return f"cast({dtype})"
        case Quantized(dtype, block, scale):
            sizes = " ".join(map(show_number, block))
            return f"q({dtype}, [{sizes}], scale={show_name(scale)})"
        case Affine(scale, shift):
            return f"affine({_show_float(scale)}, {_show_float(shift)})"
        case On(axis, coordinate):
            return f"on {axis}={coordinate}"
        case For(axis, ranges):
            shown = " ".join(_show_range(r) for r in ranges)
            # An end that is left open would take the next number.
            shown = shown.replace(".. ", ".., ")
            return f"for {axis}={shown}" if len(ranges) == 1 else f"for {axis}=[{shown}]"
        case FollowRows(name):
            return f"follow rows({show_name(name)})"
        case Alias():
            return "alias"
        case Drop():
            return "drop"


def _show_range(found: Range) -> str:
    first, last, step = map(show_number, (found.first, found.last or 0, found.step))
    if found.last == found.first and found.step == 1:
        return first
    end = "" if found.last is None else last
    return f"{first}..{end}" + (f"/{step}" if found.step > 1 else "")
