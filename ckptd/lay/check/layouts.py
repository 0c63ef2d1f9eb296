"""Runs all checks on a layout: alone, with sizes, or with observed shapes; order of findings.

`check` needs the program only, `check_bound` sizes, and with what was observed also tells which
rules would fit. Nothing here looks at single cells: rules are compared by what they hold along
each axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ckptd.errors import UsageError
from ckptd.lay.bind import (
    Observed,
    bind_all,
    fit_findings,
    from_stored,
    sorted_ranks,
    unmatched,
    with_fits,
)
from ckptd.lay.check.blocks import block_findings
from ckptd.lay.check.cover import between_findings, uncovered_findings
from ckptd.lay.check.flats import flat_findings, order_findings
from ckptd.lay.check.names import missing_findings
from ckptd.lay.check.rules import rule_findings
from ckptd.lay.check.statements import statement_findings
from ckptd.lay.resolve import Bound, Finding, Resolved, resolve_all
from ckptd.lay.syntax.tree import NOWHERE, File

Shape: TypeAlias = tuple[int, ...]

Observation: TypeAlias = Mapping[str, Shape] | Mapping[int, Mapping[str, Shape]]
"""Shapes of stored tensors by name, or of local tensors by rank and name."""


def check(resolved: Resolved) -> list[Finding]:
    """Check a layout by itself.

    Returns
    -------
    list of Finding
        Axes that a rule misses or has twice, mesh axes that cut twice, names that are never
        reached, tensors that two rules hold or none, and what does not exist.
    """
    return [
        *rule_findings(resolved),
        *between_findings(resolved),
        *uncovered_findings(resolved),
        *statement_findings(resolved),
        *order_findings(resolved),
    ]


def check_bound(bound: Bound, observed: Observation | None = None) -> list[Finding]:
    """Check a layout with its sizes, and what was observed.

    Parameters
    ----------
    bound
        The layout and its sizes; sizes may be missing, what needs them is then not checked.
    observed
        Names and shapes.

    Returns
    -------
    list of Finding
        Splits that do not divide, recorded widths that do not add up, cuts inside of quantized
        blocks, cells that no rule holds, names without a rule, shapes that the rules do not make;
        with rules that would fit.
    """
    found = None if observed is None else _sorted(bound.layout, observed, bound.sizes)
    findings = list(fit_findings(bound, found.first_shapes() if found else {}))
    findings += block_findings(bound)
    if not any(f.severity == "error" for f in findings):
        # Buffers are made of tensors, whose faults are reported already.
        findings += flat_findings(bound)
    stored = found is not None and found.stored
    for finding in uncovered_findings(bound.layout, bound.sizes):
        # A checkpoint cannot hold tensors that its model lacks: first layers may differ.
        findings.append(finding.as_warning() if stored else finding)
    if found is not None:
        findings += unmatched(found, bound.layout)
        findings += missing_findings(found, bound.layout)
    return findings


def check_program(
    files: Sequence[File],
    layout: str,
    observed: Observation | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[Finding]:
    """Check a layout of a program as far as possible; the findings are in the program's order.

    Parameters
    ----------
    files, layout
        As `ckptd.lay.resolve.resolve`.
    observed
        Names and shapes; None to check the program alone.
    sizes
        Sizes of axes that are known besides.
    """
    try:
        resolved, findings = resolve_all(files, layout)
    except UsageError as error:
        notes = tuple(t for t in (error.wanted, error.hint) if t)
        return [Finding("program", error.message, NOWHERE, error.where or "", notes)]
    findings += check(resolved)
    if observed is not None or sizes:
        found = None if observed is None else _sorted(resolved, observed, sizes)
        bound, unbound = bind_all(resolved, found, sizes)
        # Names are compared with all rules of the program, not only with those that are used.
        fits = [f for f in check_bound(bound, observed) if f.code != "unmatched"]
        findings += with_fits(unbound, fits)
    return sorted(dict.fromkeys(findings), key=lambda f: (f.at.file, f.at.line, f.at.column))


def _sorted(
    layout: Resolved, observed: Observation, sizes: Mapping[str, int] | None = None
) -> Observed:
    names = {n: s for n, s in observed.items() if isinstance(n, str) and isinstance(s, Sequence)}
    if names or not observed:
        return from_stored(layout, names)
    ranks = {r: s for r, s in observed.items() if isinstance(r, int) and isinstance(s, Mapping)}
    return sorted_ranks(layout, ranks, sizes)
