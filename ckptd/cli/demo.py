"""``ckptd demo``: train for real, kill a rank in the middle of a save, resume on other layouts.

The demo itself needs torch and runs in a process of its own, ``python -m ckptd.train.demo``, which
prints one JSON document a line; this verb starts it, shows what it says, and passes its exit code
on.
"""

from __future__ import annotations

import contextlib
import json as json_module
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptd.errors import CkptdError, DeadlineError, UsageError

__all__ = ["demo"]

_DEADLINE_S = 1200.0
_END_S = 30.0
_WIDTH_OF_A_FILE = 110
_MILLION = 1e6


def demo(
    *,
    dir: Path = Path("ckptd-demo"),
    quick: bool = False,
    json: bool = False,
    keep: bool = False,
) -> int:
    """Train a small GPT, kill a rank while it saves, resume on 2 and on 3 ranks, compare.

    Parameters
    ----------
    dir
        Folder for checkpoints, logs, plot and report; new, empty, or from an earlier demo, whose
        files are then replaced.
    quick
        A smaller model and fewer steps.
    json
        Print the report as JSON.
    keep
        Keep the copies of loaded states that the comparison was made with.

    Returns
    -------
    int
        0 when everything held, else 1.
    """
    if find_spec("torch") is None:
        raise UsageError(
            "the demo needs PyTorch, which is not installed",
            kind="no-torch",
            hint="pip install 'ckptd[train,plot]'",
        )
    report: dict[str, Any] | None = None
    with _started(_command(dir, quick=quick, keep=keep)) as process:
        for line in process.stdout or ():
            event = _decode(line)
            if "error" in event:
                raise _error(event)
            if "report" in event:
                report = event["report"]
            elif sys.stderr.isatty():
                print(
                    f"{event.get('seconds', 0.0):6.1f} s  {event.get('say', '')}", file=sys.stderr
                )
    if report is None:
        raise _ended_early(process)
    if json:
        print(json_module.dumps(report, indent=1))
    else:
        _show(report)
    return 0 if report["ok"] else 1


def _command(folder: Path, *, quick: bool, keep: bool) -> list[str]:
    flags = ["--quick"] * quick + ["--keep"] * keep
    return [sys.executable, "-m", "ckptd.train.demo", *flags, "--", str(folder)]


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
        event = json_module.loads(line)
    except ValueError:
        event = None
    # What a library prints to standard output is shown and not lost.
    return event if isinstance(event, dict) else {"say": line.rstrip()}


def _error(event: dict[str, Any]) -> CkptdError:
    error = CkptdError.from_dict(event["error"])
    for note in event.get("notes", ()):
        error.add_note(note)
    return error


def _ended_early(process: subprocess.Popen[str]) -> CkptdError:
    return CkptdError(
        "the demo ended without a report", kind="demo-run", found=f"exit code {process.returncode}"
    )


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE, highlight=False)
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("life", "ranks", "layout", "steps", "saves", "what happened"):
        table.add_column(name)
    for name in ("resumed from", "loss gap", "same samples", "state"):
        table.add_column(name)
    for life in [*report["lives"], {**report["reference"], "name": "uninterrupted", "gap": None}]:
        table.add_row(*_row(life))
    console.print(table)
    for line in _lines(report):
        console.print(line, soft_wrap=True, markup=False)


def _row(life: dict[str, Any]) -> list[str]:
    resumed = life["resumed_from"]
    return [
        life["name"],
        str(life["ranks"]),
        life["layout"],
        f"{life['first_step']}-{life['last_step']}",
        " ".join(map(str, life["saves"])),
        life["end"],
        "" if resumed is None else f"step {resumed}",
        "" if life["gap"] is None else f"{life['gap']:.1e}",
        _yes(life["ids_equal"]),
        "" if life["state_exact"] is None else ("exact" if life["state_exact"] else "DIFFERS"),
    ]


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
    absent = not (kill["commit_before"] or kill["commit_at"] or kill["commit_after"])
    yield (
        f"  commit record of step {kill['step']}: "
        + ("absent then, and after all processes had ended." if absent else "PRESENT.")
    )
    yield ""
    for check in report["checks"]:
        if not check["ok"]:
            yield f"FAILED  {check['what']}"
    total = len(report["checks"])
    held = sum(check["ok"] for check in report["checks"])
    yield f"{held} of {total} checks hold; {report['seconds']:.0f} s in all."
    yield f"checkpoints  {report['checkpoints']}"
    yield f"plot         {report['plot'] or report['plot_note']}"
    yield "try next"
    for command in report["next"]:
        yield f"  {command}"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
