"""The offline step: a checkpoint written as another layout wants it, and back again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from ckptd.errors import CkptdError, DeadlineError
from ckptd.train.demo.folder import Folder

__all__ = ["LAYOUTS", "Relaid", "reshard_and_back", "run_ckptd"]

LAYOUTS = Path(__file__).with_name("demo.lay")
_CLI = "import sys; from ckptd.cli.main import main; main(sys.argv[1:])"


class Relaid(msgspec.Struct, frozen=True):
    """What became of a checkpoint that went to another layout and back.

    Attributes
    ----------
    step
        The checkpoint.
    layout
        Where it went, in words.
    root
        The checkpoint in that layout.
    tensors
        How many of the result are bit for bit those of the original.
    identical
        ``ckptd diff`` finds no tensor and no object that differs.
    """

    step: int
    layout: str
    root: str
    tensors: int
    identical: bool


class _Counts(msgspec.Struct):
    bit_exact: bool


class _Diff(msgspec.Struct):
    tensors: list[_Counts]


def reshard_and_back(folder: Folder, step: int, deadline_s: float) -> Relaid:
    """Reshard a step to two stages of two tensor ranks and back, and compare.

    Raises
    ------
    CkptdError
        A command failed; its output is in the error.
    DeadlineError
        One took longer than `deadline_s` seconds.
    """
    original, there = f"{folder.checkpoints}@{step}", str(folder.resharded)
    back = str(folder.copies / "resharded-back")
    run_ckptd(
        ["reshard", original, there, "--from", f"{LAYOUTS}:demo", "--to", f"{LAYOUTS}:stages"],
        deadline_s,
    )
    run_ckptd(["reshard", there, back, "--to", f"{LAYOUTS}:sharded"], deadline_s)
    found = run_ckptd(["diff", original, back, "--json"], deadline_s, fine=(0, 1))
    diff = msgspec.json.decode(found.stdout, type=_Diff)
    return Relaid(
        step=step,
        layout="TP 2 x PP 2",
        root=there,
        tensors=sum(tensor.bit_exact for tensor in diff.tensors),
        identical=found.returncode == 0,
    )


def run_ckptd(
    arguments: list[str], deadline_s: float, fine: tuple[int, ...] = (0,)
) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a process of its own, as a user would.

    Raises
    ------
    CkptdError
        It ended with an exit code that is not in `fine`, or printed nothing.
    DeadlineError
        It took longer than `deadline_s` seconds.
    """
    command = [sys.executable, "-c", _CLI, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=deadline_s
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"ckptd {arguments[0]} did not end", wanted=f"{deadline_s:g} s"
        ) from None
    if done.returncode not in fine or not done.stdout:
        raise CkptdError(
            f"ckptd {arguments[0]} failed",
            kind="demo-run",
            where=" ".join(arguments[1:3]),
            found=done.stderr.decode(errors="replace"),
        )
    return done
