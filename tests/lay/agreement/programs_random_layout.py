"""Random layouts of a space: meshes, how indexes are cut, flats, rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Literal

from ckptd.lay.resolve import Bound, MeshShape, Resolved, independent
from ckptd.lay.resolve.mesh import mesh_shape
from ckptd.lay.syntax.tree import (
    UNIT,
    Alias,
    Arithmetic,
    Assigned,
    Atom,
    Branch,
    Dim,
    Even,
    Flat,
    FlatGroup,
    Glob,
    How,
    Layout,
    Mesh,
    MeshAxis,
    Modifier,
    Name,
    NameIndex,
    NamePart,
    Number,
    On,
    One,
    Pad,
    Pipe,
    Product,
    Replicas,
    Rule,
    Size,
    Split,
    Statement,
    Stored,
    Sum,
    Text,
    Value,
    Widths,
    join,
)
from tests.lay.agreement.brute import Brute
from tests.lay.agreement.programs_random_space import (
    Block,
    Cross,
    Fork,
    Leaf,
    Tree,
    World,
    halves,
    leaves,
)

__all__ = ["LayoutMaker"]


@dataclass(frozen=True)
class Cut:
    """How an index is cut in a layout."""

    splits: tuple[tuple[str, How], ...] = ()
    pipe: Pipe | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes."""
        return self.pipe.splits if self.pipe else tuple(a for a, _ in self.splits)


FACTORS = {
    1: [[1], [1, 1]],
    2: [[2], [2, 1], [1, 2]],
    3: [[3], [3, 1]],
    4: [[4], [2, 2], [2, 2]],
    6: [[6], [2, 3], [3, 2]],
    8: [[8], [2, 4], [4, 2], [2, 2, 2], [2, 2, 2]],
}


class LayoutMaker:
    """Draws a layout of a space."""

    def __init__(self, rng: Random, world: World, name: str) -> None:
        self.rng = rng
        self.world = world
        self.name = name
        self.meshes: list[Mesh] = []
        self.mesh = MeshShape(1, {}, {})
        self.cuts: dict[str, Cut] = {}
        self.flats: list[Flat] = []
        self.flat_axes: list[str] = []
        self.rules: list[Rule] = []

    def make(self) -> Layout:
        """Draw meshes, how indexes are cut, flats and rules."""
        rng = self.rng
        if rng.random() < 0.92:
            self.make_meshes()
        empty = Resolved(self.name, "", self.mesh, (), {}, {}, self.world.refined)
        self.brute = Brute(Bound(empty, self.world.sizes))
        self.places = [self.mesh.coordinates(r) for r in range(self.mesh.world)]
        for axis in ("l", "e"):
            self.cuts[axis] = self.cut(axis)
        if self.mesh.extents and rng.random() < 0.6:
            for _ in range(rng.choice([1, 1, 2])):
                self.flats.append(self.flat())
        for block in self.world.blocks:
            self.present(block)
        statements: list[Statement] = [c.pipe for c in self.cuts.values() if c.pipe]
        statements += [*self.rules, *self.flats, *self.other_states()]
        return Layout(self.name, "sp", tuple(m.name for m in self.meshes), tuple(statements))

    # --- meshes -----------------------------------------------------------------------------------

    def make_meshes(self) -> None:
        """Draw one mesh, or two over the same ranks."""
        rng = self.rng
        world = rng.choice([1, 2, 2, 3, 4, 4, 4, 6, 6, 8, 8])
        local = (MeshAxis("vpp", 2),) if rng.random() < 0.35 else ()
        axes = self.axes(world, ["pp", "dp", "tp", "cp"])
        self.meshes.append(Mesh(f"{self.name}M", axes, local))
        if rng.random() < 0.35:
            axes = self.axes(world, ["ep", "etp", "edp", "epp"])
            self.meshes.append(Mesh(f"{self.name}N", axes))
        self.mesh = mesh_shape(self.meshes)

    def axes(self, world: int, names: list[str]) -> tuple[MeshAxis, ...]:
        rng = self.rng
        extents = rng.choice(FACTORS[world])
        names = rng.sample(names, len(extents))
        out = []
        for name, extent in zip(names, extents, strict=True):
            parts: tuple[MeshAxis, ...] = ()
            if extent in (4, 6, 8) and rng.random() < 0.4:
                inner = rng.choice([2, extent // 2])
                parts = (
                    MeshAxis(f"{name}_o", extent // inner),
                    MeshAxis(f"{name}_i", inner),
                )
            out.append(MeshAxis(name, extent, parts))
        return tuple(out)

    @property
    def rank_axes(self) -> list[str]:
        """Axes that ranks differ in."""
        return [a for a, s in self.mesh.strides.items() if s]

    def apart(self, axes: Sequence[str], axis: str) -> bool:
        """Whether each combination of coordinates is a rank's."""
        return axis not in axes and independent(self.mesh, [*axes, axis])

    def cut(self, index: str) -> Cut:
        """Draw how an index is cut."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.35 or not self.mesh.extents:
            return Cut()
        taken = list(self.cuts["l"].axes) if "l" in self.cuts else []
        axes = [a for a in self.rank_axes if self.apart(taken, a)]
        if not axes:
            return Cut()
        first = str(rng.choice(axes))
        chosen = [first]
        if "vpp" in self.mesh.local and index == "l" and rng.random() < 0.8:
            chosen.insert(rng.randint(0, 1), "vpp")
        elif rng.random() < 0.25:
            more = [a for a in axes if self.apart([*taken, first], a)]
            if more:
                chosen.insert(rng.randint(0, 1), str(rng.choice(more)))
        size = self.world.sizes[index]
        if rng.random() < 0.4 and (index == "l" or rng.random() < 0.2):
            count = math.prod(self.mesh.extents[a] for a in chosen)
            return Cut((), Pipe(index, tuple(chosen), self.stages(size, count)))
        dim: Dim = Atom(index)
        splits: list[tuple[str, How]] = []
        for a in chosen:
            how = self.how(dim, a)
            splits.append((a, how))
            dim = Split(dim, a, how)
        return Cut(tuple(splits))

    def stages(self, size: int, count: int) -> str:
        """Draw a stage string."""
        rng = self.rng
        cuts = sorted(rng.randint(0, size) for _ in range(count - 1))
        widths = [b - a for a, b in pairwise([0, *cuts, size])]
        texts = [f"t*{w}" if w > 1 and rng.random() < 0.5 else "t" * w for w in widths]
        texts[0] = "E" + texts[0]
        texts[-1] += rng.choice(["L", "mL"])
        return "|".join(texts)

    # --- splits -----------------------------------------------------------------------------------

    def lengths(self, dim: Dim) -> set[int]:
        """Return the lengths that a dimension has on the ranks."""
        if "vpp" in str(dim):
            places = [{**p, "vpp": v} for p in self.places for v in range(2)]
        else:
            places = self.places
        return {len(self.brute.seq(dim, p)) for p in places}

    def how(self, inner: Dim, axis: str) -> How:
        """Draw how a dimension is split."""
        rng = self.rng
        lengths, extent = self.lengths(inner), self.mesh.extents[axis]
        grain = rng.choice([1, 1, 1, 2, 3])
        kind = rng.choice(["even", "even", "even", "ceil", "bal", "widths", "at"])
        if kind == "even" and all(-(-n // grain) % extent == 0 for n in lengths):
            return Even("even", Number(grain))
        if kind == "widths" and len(lengths) == 1:
            (n,) = lengths
            cuts = sorted(rng.randint(0, n) for _ in range(extent - 1))
            return Widths(tuple(b - a for a, b in pairwise([0, *cuts, n])))
        if kind == "at" and len(lengths) == 1 and lengths != {0}:
            (n,) = lengths
            return Assigned(tuple(rng.randrange(extent) for _ in range(n)))
        rule: Literal["ceil", "bal"] = rng.choice(["ceil", "bal"])
        return Even(rule, Number(grain) if rng.random() < 0.5 else UNIT)

    def split(self, dim: Dim, axis: str) -> Dim:
        """Attach a split, padded before it now and then."""
        rng = self.rng
        if rng.random() < 0.15:
            fill = rng.choice([0.0, 0.0, 1.0, -2.5])
            multiple: Value = Arithmetic("*", Number(rng.choice([1, 2])), Size(axis))
            dim = Pad(dim, rng.choice([multiple, Number(rng.choice([2, 3, 4]))]), fill)
        return Split(dim, axis, self.how(dim, axis))

    def attach(self, dim: Dim, axis: str) -> Dim:
        """Attach a split somewhere in a dimension."""
        rng = self.rng
        if rng.random() < 0.4:
            return self.split(dim, axis)
        match dim:
            case Product():
                k = rng.randrange(len(dim.parts))
                parts = list(dim.parts)
                parts[k] = self.attach(parts[k], axis)
                return replace(dim, parts=tuple(parts))
            case Sum():
                branches = [
                    replace(b, dim=self.attach(b.dim, axis)) if rng.random() < 0.8 else b
                    for b in dim.branches
                ]
                return replace(dim, branches=tuple(branches))
            case Pad():
                return replace(dim, inner=self.attach(dim.inner, axis))
        # Never below another split: that would change the lengths that the outer one divides.
        return self.split(dim, axis)

    # --- rules ------------------------------------------------------------------------------------

    def present(self, block: Block) -> None:
        """Draw the rules that hold a block."""
        rng = self.rng
        some = {c.axis for c in block.only}
        in_name = [a for a in block.indexes if rng.random() < 0.7 or a in some]
        self.part(block, (), block.tree, in_name)

    def part(self, block: Block, tags: tuple[str, ...], tree: Tree, in_name: list[str]) -> None:
        """Draw rules for a part of a block: one for all of it, or one for each tag."""
        rng = self.rng
        if isinstance(tree, Fork) and rng.random() < 0.4:
            for tag, child in tree.children:
                self.part(block, (*tags, tag), child, in_name)
            return
        if isinstance(tree, Cross) and rng.random() < 0.3:
            for path, atoms in leaves(tree):
                self.rule(block, (*tags, *path), Leaf(atoms), in_name)
            return
        self.rule(block, tags, tree, in_name)
        if rng.random() < 0.1:
            self.rule(block, tags, tree, in_name, alias=True)

    def rule(
        self,
        block: Block,
        tags: tuple[str, ...],
        tree: Tree,
        in_name: list[str],
        alias: bool = False,
    ) -> None:
        """Draw one rule, or two of which one has some of the numbers and one the others."""
        rng = self.rng
        free = [a for a in in_name if a not in {c.axis for c in block.only}]
        if not free or alias or rng.random() > 0.12:
            self.one_rule(block, tags, tree, in_name, [Alias()] if alias else [])
            return
        axis = rng.choice(free)
        first, second = halves(rng, axis, self.world.sizes[axis])
        named = self.rule_name(block, in_name)
        self.one_rule(block, tags, tree, in_name, [first], named)
        if rng.random() < 0.5:
            # Where the first rule has all names, the second one has what it leaves.
            self.one_rule(block, tags, tree, in_name, [], named)
        else:
            self.one_rule(block, tags, tree, in_name, [second])

    def one_rule(
        self,
        block: Block,
        tags: tuple[str, ...],
        tree: Tree,
        in_name: list[str],
        modifiers: list[Modifier],
        named: tuple[Name, list[str]] | None = None,
    ) -> None:
        """Draw one rule, of a name that is drawn already or of a new one."""
        rng = self.rng
        name, used = self.rule_name(block, in_name) if named is None else (named[0], [*named[1]])
        on_axes = [a for a in self.rank_axes if self.apart(used, a)]
        if named is None and on_axes and rng.random() < 0.12:
            axis = str(rng.choice(on_axes))
            last = self.mesh.extents[axis] - 1
            modifiers.append(On(axis, rng.choice([0, last, "last"])))
            used.append(axis)
        if not in_name and self.mesh.local and rng.random() < 0.4:
            name = Name(join((name.parts[0], Text(".v"), NameIndex("vpp"), *name.parts[1:])))
            modifiers.append(On("vpp", rng.choice([0, 1, "last"])))
        if rng.random() < 0.2:
            modifiers.append(Replicas(rng.choice(["same", "any"])))
        stacked = tuple(a for a in block.indexes if a not in in_name)
        items = self.items(tree, set(), stacked)
        dims = self.compose(items)
        if not dims and any(isinstance(m, Alias) for m in modifiers):
            # An alias that says no dimensions has those of what it copies.
            dims.append(One())
        for axis in self.split_axes(used):
            if dims:
                k = rng.randrange(len(dims))
                dims[k] = self.attach(dims[k], axis)
        reference: list[NamePart] = []
        for i, (text, axis) in enumerate(block.prefix):
            reference.append(Text(("." if i else "") + text))
            if axis and axis in in_name:
                reference.append(NameIndex(axis))
        reference.append(Text("".join(f".{t}" for t in tags)))
        self.rules.append(Rule(name, Name(join(reference)), tuple(dims), tuple(modifiers)))

    def split_axes(self, used: list[str]) -> list[str]:
        """Draw mesh axes that cut a rule's dimensions."""
        rng = self.rng
        kept = [] if rng.random() < 0.25 else self.flat_axes
        out: list[str] = []
        axes = self.rank_axes
        rng.shuffle(axes)
        for axis in axes:
            if self.apart([*used, *kept, *out], axis) and rng.random() < 0.7:
                out.append(axis)
        return out

    def rule_name(self, block: Block, in_name: list[str]) -> tuple[Name, list[str]]:
        """Draw a rule's name; return the mesh axes it speaks of as well."""
        rng = self.rng
        used: list[str] = []
        parts: list[NamePart] = [Text(block.prefix[0][0].lower())]
        order = list(in_name)
        rng.shuffle(order)
        vpp = False
        for axis in order:
            # A bare index is cut nowhere.
            cut = self.cuts[axis] if rng.random() < 0.85 else Cut()
            local = rng.random() < 0.6
            if "vpp" in cut.axes and (local or rng.random() < 0.3) and not vpp:
                vpp = True
                parts += [Text(".v"), NameIndex("vpp")]
            written = cut.splits or tuple((a, Even()) for a in cut.axes)
            parts += [Text(f".{axis}."), NameIndex(axis, written, local)]
            used += [a for a in cut.axes if self.mesh.strides[a]]
        parts.append(Text(f".r{len(self.rules)}"))
        return Name(join(parts)), used

    def items(self, tree: Tree, outside: set[str], stacked: tuple[str, ...]) -> list[Dim]:
        """Return dimensions that hold a tree between them, in any order."""
        rng = self.rng
        out: list[Dim]
        match tree:
            case Leaf():
                out = [self.axis(a) for a in (*tree.atoms, *stacked) if a not in outside]
                rng.shuffle(out)
                return out
            case Fork():
                found = [set(atoms) for _, atoms in leaves(tree)]
                common = sorted(set.intersection(*found) - outside) + list(stacked)
                chosen = [a for a in common if rng.random() < 0.7]
                inside = tuple(a for a in stacked if a not in chosen)
                children = list(tree.children)
                rng.shuffle(children)
                branches = []
                for tag, child in children:
                    items = self.items(child, outside | set(chosen), inside)
                    branches.append(Branch(tag, self.one(items)))
                out = [*map(self.axis, chosen), Sum(tuple(branches))]
                rng.shuffle(out)
                return out
            case Cross():
                sums: list[Dim] = [
                    Sum(tuple(Branch(t, self.axis(a)) for t, a in side))
                    for side in (tree.left, tree.right)
                ]
                for a in (*tree.common, *stacked):
                    if a not in outside:
                        sums.insert(rng.randint(0, len(sums)), self.axis(a))
                return sums

    def axis(self, atom: str) -> Dim:
        """Return an axis, now and then as its parts."""
        if atom in self.world.refined and self.rng.random() < 0.4:
            return self.world.refined[atom]
        return Atom(atom)

    def one(self, items: list[Dim]) -> Dim:
        """Return one dimension that holds some."""
        if not items:
            return One()
        return items[0] if len(items) == 1 else self.product(items)

    def product(self, items: list[Dim]) -> Dim:
        """Return a product, nested now and then; parts of refined axes in any order."""
        rng = self.rng
        flat: list[Dim] = []
        for item in items:
            if isinstance(item, Product) and rng.random() < 0.5:
                flat += item.parts
            else:
                flat.append(item)
        if len(flat) > 2 and rng.random() < 0.3:
            k = rng.randint(1, len(flat) - 1)
            flat = [Product(tuple(flat[:k])) if k > 1 else flat[0], *flat[k:]]
        return Product(tuple(flat))

    def compose(self, items: list[Dim]) -> list[Dim]:
        """Group items into dimensions."""
        rng = self.rng
        dims: list[Dim] = []
        left = list(items)
        while left:
            k = rng.randint(1, min(len(left), 3))
            dims.append(self.one(left[:k]))
            left = left[k:]
        if rng.random() < 0.1:
            dims.insert(rng.randint(0, len(dims)), One())
        for k, dim in enumerate(dims):
            if rng.random() < 0.06:
                dims[k] = Pad(dim, Number(rng.choice([2, 3, 4])), rng.choice([0.0, 3.0]))
        return dims

    # --- flats ------------------------------------------------------------------------------------

    def flat(self) -> Flat:
        """Draw a flat."""
        rng = self.rng
        axis = str(rng.choice(self.rank_axes))
        self.flat_axes.append(axis)
        states = [s.name for s in self.world.states]
        choices = [("*",), ("params",), ("params", *states)]
        if states:
            choices += [tuple(states), (states[-1],)]
        end: Value = UNIT
        how = Even(rng.choice(["ceil", "bal"]), Number(rng.choice([1, 1, 2])))
        if rng.random() < 0.5:
            end = Arithmetic("lcm", Size(axis), Number(rng.choice([1, 2, 4])))
            how = Even()
        kinds: list[Literal["each", "group", "bucket", "parts"]]
        kinds = ["each", "group", "bucket", "parts"]
        kind = rng.choice([*kinds, *kinds[1:3], *kinds[1:]])
        some = kind == "parts" and rng.random() < 0.5
        limit = kind == "bucket" or (kind == "parts" and rng.random() < 0.5)
        group = FlatGroup(
            kind,
            self.pattern() if kind == "group" or some else None,
            rng.choice([1, 20, 60, 200]) if limit else 0,
        )
        called = None
        if kind != "each" and rng.random() < 0.3:
            called = Name((Text(f"packed{len(self.flats)}."), NameIndex("buffer")))
        return Flat(
            group,
            (axis, how),
            rng.choice(choices),
            rng.choice(["module", "reverse", "robin"]),
            Number(rng.choice([1, 1, 2, 4, 5])),
            end,
            called=called,
        )

    def other_states(self) -> list[Stored]:
        """Draw how states of some names are called where buffers have names of their own."""
        rng = self.rng
        if not any(f.called for f in self.flats) or not self.world.states or rng.random() < 0.3:
            return []
        names = [Name((Text("packed0."), Glob(True))), Name((Glob(True),)), self.pattern()]
        return [Stored(states="other.{name}.{state}", names=rng.choice(names))]

    def pattern(self) -> Name:
        """Draw a pattern of names."""
        rng = self.rng
        block = rng.choice(self.world.blocks)
        text = block.prefix[0][0].lower()
        return Name(
            rng.choice(
                [
                    (Glob(True),),
                    (Text(f"{text}."), Glob(True)),
                    (Glob(True), Text(".l."), NameIndex("u"), Text("."), Glob(True)),
                    (Glob(True), Text(".e."), NameIndex("u"), Text("."), Glob(False)),
                    (Text(f"{text}.l."), NameIndex("u"), Text("."), Glob(False)),
                    (Text("b"), Glob(False), Text("."), Glob(True)),
                ]
            )
        )
