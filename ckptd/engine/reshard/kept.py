"""Whether two programs say the same of the tensors of one checkpoint: the kept one and a given one.

Each program leads from a cell of a stored tensor to an element of a logical tensor. Without splits
a logical tensor lies in a stored one as a single lattice, so two programs agree on all cells when
they agree on a few of each lattice of either: its first, its last, and the neighbour of the first
along each axis. What a cell is, `ckptd.engine.reshard.elements` tells.

Layers differ in the numbers in their names only, so cells are looked at once for each pair of
rules and each state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckptd.engine.reshard.elements import find
from ckptd.errors import MismatchError
from ckptd.layout.lay.equation import Bound
from ckptd.layout.lay.printer import show
from ckptd.layout.lay.regions import box_parts
from ckptd.layout.lay.ruleform import RuleForm
from ckptd.layout.lay.stored import StoredForm, TensorKey
from ckptd.types import Box

__all__ = ["Comparison", "compare"]


class _Reading(NamedTuple):
    """What a program says that a cell is; a cell of padding has none."""

    state: str
    family: str
    axes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        state = f"state {self.state} of " if self.state else ""
        return f"{state}{self.family} at {' '.join(f'{a}={n}' for a, n in self.axes)}".rstrip()


@dataclass(frozen=True)
class Comparison:
    """What two programs say of some stored tensors.

    Attributes
    ----------
    tensors
        How many of them the used program names.
    compared
        Of how many both programs speak in the same logical tensors.
    difference
        The first contradiction; the rest was then not looked at.
    """

    tensors: int
    compared: int
    difference: MismatchError | None = None


def compare(kept: Bound, used: Bound, names: Iterable[str], hint: str) -> Comparison:
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
            return Comparison(tensors, compared, found)
        compared += found
    return Comparison(tensors, compared)


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
                    "the program given for the source contradicts the one that it keeps",
                    kind="lay-kept",
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
