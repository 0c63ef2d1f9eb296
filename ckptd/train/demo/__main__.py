"""``python -m ckptd.train.demo DIR``: run the demo; every line printed is an `Event` in JSON."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import msgspec

from ckptd.errors import CkptdError
from ckptd.train.demo.data import read_corpus
from ckptd.train.demo.folder import Folder
from ckptd.train.demo.judge import checks_of
from ckptd.train.demo.plot import Curve, draw
from ckptd.train.demo.report import Event, Report
from ckptd.train.demo.story import FULL, QUICK, Plan, Story, tell
from ckptd.train.demo.watched import checks_of_watch, watch_a_job, why_not

__all__ = ["main"]


def main() -> None:
    """Run the demo as argv says; the exit code is 0 only when everything held."""
    parser = argparse.ArgumentParser(prog="python -m ckptd.train.demo", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--keep", action="store_true", help="keep the copies of loaded states")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    begun = time.monotonic()
    try:
        plan = QUICK if arguments.quick else FULL
        report = _run(Folder(arguments.folder), plan, begun, keep=arguments.keep)
    except CkptdError as error:
        notes = list(getattr(error, "__notes__", []))
        _print(Event(error=error.to_dict(), notes=notes))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        # The processes have been ended on the way here.
        sys.exit(130)
    _print(Event(report=report))
    sys.exit(0 if report.ok else 1)


def _run(folder: Folder, plan: Plan, begun: float, *, keep: bool) -> Report:
    folder.prepare()
    corpus = read_corpus()
    story = tell(folder, plan, lambda text: _say(text, begun))
    lives = story.reports(plan)
    watch_note = why_not()
    watched = None
    if not watch_note:
        place = folder.runs / "watched"
        watched = watch_a_job(place, plan.deadline_s, lambda text: _say(text, begun))
    plot_note = _draw(folder, story)
    if not keep:
        folder.remove_copies()
    checks = checks_of(lives, story.kill.landed, story.relaid, story.pace, plan.steps)
    checks += [] if watched is None else checks_of_watch(watched)
    report = Report(
        ok=all(check.ok for check in checks),
        folder=str(folder.path),
        checkpoints=str(folder.checkpoints),
        plot=None if plot_note else str(folder.plot),
        plot_note=plot_note,
        seconds=time.monotonic() - begun,
        parameters=plan.shape.parameters,
        text=corpus.digest,
        reference=story.reference_report(plan),
        lives=lives,
        kill=story.kill,
        relaid=story.relaid,
        pace=story.pace,
        watched=watched,
        watch_note=watch_note,
        checks=checks,
        next=_next(folder, lives[-1].expected_from, plan.steps),
    )
    folder.report.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return report


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


def _next(folder: Folder, stopped: int | None, steps: int) -> list[str]:
    root = shlex.quote(str(folder.checkpoints))
    return [
        f"ckptd ls --all {root}",
        f"ckptd inspect {root}",
        f"ckptd verify {root}",
        f"ckptd diff {root}@{stopped} {root}@{steps}",
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
