"""Dimensions of a rule: which elements a rank-local dimension runs through, in order.

What each form means is fixed in ``docs/design/lay.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckptd.layout.lay.node import Node

__all__ = [
    "EVEN",
    "UNIT",
    "Atom",
    "Branch",
    "Dim",
    "Even",
    "How",
    "Number",
    "One",
    "Operation",
    "Pad",
    "Product",
    "Rest",
    "Size",
    "Split",
    "Sum",
    "Value",
    "Widths",
    "Wild",
]


@dataclass(frozen=True, slots=True)
class Number(Node):
    """A whole number."""

    value: int


@dataclass(frozen=True, slots=True)
class Size(Node):
    """The extent of a mesh axis, or the size of an atom or a ``let``, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation(Node):
    """``a*b``, ``a+b``, ``a-b``, ``a//b``, ``lcm(a, b)``, ``min(a, b)`` or ``max(a, b)``."""

    operator: Literal["*", "+", "-", "//", "lcm", "min", "max"]
    left: Value
    right: Value


Value: TypeAlias = Number | Size | Operation

UNIT = Number(1)


@dataclass(frozen=True, slots=True)
class Even:
    """A split by formula, in units of `grain` elements.

    ``even``: equal parts, the number of units must divide. ``ceil``: parts of ceil(n / m), the
    last ones smaller or empty, as torch cuts. ``bal``: the first ``n mod m`` parts are one unit
    longer.
    """

    rule: Literal["even", "ceil", "bal"] = "even"
    grain: Value = UNIT


@dataclass(frozen=True, slots=True)
class Widths:
    """A split with recorded widths, in elements; as many as the mesh axis is long."""

    widths: tuple[int, ...]


How: TypeAlias = Even | Widths

EVEN = Even()


@dataclass(frozen=True, slots=True)
class Atom(Node):
    """A named axis."""

    name: str


@dataclass(frozen=True, slots=True)
class One(Node):
    """A dimension of length one that no axis stands for."""


@dataclass(frozen=True, slots=True)
class Wild(Node):
    """``_``: in a ``default``, the dimension of the imported rule at this place."""


@dataclass(frozen=True, slots=True)
class Rest(Node):
    """``...``: in a ``default``, all further dimensions of the imported rule as they are."""


@dataclass(frozen=True, slots=True)
class Split(Node):
    """``inner@axis``: the part of `inner` that a coordinate of a mesh axis holds."""

    inner: Dim
    axis: str
    how: How = EVEN


@dataclass(frozen=True, slots=True)
class Product(Node):
    """``(a b)``: all combinations, the first part outermost."""

    parts: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Branch(Node):
    """One part of a sum; `tag` is appended to the rule's reference."""

    tag: str
    dim: Dim


@dataclass(frozen=True, slots=True)
class Sum(Node):
    """``(q:a|k:b)``: one after the other; the tags name the logical tensors."""

    branches: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class Pad(Node):
    """``pad(inner, multiple, fill)``: filled up to a multiple."""

    inner: Dim
    multiple: Value
    fill: float = 0.0


Dim: TypeAlias = Atom | One | Wild | Rest | Split | Product | Sum | Pad
