"""Binds a layout to a checkpoint, to ranks or to sizes alone; rules without tensors left out.

A rule of which nothing was observed is left out of the bound layout: a shipped layout has rules
for what many a model lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptd.base.grouping import by_key
from ckptd.lay.bind.axes import needed, solved, sorted_ranks
from ckptd.lay.bind.extents import extents, index_findings, pinned
from ckptd.lay.bind.first import first_wins
from ckptd.lay.bind.fit import fit_findings, with_fits
from ckptd.lay.bind.observed import Observed, from_stored, several_shapes, unmatched
from ckptd.lay.bind.packed import buffer_findings, is_packed
from ckptd.lay.resolve import Bound, Equation, Finding, Resolved, filled, has_globs, raise_first

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
    observed = sorted_ranks(resolved, ranks, sizes)
    bound, findings = bind_all(resolved, observed, sizes)
    kept = sorted_ranks(bound.layout, ranks, bound.sizes).first_shapes() if findings else {}
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
    packed: list[Equation] = []
    if observed is None:
        findings += [_glob(e) for e in resolved.equations if has_globs(e.name)]
        layout = resolved
    else:
        findings += unmatched(observed, resolved)
        findings += several_shapes(observed, resolved.equations)
        findings += index_findings(observed, resolved)
        layout, packed = _instances(resolved, observed)
        findings += _empty(layout, resolved)
    solution = solved(resolved, observed, given or {})
    findings += solution.findings
    findings += needed(layout, solution)
    sizes = {n: size for n, size in solution.sizes.items() if not n.startswith("#")}
    if observed is None or not observed.stored:
        layout, more = first_wins(layout, sizes)
        findings += more
    bound = Bound(layout, sizes)
    if observed is not None and packed and not findings:
        findings += buffer_findings(bound, observed, packed)
    return bound, findings


def _bound(bound: Bound, findings: Sequence[Finding]) -> Bound:
    raise_first(findings)
    return bound


def _instances(resolved: Resolved, observed: Observed) -> tuple[Resolved, list[Equation]]:
    """Return a layout with the rules of which something was observed, without globs.

    And with those whose tensors lie in buffers, which are returned besides.
    """
    equations = []
    packed = []
    places = [0]
    by_rule = by_key(observed.instances)
    all_of = extents(observed, resolved) if observed.stored else {}
    for number, equation in enumerate(resolved.equations):
        for texts in by_rule.get(number, []):
            globs = (number, texts) if texts else None
            one = replace(equation, name=filled(equation.name, texts), globs=globs)
            equations += pinned(one, observed, (number, texts), all_of)
        if number not in by_rule and is_packed(equation, resolved, observed):
            packed.append(equation)
            equations.append(equation)
        places.append(len(equations))
    found = replace(
        resolved,
        equations=tuple(equations),
        drop_places=tuple(places[p] for p in resolved.drop_places),
    )
    return found, packed


def _empty(layout: Resolved, resolved: Resolved) -> Iterator[Finding]:
    """Yield that nothing is left of a layout, or what represents several tensors in buffers."""
    if resolved.equations and not layout.equations:
        message = "no rule of this layout matches an observed tensor"
        yield Finding("empty", message, rule=f"layout {resolved.name}", fit=True)
    yield from (_glob(e) for e in layout.equations if has_globs(e.name))


def _glob(equation: Equation) -> Finding:
    message = "this name matches no known tensors: write it without '*'"
    return Finding("glob", message, equation.at, equation.text)
