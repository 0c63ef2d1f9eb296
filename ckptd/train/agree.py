"""Agreement on the trainer's own thread: rank 0 does a thing once, every rank gets the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from ckptd.engine.agree import EVERY_RANK, Peers, agree, wait
from ckptd.engine.board import Board
from ckptd.errors import CkptdError, DeadlineError

__all__ = ["Agreement"]

T = TypeVar("T")


class Agreement:
    """Numbered rounds on a board: every rank makes the same calls in the same order.

    A rank of this host that died is noticed at once, by `ckptd.engine.agree`.

    Parameters
    ----------
    timeout_s
        For one round, in seconds: how far behind the slowest rank may be.
    """

    def __init__(self, board: Board, timeout_s: float) -> None:
        self.board = board
        self._timeout_s = timeout_s
        self._peers = Peers(board, "agree")
        self._round = 0

    def _key(self, name: str) -> str:
        self._round += 1
        return f"agree/{self._round}/{name}"

    def on_rank_zero(self, name: str, function: Callable[[], Any]) -> Any:
        """Run `function` on rank 0 and return its JSON-able result on every rank.

        Raises
        ------
        CkptdError
            What `function` raised, on every rank; kind ``rank-died`` when rank 0 is gone;
            `DeadlineError` when it does not answer.
        """
        if self.board.world == 1:
            return function()
        key = self._key(name)
        raw = self._answer(key, lambda: msgspec.json.encode(function()), self._timeout_s)
        return msgspec.json.decode(raw)

    def all_reports(
        self, name: str, value: bytes, digest: Callable[[list[bytes]], bytes], round_of: str = ""
    ) -> bytes:
        """Bring every rank's value to rank 0, which turns the list into one value for all.

        Parameters
        ----------
        round_of
            Names the round where not every rank takes part in each: a number that only some of them
            raise would keep them apart for ever.

        Raises
        ------
        CkptdError
            What `digest` raised, on every rank; kind ``rank-died`` when a rank is gone;
            `DeadlineError` naming the ranks that are missing.
        """
        if self.board.world == 1:
            return digest([value])
        key = f"agree/{round_of}/{name}" if round_of else self._key(name)
        if self.board.rank != 0:
            self.board.set(f"{key}/{self.board.rank}", value)
        # Rank 0 may have waited its whole time for a straggler before it answers.
        patience = 2 * self._timeout_s
        return self._answer(f"{key}/answer", lambda: digest(self._reports(key, value)), patience)

    def no_errors(self, error: CkptdError | None) -> None:
        """Raise on every rank when any rank brings an error; see `ckptd.engine.agree.agree`."""
        key = self._key("errors")
        agree(self.board, key, error, runs=self._peers.runs, stall_s=self._timeout_s)

    def on_every_rank(self, function: Callable[[], T]) -> T:
        """Return what `function` returns here, if it raises nothing on any rank.

        Raises
        ------
        CkptdError
            On every rank, when it raises on one.
        """
        error: CkptdError | None = None
        found: list[T] = []
        try:
            found.append(function())
        except CkptdError as caught:
            error = caught
        self.no_errors(error)
        return found[0]

    def wait(self, key: str, rank: int, timeout_s: float) -> bytes:
        """Return what `rank` publishes under `key`; see `ckptd.engine.agree.wait`."""
        runs = partial(self._peers.runs, rank)
        return wait(self.board, key, rank, alive=runs, stall_s=timeout_s)

    def _answer(self, key: str, make: Callable[[], bytes], timeout_s: float) -> bytes:
        """Rank 0 makes the answer; its error is everybody's."""
        if self.board.rank == 0:
            try:
                value = make()
            except CkptdError as error:
                self.board.set(key, b"-" + msgspec.json.encode(error.to_dict()))
                raise
            self.board.set(key, b"+" + value)
            return value
        raw = self.wait(key, 0, timeout_s)
        if raw.startswith(b"-"):
            raise CkptdError.from_dict(msgspec.json.decode(raw[1:]))
        return raw[1:]

    def _reports(self, key: str, own: bytes) -> list[bytes]:
        """Collect on rank 0, by rank."""
        out = [own]
        end = time.monotonic() + self._timeout_s
        for rank in range(1, self.board.world):
            try:
                left = max(0.01, end - time.monotonic())
                out.append(self.wait(f"{key}/{rank}", rank, left))
            except DeadlineError as error:
                raise self._missing(key, rank) from error
        return out

    def _missing(self, key: str, first: int) -> DeadlineError:
        world = self.board.world
        missing = [r for r in range(first, world) if self.board.peek(f"{key}/{r}") is None]
        return DeadlineError(
            "ranks did not report in time",
            kind="board",
            where=key,
            wanted=f"all {world} ranks within {self._timeout_s:.0f} s",
            found=f"missing ranks {missing[:16]}{' ...' if len(missing) > 16 else ''}",
            hint=EVERY_RANK,
        )
