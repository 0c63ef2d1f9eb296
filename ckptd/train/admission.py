"""What becomes of a save that is due while all slots are taken, and of one that failed."""

from __future__ import annotations

import logging
from typing import Literal

from ckptd.engine.board import Board
from ckptd.errors import UsageError
from ckptd.monitor.view import Phase
from ckptd.train.recorder import phase

__all__ = ["Admission", "WhenFailed", "WhenFull", "check_when_failed"]

WhenFull = Literal["wait", "skip"]
WhenFailed = Literal["raise", "warn"]

_log = logging.getLogger("ckptd")


def check_when_failed(value: WhenFailed) -> WhenFailed:
    """Return the policy; `UsageError` (kind ``bad-policy``) when it is none."""
    if value not in ("raise", "warn"):
        raise UsageError(
            "no such policy",
            kind="bad-policy",
            where="when_failed",
            wanted="raise, or warn",
            found=repr(value),
        )
    return value


class Admission:
    """Decides alike on every rank: rank 0 looks at its own slots, the others ask the board.

    Ranks that skipped apart from one another would count their attempts differently, and no later
    save of theirs would ever be complete.

    Parameters
    ----------
    when_full
        What happens when rank 0 has no free slot.
    timeout_s
        Longest wait for rank 0, in seconds.
    """

    def __init__(self, when_full: WhenFull, board: Board, timeout_s: float) -> None:
        if when_full not in ("wait", "skip"):
            raise UsageError(
                "no such policy", kind="bad-policy", wanted="wait, or skip", found=repr(when_full)
            )
        self._skips = when_full == "skip"
        self._board = board
        self._timeout_s = timeout_s
        self._calls = 0
        self.skipped = 0
        """Saves that were due and skipped."""

    @phase(Phase.CKPT)
    def grants(self, step: int, full: bool) -> bool:
        """Tell whether the save of `step` begins; every rank asks once a save that is due.

        Parameters
        ----------
        full
            Whether this rank has no free slot.

        Raises
        ------
        DeadlineError
            Rank 0 does not come to this save.
        """
        if not self._skips:
            return True
        self._calls += 1
        if self._board.rank == 0:
            self._board.set(f"admit/{self._calls}", b"0" if full else b"1")
            self._board.delete(f"admit/{self._calls - 64}")
        granted = self._board.get(f"admit/{self._calls}", self._timeout_s) == b"1"
        if not granted:
            self.skipped += 1
            _log.warning(
                "step %d is not saved: earlier saves are still being written (%d skipped so far)",
                step,
                self.skipped,
            )
        return granted
