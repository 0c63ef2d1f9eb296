"""The ranks of one host in one read: what they tell each other, over the job's board."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from ckptd.decoding import msgpack_decoder
from ckptd.engine.agree import STALL_S, Pulse, agree, identity, liveness, wait
from ckptd.engine.blocks import Runs, decode_runs, encode_runs
from ckptd.engine.board import Board, LocalBoard
from ckptd.engine.hostbuffer import SharedMemory
from ckptd.errors import CkptdError, UsageError

__all__ = ["HostGroup", "Needs"]

_Post = tuple[bytes, tuple[int, int], bool, tuple[int, str, str]]

_posts = msgpack_decoder(_Post)
"""What a rank needs, its budgets, whether it can open its files, and its process."""


class Needs(NamedTuple):
    """What the ranks of a host need.

    Attributes
    ----------
    runs
        Of each local rank.
    budgets
        The smallest of all ranks: in bytes of files that can be opened, and of a buffer.
    files
        Whether every rank can open the files that it needs.
    """

    runs: list[Runs]
    budgets: tuple[int, int]
    files: bool


class HostGroup:
    """The ranks of one host in one read.

    Parameters
    ----------
    board
        The board of the whole job.
    key
        Unique to this read, the same on all ranks of the job.
    rank
        This rank in the job: ``board.rank``.
    members
        Ranks on this host, rising, `rank` among them.
    stall_s
        Longest time in seconds without progress of an awaited rank.

    Raises
    ------
    UsageError
        `rank` is not the board's, or not one of `members`.
    """

    def __init__(
        self,
        board: Board,
        key: str,
        rank: int,
        members: Sequence[int],
        *,
        stall_s: float = STALL_S,
    ) -> None:
        if rank != board.rank or rank not in members or not all(m < board.world for m in members):
            raise UsageError(
                "not the ranks of a host",
                wanted=f"ranks of a world of {board.world}, {board.rank} among them",
                found=f"rank {rank}, members {list(members)[:16]}",
            )
        self.board = board
        self.key = key
        self.members = tuple(members)
        self.local_rank = self.members.index(rank)
        self.local_world = len(self.members)
        self.stall_s = stall_s
        self.pulse = Pulse(board, key)
        self._alive: list[Callable[[], bool] | None] = [None] * self.local_world
        self._posted: list[str] = []
        self._verdict: list[str] = []

    @staticmethod
    def alone() -> HostGroup:
        """Return the group of a job of one rank."""
        return HostGroup(LocalBoard(), "alone", 0, (0,))

    def exchange(self, tag: str, value: bytes) -> list[bytes]:
        """Publish `value` and return every local rank's, by local rank.

        Raises
        ------
        DeadlineError, CkptdError
            See `ckptd.engine.agree.wait`.
        """
        if self.local_world == 1:
            return [value]
        mine = self._name(tag, self.local_rank)
        self.board.set(mine, value)
        self._posted.append(mine)
        return [
            value if peer == self.local_rank else self._await(tag, peer)
            for peer in range(self.local_world)
        ]

    def _await(self, tag: str, peer: int) -> bytes:
        return wait(
            self.board,
            self._name(tag, peer),
            self.members[peer],
            pulse=self.pulse,
            alive=self._alive[peer],
            stall_s=self.stall_s,
            own=self.pulse,
        )

    def _name(self, tag: str, peer: int) -> str:
        return f"{self.key}/host{self.members[0]}/{tag}/{peer}"

    def agree(self, stage: str, error: CkptdError | None) -> None:
        """Let all ranks of the job agree that none has an error; see `ckptd.engine.agree.agree`."""
        key = f"{self.key}/{stage}"
        agree(self.board, key, error, pulse=self.pulse, runs=self._runs, stall_s=self.stall_s)
        if self.board.rank == 0:
            # Whoever came this far has read the verdict before, and perhaps not yet this one.
            self._posted += self._verdict
            self._verdict = [f"{key}/all"]

    def _runs(self, rank: int) -> bool:
        """Tell whether a rank still runs; True for those of other hosts."""
        alive = self._alive[self.members.index(rank)] if rank in self.members else None
        return alive is None or alive()

    def barrier(self, tag: str) -> None:
        """Wait for all local ranks. One that failed has told so by its pulse: raises its error."""
        self.exchange(tag, b"")

    def needs(self, runs: Runs, budgets: tuple[int, int], files: bool) -> Needs:
        """Tell what this rank needs, its budgets, and whether it can open its files.

        From here on the processes of the others are known, so that a dead one is noticed at once.
        """
        post = msgspec.msgpack.encode((encode_runs(runs), budgets, files, identity()))
        posts = [_posts.decode(raw) for raw in self.exchange("needs", post)]
        for peer, (_, _, _, process) in enumerate(posts):
            if peer != self.local_rank:
                self._alive[peer] = liveness(process)
        return Needs(
            [decode_runs(post[0]) for post in posts],
            (min(post[1][0] for post in posts), min(post[1][1] for post in posts)),
            all(post[2] for post in posts),
        )

    def same_files(self, identity: bytes) -> bool:
        """Tell whether all local ranks open the very same files; empty for one that cannot.

        Ranks verify for one another what each copies for itself: from equal copies of a file in
        different places one would take bytes that nobody looked at.
        """
        return bool(identity) and set(self.exchange("files", identity)) == {identity}

    def share_memory(self, size: int) -> SharedMemory | None:
        """Return `size` bytes that all local ranks map, or None when one of them cannot.

        The name is gone from the file system before this returns, so that nothing stays behind,
        however the job ends.
        """
        memory, problem, path = None, "", ""
        if self.local_rank == 0:
            try:
                memory = SharedMemory.create(size)
                path = memory.path
            except CkptdError as error:
                problem = error.message
        try:
            path = self.exchange("buffer", path.encode())[0].decode()
            if self.local_rank and path:
                try:
                    memory = SharedMemory.open(path, size)
                except CkptdError as error:
                    problem = error.message
            good = b"" if path and not problem else b"no"
            everybody = self.exchange("mapped", good)
        finally:
            if memory is not None:
                memory.unlink()
        return memory if not any(everybody) else None

    def close(self) -> None:
        """Take this rank's posts from the board; call it when all ranks are done. Idempotent."""
        for key in self._posted:
            self.board.delete(key)
        self._posted.clear()
        if self.board.world > 1:
            self.pulse.forget()
