"""``ckptd demo``: train for real, kill a rank in the middle of a save, resume on other layouts.

The demo itself needs torch and runs in a process of its own, ``python -m ckptd_demo``, which
prints one JSON document a line; this verb starts it, shows what it prints, and returns its exit
code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from ckptd.cli import Json, flag, json_text, print_table
from ckptd.errors import CkptdError, DeadlineError, UsageError

__all__ = ["demo"]

_DEADLINE_S = 1200.0
_END_S = 30.0
_MILLION = 1e6


def demo(
    *,
    dir: Annotated[
        Path,
        Parameter(
            help="Folder for checkpoints, logs, plot and report; an earlier demo's is reused."
        ),
    ] = Path("ckptd-demo"),
    quick: Annotated[
        bool,
        flag(
            "A minute: train, kill a rank in a save, resume on three ranks. With --only: these"
            " parts, on a smaller model."
        ),
    ] = False,
    keep: Annotated[bool, flag("Keep the copies that loads were compared with.")] = False,
    only: Annotated[
        tuple[Literal["save", "watch", "elastic", "rl"], ...],
        Parameter(help="Run only this part; may be repeated."),
    ] = (),
    rl: Annotated[
        bool,
        flag("Same as --only rl: publish a policy's weights to a rollout."),
    ] = False,
    to: Annotated[
        str,
        Parameter(help="With --rl: a store that the weights go through, such as s3://bucket/live."),
    ] = "",
    json: Json = False,
) -> int:
    """Train small GPTs: save, load, watch, recover; break them, and compare with what is right."""
    if find_spec("torch") is None:
        raise UsageError(
            "the demo needs PyTorch, which is not installed",
            kind="missing-package",
            hint="pip install 'ckptd[train,plot,monitor]'",
        )
    report: dict[str, Any] | None = None
    error: CkptdError | None = None
    parts = (*only, "rl") if rl else only
    with _started(_command(dir, parts, quick=quick, keep=keep, to=to)) as process:
        for line in process.stdout or ():
            event = _decode(line)
            if "error" in event:
                error = _error(event)
            elif "report" in event:
                report = event["report"]
            elif not json or sys.stderr.isatty():
                print(
                    f"{event.get('seconds', 0.0):6.1f} s  {event.get('say', '')}", file=sys.stderr
                )
    if error is not None:
        raise error
    if report is None:
        raise _ended_early(process)
    if json:
        print(json_text({"verb": "demo", "schema": 1, **report}, indent=1))
    else:
        _show(report)
    return 0 if report["ok"] else 1


def _command(
    folder: Path, only: Sequence[str], *, quick: bool, keep: bool, to: str = ""
) -> list[str]:
    flags = ["--quick"] * quick + ["--keep"] * keep + [f"--only={part}" for part in only]
    flags += [f"--to={to}"] * bool(to)
    return [sys.executable, "-m", "ckptd_demo", *flags, "--", str(folder)]


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run the demo; when the deadline passes or this is left early, it ends with all its ranks."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    # A deadline of its own besides the demo's many: reading a line has none.
    timer = threading.Timer(_DEADLINE_S, process.terminate)
    timer.daemon = True
    timer.start()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield process
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            "the demo did not end after its report", wanted=f"{_END_S:g} s"
        ) from None
    finally:
        timer.cancel()
        _end(process)
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()  # it then ends its ranks
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _decode(line: str) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        event = None
    # What a library prints to standard output is shown and not lost.
    return event if isinstance(event, dict) else {"say": line.rstrip()}


def _error(event: dict[str, Any]) -> CkptdError:
    error = CkptdError.from_dict(event["error"])
    for note in event.get("notes", ()):
        error.add_note(note)
    return error


def _ended_early(process: subprocess.Popen[str]) -> CkptdError:
    return CkptdError("the demo ended without a report", found=f"exit code {process.returncode}")


def _show(report: dict[str, Any]) -> None:
    if report["reference"] is not None:
        lives = [report["reference"], *report["lives"]]
        cells = [_cells(life) for life in lives]
        print_table(
            ("", *(life["name"] for life in lives)),
            [(label, *(cell[label] for cell in cells)) for label in cells[0]],
        )
        for line in _lines(report):
            print(line)
    if report["watched"] is not None or report["watch_note"]:
        _show_watched(report)
    if report["elastic"] is not None or report["elastic_note"]:
        _show_elastic(report["elastic"], report["elastic_note"])
    if report["policy"] is not None:
        _show_policy(report)
    for line in _ending(report):
        print(line)


def _cells(life: dict[str, Any]) -> dict[str, str]:
    """Return a column of the table: a life of the job, down its rows."""
    resumed, gap = life["resumed_from"], life["gap"]
    itself = life["name"] == "reference"
    exact = {None: "", True: f"yes, {life['tensors']} tensors", False: "NO"}
    return {
        "ranks": str(life["ranks"]),
        "layout": life["layout"],
        "steps": f"{life['first_step']} to {life['last_step']}",
        "saves at": " ".join(map(str, life["saves"])) or "none",
        "end": life["end"],
        "resumed at": "" if resumed is None else str(resumed),
        "loss gap": "" if itself else "no value" if gap is None else f"{gap:.1e}",
        "same samples": "" if itself else "yes" if life["ids_equal"] else "NO",
        "state exact": exact[life["state_exact"]],
        "seconds": f"{life['seconds']:.0f}",
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    kill = report["kill"]
    window = max(life["gap_steps"] for life in report["lives"])
    yield ""
    yield (
        f"{report['parameters'] / _MILLION:.2f} M parameters; loss gap: largest relative difference"
        f" from the uninterrupted run in the first {window} steps of a life."
    )
    yield (
        f"The kill: SIGKILL to rank {kill['rank']} and its writer with {kill['data_bytes_seen']:,}"
        f" data bytes of {kill['file']} written;"
    )
    absent = not any(kill[f"commit_{when}"] for when in ("before", "at", "after", "end"))
    yield (
        f"  commit record of step {kill['step']}: "
        + ("absent then, and after all processes had ended." if absent else "PRESENT.")
    )
    if (relaid := report["relaid"]) is not None:
        verdict = "identical" if relaid["identical"] else "DIFFERENT"
        yield (
            f"Resharded: step {relaid['step']} to {relaid['layout']} and back,"
            f" {relaid['tensors']} tensors bit-exact; ckptd diff: {verdict}."
        )
    if (pace := report["pace"]) is None:
        return
    yield (
        f"A save at every step, {pace['ranks']} ranks: {pace['complete']} of {pace['saves']}"
        f" snapshots whole; a step takes {pace['saving_step_s']:.3f} s with a save,"
        f" {pace['step_s']:.3f} s without: {pace['saving_step_s'] / pace['step_s']:.2f} times."
    )


def _show_watched(report: dict[str, Any]) -> None:
    watched = report["watched"]
    print()
    if watched is None:
        print(report["watch_note"])
        return
    print(f"A job of {watched['ranks']} ranks, watched; hangs count from {watched['floor_s']:g} s:")
    print_table(
        ("DONE", "SAID", "OF", ">AFTER"),
        [
            (
                f"rank {one['rank']} {one['what']}",
                one["said"],
                ", ".join(one["suspects"]),
                f"{one['after_s']:.1f} s",
            )
            for one in watched["found"]
        ],
    )


def _ending(report: dict[str, Any]) -> Iterator[str]:
    yield ""
    for check in report["checks"]:
        if not check["ok"]:
            yield f"FAILED  {check['what']}"
    total = len(report["checks"])
    held = sum(check["ok"] for check in report["checks"])
    yield f"{held} of {total} checks hold; {report['seconds']:.0f} s in all."
    if report["lives"]:
        yield f"checkpoints  {report['checkpoints']}"
    if report["relaid"] is not None:
        yield f"resharded    {report['relaid']['root']}"
        yield f"plot         {report['plot'] or report['plot_note']}"
    if report["elastic_plot"] is not None:
        yield f"plot         {report['elastic_plot']}"
    if report["next"]:
        yield "try next"
    for command in report["next"]:
        yield f"  {command}"


PARTS = ("detect", "fence", "plan", "spawn", "import", "init", "load", "first_step")


def _show_elastic(told: dict[str, Any] | None, note: str) -> None:
    """Print deeds with their consequences, and what each recovery took, by its parts.

    Parameters
    ----------
    told
        The report's `elastic`; None where there was none.
    note
        Why there was none.
    """
    print()
    if told is None:
        print(note)
        return
    print(
        f"{told['ranks']} ranks on {told['nodes']} nodes under ckptd run, {told['steps']} steps;"
        " what was done to them, and when they trained again:"
    )
    lost = [life["lost"] for life in told["lives"][1:]]
    print_table(
        ("DONE", ">RANKS THEN", ">AFTER", ">STEPS AGAIN"),
        [
            (deed["what"], str(deed["ranks"]), f"{deed['after_s']:.2f} s", str(again))
            for deed, again in zip(told["deeds"], lost, strict=False)
        ],
    )
    print("Recoveries, as the controller timed them; seconds:")
    print_table(
        ("CAUSE", "LEVEL", *(f">{part.upper().replace('_', ' ')}" for part in PARTS), ">TOTAL"),
        [_row(one) for one in told["recoveries"]],
    )
    print(
        f"Losses: at most {told['gap']:.1e} from the uninterrupted run (allowed"
        f" {told['tolerance']:.0e}); violations: {len(told['violations'])}"
    )
    for text in told["violations"]:
        print(f"  {text}")


def _row(recovery: dict[str, Any]) -> tuple[str, ...]:
    cells = [recovery.get(part) for part in PARTS]
    shown = ["" if cell is None else f"{cell:.2f}" for cell in cells]
    cause = recovery["cause"]
    return (cause, f"L{recovery['level']}", *shown, f"{recovery['total']:.2f}")


def _show_policy(report: dict[str, Any]) -> None:
    """Print the lives of the policy's trainer, and what its rollout took."""
    told = report["policy"]
    out = told["outage"]
    print()
    print("A policy, published after each step to a rollout of two tensor-parallel ranks:")
    print_table(
        ("TRAINER", ">RANKS", ">STEPS", ">VERSIONS", ">REWARD", ">PUBLISH"),
        [
            (
                life["layout"],
                str(life["ranks"]),
                f"{life['first']} to {life['last']}",
                str(life["published"]),
                f"{life['first_reward']:.2f} to {life['last_reward']:.2f}",
                f"{1e3 * life['publish_s']:.0f} ms at most",
            )
            for life in told["lives"]
        ],
    )
    print(
        f"The rollout took {told['versions']} versions; its logits are the trainer's bit for bit in"
        f" {told['equal']} of {told['applied']} cases."
    )
    print(
        f"  lag {told['lag_s']:.2f} s in the middle, {told['most_lag_s']:.2f} s at most;"
        f" {told['bytes_moved']:,} bytes moved of {told['bytes_needed']:,} needed"
    )
    print(
        f"  rank {out['rank']} killed: back after {out['gone_s']:.1f} s with step {out['version']};"
        f" the trainer made {out['steps']} steps meanwhile"
    )
    if report["policy_plot"]:
        print(f"  picture: {report['policy_plot']}")
