"""Ranks of one host share a read: shared memory, who brings which blocks, waves.

In it: the smallest budget; how work is shared out.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import BLOCK_BYTES
from ckptd.base.grids.runs import (
    Runs,
    clip,
    coalesce,
    count,
    cut_runs,
    decode_runs,
    encode_runs,
    merge,
    no_runs,
    sweep,
)
from ckptd.base.runtime.host import limit_of
from ckptd.base.runtime.ranks import (
    STALL_S,
    Board,
    LocalBoard,
    RankHeartbeat,
    agree,
    identity,
    liveness,
    posted,
    wait,
)
from ckptd.checkpoint.load.plan import BlockLine, N
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CkptdError, StoreError, UsageError

SHM_FOLDER = "/dev/shm"


class HostBuffer:
    """A buffer, and which blocks lie where in it.

    Parameters
    ----------
    line
        Positions of blocks.
    memory
        The bytes; as many blocks as the largest wave has.
    """

    def __init__(self, line: BlockLine, memory: NDArray[np.uint8]) -> None:
        self._line = line
        self.memory = memory
        self.lay_out(np.empty((0, 2), dtype=np.int64))

    def lay_out(self, runs: Runs) -> None:
        """Map the buffer to these blocks; the blocks that it held before are forgotten."""
        lengths = runs[:, 1] - runs[:, 0]
        self._starts = runs[:, 0]
        self._ends = runs[:, 1]
        self._at = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        if int(self._at[-1]) * BLOCK_BYTES > len(self.memory):
            raise UsageError(
                "a batch of reads exceeds the host buffer",
                wanted=f"{int(self._at[-1]) * BLOCK_BYTES} bytes",
                found=f"{len(self.memory)} bytes",
            )

    def offset(self, file: N, start: N, end: N) -> N:
        """Return where bytes ``[start, end)`` of the data section of `file` lie in the buffer.

        Raises
        ------
        UsageError
            The buffer does not hold them all.
        """
        lo, hi = self._line.positions(file, start, end)
        run: Any = np.searchsorted(self._starts, lo, side="right") - 1
        if np.any(run < 0) or np.any(hi > self._ends[run]):
            raise UsageError("the host buffer does not hold these bytes", found=(file, start, end))
        found: N = (self._at[run] + lo - self._starts[run]) * BLOCK_BYTES + start % BLOCK_BYTES
        return found

    def view(self, file: int, start: int, end: int) -> memoryview:
        """Return these bytes of `file`, writable."""
        at = self.offset(file, start, end)
        return self.memory.data[at : at + end - start]


class SharedMemory:
    """A named file of memory that several processes of a host map.

    It lies in /dev/shm where that has room, else in the folder for temporary files. Its blocks
    are reserved when it is made, so that touching it never fails (a sparse file without room
    behind it kills with SIGBUS). The owner unlinks it as soon as all ranks have it open, so a
    killed job leaves nothing.
    """

    def __init__(self, path: str, fd: int, size: int, *, owner: bool) -> None:
        self.path = path
        self._owner = owner
        try:
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    @staticmethod
    def create(size: int, folder: str | None = None) -> SharedMemory:
        """Make and map `size` bytes, mode 0600.

        Raises
        ------
        StoreError
            kind ``no-space``: neither memory nor the temporary folder has room.
        """
        found, limit = [], None
        for place in [folder] if folder else [SHM_FOLDER, tempfile.gettempdir()]:
            path = os.path.join(place, f"ckptd-{os.getpid()}-{secrets.token_hex(8)}")
            try:
                return SharedMemory._create(path, size)
            except OSError as error:
                found.append(f"{place}: {error.strerror}")
                limit = limit_of(error)
        raise StoreError(
            "no space for the buffer that the ranks of this host share",
            kind="no-space",
            wanted=f"{size} bytes",
            found="; ".join(found),
            hint=limit or "give load() a smaller budget_bytes, or point TMPDIR at a larger disk",
        )

    @staticmethod
    def _create(path: str, size: int) -> SharedMemory:
        if not hasattr(os, "posix_fallocate"):
            raise OSError(errno.ENOTSUP, "this system cannot reserve memory")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return SharedMemory(path, fd, size, owner=True)

    @staticmethod
    def open(path: str, size: int) -> SharedMemory:
        """Map what another rank of this user made.

        Raises
        ------
        StoreError
            It is not there (another container), not ours, or has another size.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise StoreError(
                "cannot open the host's shared buffer", where=path, found=error.strerror
            ) from None
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or info.st_size != size:
            os.close(fd)
            raise StoreError(
                "the host's shared buffer belongs to another user or has another size",
                where=path,
                wanted=f"{size} bytes of user {os.geteuid()}",
                found=f"{info.st_size} bytes of user {info.st_uid}",
            )
        return SharedMemory(path, fd, size, owner=False)

    def unlink(self) -> None:
        """Remove the name; the memory lives as long as any process maps it. Idempotent."""
        if self._owner:
            self._owner = False
            os.unlink(self.path)


LEAST_BLOCKS = 4
"""Smallest budget that a read can be cut to, in blocks."""

_MOST_SPAN_BLOCKS = 4
_SMALL_BLOCKS = 8


class Wave(msgspec.Struct, frozen=True, eq=False):
    """A part of a read that fits the budget.

    Attributes
    ----------
    start, end
        Moves whose first block lies in this stretch of the line belong to the wave.
    layout
        Blocks that are in memory during the wave.
    needed
        Those of them that any rank needs.
    mine
        Those that this rank brings and checks.
    """

    start: int
    end: int
    layout: Runs
    needed: Runs
    mine: Runs


class ReadSchedule(msgspec.Struct, frozen=True, eq=False):
    """All waves of one rank. `span_bytes`: what one move may span, so that it fits its wave."""

    waves: list[Wave]
    span_bytes: int
    most_blocks: int

    @property
    def mine(self) -> Runs:
        """Blocks that this rank brings in any wave."""
        return merge(np.concatenate([no_runs(), *(w.mine for w in self.waves)]))


def make_schedule(
    line: BlockLine, needs: Sequence[Runs], me: int, *, budget_blocks: int, gap: int
) -> ReadSchedule:
    """Cut a host's read into waves and say what local rank `me` brings.

    Parameters
    ----------
    needs
        Blocks that each local rank needs.
    budget_blocks
        Blocks that may be in memory at a time; at least `LEAST_BLOCKS` are assumed.
    gap
        Holes of so many blocks may be read along, and get room.
    """
    budget = max(budget_blocks, LEAST_BLOCKS)
    span = min(_MOST_SPAN_BLOCKS, budget // 4)
    everybody = merge(np.concatenate([no_runs(), *needs]))
    room = coalesce(everybody, gap, everybody)
    if not len(room):
        return ReadSchedule([], span << 20, 0)
    if count(room) <= budget:
        cuts = [int(room[0, 0]), int(room[-1, 1])]
    else:
        cuts = cut_runs(room, budget - span - 1)
    waves = []
    for start, end in pairwise(cuts):
        # A move that begins before `end` may reach beyond it, into the next wave's blocks.
        reach = (
            min(end + span + 1, line.first(line.file_at(end - 1) + 1)) if end != cuts[-1] else end
        )
        segments, members = sweep([clip(n, start, reach) for n in needs])
        waves.append(
            Wave(
                start,
                end,
                clip(room, start, reach),
                clip(everybody, start, reach),
                assign(segments, members)[me],
            )
        )
    return ReadSchedule(waves, span << 20, max(count(w.layout) for w in waves))


def assign(segments: Runs, members: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> list[Runs]:
    """Give each segment to ranks, so that all bring alike much.

    Parameters
    ----------
    segments, members
        As `ckptd.base.grids.runs.sweep` returns them.

    Returns
    -------
    list[Runs]
        Each rank's blocks. Segments that few need are given out first, each to those who need
        it and have room left; what remains goes to anybody with room.
    """
    ranks = members.shape[1]
    room = [-(-count(segments) // ranks)] * ranks
    given: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    order = np.argsort(members.sum(axis=1), kind="stable").tolist()
    table = segments.tolist()
    left: list[tuple[int, int]] = []
    for i in order:
        left += _give(tuple(table[i]), np.flatnonzero(members[i]).tolist(), room, given)
    for segment in left:
        _give(segment, list(range(ranks)), room, given)
    return [merge(np.array(g, dtype=np.int64).reshape(-1, 2)) for g in given]


def _give(
    segment: tuple[int, int],
    candidates: list[int],
    room: list[int],
    given: list[list[tuple[int, int]]],
) -> list[tuple[int, int]]:
    """Deal `segment` out to `candidates` by the room they have; return what found none."""
    at, end = segment
    most = max(candidates, key=lambda r: room[r])
    if end - at <= min(_SMALL_BLOCKS, room[most]):
        candidates = [most]  # a few blocks are one request: do not tear them apart
    total = sum(room[r] for r in candidates)
    size, seen = min(end - at, total), 0
    first = at
    for rank in candidates:
        seen += room[rank]
        upto = first + size * seen // total if total else first
        if upto > at:
            given[rank].append((at, upto))
            room[rank] -= upto - at
            at = upto
    return [(at, end)] if at < end else []


_Post = tuple[bytes, tuple[int, int], bool, tuple[int, str, str]]

_posts = msgpack_decoder(_Post)
"""The blocks that a rank needs, its budgets, whether it can open its files, and its process."""


class Needs(NamedTuple):
    """Blocks that the ranks of a host need, and their budgets.

    Attributes
    ----------
    runs
        Blocks of each local rank.
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
        self, board: Board, key: str, rank: int, members: Sequence[int], *, stall_s: float = STALL_S
    ) -> None:
        if rank != board.rank or rank not in members or not all(m < board.world for m in members):
            raise UsageError(
                "invalid list of ranks of a host",
                wanted=f"ranks of a world of {board.world}, {board.rank} among them",
                found=f"rank {rank}, members {list(members)[:16]}",
            )
        self.board = board
        self.key = key
        self.members = tuple(members)
        self.local_rank = self.members.index(rank)
        self.local_world = len(self.members)
        self.stall_s = stall_s
        self.pulse = RankHeartbeat(board, key)
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
            See `ckptd.base.runtime.ranks.wait`.
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
        """Agree with all ranks of the job that none failed (`ckptd.base.runtime.ranks.agree`)."""
        key = f"{self.key}/{stage}"
        agree(self.board, key, error, pulse=self.pulse, runs=self._runs, stall_s=self.stall_s)
        if self.board.rank == 0:
            # Every rank here has read the previous verdict, maybe not this one.
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
        posts = [posted(_posts, raw) for raw in self.exchange("needs", post)]
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

        Ranks verify for one another what each copies for itself: from another copy of a file a
        rank would take bytes that no rank has verified.
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
