"""``ckptd gc``: the plan of deletions, its options (``--keep``), question and prints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from ckptd.checkpoint.cli.address import Root, opened
from ckptd.checkpoint.root.gc import GcItem, GcKept, GcPlan, GcReport, plan_gc, run_gc
from ckptd.checkpoint.root.policy import Best, Keep
from ckptd.cli.options import duration_s
from ckptd.cli.output import Document, Json, Reply, counted, flag, note, print_rows
from ckptd.decoding import converter
from ckptd.errors import RefusedError, UsageError, size_text


class Skipped(GcItem, frozen=True, kw_only=True):
    """An item that stayed, and why."""

    why: str


class GcDocument(Document, frozen=True, kw_only=True, tag="gc"):
    """The document that ``ckptd gc --json`` prints.

    Attributes
    ----------
    root
        URL.
    dry_run
        Nothing was deleted.
    planned
        What may go: kind (``commit``, ``data``, ``leftover``, ``parts``, ``pin``, ``lease``,
        ``annotation``), key, reason, nbytes, objects, and modified (seconds since 1970).
    planned_bytes
        Bytes that this frees.
    kept
        Checkpoints that stay, with the reasons.
    notes
        Remarks for a person.
    deleted, skipped, swept
        Items that are gone, those that stayed because something changed meanwhile (with `why`),
        and names of what interrupted calls had left. Empty in a dry run.
    """

    root: str
    dry_run: bool
    planned: tuple[GcItem, ...]
    planned_bytes: int
    kept: tuple[GcKept, ...]
    notes: tuple[str, ...]
    deleted: tuple[GcItem, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    swept: tuple[str, ...] = ()


def gc(
    root: Root,
    /,
    *,
    keep: Annotated[
        int | None, Parameter(help="Keep the newest N checkpoints; without any --keep, all.")
    ] = None,
    keep_every_steps: Annotated[
        int | None, Parameter(help="Keep the first at or after each multiple of this number.")
    ] = None,
    keep_every: Annotated[
        str | None, Parameter(help="Keep the first of each period: 30m, 6h, 1d.")
    ] = None,
    keep_best: Annotated[
        str | None, Parameter(help="Keep the N best by a metric: loss:min:3.")
    ] = None,
    abandoned: Annotated[str, Parameter(help="How long to keep abandoned lines.")] = "7d",
    leftover: Annotated[
        str, Parameter(help="Age at which an unfinished save of the newest generation is deleted.")
    ] = "1d",
    other_runs: Annotated[
        bool,
        flag("Also delete abandoned lines of runs that the newest checkpoint does not continue."),
    ] = False,
    dry_run: Annotated[bool, flag("Show the plan and change nothing.")] = False,
    yes: Annotated[bool, flag("Do not ask.")] = False,
    json: Json = False,
) -> Reply:
    """Delete what no kept checkpoint needs: leftovers, abandoned lines, and by --keep old steps.

    Never deleted are the newest complete checkpoint and all after it, and what is pinned or read.
    """
    rule = _rule(keep, keep_every_steps, keep_every, keep_best)
    waits = duration_s(abandoned, "--abandoned"), duration_s(leftover, "--leftover")
    with opened(root) as catalogue:
        plan = plan_gc(
            catalogue, rule, abandoned_s=waits[0], leftover_s=waits[1], other_runs=other_runs
        )
        if not json:
            _show_plan(plan)
        report = GcReport()
        if not dry_run:
            _confirm(plan, root, yes=yes, ask=not json)
            report = run_gc(catalogue.store, plan)
    document = GcDocument(
        root=catalogue.store.url,
        dry_run=dry_run,
        planned=plan.items,
        planned_bytes=plan.nbytes,
        kept=plan.kept,
        notes=plan.notes,
        deleted=report.deleted,
        skipped=tuple(Skipped(**msgspec.structs.asdict(i), why=why) for i, why in report.skipped),
        swept=report.swept,
    )
    return Reply(document, lambda _: _show_report(report))


def _rule(
    last: int | None, every_steps: int | None, every: str | None, best: str | None
) -> Keep | None:
    if (last, every_steps, every, best) == (None,) * 4:
        return None
    period = None if every is None else timedelta(seconds=duration_s(every, "--keep-every"))
    # Given only, say, --keep-best, the newest alone stays besides: to keep all would make the
    # other rules do nothing.
    return Keep(
        last=1 if last is None else last,
        every_steps=every_steps,
        every=period,
        best=None if best is None else _best(best),
    )


_as_best: Callable[[Any], Best] = converter(Best, strict=False)


def _best(text: str) -> Best:
    try:
        return _as_best(text.rsplit(":", 2))
    except msgspec.ValidationError as error:
        raise UsageError(
            "invalid --keep-best",
            where="--keep-best",
            wanted="METRIC:min:N or METRIC:max:N",
            found=text,
        ) from error


def _confirm(plan: GcPlan, root: str, *, yes: bool, ask: bool) -> None:
    """Ask a person; refuse where there is no terminal to ask."""
    if yes or not plan.items:
        return
    if not ask or not sys.stdin.isatty():
        raise RefusedError(
            f"deleting {len(plan.items)} things needs confirmation, and there is no terminal",
            where=root,
            hint="--yes deletes without asking; --dry-run only shows the plan",
        )
    what = f"{counted(len(plan.items), 'thing')}, {size_text(plan.nbytes)}"
    print(f"delete {what}? [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RefusedError("nothing was deleted", where=root)


# -- for people ------------------------------------------------------------------------------------


def _show_plan(plan: GcPlan) -> None:
    for text in plan.notes:
        note(text)
    if plan.kept:
        print_rows(
            plan.kept,
            {
                ">KEEP STEP": lambda k: k.step,
                ">GEN": lambda k: k.generation,
                "BECAUSE": lambda k: "; ".join(k.reasons),
            },
        )
        print()
    if not plan.items:
        print("nothing to delete")
        return
    print_rows(
        plan.items,
        {
            "DELETE": lambda i: i.kind,
            "KEY": lambda i: i.key,
            ">SIZE": lambda i: size_text(i.nbytes) if i.nbytes else None,
            "BECAUSE": lambda i: i.reason,
        },
    )
    print(f"\nin all {counted(len(plan.items), 'thing')}, {size_text(plan.nbytes)}")


def _show_report(report: GcReport) -> None:
    for item, why in report.skipped:
        note(f"kept {item.key}: {why}")
    if report.deleted:
        print(f"deleted {counted(len(report.deleted), 'thing')}, {size_text(report.nbytes)}")
    if report.swept:
        print(f"removed {len(report.swept)} leftovers of interrupted calls")
