"""Random pairs of layouts: copies move exactly the cells that the brute force says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from ckptd.lay.bind import bind_ranks, bind_stored
from ckptd.lay.check import check, check_bound
from ckptd.lay.resolve import Bound, Equation, resolve
from ckptd.lay.syntax import parse, show
from ckptd.lay.syntax.tree import NOWHERE, Dim, Pad, Product, Split, Sum
from tests.lay.agreement.brute import Brute
from tests.lay.agreement.brute_judge import Judge
from tests.lay.agreement.programs_random import Pair, pair, pairs
from tests.lay.agreement.programs_random_constructs import CONSTRUCTS

SHORT = 130
PARTS = 2
LONG = 10_000


def judged(drawn: Pair, live: bool = True) -> None:
    """Compare a pair; the program is part of the message."""
    try:
        Judge(drawn.source, drawn.target).check(live)
    except Exception as error:
        error.add_note(str(drawn))
        raise


def campaign(
    seeds: Iterable[int], report: Callable[[str], None], what: str, live_every: int = 1
) -> None:
    """Compare the pairs of some seeds and say what occurred in them."""
    seen: Counter[str] = Counter()
    count = cells = 0
    for seed in seeds:
        drawn = pair(random.Random(seed))
        try:
            judged(drawn, live=count % live_every == 0)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        seen.update(drawn.constructs)
        cells += Brute(drawn.source).numbering.total
        count += 1
    report(f"{what}: {count} pairs, {cells} cells, all as the brute force says; constructs in")
    shown = [f"{name} {seen[name]}" for name in CONSTRUCTS]
    for i in range(0, len(shown), 8):
        report("  " + ", ".join(shown[i : i + 8]))
    rare = [name for name in CONSTRUCTS if seen[name] < count / 100]
    assert not rare, f"occur in less than a hundredth: {rare}"
    assert set(seen) - {""} == set(CONSTRUCTS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_agreement(part: int, report: Callable[[str], None]) -> None:
    first, last = SHORT * part // PARTS, SHORT * (part + 1) // PARTS
    campaign(range(first, last), report, f"seeds {first} to {last - 1}", live_every=10)


@pytest.mark.slow
@settings(max_examples=15)
@given(pairs())
def test_agreement_shrinks(drawn: Pair) -> None:
    """The same, drawn by hypothesis, which finds the least program that fails."""
    judged(drawn)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_long_agreement(report: Callable[[str], None]) -> None:
    first = random.SystemRandom().randrange(10**6, 10**12)
    campaign(range(first, first + LONG), report, f"seeds {first} to {first + LONG - 1}")


@pytest.mark.slow
def test_what_is_right_is_not_found_fault_with() -> None:
    """Nothing is said against random programs, and they bind to their tensors' shapes."""
    for seed in range(40):
        drawn = pair(random.Random(seed))
        for bound in (drawn.source, drawn.target):
            meaning = Brute(bound)
            stored = {n: c.shape for n, (_, c) in meaning.stored().items()}
            ranks = {
                r: {n: c.shape for n, (_, c) in meaning.local(r).items()}
                for r in range(meaning.mesh.world)
            }
            found = check(bound.layout)
            for observed, again in (
                (stored, bind_stored(bound.layout, stored, bound.sizes)),
                (ranks, bind_ranks(bound.layout, ranks, bound.sizes)),
            ):
                found += check_bound(again, observed)
            errors = [f.render() for f in found if f.severity == "error"]
            assert not errors, "\n".join([f"seed {seed}", *errors, str(drawn)])


def test_programs_are_text() -> None:
    """What is drawn can be written down and read again: a failure is reported as text."""
    for seed in range(20):
        drawn = pair(random.Random(seed))
        again = resolve([parse(show(drawn.file))], "src").equations
        assert _unplaced(again) == _unplaced(drawn.source.layout.equations)


def _unplaced(equations: Iterable[Equation]) -> list[Equation]:
    return [replace(e, at=NOWHERE) for e in equations]


@pytest.mark.slow
def test_the_judge_sees_a_difference() -> None:
    """A plan for a layout with all products and sums turned around is not one for the layout."""
    found = 0
    for seed in range(30):
        drawn = pair(random.Random(seed))
        turned = _turned_layout(drawn.target)
        if _same(drawn.target, turned):
            continue
        judge = Judge(drawn.source, turned)
        judge.target = Brute(drawn.target, judge.target.numbering)
        with pytest.raises(AssertionError):
            judge.check()
        found += 1
    assert found >= 15


def _turned_layout(bound: Bound) -> Bound:
    equations = tuple(replace(e, dims=tuple(map(_turned, e.dims))) for e in bound.layout.equations)
    return replace(bound, layout=replace(bound.layout, equations=equations))


def _turned(dim: Dim) -> Dim:
    match dim:
        case Product():
            two = sum(map(_has_sum, dim.parts)) > 1
            parts = tuple(map(_turned, dim.parts))
            # Tags of two sums are in order; everything else may come in any.
            return replace(dim, parts=parts if two else parts[::-1])
        case Sum():
            branches = tuple(replace(b, dim=_turned(b.dim)) for b in dim.branches)
            return replace(dim, branches=branches[::-1])
        case Split() | Pad():
            return replace(dim, inner=_turned(dim.inner))
    return dim


def _has_sum(dim: Dim) -> bool:
    match dim:
        case Product():
            return any(map(_has_sum, dim.parts))
        case Split() | Pad():
            return _has_sum(dim.inner)
    return isinstance(dim, Sum)


def _same(first: Bound, second: Bound) -> bool:
    a, b = Brute(first), Brute(second)
    return all(
        {n: c.tolist() for n, (_, c) in a.local(r).items()}
        == {n: c.tolist() for n, (_, c) in b.local(r).items()}
        for r in range(a.mesh.world)
    )
