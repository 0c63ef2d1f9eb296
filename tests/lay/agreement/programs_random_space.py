"""Random spaces: logical tensors, their axes and sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from ckptd.lay.syntax.tree import (
    Atom,
    Dim,
    FollowedState,
    For,
    Name,
    NameIndex,
    NamePart,
    Product,
    Range,
    SpaceTensor,
    Text,
    join,
)

__all__ = [
    "Block",
    "Cross",
    "Fork",
    "Leaf",
    "SpaceMaker",
    "Tree",
    "World",
    "families",
    "halves",
    "leaves",
]

MOST_CELLS = 400
"""Elements of a block, so that a pair takes milliseconds."""


@dataclass(frozen=True)
class Leaf:
    """A logical tensor: the axes that its siblings lack come last."""

    atoms: tuple[str, ...]


@dataclass(frozen=True)
class Fork:
    """Logical tensors by tag."""

    children: tuple[tuple[str, Tree], ...]


@dataclass(frozen=True)
class Cross:
    """Logical tensors by two tags: ``a.x a.y b.x b.y``; each tag brings an axis of its own."""

    left: tuple[tuple[str, str], ...]
    right: tuple[tuple[str, str], ...]
    common: tuple[str, ...]


Tree: TypeAlias = Leaf | Fork | Cross


@dataclass(frozen=True)
class Block:
    """Tensors whose names begin alike.

    Attributes
    ----------
    prefix
        Name, with an index or without: ``(("L0", "l"), ("X", "e"))``.
    tree
        What comes behind it.
    only
        Which numbers there are, where not all.
    """

    prefix: tuple[tuple[str, str], ...]
    tree: Tree
    only: tuple[For, ...] = ()

    @property
    def indexes(self) -> tuple[str, ...]:
        """Axes of the indexes in the names."""
        return tuple(a for _, a in self.prefix if a)


@dataclass
class World:
    """What both layouts share."""

    sizes: dict[str, int] = field(default_factory=dict)
    refined: dict[str, Dim] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    states: tuple[FollowedState, ...] = ()


SIZES = [1, 2, 2, 3, 3, 4, 4, 5, 6, 8]


class SpaceMaker:
    """Draws a space."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.world = World()
        self.count = 0

    def make(self) -> World:
        """Draw tensors until there are enough cells."""
        rng, world = self.rng, self.world
        world.sizes["l"] = rng.choice([2, 3, 4, 4, 5, 6])
        world.sizes["e"] = rng.choice([1, 2, 3, 4])
        world.states = tuple(FollowedState(s, f"st_{s}") for s in "ms"[: rng.choice([0, 1, 1, 2])])
        for number in range(rng.choice([1, 2, 2, 3])):
            for _ in range(20):
                block = self.block(number)
                if cells(world, block) <= MOST_CELLS:
                    world.blocks.append(block)
                    break
        if not world.blocks:
            world.blocks.append(Block((("B0", ""),), Leaf(("l",))))
        return world

    def atom(self) -> str:
        """Return an axis: a new one, one that is there already, or one with parts."""
        rng, world = self.rng, self.world
        plain = [a for a in world.sizes if re.fullmatch("a[0-9]+", a)]
        kind = rng.random()
        if kind < 0.2 and plain:
            return str(rng.choice(plain))
        name = f"a{self.count}"
        self.count += 1
        if kind > 0.8:
            parts = (f"{name}x", f"{name}y")
            for p in parts:
                world.sizes[p] = rng.choice([1, 2, 2, 3])
            world.refined[name] = Product(tuple(map(Atom, parts)))
        else:
            world.sizes[name] = rng.choice(SIZES)
        return name

    def atoms(self, least: int, most: int, other: Sequence[str] = ()) -> tuple[str, ...]:
        """Return some different axes."""
        out: list[str] = []
        for _ in range(self.rng.randint(least, most)):
            name = self.atom()
            if name not in out and name not in other:
                out.append(name)
        return tuple(out)

    def block(self, number: int) -> Block:
        """Draw a block."""
        rng = self.rng
        prefix = [(f"B{number}", rng.choice(["", "l", "l"]))]
        if rng.random() < 0.4:
            prefix.append(("X", "e"))
        kind = rng.random()
        common = self.atoms(0, 2)
        tree: Tree
        if kind < 0.35:
            tree = Leaf(self.atoms(0, 3))
        elif kind < 0.9:
            tree = self.fork(common, 2 if rng.random() < 0.3 else 1)
        else:
            left = tuple((t, self.atoms(1, 1, common)) for t in ("u", "v"))
            used = {a for _, own in left for a in own} | set(common)
            right = tuple((t, self.atoms(1, 1, tuple(used))) for t in ("x", "y"))
            if not all(own for _, own in (*left, *right)):
                return self.block(number)
            tree = Cross(
                tuple((t, own[0]) for t, own in left),
                tuple((t, own[0]) for t, own in right),
                common,
            )
        only: tuple[For, ...] = ()
        if prefix[0][1] and rng.random() < 0.2:
            only = (rng.choice(halves(rng, prefix[0][1], self.world.sizes[prefix[0][1]])),)
        return Block(tuple(prefix), tree, only)

    def fork(self, common: tuple[str, ...], depth: int) -> Fork:
        """Draw tensors that have some axes in common."""
        children: list[tuple[str, Tree]] = []
        for tag in "qkv"[: self.rng.choice([2, 2, 3])]:
            if depth > 1 and self.rng.random() < 0.4:
                children.append((tag, self.fork((*common, *self.atoms(0, 1, common)), depth - 1)))
            else:
                own = self.atoms(0, 1, common)
                children.append((tag, Leaf((*common, *own))))
        return Fork(tuple(children))


def halves(rng: Random, axis: str, size: int) -> tuple[For, For]:
    """Draw two conditions of which one or the other holds."""
    if rng.random() < 0.5:
        k = rng.randint(1, max(1, size - 1))
        return For(axis, (Range(0, k - 1),)), For(axis, (Range(k),))
    step = rng.choice([2, 2, 3])
    others = tuple(Range(k, None, step) for k in range(1, step))
    return For(axis, (Range(0, None, step),)), For(axis, others)


def leaves(tree: Tree) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield tags and axes of all tensors of a block."""
    match tree:
        case Leaf():
            yield (), tree.atoms
        case Fork():
            for tag, child in tree.children:
                for tags, atoms in leaves(child):
                    yield (tag, *tags), atoms
        case Cross():
            for s, a in tree.left:
                for t, b in tree.right:
                    yield (s, t), (*tree.common, a, b)


def length(world: World, atom: str) -> int:
    """Return the length of an axis, or of all its parts."""
    if atom in world.refined:
        parts = world.refined[atom]
        assert isinstance(parts, Product)
        return math.prod(world.sizes[p.name] for p in parts.parts if isinstance(p, Atom))
    return world.sizes[atom]


def cells(world: World, block: Block) -> int:
    """Return how many elements a block has."""
    each = sum(math.prod(length(world, a) for a in atoms) for _, atoms in leaves(block.tree))
    return each * math.prod(world.sizes[a] for a in block.indexes)


def families(block: Block) -> Iterator[SpaceTensor]:
    """Yield the tensors of a block as a space declares them."""
    for tags, atoms in leaves(block.tree):
        parts: list[NamePart] = []
        for i, (text, axis) in enumerate(block.prefix):
            parts.append(Text(("." if i else "") + text))
            if axis:
                parts.append(NameIndex(axis))
        parts.append(Text("".join(f".{t}" for t in tags)))
        yield SpaceTensor(Name(join(parts)), atoms, block.only)
