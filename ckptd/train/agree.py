"""Agreement on the trainer's own thread: rank 0 does a thing once, every rank gets the outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ckptd.engine.board import Board, collect, share
from ckptd.errors import CkptdError

__all__ = ["Agreement"]


class Agreement:
    """Numbered rounds on a board: every rank makes the same calls in the same order.

    Parameters
    ----------
    timeout_s
        For one round, in seconds: how far behind the slowest rank may be.
    """

    def __init__(self, board: Board, timeout_s: float) -> None:
        self.board = board
        self._timeout_s = timeout_s
        self._round = 0

    def _key(self, name: str) -> str:
        self._round += 1
        return f"agree/{self._round}/{name}"

    def on_rank_zero(self, name: str, function: Callable[[], Any]) -> Any:
        """Run `function` on rank 0 and return its JSON-able result on every rank.

        Raises
        ------
        CkptdError
            What `function` raised, on every rank; `DeadlineError` when rank 0 does not answer.
        """
        if self.board.world == 1:
            return function()
        key = self._key(name)
        answer: bytes | None = None
        error: CkptdError | None = None
        if self.board.rank == 0:
            try:
                answer = msgspec.json.encode({"value": function()})
            except CkptdError as caught:
                error = caught
                answer = msgspec.json.encode({"error": caught.to_dict()})
        outcome = msgspec.json.decode(share(self.board, key, answer, self._timeout_s))
        if "error" in outcome:
            raise error or CkptdError.from_dict(outcome["error"])
        return outcome["value"]

    def all_reports(self, name: str, value: bytes, digest: Callable[[list[bytes]], bytes]) -> bytes:
        """Bring every rank's value to rank 0, which turns the list into one value for all.

        Raises
        ------
        CkptdError
            What `digest` raised, on every rank; `DeadlineError` naming the ranks that are missing.
        """
        if self.board.world == 1:
            return digest([value])
        key = self._key(name)
        answer: bytes | None = None
        error: CkptdError | None = None
        try:
            values = collect(self.board, key, value, self._timeout_s)
            if values is not None:
                answer = b"+" + digest(values)
        except CkptdError as caught:
            error = caught
            answer = b"-" + msgspec.json.encode(caught.to_dict())
        # Rank 0 may have waited its whole time for a straggler before it answers.
        raw = share(self.board, key + "/answer", answer, 2 * self._timeout_s)
        if raw[:1] == b"-":
            raise error or CkptdError.from_dict(msgspec.json.decode(raw[1:]))
        return raw[1:]
