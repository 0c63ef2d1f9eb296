"""Retention: what a job deletes by itself, after a save."""

from __future__ import annotations

from ckptd import events
from ckptd.engine.catalogue import Catalogue
from ckptd.engine.gc import GcReport, plan_gc, run_gc
from ckptd.engine.policy import Keep
from ckptd.format.names import CommitName

__all__ = ["apply_retention"]


def apply_retention(
    catalogue: Catalogue, keep: Keep | int, *, whole: CommitName | None = None
) -> GcReport:
    """Delete what `keep` does not want, and what older lives of the job left over.

    For one rank, after a commit; the save is durable whatever happens here. The grace periods are
    those of `ckptd.engine.gc.plan_gc`.

    Parameters
    ----------
    keep
        The rule for the line.
    whole
        The commit that the caller just made, so that its files need not be looked for.

    Raises
    ------
    ConflictError
        Kind ``stale-plan``: a newer life of the job began meanwhile; it is the one to delete.
    """
    with events.span("retention") as span:
        plan = plan_gc(catalogue, keep, thorough=False, whole=whole)
        report = run_gc(catalogue.store, plan) if plan.items else GcReport()
        span.nbytes = sum(item.nbytes for item in report.deleted)
    return report
