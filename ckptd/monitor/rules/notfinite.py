"""NaN and infinity: the first rank that gave one to a sum."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptd.monitor.job import JobView
from ckptd.monitor.report import SUM
from ckptd.monitor.rules.corruption import LATE_S
from ckptd.monitor.rules.naming import rank_suspects
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import Verdict, VerdictKind

NOT_FINITE = 2
"""Kind of rows of `SUM` of such calls: `set` is the group, `value` its number and a text."""


class FirstBad:
    """The first call of each rank whose input was not finite and spoiled its model; no clock."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        self._rows = np.zeros(0, SUM)
        self._ranks = np.zeros(0, np.int64)
        self._last = 0.0

    def add(self, rows: Array, ranks: Array, now: float) -> None:
        """Take rows of `SUM`; `ranks` are the ranks of the report's rows."""
        rows = rows[rows["what"] == NOT_FINITE]
        if not len(rows):
            return
        if not rows["value"].all():  # a rank has loaded an earlier state
            self.forget()
            rows = rows[rows["value"] != 0]
        self._rows = np.frombuffer(self._rows.tobytes() + rows.tobytes(), SUM)
        self._ranks = np.append(self._ranks, ranks[rows["row"]])
        self._last = now

    def judge(self, job: JobView, now: float) -> Iterator[Verdict]:
        """Yield the verdict, once no further rank is to be expected; again until forgotten.

        A rank that was given such a value in a call of the step has it in a later call of that
        group than the rank that gave it.
        """
        if not len(self._rows) or now - self._last < LATE_S:
            return
        step = int(self._rows["step"].min())
        here = self._rows["step"] == step
        rows, ranks = self._rows[here], self._ranks[here]
        order = np.argsort(rows["value"], kind="stable")
        rows, ranks = rows[order], ranks[order]
        calls = rows["value"] >> np.uint64(32)
        least = {int(g): int(calls[rows["set"] == g].min()) for g in rows["set"]}
        first = np.array([c == least[int(g)] for g, c in zip(rows["set"], calls, strict=True)])
        rows, calls, ranks = rows[first], calls[first], ranks[first]
        what = [
            f"{job.texts.get(int(v) & 0xFFFFFFFF) or 'a value'}, in call {int(c)} of "
            f"{job.group_name(int(g))}"
            for v, c, g in zip(rows["value"], calls, rows["set"], strict=True)
        ]
        since = len(np.unique(self._ranks))
        numbers = {"step": step, "first": len(rows), "not finite": since, "call": float(calls[0])}
        lasting = f"{since} of {len(job.ranks)} ranks have spoiled their parameters with it"
        if 2 * len(rows) > len(job.ranks):
            yield Verdict(
                kind=VerdictKind.NOT_FINITE,
                suspects=(),
                evidence=(
                    f"NaN or infinity at step {step} on {len(rows)} ranks at once: {what[0]}",
                    lasting,
                ),
                rules_out=("one rank's device or data: most ranks had it in the same step",),
                refuted_by="the step computed again from the save before it is finite",
                action=f"go back to a save before step {step}; look at the step size, the loss "
                "scale and what the model computes",
                numbers=numbers,
                groups=tuple(np.unique(rows["set"]).tolist()),
            )
            return
        at = np.flatnonzero(np.isin(job.ranks["rank"], ranks))
        detail = dict(zip(ranks.tolist(), what, strict=True))
        share = 0.9 / len(rows)
        yield Verdict(
            kind=VerdictKind.NOT_FINITE,
            suspects=rank_suspects(job, at, share, [detail[int(job.ranks["rank"][r])] for r in at]),
            evidence=(
                f"first to give NaN or infinity to the others, at step {step}: {what[0]}",
                lasting,
            ),
            rules_out=("the step size or the loss scale: what the other ranks gave was finite",),
            refuted_by="the rank's gradients at that step are finite when it is computed again",
            action=f"go back to a save before step {step}; look at this rank's batch, and at its "
            "device if the same rank comes first again",
            numbers=numbers,
            groups=tuple(np.unique(rows["set"]).tolist()),
        )
