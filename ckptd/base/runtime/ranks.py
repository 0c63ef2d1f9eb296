"""`Board`: ranks agree, wait for each other, notice dead or stalled ones; error of failed ranks.

In it: seconds without progress after which a wait ends, heartbeat of ranks, how many errors of
ranks are shown.

A wait ends when its value comes, when the awaited rank says that it gives up, when its process is
gone (seen on the same host only), or when it made no progress for `stall_s` seconds. Time alone
ends nothing: reading a terabyte may take an hour, as long as bytes keep coming.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from ckptd.decoding import Decoder, json_decoder, msgpack_decoder
from ckptd.errors import CkptdError, CorruptError, DeadlineError

T = TypeVar("T")


class Board(Protocol):
    """Keys are unique to their use: they carry generation, step, attempt and a counter.

    Implementations are thread-safe. Values are small (below 8 MB).
    """

    rank: int
    world: int

    def set(self, key: str, value: bytes) -> None:
        """Publish `value`."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a key; `DeadlineError` (kind ``board``) names it when it does not come."""

    def peek(self, key: str) -> bytes | None:
        """Return the value if it is there already, without waiting."""

    def peek_all(self, keys: list[str]) -> list[bytes] | None:
        """Return the values of several keys, if all of them are there; in two round trips."""

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, which begins at 0; return its value. `peek` does not show it."""

    def count(self, key: str) -> int:
        """Return the value of a counter."""

    def delete(self, key: str) -> None:
        """Forget a key; no error when it is gone."""


class LocalBoard:
    """A board for threads of one process; with ``world=1`` it is the board of a job of one rank."""

    def __init__(self, rank: int = 0, world: int = 1, peers: LocalBoard | None = None) -> None:
        self.rank = rank
        self.world = world
        self._values: dict[str, bytes] = peers._values if peers else {}
        self._counts: dict[str, int] = peers._counts if peers else {}
        self._changed: threading.Condition = peers._changed if peers else threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """See `Board`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `Board`."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise DeadlineError(
                    "no value was published in time",
                    kind="board",
                    where=key,
                    wanted=f"within {timeout_s:.0f} s",
                )
            return self._values[key]

    def peek(self, key: str) -> bytes | None:
        """See `Board`."""
        with self._changed:
            return self._values.get(key)

    def peek_all(self, keys: list[str]) -> list[bytes] | None:
        """See `Board`."""
        with self._changed:
            there = self._values.keys() >= set(keys)
            return [self._values[key] for key in keys] if there else None

    def add(self, key: str, amount: int = 1) -> int:
        """See `Board`."""
        with self._changed:
            self._counts[key] = self._counts.get(key, 0) + amount
            return self._counts[key]

    def count(self, key: str) -> int:
        """See `Board`."""
        with self._changed:
            return self._counts.get(key, 0)

    def delete(self, key: str) -> None:
        """See `Board`."""
        with self._changed:
            self._values.pop(key, None)
            self._counts.pop(key, None)


error_fields = json_decoder(dict[str, str | None])
"""Decodes an error that a rank posted."""
_errors = json_decoder(dict[int, dict[str, str | None]])

_identities = msgpack_decoder(tuple[int, str, str])

EVERY_RANK = (
    "every rank must call save(), load(), latest() and close(), in the same order, and not rank 0 "
    "alone"
)
"""Hint of errors about missing ranks."""
STALL_S = 300.0
"""Longest time in seconds without progress of an awaited rank."""

_POLL_S = 0.5
_BEAT_S = 2.0
_GIVE_UP = b"!"
_MOST_ERRORS = 16


def posted(decoder: Decoder[T], raw: bytes) -> T:
    """Return a value that a rank posted.

    Raises
    ------
    CorruptError
        No rank can have: where the job has no secret, any program that reaches the store can.
    """
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as error:
        text = "a value in the job's store was not written by a rank of this version"
        hint = "set CKPTD_SECRET on all nodes, so that values of other programs are refused"
        raise CorruptError(text, found=str(error), hint=hint) from error


class RankHeartbeat:
    """Tells the other ranks that this one gets on, or that it gave up.

    Parameters
    ----------
    board
        The job's board.
    key
        Unique to the operation.
    """

    def __init__(self, board: Board, key: str) -> None:
        self._board = board
        self._key = key
        self._lock = threading.Lock()
        self._steps = 0
        self._next = 0.0
        self._seen: dict[int, int] = {}

    def beat(self) -> None:
        """Note a step forward; published every two seconds at most. Safe from any thread."""
        if self._board.world == 1:
            return
        with self._lock:
            self._steps += 1
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + _BEAT_S
            steps = self._steps
        self._board.set(self._name(self._board.rank), b"%d" % steps)

    def give_up(self, error: CkptdError) -> None:
        """Show the ranks that wait for this one that nothing more will come."""
        if self._board.world > 1:
            raw = _GIVE_UP + msgspec.json.encode(error.to_dict())
            self._board.set(self._name(self._board.rank), raw)

    def look(self, rank: int) -> bytes | None:
        """Return the last sign of `rank`: one that is gone, or is older, is no other sign."""
        sign = self._board.peek(self._name(rank)) or b"0"
        if sign.startswith(_GIVE_UP):
            return sign
        self._seen[rank] = max(self._seen.get(rank, 0), int(sign))
        return b"%d" % self._seen[rank]

    def forget(self) -> None:
        """Remove this rank's signs from the board."""
        self._board.delete(self._name(self._board.rank))

    def _name(self, rank: int) -> str:
        return f"{self._key}/pulse/{rank}"


class Peers:
    """The processes of the ranks, as far as one sees those of others.

    Parameters
    ----------
    board
        The job's board.
    key
        Unique to the group of ranks and its life; every rank makes one of these.
    """

    def __init__(self, board: Board, key: str) -> None:
        self._board = board
        self._key = key
        self._tests: dict[int, Callable[[], bool] | None] = {}
        if board.world > 1:
            board.set(self._name(board.rank), msgspec.msgpack.encode(identity()))

    def runs(self, rank: int) -> bool:
        """Tell whether the process of `rank` runs; True where that cannot be known, or not yet."""
        if rank not in self._tests:
            raw = self._board.peek(self._name(rank))
            if raw is None:
                return True
            self._tests[rank] = liveness(posted(_identities, raw))
        test = self._tests[rank]
        return test is None or test()

    def _name(self, rank: int) -> str:
        return f"{self._key}/process/{rank}"


def wait(
    board: Board,
    key: str,
    rank: int,
    *,
    pulse: RankHeartbeat | None = None,
    alive: Callable[[], bool] | None = None,
    stall_s: float = STALL_S,
    own: RankHeartbeat | None = None,
) -> bytes:
    """Return the value that `rank` publishes under `key`.

    Parameters
    ----------
    pulse
        Where signs of `rank` are looked for.
    alive
        Tells whether its process still runs; None when that cannot be known.
    stall_s
        Longest time without a sign, in seconds.
    own
        Beaten while waiting: a rank that waits for us must not take our waiting for a stall.

    Raises
    ------
    DeadlineError
        kind ``board``: no value and no sign within `stall_s`.
    CkptdError
        kind ``rank-died``: its process is gone. Or what that rank gave up with.
    """
    last, until = None, time.monotonic() + stall_s
    while True:
        try:
            return board.get(key, max(0.01, min(_POLL_S, until - time.monotonic())))
        except DeadlineError:
            sign = pulse.look(rank) if pulse else None
        if sign is not None and sign.startswith(_GIVE_UP):
            raise _error_of(rank, posted(error_fields, sign[1:]))
        if alive is not None and not alive() and board.peek(key) is None:
            raise CkptdError(
                "a rank of this host ended before it came to this call",
                kind="rank-died",
                where=f"rank {rank}, waiting for {key}",
                wanted="the same call on every rank",
                found="its process is gone",
                hint=f"{EVERY_RANK}; if it did, the output of that rank says why it died",
            )
        if sign != last:
            last, until = sign, time.monotonic() + stall_s
        if time.monotonic() >= until:
            raise DeadlineError(
                "a rank made no progress",
                kind="board",
                where=f"rank {rank}, waiting for {key}",
                wanted=f"progress within {stall_s:.0f} s",
                hint=EVERY_RANK,
            )
        if own is not None:
            own.beat()


def agree(
    board: Board,
    key: str,
    error: CkptdError | None,
    *,
    pulse: RankHeartbeat | None = None,
    runs: Callable[[int], bool] | None = None,
    stall_s: float = STALL_S,
) -> None:
    """Return on every rank when no rank has an error, else raise on every rank.

    A rank that failed raises its own error, the others the error of the lowest rank that failed,
    with a note of the rank.

    Parameters
    ----------
    key
        Unique to this agreement.
    error
        What this rank failed with.
    pulse, stall_s
        See `wait`. Rank 0 is given twice as long, since it waits for the others first.
    runs
        Tells of a rank whether its process still runs, as far as that is known.
    """
    if board.world == 1:
        verdict = _verdict({0: error.to_dict()} if error else {})
    elif board.rank == 0:
        verdict = _verdict(_gather(board, key, error, pulse, runs, stall_s))
        board.set(f"{key}/all", verdict)
    else:
        board.set(f"{key}/{board.rank}", _encode(error))
        try:
            alive = partial(runs, 0) if runs else None
            verdict = wait(board, f"{key}/all", 0, pulse=pulse, alive=alive, stall_s=2 * stall_s)
        except CkptdError:
            if error is not None:
                raise error from None
            raise
        board.delete(f"{key}/{board.rank}")
    failed: dict[int, dict[str, str | None]] = posted(_errors, verdict)
    if failed:
        raise _choose(error, failed)


def _encode(error: CkptdError | None) -> bytes:
    return msgspec.json.encode(error.to_dict() if error else None)


def _verdict(failed: dict[int, dict[str, str | None]]) -> bytes:
    return msgspec.json.encode(dict(sorted(failed.items())[:_MOST_ERRORS]))


def _gather(
    board: Board,
    key: str,
    error: CkptdError | None,
    pulse: RankHeartbeat | None,
    runs: Callable[[int], bool] | None,
    stall_s: float,
) -> dict[int, dict[str, str | None]]:
    """Collect on rank 0. After the first rank that is lost the others are not waited for."""
    failed: dict[int, dict[str, str | None]] = {}
    if error is not None:
        failed[0] = error.to_dict()
    lost = False
    for rank in range(1, board.world):
        try:
            if lost:
                raw = board.peek(f"{key}/{rank}") or b"null"
            else:
                name, alive = f"{key}/{rank}", partial(runs, rank) if runs else None
                raw = wait(board, name, rank, pulse=pulse, alive=alive, stall_s=stall_s, own=pulse)
            report = posted(error_fields, raw) if raw != b"null" else None
        except CkptdError as missing:
            lost, report = True, missing.to_dict()
        if report is not None:
            failed[rank] = report
    return failed


def _choose(error: CkptdError | None, failed: dict[int, dict[str, str | None]]) -> CkptdError:
    first = min(failed)
    chosen = error if error is not None else _error_of(first, failed[first])
    if len(failed) > 1:
        chosen.add_note(f"ranks that failed: {sorted(failed)}")
    return chosen


def _error_of(rank: int, report: dict[str, str | None]) -> CkptdError:
    error = CkptdError.from_dict(report)
    error.add_note(f"met by rank {rank}")
    return error


def identity() -> tuple[int, str, str]:
    """Return what tells this process from all others of its host: pid, start time, namespace."""
    pid = os.getpid()
    return pid, _start_time(pid), _namespace()


def liveness(other: tuple[int, str, str]) -> Callable[[], bool] | None:
    """Return a test whether the process `other` still runs; None when it cannot be seen."""
    pid, started, namespace = other
    if not started or not namespace or namespace != _namespace():
        return None
    return lambda: _start_time(pid) == started


def _namespace() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f"{f.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Start time of a process in ticks since boot, or "" when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
