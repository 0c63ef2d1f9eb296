"""A layout and what was observed: extents of indexes, sizes of axes, no globs left.

A rule of which nothing was observed is left out of the bound layout: a shipped layout has rules
for what many a model lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptd.layout.lay.check_fit import fit_findings, with_fits
from ckptd.layout.lay.equation import Bound, Equation, Resolved
from ckptd.layout.lay.finding import Finding, raise_first
from ckptd.layout.lay.observe_first import first_wins
from ckptd.layout.lay.observe_indexes import extents, index_findings, pinned
from ckptd.layout.lay.observe_sizes import needed, solved
from ckptd.layout.lay.observed import (
    Observed,
    from_ranks,
    from_stored,
    several_shapes,
    unmatched,
)
from ckptd.layout.lay.pattern import filled
from ckptd.layout.lay.resolve_draft import has_globs

__all__ = ["bind_all", "bind_ranks", "bind_sizes", "bind_stored"]

Shape = tuple[int, ...]


def bind_stored(
    resolved: Resolved, shapes: Mapping[str, Shape], sizes: Mapping[str, int] | None = None
) -> Bound:
    """Bind a layout to the tensors of a checkpoint, which are whole and have global numbers.

    Parameters
    ----------
    resolved
        The layout.
    shapes
        Shape of each tensor, by its name in the checkpoint. Names of states are understood.
    sizes
        Sizes of axes that are known besides.

    Raises
    ------
    MismatchError
        ``lay-fit``: a name without a rule, numbers with a gap, shapes that contradict the rules
        or each other, or a size that does not follow.
    """
    return _bound(*bind_all(resolved, from_stored(resolved, shapes), sizes))


def bind_ranks(
    resolved: Resolved,
    ranks: Mapping[int, Mapping[str, Shape]],
    sizes: Mapping[str, int] | None = None,
) -> Bound:
    """Bind a layout to the tensors of ranks: all of them, or some.

    From some ranks alone the sizes of axes that are not cut evenly do not follow; `sizes` has to
    say them then.

    Parameters
    ----------
    resolved
        The layout.
    ranks
        Shape of each local tensor by name, by rank.
    sizes
        Sizes of axes that are known besides.

    Raises
    ------
    MismatchError
        ``lay-fit``, as `bind_stored`, and if a split does not divide; the hint shows rules that
        would fit.
    """
    observed = from_ranks(resolved, ranks)
    bound, findings = bind_all(resolved, observed, sizes)
    kept = from_ranks(bound.layout, ranks).first_shapes() if findings else {}
    return _bound(bound, with_fits(findings, list(fit_findings(bound, kept))))


def bind_sizes(resolved: Resolved, sizes: Mapping[str, int]) -> Bound:
    """Bind a layout to sizes of axes: all that the program does not say itself.

    Raises
    ------
    MismatchError
        ``lay-fit``: a size is missing, two contradict each other, or a split does not divide.
    """
    bound, findings = bind_all(resolved, None, sizes)
    return _bound(bound, with_fits(findings, list(fit_findings(bound, {}))))


def bind_all(
    resolved: Resolved, observed: Observed | None, given: Mapping[str, int] | None = None
) -> tuple[Bound, list[Finding]]:
    """Bind a layout, and return what is wrong; the sizes are then not complete."""
    findings: list[Finding] = []
    if observed is None:
        findings += [_glob(e) for e in resolved.equations if has_globs(e.name)]
        layout = resolved
    else:
        findings += unmatched(observed, resolved)
        findings += several_shapes(observed, resolved.equations)
        findings += index_findings(observed, resolved)
        layout = _instances(resolved, observed)
    solution = solved(resolved, observed, given or {})
    findings += solution.findings
    findings += needed(layout, solution)
    sizes = {n: size for n, size in solution.sizes.items() if not n.startswith("#")}
    if observed is None or not observed.stored:
        layout, more = first_wins(layout, sizes)
        findings += more
    return Bound(layout, sizes), findings


def _bound(bound: Bound, findings: Sequence[Finding]) -> Bound:
    raise_first(findings)
    return bound


def _instances(resolved: Resolved, observed: Observed) -> Resolved:
    """Return a layout with the rules of which something was observed, without globs."""
    equations = []
    places = [0]
    by_rule: dict[int, list[tuple[str, ...]]] = {}
    all_of = extents(observed, resolved) if observed.stored else {}
    for number, texts in observed.instances:
        by_rule.setdefault(number, []).append(texts)
    for number, equation in enumerate(resolved.equations):
        for texts in by_rule.get(number, []):
            found = replace(equation, name=filled(equation.name, texts))
            equations += pinned(found, observed, (number, texts), all_of)
        places.append(len(equations))
    return replace(
        resolved,
        equations=tuple(equations),
        drop_places=tuple(places[p] for p in resolved.drop_places),
    )


def _glob(equation: Equation) -> Finding:
    message = "nothing says which tensors this name stands for: write it without '*'"
    return Finding("glob", message, equation.at, equation.text)
