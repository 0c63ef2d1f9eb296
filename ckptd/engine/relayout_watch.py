"""Waiting while tensors move: with a deadline, and an eye on the others.

A wait ends when its event comes, when a rank posts that it failed, when a process of this host is
gone, or at its deadline. What a rank fails with it posts on the job's board before it raises, so
that every rank, however far from the cause, raises the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec

from ckptd.engine.agree import Peers
from ckptd.engine.board import Board
from ckptd.engine.transport import Pending, gone
from ckptd.errors import CkptdError, DeadlineError

__all__ = ["Watch"]

_LOOK_S = 0.2
_ROOT_CAUSE_S = 1.0


class Watch:
    """The waits of one move.

    Parameters
    ----------
    board
        Of the processes that take part.
    key
        Unique to the move, the same on all of them.
    timeout_s
        Longest wait for one message, and for the others at the end, in seconds.
    """

    def __init__(self, board: Board, key: str, timeout_s: float) -> None:
        self.board = board
        self._key = key
        self._timeout_s = timeout_s
        self._peers = Peers(board, key)

    def through(self, pending: Pending, peer: int, what: str) -> None:
        """Return when a message is through.

        Raises
        ------
        CkptdError
            kind ``rank-died`` names a rank that is gone; or what another rank failed with.
        DeadlineError
            Nothing happened for too long.
        """

        def is_through(timeout_s: float) -> bool:
            try:
                return pending.wait(timeout_s)
            except CkptdError as error:
                raise self._cause(error, peer) from None

        self._until(is_through, peer, what)

    def _until(self, test: Callable[[float], bool], peer: int, what: str) -> None:
        end = time.monotonic() + self._timeout_s
        while not test(_LOOK_S):
            self.look(peer)
            if time.monotonic() >= end:
                raise DeadlineError(
                    f"rank {peer} made no progress",
                    kind="board",
                    where=f"rank {peer}, {what}",
                    wanted=f"a message within {self._timeout_s:.0f} s",
                    hint="every rank must make the same call; see what that rank is doing",
                )

    def look(self, peer: int | None = None) -> None:
        """Raise what another rank posted, or that `peer` is gone."""
        posted = self.board.peek(f"{self._key}/failed")
        if posted is not None:
            raise CkptdError.from_dict(msgspec.json.decode(posted))
        if peer is not None and not self._peers.runs(peer):
            raise gone(peer, "its process has ended")

    def _cause(self, error: CkptdError, peer: int) -> CkptdError:
        """Return what broke a link: mostly a rank that failed itself, and posted why."""
        end = time.monotonic() + _ROOT_CAUSE_S
        while time.monotonic() < end:
            try:
                self.look(peer)
            except CkptdError as first:
                return first
            time.sleep(_LOOK_S / 4)
        return error

    def fail(self, error: CkptdError) -> CkptdError:
        """Tell all others why this rank fails; return the first failure of all."""
        if self.board.world == 1:
            return error
        posted = self.board.peek(f"{self._key}/failed")
        if posted is not None:
            return CkptdError.from_dict(msgspec.json.decode(posted))
        self.board.set(f"{self._key}/failed", msgspec.json.encode(error.to_dict()))
        return error

    def all_done(self) -> None:
        """Return when every rank is done.

        Raises
        ------
        CkptdError, DeadlineError
            As `through`.
        """
        if self.board.world == 1:
            return
        if self.board.rank:
            self.board.set(f"{self._key}/done/{self.board.rank}", b"yes")
            # Rank 0 may itself wait for a straggler as long as it may.
            self._until(self._answer, 0, "waiting for all ranks")
            return
        for rank in range(1, self.board.world):
            key = f"{self._key}/done/{rank}"
            self._until(partial(self._there, key), rank, "waiting for its end")
            self.board.delete(key)
        self.board.set(f"{self._key}/all", b"yes")

    def _answer(self, timeout_s: float) -> bool:
        return self._there(f"{self._key}/all", timeout_s)

    def _there(self, key: str, timeout_s: float) -> bool:
        try:
            self.board.get(key, timeout_s)
        except DeadlineError:
            return False
        return True
