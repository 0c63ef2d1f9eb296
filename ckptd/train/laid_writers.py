"""Which of several replicas writes a stored tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ckptd.layout.lay.places import free_ranges
from ckptd.layout.lay.stored import StoredForm, StoredTensor

__all__ = ["Writers"]

_Key = tuple[int, tuple[int, ...], str]


@dataclass(frozen=True, eq=False)
class Writers:
    """Spreads the stored tensors of a layout over the ranks that hold replicas.

    A pure function of the layout: all ranks come to the same. A tensor's pieces are all written
    at one coordinate of the axes that hold replicas of it; each tensor goes where least was given
    so far.
    """

    form: StoredForm

    def shift(self, stored: StoredTensor) -> int:
        """Return how far from the lowest holders the ranks are that write a tensor."""
        return self._shifts[(stored.rule, stored.indexes, self._flat_axis(stored))]

    def _flat_axis(self, stored: StoredTensor) -> str:
        flat = self.form.packing.flat_of(stored.rule, stored.indexes, stored.state)
        return "" if flat is None else self.form.bound.layout.flats[flat].split[0]

    @cached_property
    def _shifts(self) -> Mapping[_Key, int]:
        out: dict[_Key, int] = {}
        given: dict[tuple[tuple[int, int], ...], np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
        for rule in self.form.stored_rules:
            if not rule.plain:
                continue
            for indexes in rule.tensors():
                for axis in self._axes(rule.number, indexes):
                    free = free_ranges(self.form.mesh, rule.axes | ({axis} if axis else set()))
                    if not free:
                        continue
                    loads = given.setdefault(
                        tuple(free), np.zeros(math.prod(n for _, n in free), dtype=np.float64)
                    )
                    number = int(loads.argmin())
                    loads[number] += math.prod(rule.shape)
                    out[rule.number, indexes, axis] = _shift(number, free)
        return _Zeros(out)

    def _axes(self, rule: int, indexes: tuple[int, ...]) -> dict[str, None]:
        """Return the axes of the flats that a tensor's states lie in; empty for none."""
        flats = (self.form.packing.flat_of(rule, indexes, s) for s in self.form.states)
        layout = self.form.bound.layout
        return dict.fromkeys("" if f is None else layout.flats[f].split[0] for f in flats)


class _Zeros(dict[_Key, int]):
    """Zero for what is not there: tensors whose holders are not a plain product."""

    def __missing__(self, key: _Key) -> int:
        return 0


def _shift(number: int, free: list[tuple[int, int]]) -> int:
    out = 0
    for stride, count in free:
        number, digit = divmod(number, count)
        out += digit * stride
    return out
