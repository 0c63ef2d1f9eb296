"""Adds up what schedules came to, as lines for a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from tests.checkpoint.crash.tiers.outcome import Outcome

__all__ = ["lines"]


def lines(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield counts by victims, moments, tiers and promises, and what was wrong."""
    done = sorted(outcomes, key=lambda o: o.seed)
    kills = [kill for o in done for kill in o.kills]
    yield (
        f"{len(kills)} kills in {len(done)} jobs with {sum(o.lives for o in done)} lives,"
        f" seeds {_ranges([o.seed for o in done])}"
    )
    yield f"victims: {_counts(Counter(k[0] for k in kills))}"
    yield f"moments: {_counts(Counter(k[1].partition(' ')[0] for k in kills))}"
    yield f"tiers: {_counts(Counter('+'.join(o.tiers) for o in done for _ in o.kills))}"
    yield f"promises, of each rank: {_counts(_sum(o.promises for o in done))}"
    yield f"lives began from: {_counts(_sum(o.restored for o in done))}"
    yield f"calls that raised, by kind: {_counts(_sum(o.raised for o in done)) or 'none'}"
    for o in done:
        for fault in o.faults:
            yield f"seed {o.seed}: {fault}"


def _sum(tables: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for table in tables:
        total.update(table)
    return total


def _counts(counter: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {what}" for what, n in sorted(counter.items(), key=lambda i: -i[1]))


def _ranges(seeds: list[int]) -> str:
    """Return numbers as ranges."""
    found: list[list[int]] = []
    for seed in seeds:
        if found and seed == found[-1][1] + 1:
            found[-1][1] = seed
        else:
            found.append([seed, seed])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in found)
