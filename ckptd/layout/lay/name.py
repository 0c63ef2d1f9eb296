"""Name patterns: of rank-local tensors, logical tensors, files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ckptd.layout.lay.dims import How
from ckptd.layout.lay.node import Node

__all__ = ["Alternatives", "Glob", "Index", "Name", "NamePart", "Text", "join"]


@dataclass(frozen=True, slots=True)
class Text:
    """Literal characters of a name."""

    text: str


@dataclass(frozen=True, slots=True)
class Glob:
    """``*`` (within one component of a dotted name) or ``**`` (any number of components)."""

    deep: bool


@dataclass(frozen=True, slots=True)
class Index(Node):
    """``{l}``, ``{l@pp}`` or ``{#l@vpp@pp}``: an axis in a name.

    Attributes
    ----------
    axis
        The atom (or, in object names and file names, the mesh axis); in a reference also a whole
        number (``X{0}``), in a template the word it stands for (``{name}``).
    splits
        ``(mesh axis, how)``, in textual order, outermost first.
    local
        ``#``: the number within the part that a rank holds, not within the whole.
    width
        Fewest digits, zeros in front: ``{tp:02}`` in the names of files.
    """

    axis: str
    splits: tuple[tuple[str, How], ...] = ()
    local: bool = False
    width: int = 0


@dataclass(frozen=True, slots=True)
class Alternatives:
    """``{k,v}``: one rule for each; the reference's alternatives go in step with the name's."""

    texts: tuple[str, ...]


NamePart: TypeAlias = Text | Glob | Index | Alternatives


@dataclass(frozen=True, slots=True)
class Name(Node):
    """A name pattern: parts without separators, the dots are in the texts."""

    parts: tuple[NamePart, ...]


def join(parts: Iterable[NamePart]) -> tuple[NamePart, ...]:
    """Return the parts with neighbouring texts made one and empty ones left out.

    A `Name` is always made of joined parts, so that equal patterns are equal trees.
    """
    out: list[NamePart] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + part.text)
        elif part != Text(""):
            out.append(part)
    return tuple(out)
