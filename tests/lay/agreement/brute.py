"""What a layout means, element by element: "Meaning" of ``docs/design/lay.md`` written down.

This is the judge of everything that computes with intervals, and shares no code with it: only the
syntax tree and what is looked up. It knows every entry of every dimension, so sizes are small.

A *cell* is an element of a family. All cells of a space are numbered, family by family, and a
tensor is an array of cell numbers; a negative number -1 - k stands for fill number k.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptd.lay.resolve import Bound, Equation, Family, Tags
from ckptd.lay.syntax.tree import (
    Alias,
    Atom,
    Dim,
    Flat,
    Glob,
    Name,
    NameIndex,
    On,
    Pipe,
    Split,
    Text,
)
from tests.lay.agreement.brute_sequences import Entry, Place, Sequences, Wrong, dealt, split_axes

__all__ = ["Brute", "Cells", "Numbering", "Place", "Wrong", "load", "save"]

Cells: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Numbering:
    """Numbers of all cells of a space.

    Attributes
    ----------
    families
        First cell and shape of each family, by name.
    total
        Number of cells.
    """

    families: Mapping[str, tuple[int, tuple[str, ...], tuple[int, ...]]]
    total: int

    @staticmethod
    def of(*bounds: Bound) -> Numbering:
        """Number the cells of all families that some layouts of one space hold."""
        sizes = {a: n for b in bounds for a, n in b.sizes.items()}
        found = {
            f.name: f.axes for b in bounds for e in b.layout.equations for f in e.families.values()
        }
        out = {}
        total = 0
        for name, axes in sorted(found.items()):
            shape = tuple(sizes[a] for a in axes)
            out[name] = (total, axes, shape)
            total += math.prod(shape)
        return Numbering(out, total)

    def strides(self, family: Family) -> tuple[int, dict[str, int]]:
        """Return a family's first cell, and how far apart neighbours along each axis are."""
        first, axes, shape = self.families[family.name]
        return first, {a: math.prod(shape[i + 1 :]) for i, a in enumerate(axes)}

    def name(self, cell: int) -> str:
        """Return a cell in words."""
        for name, (first, axes, shape) in self.families.items():
            if first <= cell < first + math.prod(shape):
                at = np.unravel_index(cell - first, shape)
                return f"{name}{dict(zip(axes, map(int, at), strict=True))}"
        return f"fill {cell}"


@dataclass(frozen=True)
class Tensor:
    """A rank-local tensor before flats: which rule, which indexes, which cells."""

    rule: int
    indexes: tuple[int, ...]
    name: str
    long_name: str
    cells: Cells


class Brute(Sequences):
    """A layout whose sizes are known.

    Parameters
    ----------
    bound
        The layout.
    numbering
        Of the cells; layouts that are compared share one.
    """

    def __init__(self, bound: Bound, numbering: Numbering | None = None) -> None:
        super().__init__(bound)
        self.numbering = numbering or Numbering.of(bound)
        self.fills: list[float] = [0.0]
        self._cells: dict[object, Cells] = {}
        self._ranks: dict[int, list[Tensor]] = {}
        self._local: dict[int, dict[str, tuple[str, Cells]]] = {}

    # --- tensors --------------------------------------------------------------------------------

    def cells(self, rule: int, fixed: Mapping[str, int], place: Place | None) -> Cells:
        """Return the cells of a tensor.

        Parameters
        ----------
        rule
            Number of the equation.
        fixed
            Index of each axis that the tensor's name says.
        place
            Coordinates; None for the stored form.
        """
        equation = self.layout.equations[rule]
        axes = {a for d in equation.dims for a in split_axes(d)}
        mine = None if place is None else tuple((a, place[a]) for a in sorted(axes))
        key = (rule, tuple(fixed.items()), mine)
        if key not in self._cells:
            self._cells[key] = self._tensor(equation, {**equation.pinned, **fixed}, place)
        return self._cells[key]

    def _tensor(self, equation: Equation, fixed: Mapping[str, int], place: Place | None) -> Cells:
        sequences = [self.seq(d, place) for d in equation.dims]
        out = np.full([len(s) for s in sequences], _MISSING, dtype=np.int64)
        kinds = [sorted({e.tags for e in s if e.fill is None}) for s in sequences]
        for tags in product(*kinds):
            family = equation.families[tuple(t for part in tags for t in part)]
            at, numbers = self._lattice(family, sequences, tags, fixed)
            out[np.ix_(*at)] = numbers
        for dim, sequence in enumerate(sequences):
            for i, e in enumerate(sequence):
                if e.fill is not None:
                    where = (slice(None),) * dim + (i,)
                    out[where] = np.where(out[where] == _MISSING, self._fill(e.fill), out[where])
        if (out == _MISSING).any():
            raise Wrong(f"{equation.text}: an element means nothing")
        return out

    def _lattice(
        self,
        family: Family,
        sequences: Sequence[Sequence[Entry]],
        tags: Sequence[Tags],
        fixed: Mapping[str, int],
    ) -> tuple[list[list[int]], Cells]:
        """Return where the entries with some tags are, and the cells at all combinations."""
        first, strides = self.numbering.strides(family)
        # An index of the name that this family does not have tells apart what is one tensor.
        used = {a: i for a, i in fixed.items() if a in strides}
        numbers = np.array(first + sum(i * strides[a] for a, i in used.items()), dtype=np.int64)
        at = []
        left = set(strides) - set(used)
        for sequence, wanted in zip(sequences, tags, strict=True):
            mine = [i for i, e in enumerate(sequence) if e.fill is None and e.tags == wanted]
            axes = {tuple(sorted(sequence[i].axes)) for i in mine}
            if len(axes) != 1 or not set(*axes) <= left:
                raise Wrong(f"{family.name}: an axis comes twice, or is none of its: {axes}")
            left -= set(*axes)
            steps = [sum(strides[a] * k for a, k in sequence[i].axes.items()) for i in mine]
            numbers = np.add.outer(numbers, np.array(steps, dtype=np.int64))
            at.append(mine)
        if left:
            raise Wrong(f"{family.name}: nothing says {sorted(left)}")
        return at, numbers

    def _fill(self, value: float) -> int:
        if value not in self.fills:
            self.fills.append(value)
        return -1 - self.fills.index(value)

    # --- names ----------------------------------------------------------------------------------

    def numbers(self, index: NameIndex, place: Place) -> list[int]:
        """Return the numbers that an index has at some coordinates, in order."""
        size = self.sizes[index.axis]
        pipe = self._pipe(index)
        if pipe is not None:
            stage = 0
            for axis in pipe.splits:
                stage = stage * self.mesh.extents[axis] + place[axis]
            counts = [s.count("t") for s in _unrolled(pipe.stages)]
            if sum(counts) != size or len(counts) != math.prod(
                self.mesh.extents[a] for a in pipe.splits
            ):
                raise Wrong(f"{pipe} does not fit {size} layers")
            return dealt(list(range(size)), counts)[stage]
        dim: Dim = Atom(index.axis)
        for axis, how in index.splits:
            dim = Split(dim, axis, how)
        return [e.axes[index.axis] for e in self.seq(dim, place)]

    def _pipe(self, index: NameIndex) -> Pipe | None:
        """Return the stage string of an index that is cut over its mesh axes."""
        said = (index.axis, tuple(a for a, _ in index.splits))
        return next((p for p in self.layout.pipes if (p.axis, p.splits) == said), None)

    def _cutting(self, index: NameIndex) -> tuple[str, ...]:
        """Return the mesh axes that an index speaks of."""
        if index.axis in self.mesh.extents:
            return (index.axis,)
        return tuple(a for a, _ in index.splits)

    def _indexes(self, equation: Equation) -> list[NameIndex]:
        """Return the indexes of a name that are axes of families."""
        found = [p for p in equation.name.parts if isinstance(p, NameIndex)]
        return [p for p in found if p.axis not in self.mesh.extents]

    def _name(self, name: Name, numbers: Mapping[str, int], place: Place) -> str:
        out = []
        for part in name.parts:
            if isinstance(part, Glob):
                raise Wrong("a glob is left")
            if isinstance(part, Text):
                out.append(part.text)
            elif isinstance(part, NameIndex):
                number = place[part.axis] if part.axis in place else numbers[part.axis]
                out.append(str(number))
        return "".join(out)

    def _stored_name(self, equation: Equation, numbers: Mapping[str, int]) -> str:
        """Return a name with global numbers, and without those of local mesh axes."""
        parts = equation.name.parts
        kept = (p for p in parts if not (isinstance(p, NameIndex) and p.axis in self.mesh.local))
        return self._name(Name(tuple(kept)), numbers, {})

    def _dressed(self, name: str, state: str) -> str:
        if not state:
            return self.layout.params.replace("{name}", name)
        stored = {s.name: s.stored for s in self.layout.states}[state]
        templates = [t for n, t in self.layout.other_states if _matched(n, name) is not None]
        template = [*templates, self.layout.state_names][0]
        return template.replace("{state}", stored).replace("{name}", name)

    # --- what is there --------------------------------------------------------------------------

    @property
    def states(self) -> list[str]:
        """Short names of all states; the parameter itself is the empty one."""
        return ["", *(s.name for s in self.layout.states)]

    def stored(self) -> dict[str, tuple[str, Cells]]:
        """Return state and cells of each stored tensor, by name."""
        out: dict[str, tuple[str, Cells]] = {}
        for rule, equation in enumerate(self.layout.equations):
            if any(isinstance(m, Alias) for m in equation.modifiers):
                continue
            axes = [p.axis for p in self._indexes(equation)]
            for indexes in product(*(range(self.sizes[a]) for a in axes)):
                fixed = dict(zip(axes, indexes, strict=True))
                if not self._is_for(equation, fixed):
                    continue
                for state in self.states:
                    name = self._dressed(self._stored_name(equation, fixed), state)
                    if name in out:
                        raise Wrong(f"two stored tensors {name}")
                    out[name] = (state, self.cells(rule, fixed, None))
        return out

    def local(self, rank: int) -> dict[str, tuple[str, Cells]]:
        """Return state and cells of each tensor and buffer that a rank holds, by name."""
        if rank not in self._local:
            self._local[rank] = self._all_local(rank)
        return self._local[rank]

    def _all_local(self, rank: int) -> dict[str, tuple[str, Cells]]:
        place = self.mesh.coordinates(rank)
        out: dict[str, tuple[str, Cells]] = {}
        for state in self.states:
            packed: dict[int, list[Tensor]] = {}
            for tensor in self._tensors(rank):
                flat = self._flat_of(tensor, state)
                if flat is None:
                    _put(out, self._dressed(tensor.name, state), state, tensor.cells)
                elif self.layout.flats[flat].group.kind == "each":
                    whole = self._buffer([tensor], self.layout.flats[flat])
                    mine = self._share(whole, self.layout.flats[flat], place)
                    _put(out, self._dressed(tensor.name, state), state, mine)
                else:
                    packed.setdefault(flat, []).append(tensor)
            buffers = [
                (flat, group)
                for number in sorted(packed)
                for flat in [self.layout.flats[number]]
                for group in self._groups(packed[number], flat)
            ]
            for i, (flat, group) in enumerate(buffers):
                if flat.group.kind == "parts":
                    mine = [self._share(self._buffer([t], flat), flat, place) for t in group]
                    cells = np.concatenate(mine)
                else:
                    cells = self._share(self._buffer(group, flat), flat, place)
                _put(out, self._called(flat, group, i, state), state, cells)
        return out

    def _called(self, flat: Flat, group: list[Tensor], number: int, state: str) -> str:
        """Return the name of a buffer on a rank."""
        if flat.called is None:
            return f"flat.{number}.{state or 'params'}"
        known = {"buffer": str(number)}
        if flat.group.name is not None:
            indexes = [p.axis for p in flat.group.name.parts if isinstance(p, NameIndex)]
            found = _matched(flat.group.name, group[0].long_name)
            assert found is not None
            known |= dict(zip(indexes, found, strict=True))
        text = "".join(
            p.text if isinstance(p, Text) else known[p.axis]
            for p in flat.called.parts
            if isinstance(p, Text | NameIndex)
        )
        return self._dressed(text, state)

    def _tensors(self, rank: int) -> list[Tensor]:
        """Return what a rank holds before flats, in the order of modules."""
        if rank not in self._ranks:
            found = self._unordered(rank)
            for t in list(found):
                same = [u for u in found if u.name == t.name]
                if any(not np.array_equal(u.cells, t.cells) for u in same):
                    raise Wrong(f"two tensors {t.name} on rank {rank}")
            self._ranks[rank] = self._ordered(found, list(range(len(self.layout.equations))), 0)
        return self._ranks[rank]

    def _unordered(self, rank: int) -> list[Tensor]:
        out = []
        for rule, equation in enumerate(self.layout.equations):
            for place in self._places(equation, self.mesh.coordinates(rank)):
                if not self._is_on(equation, place):
                    continue
                indexes = self._indexes(equation)
                dealt = [self.numbers(p, place) for p in indexes]
                for at in product(*(range(len(d)) for d in dealt)):
                    fixed = {p.axis: d[i] for p, d, i in zip(indexes, dealt, at, strict=True)}
                    if not self._is_for(equation, fixed):
                        continue
                    shown = {
                        p.axis: i if p.local else d[i]
                        for p, d, i in zip(indexes, dealt, at, strict=True)
                    }
                    out.append(
                        Tensor(
                            rule,
                            tuple(fixed.values()),
                            self._name(equation.name, shown, place),
                            self._name(equation.name, fixed, place),
                            self.cells(rule, fixed, place),
                        )
                    )
        return out

    def _places(self, equation: Equation, place: Place) -> list[Place]:
        """Return a rank's coordinates, once for each on the local axes that a rule speaks of."""
        found = {
            a for p in equation.name.parts if isinstance(p, NameIndex) for a in self._cutting(p)
        }
        found |= {m.axis for m in equation.modifiers if isinstance(m, On)}
        local = [a for a in self.mesh.local if a in found]
        return [
            {**place, **dict(zip(local, c, strict=True))}
            for c in product(*(range(self.mesh.extents[a]) for a in local))
        ]

    def _is_on(self, equation: Equation, place: Place) -> bool:
        for m in equation.modifiers:
            if isinstance(m, On):
                last = self.mesh.extents[m.axis] - 1
                if place[m.axis] != (last if m.coordinate == "last" else m.coordinate):
                    return False
        return True

    def _is_for(self, equation: Equation, numbers: Mapping[str, int]) -> bool:
        """Whether a rule has a tensor with some numbers."""
        for axis, n in numbers.items():
            if axis in equation.only:
                found = list(equation.only[axis].first)
                while len(found) <= n:
                    found += equation.only[axis].cycle
                if not found[n]:
                    return False
        return True

    def _ordered(self, tensors: list[Tensor], rules: list[int], depth: int) -> list[Tensor]:
        """Order tensors by modules.

        Rules that follow each other and whose names begin alike up to an index are one module for
        each number of that index.
        """
        runs: list[tuple[object, list[int]]] = []
        for rule in rules:
            beginning = self._beginning(rule, depth)
            if not runs or beginning is None or runs[-1][0] != beginning:
                runs.append((beginning, []))
            runs[-1][1].append(rule)
        out: list[Tensor] = []
        for beginning, run in runs:
            mine = [t for t in tensors if t.rule in run]
            if beginning is None:
                out += mine
                continue
            for number in sorted({self._written(t, depth) for t in mine}):
                module = [t for t in mine if self._written(t, depth) == number]
                out += self._ordered(module, run, depth + 1)
        return out

    def _beginning(self, rule: int, depth: int) -> object:
        parts = self.layout.equations[rule].name.parts
        found = [i for i, p in enumerate(parts) if isinstance(p, NameIndex)]
        return parts[: found[depth] + 1] if depth < len(found) else None

    def _written(self, tensor: Tensor, depth: int) -> int:
        """Return the number that stands in a tensor's long name at an index."""
        equation = self.layout.equations[tensor.rule]
        pattern = "".join(
            re.escape(p.text) if isinstance(p, Text) else "([0-9]+)" for p in equation.name.parts
        )
        found = re.fullmatch(pattern, tensor.long_name)
        assert found is not None
        return int(found[depth + 1])

    # --- flats ----------------------------------------------------------------------------------

    def _flat_of(self, tensor: Tensor, state: str) -> int | None:
        """Return the first flat that takes a tensor of a state, or None."""
        for number, flat in enumerate(self.layout.flats):
            if "*" not in flat.states and (state or "params") not in flat.states:
                continue
            if self._changes_along(tensor.rule, flat.split[0]):
                continue
            if flat.group.name is None or _matched(flat.group.name, tensor.long_name) is not None:
                return number
        return None

    def _changes_along(self, rule: int, axis: str) -> bool:
        """Whether what a rank has of a rule depends on its coordinate on a mesh axis."""
        equation = self.layout.equations[rule]
        speaks = {a for d in equation.dims for a in split_axes(d)}
        speaks |= {m.axis for m in equation.modifiers if isinstance(m, On)}
        for p in equation.name.parts:
            if isinstance(p, NameIndex):
                speaks |= set(self._cutting(p))
        stride, extent = self.mesh.strides[axis], self.mesh.extents[axis]
        for rank in range(self.mesh.world):
            here = self.mesh.coordinates(rank)
            first = self.mesh.coordinates(rank - here[axis] * stride)
            if any(here.get(a) != first.get(a) for a in speaks) and extent > 1:
                return True
        return axis in speaks

    def _groups(self, tensors: list[Tensor], flat: Flat) -> list[list[Tensor]]:
        """Return the tensors of each buffer."""
        ordered = tensors[::-1] if flat.order == "reverse" else list(tensors)
        if flat.group.name is not None:
            groups: dict[object, list[Tensor]] = {}
            for t in ordered:
                groups.setdefault(_matched(flat.group.name, t.long_name), []).append(t)
            dealt = [self._dealt(g, flat) for g in groups.values()]
            if flat.group.kind == "parts":
                return [row for g in dealt for row in self._rows(g, flat)]
            return dealt
        if flat.group.kind == "parts":
            return self._rows(self._dealt(ordered, flat), flat)
        ordered = self._dealt(ordered, flat)
        buckets: list[list[Tensor]] = []
        for t in ordered:
            if not buckets or len(self._unended(buckets[-1], flat)) >= flat.group.elements:
                buckets.append([])
            buckets[-1].append(t)
        return buckets

    def _rows(self, tensors: list[Tensor], flat: Flat) -> list[list[Tensor]]:
        """Return the tensors of each buffer of parts: it is full when the first rank's is."""
        axis, how = flat.split
        rows: list[list[Tensor]] = []
        held = flat.group.elements
        for t in tensors:
            if not rows or (flat.group.elements and held >= flat.group.elements):
                rows.append([])
                held = 0
            rows[-1].append(t)
            whole = self._buffer([t], flat)
            held += len(whole[self.deal(len(whole), how, self.mesh.extents[axis])[0]])
        return rows

    def _dealt(self, tensors: list[Tensor], flat: Flat) -> list[Tensor]:
        """Deal tensors out in turn, one hand for each coordinate, and put the hands together."""
        if flat.order != "robin":
            return tensors
        hands: dict[int, list[Tensor]] = {}
        for i, t in enumerate(tensors):
            hands.setdefault(i % self.mesh.extents[flat.split[0]], []).append(t)
        return [t for hand in hands.values() for t in hand]

    def _unended(self, tensors: list[Tensor], flat: Flat) -> list[int]:
        out: list[int] = []
        for t in tensors:
            out += [-1] * (-len(out) % self.number(flat.start))
            out += t.cells.reshape(-1).tolist()
        return out

    def _buffer(self, tensors: list[Tensor], flat: Flat) -> Cells:
        out = self._unended(tensors, flat)
        out += [-1] * (-len(out) % self.number(flat.end))
        return np.array(out, dtype=np.int64)

    def _share(self, buffer: Cells, flat: Flat, place: Place) -> Cells:
        axis, how = flat.split
        return buffer[self.deal(len(buffer), how, self.mesh.extents[axis])[place[axis]]]


_MISSING = -(2**40)


def save(meaning: Brute, values: Mapping[str, Values]) -> dict[int, dict[str, Values]]:
    """Return what each rank holds of logical values.

    Parameters
    ----------
    meaning
        The layout.
    values
        By state, one for each cell.
    """
    return {
        rank: {
            name: filled(meaning, cells, values[state])
            for name, (state, cells) in meaning.local(rank).items()
        }
        for rank in range(meaning.mesh.world)
    }


def filled(meaning: Brute, cells: Cells, values: Values) -> Values:
    """Return a tensor: values at its cells, fills between them."""
    fills = np.array(meaning.fills)
    return np.where(
        cells >= 0,
        values[np.maximum(cells, 0)],
        fills[np.minimum(np.maximum(-1 - cells, 0), len(fills) - 1)],
    )


def load(meaning: Brute, held: Mapping[int, Mapping[str, Values]]) -> dict[str, Values]:
    """Return the logical values that ranks hold, by state; NaN where nobody holds a cell.

    Raises
    ------
    Wrong
        Two ranks hold different values of a cell, or a tensor has another shape.
    """
    out = {s: np.full(meaning.numbering.total, np.nan) for s in meaning.states}
    for rank, tensors in held.items():
        for name, (state, cells) in meaning.local(rank).items():
            found = tensors[name]
            if found.shape != cells.shape:
                raise Wrong(f"{name} has the shape {found.shape} on rank {rank}")
            real = cells >= 0
            before = out[state][cells[real]]
            if (~np.isnan(before) & (before != found[real])).any():
                raise Wrong(f"{name} of rank {rank} differs from another copy")
            out[state][cells[real]] = found[real]
    return out


def _put(out: dict[str, tuple[str, Cells]], name: str, state: str, cells: Cells) -> None:
    if name in out and not np.array_equal(out[name][1], cells):
        raise Wrong(f"two tensors {name}")
    out[name] = (state, cells)


def _unrolled(stages: str) -> list[str]:
    """Unroll a stage string as Megatron-LM does, innermost parentheses first."""
    text = stages.replace(",", "").replace(" ", "")
    while "(" in text:
        text = re.sub(r"\(([^()]*)\)(?:\*([0-9]+))?", lambda m: m[1] * int(m[2] or 1), text)
    text = re.sub(r"(.)\*([0-9]+)", lambda m: m[1] * int(m[2]), text)
    return text.split("|")


def _matched(pattern: Name, name: str) -> tuple[str, ...] | None:
    """Return what a pattern's indexes are in a name that it matches, or None."""
    out = ""
    parts = pattern.parts
    for k, part in enumerate(parts):
        deep_before = k > 0 and isinstance(b := parts[k - 1], Glob) and b.deep
        if isinstance(part, Text):
            # "**." stands for any number of components, none among them.
            out += re.escape(part.text[1:] if deep_before else part.text)
        elif isinstance(part, Glob):
            last = k == len(parts) - 1
            out += (".+" if last else r"(?:[^.]+\.)*") if part.deep else "[^.]*"
        else:
            out += "([0-9]+)"
    found = re.fullmatch(out, name)
    return found.groups() if found else None
