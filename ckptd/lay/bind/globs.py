"""Globs (``*`` in names): the texts that they matched when a layout was bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ckptd.errors import UsageError
from ckptd.lay.bind.first import numbered
from ckptd.lay.resolve import Bound, Equation, Resolved, filled, has_globs
from ckptd.lay.syntax.tree import Glob


class FilledGlobs(NamedTuple):
    """Texts that the globs of a rule matched.

    Attributes
    ----------
    rule
        Its number in the layout as it was looked up.
    texts
        The texts, in the order of the globs.
    numbers
        Number by index of the name, where the rule has one number of it only.
    """

    rule: int
    texts: tuple[str, ...]
    numbers: dict[str, int]


def filled_globs(bound: Bound, resolved: Resolved) -> tuple[FilledGlobs, ...]:
    """Return what the globs of a layout represented when it was bound.

    Parameters
    ----------
    bound, resolved
        The layout with what was observed, and before.
    """
    out = []
    for equation in bound.layout.equations:
        if equation.globs is not None:
            rule, texts = equation.globs
            stated = resolved.equations[rule].pinned
            numbers = {a: n for a, n in equation.pinned.items() if stated.get(a) != n}
            out.append(FilledGlobs(rule, texts, numbers))
    return tuple(out)


def with_globs(resolved: Resolved, found: Sequence[FilledGlobs]) -> Resolved:
    """Return a layout whose globs represent what they represented elsewhere; the others match none.

    Raises
    ------
    UsageError
        kind ``lay-use``: it is of another layout.
    """
    by_rule: dict[int, list[Equation]] = {}
    for rule, texts, numbers in found:
        equation = resolved.equations[rule] if rule < len(resolved.equations) else None
        globs = [] if equation is None else [p for p in equation.name.parts if isinstance(p, Glob)]
        if equation is None or not globs or len(globs) != len(texts):
            raise UsageError(
                "the expansion of globs belongs to another layout",
                kind="lay-use",
                where=resolved.name,
                found=f"rule {rule}: {', '.join(texts)[:200]}",
            )
        one = replace(equation, name=filled(equation.name, texts), globs=(rule, texts))
        by_rule.setdefault(rule, []).append(numbered(one, numbers) if numbers else one)
    equations: list[Equation] = []
    places = [0]
    for rule, equation in enumerate(resolved.equations):
        equations += by_rule.get(rule, ()) if has_globs(equation.name) else [equation]
        places.append(len(equations))
    drops = tuple(places[p] for p in resolved.drop_places)
    return replace(resolved, equations=tuple(equations), drop_places=drops)
