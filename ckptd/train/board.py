"""The board of a distributed job: the store that `init_process_group` already made."""

from __future__ import annotations

import hmac
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ckptd.config import SECRET_VARIABLE, derived_key, given_secret
from ckptd.engine.agree import EVERY_RANK
from ckptd.engine.board import Board, LocalBoard
from ckptd.errors import CkptdError, DeadlineError, RefusedError, UsageError
from ckptd.format.digest import digest_hex

__all__ = ["JobBoard", "board_of", "forget_boards", "global_ranks"]

_FIRST_POLL_S = 0.0005
_LONGEST_POLL_S = 0.05
_MAC_BYTES = 16
_boards_made: dict[str, int] = {}


class JobBoard:
    """A board over torch's own store, with every key below one prefix.

    The connection is a clone of the job's: a wait in one thread does not hold up another.

    torch's store lets everybody in who reaches its port. So where the job has a secret, every value
    carries a MAC over its key and itself, and one without is refused: a stranger can end the job
    there, as he can end its rendezvous, and cannot make ranks believe what no rank has said.
    Counters have none: the store itself adds.

    Parameters
    ----------
    store
        A ``torch.distributed.Store``.
    rank, world
        Position in, and size of, the process group that the board belongs to.
    prefix
        Of all keys.
    secret
        The job's; None: values are believed as they are.
    """

    def __init__(
        self, store: Any, rank: int, world: int, prefix: str, secret: bytes | None = None
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._secret = None if secret is None else derived_key(secret, "board")
        self.rank = rank
        self.world = world

    def clone(self) -> JobBoard:
        """Return the same board on a connection of its own, for another thread."""
        twin = JobBoard(_clone(self._store), self.rank, self.world, self._prefix)
        twin._secret = self._secret
        return twin

    def set(self, key: str, value: bytes) -> None:
        """See `ckptd.engine.board.Board`."""
        name = self._prefix + key
        self._call(self._store.set, name, self._mac(name, value) + value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `ckptd.engine.board.Board`."""
        end = time.monotonic() + timeout_s
        pause = _FIRST_POLL_S
        while (value := self.peek(key)) is None:
            if time.monotonic() > end:
                raise DeadlineError(
                    "nobody published a value in time",
                    kind="board",
                    where=key,
                    wanted=f"within {timeout_s:.0f} s",
                    hint=EVERY_RANK,
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_S)
        return value

    def peek(self, key: str) -> bytes | None:
        """See `ckptd.engine.board.Board`."""
        name = self._prefix + key
        if not self._call(self._store.check, [name]):
            return None
        raw: bytes = self._call(self._store.get, name)
        if self._secret is None:
            return raw
        mac, value = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(name, value)):
            raise RefusedError(
                "a value in the job's store was not written by a rank of this job",
                kind="bad-mac",
                where=name,
                wanted=f"a MAC with the job's secret ({SECRET_VARIABLE})",
                hint=f"{SECRET_VARIABLE} must be set on all nodes or on none, and be the same; "
                "if it is, somebody else writes to the job's store: keep its port from others",
            )
        return value

    def add(self, key: str, amount: int = 1) -> int:
        """See `ckptd.engine.board.Board`."""
        return int(self._call(self._store.add, self._prefix + key, amount))

    def count(self, key: str) -> int:
        """See `ckptd.engine.board.Board`."""
        # Adding nothing makes the key: a store must not fill with counters that were looked for.
        return self.add(key, 0) if self._call(self._store.check, [self._prefix + key]) else 0

    def delete(self, key: str) -> None:
        """See `ckptd.engine.board.Board`."""
        self._call(self._store.delete_key, self._prefix + key)

    def _mac(self, name: str, value: bytes) -> bytes:
        if self._secret is None:
            return b""
        key = name.encode()
        told = b"".join((len(key).to_bytes(8, "little"), key, value))
        return hmac.digest(self._secret, told, "sha256")[:_MAC_BYTES]

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except (RuntimeError, dist.DistError) as error:
            raise CkptdError(
                "the job's store is gone",
                kind="board-lost",
                found=str(error).splitlines()[0][:200],
                hint="rank 0 or the launcher has ended; see their logs",
            ) from error


def _clone(store: Any) -> Any:
    try:
        return store.clone()
    except (RuntimeError, AttributeError):
        return store  # stores without connections (FileStore, HashStore) need no second one


def global_ranks(process_group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group by group rank; ``(0,)`` without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise UsageError(
                "a process group was given, but torch.distributed is not initialised",
                kind="no-process-group",
                hint="call torch.distributed.init_process_group first",
            )
        return (0,)
    return tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))


def forget_boards() -> None:
    """Count boards anew: this process joins another store, with ranks that have made none."""
    _boards_made.clear()


def board_of(process_group: Any, timeout_s: float) -> Board:
    """Return a board for the ranks of a process group; the default group when None.

    Every rank of the group calls this equally often: the count keeps boards apart.
    """
    ranks = global_ranks(process_group)
    if len(ranks) == 1:
        return LocalBoard()
    own = digest_hex(repr(ranks).encode())[:12]
    _boards_made[own] = _boards_made.get(own, 0) + 1
    store = dist.distributed_c10d._get_default_store()
    store = _clone(store)
    store.set_timeout(timedelta(seconds=timeout_s))
    rank = ranks.index(dist.get_rank())
    prefix = f"ckptd/{own}/{_boards_made[own]}/"
    return JobBoard(store, rank, len(ranks), prefix, given_secret())
