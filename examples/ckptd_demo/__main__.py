"""``python -m ckptd_demo DIR``: run the demo; every line printed is an `Event` in JSON."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import msgspec

from ckptd.crashes import report_crashes
from ckptd.errors import CkptdError
from ckptd_demo import elastic
from ckptd_demo import watched as watch
from ckptd_demo.data import read_corpus
from ckptd_demo.elastic import checks_of_elastic
from ckptd_demo.judge import checks_of
from ckptd_demo.plot import Curve, draw, draw_elastic, draw_policy
from ckptd_demo.policy import checks_of_policy, run_policy
from ckptd_demo.report import Elastic, Event, Report, Watched
from ckptd_demo.story import FIRST, FULL, QUICK, Folder, Plan, Story, tell
from ckptd_demo.watched import checks_of_watch

__all__ = ["PARTS", "main"]

PARTS = ("watch", "elastic", "save")
"""Those that run if none is asked for."""
POLICY = "rl"
POLICY_STEPS = {False: 12, True: 6}
"""Of each life of the trainer; the second: with ``--quick``."""
ELASTIC_TOLERANCE = 1e-6


def main() -> None:
    """Run the demo as argv says; the exit code is 0 only when everything held."""
    report_crashes()
    parser = argparse.ArgumentParser(prog="python -m ckptd_demo", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a minute: kill a rank, resume on three; with --only, its parts on a smaller model",
    )
    parser.add_argument("--keep", action="store_true", help="keep the copies of loaded states")
    parser.add_argument(
        "--only", action="append", choices=(*PARTS, POLICY), help="this part, and no other"
    )
    parser.add_argument("--to", default="", help="store that the policy's weights go through")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    begun = time.monotonic()
    try:
        plan, parts = QUICK if arguments.quick else FULL, arguments.only or PARTS
        if arguments.quick and not arguments.only:
            plan, parts = FIRST, ("save",)
        report = _run(
            Folder(arguments.folder), plan, parts, begun, keep=arguments.keep, to=arguments.to
        )
    except CkptdError as error:
        notes = list(getattr(error, "__notes__", []))
        _print(Event(error=error.to_dict(), notes=notes))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        # The processes have been ended on the way here.
        sys.exit(130)
    _print(Event(report=report))
    sys.exit(0 if report.ok else 1)


def _run(
    folder: Folder, plan: Plan, parts: Sequence[str], begun: float, *, keep: bool, to: str
) -> Report:
    folder.prepare()
    say = partial(_say, begun=begun)
    watched, watch_note = _watched(folder, plan, say) if "watch" in parts else (None, "")
    elastic, elastic_note, plot = None, "", None
    if "elastic" in parts:
        elastic, elastic_note, plot = _elastic(folder, plan, say)
    report = Report(
        ok=True,
        folder=str(folder.path),
        checkpoints=str(folder.checkpoints),
        plot=None,
        plot_note="",
        seconds=0.0,
        parameters=plan.shape.parameters,
        text=read_corpus().digest,
        reference=None,
        lives=[],
        kill=None,
        relaid=None,
        pace=None,
        watched=watched,
        watch_note=watch_note,
        elastic=elastic,
        elastic_note=elastic_note,
        elastic_plot=plot,
        checks=[],
        next=[],
    )
    if POLICY in parts:
        report = _published(folder, plan, report, say, to)
    if "save" in parts:
        report = _saved(folder, plan, report, say, keep=keep)
    checks = list(report.checks)
    checks += [] if watched is None else checks_of_watch(watched)
    checks += [] if elastic is None else checks_of_elastic(elastic)
    checks += [] if report.policy is None else checks_of_policy(report.policy)
    report = msgspec.structs.replace(
        report,
        ok=all(check.ok for check in checks),
        checks=checks,
        seconds=time.monotonic() - begun,
    )
    folder.report.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return report


def _saved(
    folder: Folder, plan: Plan, report: Report, say: Callable[[str], None], *, keep: bool
) -> Report:
    """Return the report with the part about saving and loading."""
    story = tell(folder, plan, say)
    lives = story.reports(plan)
    plot_note = "no plot of so short a run" if plan.short else _draw(folder, story)
    if not keep:
        folder.remove_copies()
    return msgspec.structs.replace(
        report,
        plot=None if plot_note else str(folder.plot),
        plot_note=plot_note,
        reference=story.reference_report(plan),
        lives=lives,
        kill=story.kill,
        relaid=story.relaid,
        pace=story.pace,
        checks=checks_of(lives, story.kill.landed, story.relaid, story.pace, plan.steps),
        next=_next(folder, lives[-1].expected_from, plan),
    )


def _watched(folder: Folder, plan: Plan, say: Callable[[str], None]) -> tuple[Watched | None, str]:
    note = watch.why_not()
    if note:
        return None, note
    return watch.watch_a_job(folder.runs / "watched", plan.deadline_s, say), ""


def _elastic(
    folder: Folder, plan: Plan, say: Callable[[str], None]
) -> tuple[Elastic | None, str, str | None]:
    note = elastic.why_not()
    if note:
        return None, note, None
    place = folder.runs / "elastic"
    told, rows = elastic.elastic_run(place, ELASTIC_TOLERANCE, plan.deadline_s, say)
    if find_spec("matplotlib") is None:
        return told, "", None
    draw_elastic(folder.elastic_plot, told, rows)
    return told, "", str(folder.elastic_plot)


def _published(
    folder: Folder, plan: Plan, report: Report, say: Callable[[str], None], to: str
) -> Report:
    """Return the report with the part about publishing to a rollout."""
    steps = POLICY_STEPS[plan is QUICK]
    told, rows = run_policy(folder.runs / "policy", steps, plan.deadline_s, say, to)
    plot = None
    if find_spec("matplotlib") is not None:
        draw_policy(folder.policy_plot, told, rows)
        plot = str(folder.policy_plot)
    return msgspec.structs.replace(report, policy=told, policy_plot=plot)


def _draw(folder: Folder, story: Story) -> str:
    """Draw the picture; return why not, or an empty string."""
    if find_spec("matplotlib") is None:
        return "no plot without matplotlib: pip install 'ckptd[plot]'"
    kept = [life.expected_from for life in story.lives[1:]] + [story.lives[-1].spec.until]
    curves = [
        Curve(f"{life.name}: {life.spec.cut}", life.rows, step or 0)
        for life, step in zip(story.lives, kept, strict=True)
    ]
    draw(folder.plot, story.reference.rows, curves, story.kill.step)
    return ""


def _next(folder: Folder, stopped: int | None, plan: Plan) -> list[str]:
    root = shlex.quote(str(folder.checkpoints))
    found = [
        f"ckptd ls --all {root}",
        f"ckptd inspect {root}",
        f"ckptd verify {root}",
        f"ckptd diff {root}@{stopped} {root}@{plan.steps}",
    ]
    if plan.short:
        return found
    return [
        *found,
        f"ckptd inspect {shlex.quote(str(folder.resharded))}",
        f"ckptd gc --dry-run {root}",
    ]


def _say(text: str, begun: float) -> None:
    _print(Event(say=text, seconds=time.monotonic() - begun))


def _print(event: Event) -> None:
    sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
    sys.stdout.flush()


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
