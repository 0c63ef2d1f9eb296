"""Modifiers: what is true of the values of a rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckptd.layout.lay.name import Name
from ckptd.layout.lay.node import Node

__all__ = [
    "Affine",
    "Alias",
    "Average",
    "Cast",
    "Drop",
    "FollowRows",
    "For",
    "Modifier",
    "On",
    "Quantized",
    "Range",
    "Replicas",
]


@dataclass(frozen=True, slots=True)
class Replicas(Node):
    """``same`` (must be equal, checked) or ``any`` (take one)."""

    kind: Literal["same", "any"]


@dataclass(frozen=True, slots=True)
class Average(Node):
    """``avg(tp)`` or ``sum(dp)``: what the ranks along a mesh axis hold is combined."""

    kind: Literal["avg", "sum"]
    axis: str


@dataclass(frozen=True, slots=True)
class Cast(Node):
    """``cast(bfloat16)``: held in another type."""

    dtype: str


@dataclass(frozen=True, slots=True)
class Quantized(Node):
    """``q(float8_e4m3fn, [128 128], scale={name}_scale_inv)``: blocks with a scale each.

    `scale` is the name of the tensor of scales; ``{name}`` stands for this tensor's name.
    """

    dtype: str
    block: tuple[int, ...]
    scale: Name


@dataclass(frozen=True, slots=True)
class Affine(Node):
    """``affine(a, b)``: physical = a * logical + b."""

    scale: float
    shift: float


@dataclass(frozen=True, slots=True)
class On(Node):
    """``on pp=0`` or ``on pp=last``: only ranks with this coordinate hold the tensor."""

    axis: str
    coordinate: int | Literal["last"]


@dataclass(frozen=True, slots=True)
class Range:
    """``3..7``: from the first number to the last, or for ever (``3..``); ``1../2`` every other."""

    first: int
    last: int | None = None
    step: int = 1


@dataclass(frozen=True, slots=True)
class For(Node):
    """``for l=3..``: the rule, or the tensor of a space, is there for these numbers only."""

    axis: str
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class FollowRows(Node):
    """``follow rows(name)``: the first dimension is cut and ordered like that tensor's."""

    name: Name


@dataclass(frozen=True, slots=True)
class Alias(Node):
    """``alias E``: another copy of a logical tensor that a different rule holds already."""


@dataclass(frozen=True, slots=True)
class Drop(Node):
    """``drop``: left out on purpose."""


Modifier: TypeAlias = (
    Replicas | Average | Cast | Quantized | Affine | On | For | FollowRows | Alias | Drop
)
