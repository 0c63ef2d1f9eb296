"""The offline step: a checkpoint written as another layout wants it, and back again."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ckptd.train.demo.compare import compare
from ckptd.train.demo.folder import Folder
from ckptd.train.demo.verbs import run_ckptd

__all__ = ["LAYOUTS", "Relaid", "reshard_and_back"]

LAYOUTS = Path(__file__).with_name("demo.lay")


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
    found = compare(original, back, deadline_s)
    return Relaid(
        step=step,
        layout="TP 2 x PP 2",
        root=there,
        tensors=found.exact,
        identical=found.identical,
    )
