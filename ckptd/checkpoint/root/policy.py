"""`Every` (when to save) and `Keep` (retention: last, best, period): rules and their checks.

In it: defaults; a metric's best, ties, checkpoints still without it.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec

from ckptd.checkpoint.format.names import CommitName, commit_key
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.root.index import seconds_of
from ckptd.errors import UsageError

Best = tuple[str, Literal["min", "max"], int]


def check_positive(name: str, value: object, kinds: tuple[type[int | float], ...]) -> None:
    """Raise `UsageError` unless `value` is a positive, finite number."""
    # An int may be above every float, and be less than infinity all the same.
    number = isinstance(value, kinds) and 0 < value <= sys.float_info.max
    if not number or isinstance(value, bool):
        raise UsageError(f"{name} must be positive", where=name, found=repr(value))


def check_given(options: object, kinds: tuple[type[int | float], ...], *names: str) -> None:
    """Check the numbers that a group of options has, where they are given."""
    for name in names:
        if (value := getattr(options, name)) is not None:
            check_positive(name, value, kinds)


def plain_int(value: Any) -> Any:
    """Return an integer of another type (numpy's, say) as an int, and all else as it is."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return value
    return int(value)


class Every(msgspec.Struct, frozen=True):
    """When a save is due. With both parameters, whichever comes first.

    Parameters
    ----------
    steps
        At the first step at or after each multiple of it. Every rank decides this alike.
    minutes
        That long after the last save, in minutes. Clocks differ, so rank 0 decides and announces.
    """

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise UsageError("Every needs steps or minutes", wanted="Every(steps=100)")
        check_given(self, (int,), "steps")
        check_given(self, (int, float), "minutes")

    @staticmethod
    def of(value: int | Every) -> Every:
        """Return the rule; a plain number means steps."""
        return value if isinstance(value, Every) else Every(steps=plain_int(value))

    @property
    def by_clock(self) -> bool:
        """Whether rank 0 must decide."""
        return self.minutes is not None

    def due(self, step: int, last_step: int | None) -> bool:
        """Tell whether the number of steps asks for a save of `step`.

        Parameters
        ----------
        step
            Completed steps.
        last_step
            The step that was saved or loaded last; None when there is none.
        """
        return self.steps is not None and step // self.steps > (last_step or 0) // self.steps

    def late(self, elapsed_s: float) -> bool:
        """Tell whether the clock asks for one, so long after the last save or the start."""
        return self.minutes is not None and elapsed_s >= 60.0 * self.minutes


class Keep(msgspec.Struct, frozen=True):
    """Which checkpoints of the line to keep; one that any rule wants stays.

    Parameters
    ----------
    last
        The newest so many; None keeps all. The newest one is never deleted.
    every_steps
        The first at or after each positive multiple of it, and step 0, for ever.
    every
        The first of each such period of time (counted from 1970), for ever.
    best
        ``(metric, "min" or "max", n)``: the best n by a number in the checkpoint's metadata, as
        it was saved or added since (`ckptd.Checkpointer.annotate`). One that has no such key waits:
        it stays until one that is `last` or more checkpoints newer has it, since evaluations
        may end in another order. A value that is no number (None, NaN) does not take part.
    """

    last: int | None = 3
    every_steps: int | None = None
    every: timedelta | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        check_given(self, (int,), "last", "every_steps")
        if self.every is not None:
            if not isinstance(self.every, timedelta):
                raise UsageError("every must be a timedelta", found=repr(self.every))
            check_positive("every", self.every.total_seconds(), (float,))
        match self.best:
            case None:
                pass
            case (str(), "min" | "max", count):
                check_positive("best", count, (int,))
            case _:
                raise UsageError(
                    "invalid best=", wanted='("loss", "min", 3)', found=repr(self.best)
                )

    @staticmethod
    def of(value: int | Keep | None) -> Keep:
        """Return the rule; a plain number means the newest so many, None means all."""
        return value if isinstance(value, Keep) else Keep(last=plain_int(value))


class Selection(msgspec.Struct, frozen=True):
    """Decision of a rule.

    Attributes
    ----------
    kept, dropped
        The reasons, by name; every name is in exactly one of the two.
    """

    kept: dict[CommitName, tuple[str, ...]]
    dropped: dict[CommitName, tuple[str, ...]]


def select(commits: Iterable[Commit], keep: Keep) -> Selection:
    """Apply `keep` to the commits of one line.

    The result is stable: dropping what it drops and asking again keeps the same ones, and a
    commit that was dropped once is never wanted later, unless the metrics of others change.
    """
    ordered = sorted(commits, key=lambda c: c.name)
    reasons: dict[CommitName, list[str]] = {c.name: [] for c in ordered}
    recent = ordered if keep.last is None else ordered[-keep.last :]
    for c in recent:
        reasons[c.name].append("all are kept" if keep.last is None else f"newest {keep.last}")
    if keep.every_steps is not None:
        # Below the first multiple only step 0 counts: it is a multiple, step 7 is not after one.
        k = keep.every_steps
        for name in _firsts([(c.name, c.step // k) for c in ordered if c.step >= k or not c.step]):
            reasons[name].append(f"every {keep.every_steps} steps")
    if keep.every is not None:
        for name in _firsts([(c.name, _period(c, keep.every)) for c in ordered]):
            reasons[name].append(f"every {keep.every}")
    if keep.best is not None:
        metric, mode, n = keep.best
        for name in _best(ordered, metric, mode)[:n]:
            reasons[name].append(f"best {n} by {mode} {metric}")
        for name in _waiting(ordered, metric, keep.last or 0):
            reasons[name].append(f"waits for its {metric}")
    if ordered and not reasons[ordered[-1].name]:
        reasons[ordered[-1].name].append("newest")
    return Selection(
        {n: tuple(r) for n, r in reasons.items() if r},
        {n: ("no rule keeps it",) for n, r in reasons.items() if not r},
    )


def _firsts(buckets: Sequence[tuple[CommitName, int]]) -> list[CommitName]:
    first: dict[int, CommitName] = {}
    for name, bucket in buckets:
        first.setdefault(bucket, name)
    return list(first.values())


def _period(commit: Commit, every: timedelta) -> int:
    return int(seconds_of(commit.created, commit_key(commit.name)) // every.total_seconds())


def _best(commits: Sequence[Commit], metric: str, mode: str) -> list[CommitName]:
    """Names by value, best first; of equals the newer, because it has seen more data."""
    sign = 1.0 if mode == "min" else -1.0
    scored = [(metric_of(c.metadata.get(metric)), c.name) for c in commits]
    ranked = sorted((sign * v, -n.step, n) for v, n in scored if v is not None)
    return [n for _, _, n in ranked]


def _waiting(commits: Sequence[Commit], metric: str, margin: int) -> list[CommitName]:
    """Names of those without the metric that none `margin` or more commits later has passed."""
    has = [metric in c.metadata for c in commits]
    passed = max((i for i, there in enumerate(has) if there), default=-1) - margin
    return [c.name for i, c in enumerate(commits) if not has[i] and i > passed]


def unmet(commits: Sequence[Commit], keep: Keep) -> list[str]:
    """Say that no commit has the metric of `keep`, where more wait than it keeps; else nothing."""
    metric, _, n = keep.best or ("", "", 0)
    most = len(commits) if keep.best is None or keep.last is None else n + keep.last
    if len(commits) <= most or any(metric in c.metadata for c in commits):
        return []
    found = {k for c in commits for k, v in c.metadata.items() if metric_of(v) is not None}
    have = ", ".join(sorted(found)) or "no numbers"
    return [f"no checkpoint has the metric {metric}, so each waits and stays; there: {have}"]


def metric_of(value: object) -> float | None:
    """Return a metric as a number; what a user wrote there may be anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int beyond every float
        return None
