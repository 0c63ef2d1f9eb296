"""`JobBoard`: board over torch's own store, its keys proved; agreements, trees, hosts of ranks.

In it: intervals of polling; fan-out of the tree.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from ckptd.base.digest import digest_hex
from ckptd.base.grouping import by_key
from ckptd.base.runtime.host import address_towards, host_id
from ckptd.base.runtime.ownership import OfOneProcess
from ckptd.base.runtime.ranks import (
    EVERY_RANK,
    Board,
    LocalBoard,
    Peers,
    RankHeartbeat,
    agree,
    error_fields,
    posted,
    wait,
)
from ckptd.decoding import ANYTHING, json_decoder, msgpack_decoder
from ckptd.errors import CkptdError, DeadlineError, RefusedError, UsageError

T = TypeVar("T")


_BLOCK = 64
"""Rounds after which ranks count themselves, so that rank 0 may delete what it posted before."""


_NUMBER_BYTES = 16
"""Of the number that each rank draws in a life, and of a hash of these."""


_FAN = 128
"""So many ranks in a row post to the first of them, so many of these to the first of them, ..."""


class Agreement:
    """Numbered rounds on a board: every rank makes the same calls in the same order.

    A rank of this host that died is noticed at once, by `ckptd.base.runtime.ranks`. What is posted
    is deleted some rounds later, when every rank has read it.

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
        self._posted: dict[int, list[str]] = {}

    def _key(self, name: str) -> str:
        if self._round % _BLOCK == 0 and self._round and self.board.world > 1:
            self._forget(self._round // _BLOCK)
        self._round += 1
        return f"agree/{self._round}/{name}"

    def _forget(self, block: int) -> None:
        """Note that this rank is done with a block of rounds; rank 0 deletes those that all are."""
        if self.board.rank:
            self.board.add(f"agree/done/{block}")
            return
        for old in sorted(self._posted):
            if old > block or self.board.count(f"agree/done/{old}") < self.board.world - 1:
                return
            for key in (*self._posted.pop(old), f"agree/done/{old}"):
                self.board.delete(key)

    def _note(self, key: str) -> None:
        """Note what rank 0 posts in this round, unless the round has a name of its own."""
        if not key.startswith(f"agree/{self._round}/"):
            return
        self._posted.setdefault((self._round - 1) // _BLOCK + 1, []).append(key)

    def on_rank_zero(self, name: str, function: Callable[[], Any], more_s: float = 0.0) -> Any:
        """Run `function` on rank 0 and return its JSON-able result on every rank.

        Parameters
        ----------
        more_s
            How much longer than `timeout_s` that may take, in seconds.

        Raises
        ------
        CkptdError
            What `function` raised, on every rank; kind ``rank-died`` when rank 0 is gone;
            `DeadlineError` when it does not answer.
        """
        if self.board.world == 1:
            return function()
        key = self._key(name)
        wait_s = self._timeout_s + more_s
        raw = self._answer(key, lambda: msgspec.json.encode(function()), wait_s)
        return posted(ANYTHING, raw)

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

        def join(lists: list[bytes]) -> bytes:
            return msgspec.msgpack.encode([v for each in lists for v in posted(_values, each)])

        key = f"agree/{round_of}/{name}" if round_of else self._key(name)
        own = msgspec.msgpack.encode([value])
        return self._joined(key, own, join, lambda raw: digest(posted(_values, raw)))

    def in_tree(self, name: str, value: bytes, join: Callable[[list[bytes]], bytes]) -> bytes:
        """Join the values of all ranks, and return the result on every rank.

        Each rank joins what a few others have joined before, and posts that: none handles the
        values of all, which may be large where those of `all_reports` are small.

        Parameters
        ----------
        join
            Joins values in any grouping; they are in the order of ranks.

        Raises
        ------
        CkptdError
            What `join` raised on any rank; kind ``rank-died`` when a rank is gone;
            `DeadlineError` naming the ranks that are missing.
        """
        if self.board.world == 1:
            return join([value])
        return self._joined(self._key(name), value, join, lambda raw: raw)

    def _joined(
        self,
        key: str,
        value: bytes,
        join: Callable[[list[bytes]], bytes],
        answer: Callable[[bytes], bytes],
    ) -> bytes:
        """Join in a tree what all ranks bring, and return what rank 0 answers to that."""
        rank, world = self.board.rank, self.board.world
        # A rank may have waited its whole time for a straggler, at each level.
        above = self._timeout_s * (_levels(0, world) + 1)

        def joined() -> bytes:
            return join([value, *self._reports(key)])

        if rank == 0:
            return self._answer(f"{key}/answer", lambda: answer(joined()), above)
        try:
            self.board.set(f"{key}/{rank}", b"+" + joined())
        except Exception as error:
            report = msgspec.json.encode(_reported(error).to_dict())
            self.board.set(f"{key}/{rank}", b"-" + report)
            raise
        found = _value(self.wait(f"{key}/answer", 0, above))
        with suppress(CkptdError):  # the answer is here: the store may end with rank 0
            self.board.delete(f"{key}/{rank}")  # each its own: thousands are many for one
        return found

    def life(self) -> bytes:
        """Return what names this life of the ranks, the same on all of them.

        It is a hash of numbers that all of them draw now, in the tree in which they report, and
        each finds its own in it: so no earlier life can have had it. A rank reads the list of rank
        0 and those of the ranks between, and not the numbers of all. A rank asks those below with
        its number, and takes answers to that alone: a launcher that keeps its store for the next
        life, or a stranger, leaves others there.

        Raises
        ------
        RefusedError
            kind ``bad-mac``: some rank has another secret.
        DeadlineError
            Not all ranks come in time, or not to this life.
        """
        rank, number = self.board.rank, secrets.token_bytes(_NUMBER_BYTES)
        # At each level one may have waited its whole time for a straggler.
        end = time.monotonic() + self._timeout_s * (_levels(0, self.board.world) + 1)
        if below := _below(rank, self.board.world):
            self.board.set(f"life/ask/{rank}", number)
            listed = b"".join([number, *self._answers(number, below, end)])
            number = _hashed(listed)
            self.board.set(f"life/of/{rank}", listed)
        asked, above = b"", _above(rank)
        pauses = self._pauses("life/of", [above], end)
        while (found := self._life_with(number)) is None:
            ask = self.board.peek(f"life/ask/{above}") or b""
            if ask != asked:
                asked = ask
                self.board.set(f"life/{rank}", ask + number)
            next(pauses)
        return found

    def _answers(self, number: bytes, below: list[int], end: float) -> list[bytes]:
        """Return what the ranks below answer to this one's number, by rank."""
        found: dict[int, bytes] = {}
        left, size = below, len(below)
        pauses = self._pauses("life", left, end)
        while left:
            raw = self.board.peek_all([f"life/{r}" for r in left[:size]])
            if raw is None and size > 1:
                size //= 2
                continue
            pairs = zip(left, raw or (), strict=False)
            fresh = {r: v[len(number) :] for r, v in pairs if v.startswith(number)}
            found |= fresh
            left = [r for r in left if r not in found]
            size = max(1, min(2 * size, len(left)))
            if not fresh:
                left = [*left[1:], left[0]]  # one that is late holds up no other
                next(pauses)
        return [found[r] for r in below]

    def _life_with(self, number: bytes) -> bytes | None:
        """Return the life that the lists say now; None while this rank's number is not in it."""
        at, size = self.board.rank, _NUMBER_BYTES
        while at:
            above = _above(at)
            listed = self.board.peek(f"life/of/{above}") or b""
            place = size * [above, *_below(above, self.board.world)].index(at)
            if listed[place : place + size] != number:
                return None
            at, number = above, _hashed(listed)
        return number

    def _pauses(self, key: str, ranks: list[int], end: float) -> Iterator[None]:
        """Sleep at each step, longer and longer, until the time is up."""
        pause, longest = _FIRST_POLL_S, _LONGEST_POLL_S * max(1.0, self.board.world / 512)
        while time.monotonic() < end:
            time.sleep(pause)
            pause = min(pause * 1.5, longest)
            yield
        raise self._missing(key, ranks, self._timeout_s)

    def no_errors(self, error: Exception | None, pulse: RankHeartbeat | None = None) -> None:
        """Raise on every rank when any rank brings an error; see `ckptd.base.runtime.ranks.agree`.

        One that is not of ckptd, as of a function of the program, is raised as it is where it was
        brought; the other ranks raise kind ``crashed``. With a pulse a rank may be late as long as
        it gets on.
        """
        key = self._key("errors")
        if self.board.rank == 0 and self.board.world > 1:
            self._note(f"{key}/all")
        own = None if error is None else _reported(error)
        try:
            agree(self.board, key, own, pulse=pulse, runs=self._peers.runs, stall_s=self._timeout_s)
        except CkptdError:
            if error is not None and own is not error:
                raise error from error.__cause__
            raise

    def on_every_rank(self, function: Callable[[], T], pulse: RankHeartbeat | None = None) -> T:
        """Return what `function` returns here, if it raises nothing on any rank.

        Parameters
        ----------
        pulse
            Beaten by `function`, where it may take longer than `timeout_s`.

        Raises
        ------
        CkptdError
            On every rank, when it raises on one; see `no_errors`.
        """
        error: Exception | None = None
        found: list[T] = []
        try:
            found.append(function())
        except Exception as caught:  # noqa: BLE001 - no_errors raises it
            error = caught
        self.no_errors(error, pulse)
        return found[0]

    def wait(self, key: str, rank: int, timeout_s: float) -> bytes:
        """Return what `rank` publishes under `key`; see `ckptd.base.runtime.ranks.wait`."""
        runs = partial(self._peers.runs, rank)
        return wait(self.board, key, rank, alive=runs, stall_s=timeout_s)

    def _answer(self, key: str, make: Callable[[], bytes], timeout_s: float) -> bytes:
        """Return rank 0's answer; every rank raises its error."""
        if self.board.rank == 0:
            self._note(key)
            try:
                value = make()
            except Exception as error:
                self.board.set(key, b"-" + msgspec.json.encode(_reported(error).to_dict()))
                raise
            self.board.set(key, b"+" + value)
            return value
        return _value(self.wait(key, 0, timeout_s))

    def _reports(self, key: str) -> list[bytes]:
        """Collect what the ranks below this one posted, by rank, as many at once as are there."""
        rank, world = self.board.rank, self.board.world
        timeout_s = self._timeout_s * _levels(rank, world)
        end = time.monotonic() + timeout_s
        below = _below(rank, world)
        out: list[bytes] = []
        size = len(below)
        while len(out) < len(below):
            left = below[len(out) :]
            found = self.board.peek_all([f"{key}/{r}" for r in left[:size]])
            if found is None and size > 1:
                size //= 2
                continue
            try:
                wait_s = max(0.01, end - time.monotonic())
                found = found or [self.wait(f"{key}/{left[0]}", left[0], wait_s)]
            except DeadlineError as error:
                raise self._missing(key, left, timeout_s) from error
            out += map(_value, found)
            size *= 2
        return out

    def _missing(self, key: str, ranks: list[int], timeout_s: float) -> DeadlineError:
        missing = [r for r in ranks if self.board.peek(f"{key}/{r}") is None]
        return DeadlineError(
            "ranks did not report in time",
            kind="board",
            where=key,
            wanted=f"all {self.board.world} ranks within {timeout_s:.0f} s",
            found=f"missing ranks {missing[:16]}{' ...' if len(missing) > 16 else ''}",
            hint=EVERY_RANK,
        )


def _value(raw: bytes) -> bytes:
    """Return what a rank posted, or raise what it raised."""
    if raw.startswith(b"-"):
        raise CkptdError.from_dict(posted(error_fields, raw[1:]))
    return raw[1:]


def _levels(rank: int, world: int) -> int:
    """Return how many levels of ranks a tree has below one of them."""
    level = 0
    while rank % _FAN ** (level + 1) == 0 and rank + _FAN**level < world:
        level += 1
    return level


def _below(rank: int, world: int) -> list[int]:
    """Return the ranks of a tree that post to one of them."""
    levels = range(_levels(rank, world))
    below = [rank + n * _FAN**level for level in levels for n in range(1, _FAN)]
    return [r for r in below if r < world]


def _above(rank: int) -> int:
    """Return the rank to which one of a tree posts; 0 of rank 0."""
    span = _FAN
    while rank and rank % span == 0:
        span *= _FAN
    return rank - rank % span


def _hashed(listed: bytes) -> bytes:
    return hashlib.sha256(listed).digest()[:_NUMBER_BYTES]


def _reported(error: Exception) -> CkptdError:
    """Return what other ranks raise for an error."""
    if isinstance(error, CkptdError):
        return error
    return CkptdError(
        "an error of the program interrupted a rank",
        kind="crashed",
        found=repr(error)[:500],
        hint="the output of that rank has the traceback",
    )


_values = msgpack_decoder(list[bytes])
_members = json_decoder(dict[str, tuple[int, ...]])


def host_members(agreement: Agreement) -> tuple[int, ...]:
    """Return the group ranks on this rank's host, rising. One round on the board."""
    return _hosts(agreement)[host_id()]


def host_count(agreement: Agreement) -> int:
    """Return the number of hosts of the group. One round on the board."""
    return len(_hosts(agreement))


def _hosts(agreement: Agreement) -> dict[str, tuple[int, ...]]:
    def tabulate(ids: list[bytes]) -> bytes:
        table = by_key((name.decode(errors="replace"), rank) for rank, name in enumerate(ids))
        return msgspec.json.encode(table)

    return posted(_members, agreement.all_reports("hosts", host_id().encode(), tabulate))


def bind_address() -> str:
    """Return the address by which other nodes of the job reach this one; see `address_towards`."""
    return address_towards(os.environ.get("MASTER_ADDR", "localhost"))


_FIRST_POLL_S = 0.0005
_LONGEST_POLL_S = 0.05
_MAC_BYTES = 16
_ABSENT = "\x01absent"  # what `compare_set` gives back where there is nothing; nobody posts it
_boards_made: dict[str, int] = {}


class JobBoard(OfOneProcess):
    """A board over torch's own store, with every key below one prefix.

    The connection is a clone of the job's: a wait in one thread does not hold up another.

    torch's store accepts whatever reaches its port. So where the job has a secret, every value
    carries a MAC over its name and itself, with a key that is of the secret and of this life of the
    ranks, and another is refused: a stranger can end the job there, as it can end its rendezvous,
    and cannot make ranks believe what no rank has posted here in this life. A name has the round,
    and the rank that writes it; what is posted twice under one name tells its order itself.
    Counters have no MAC: the store itself adds, and nothing that is loaded follows from them.

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
    life
        See `Agreement.life`. Empty for the board on which ranks agree on one.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        prefix: str,
        secret: bytes | None = None,
        life: bytes = b"",
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._secret: bytes | None = None
        if secret is not None:
            from ckptd.base.net.signing import derived_key

            self._secret = derived_key(secret, "board", life.hex())
        self.rank = rank
        self.world = world

    def clone(self) -> JobBoard:
        """Return the same board on a connection of its own, for another thread."""
        twin = JobBoard(_clone(self._store), self.rank, self.world, self._prefix)
        twin._secret = self._secret
        return twin

    def set(self, key: str, value: bytes) -> None:
        """See `ckptd.base.runtime.ranks.Board`."""
        name = self._prefix + key
        self._call(self._store.set, name, self._mac(name, value) + value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `ckptd.base.runtime.ranks.Board`."""
        end = time.monotonic() + timeout_s
        pause = _FIRST_POLL_S
        while (value := self.peek(key)) is None:
            if time.monotonic() > end:
                raise DeadlineError(
                    "no rank published a value in time",
                    kind="board",
                    where=key,
                    wanted=f"within {timeout_s:.0f} s",
                    hint=EVERY_RANK,
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_S)
        return value

    def peek(self, key: str) -> bytes | None:
        """See `ckptd.base.runtime.ranks.Board`."""
        # In one call: what `check` finds can go before `get`, which would wait until it comes back.
        name = self._prefix + key
        raw = self._call(self._store.compare_set, name, _ABSENT, _ABSENT)
        return None if raw == _ABSENT.encode() else self._checked(name, raw)

    def peek_all(self, keys: list[str]) -> list[bytes] | None:
        """See `ckptd.base.runtime.ranks.Board`."""
        names = [self._prefix + key for key in keys]
        if not self._call(self._store.check, names):
            return None
        raw = self._call(self._store.multi_get, names)
        return [self._checked(*each) for each in zip(names, raw, strict=True)]

    def add(self, key: str, amount: int = 1) -> int:
        """See `ckptd.base.runtime.ranks.Board`."""
        return int(self._call(self._store.add, self._prefix + key, amount))

    def count(self, key: str) -> int:
        """See `ckptd.base.runtime.ranks.Board`."""
        # Adding nothing makes the key: a store must not fill with counters that were looked for.
        return self.add(key, 0) if self._call(self._store.check, [self._prefix + key]) else 0

    def delete(self, key: str) -> None:
        """See `ckptd.base.runtime.ranks.Board`."""
        self._call(self._store.delete_key, self._prefix + key)

    def _checked(self, name: str, raw: bytes) -> bytes:
        """Return the value in what the store has, if its MAC is right."""
        if self._secret is None:
            return raw
        mac, value = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(name, value)):
            raise _not_of_this_life(name)
        return value

    def _mac(self, name: str, value: bytes) -> bytes:
        if self._secret is None:
            return b""
        key = name.encode()
        signed = b"".join((len(key).to_bytes(8, "little"), key, value))
        return hmac.digest(self._secret, signed, "sha256")[:_MAC_BYTES]

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except dist.DistStoreError as error:
            raise DeadlineError(
                "the job's store had a value, and when it was read it had none",
                kind="board",
                where=self._prefix,
                found=str(error).splitlines()[0][:200],
                hint=EVERY_RANK,
            ) from error
        except (RuntimeError, dist.DistError) as error:
            raise CkptdError(
                "the job's store is gone",
                kind="board-lost",
                found=str(error).splitlines()[0][:200],
                hint="rank 0 or the launcher has ended; see their logs",
            ) from error


def _not_of_this_life(name: str) -> RefusedError:
    from ckptd.base.net.signing import SECRET_VARIABLE

    return RefusedError(
        "a value in the job's store was not written there by a rank of this life of the job",
        kind="bad-mac",
        where=name,
        wanted=f"a MAC for this name, with the job's secret ({SECRET_VARIABLE}) and of this life",
        hint=f"{SECRET_VARIABLE} must be set on all nodes or on none, and be the same; "
        "if it is, another program writes to the job's store: keep its port from others",
    )


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
                hint="call torch.distributed.init_process_group first",
            )
        return (0,)
    return tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))


def forget_boards() -> None:
    """Count boards again: this process joins another store, with ranks that have made none."""
    _boards_made.clear()


def board_of(process_group: Any, timeout_s: float) -> Board:
    """Return a board for the ranks of a process group; the default group when None.

    Every rank of the group calls this equally often: the count keeps boards apart. They wait for
    one another, and each board has a life of its own: a launcher may keep its store when it starts
    the ranks again, with what they have written there.
    """
    ranks = global_ranks(process_group)
    if len(ranks) == 1:
        return LocalBoard()
    from ckptd.base.net.handed import ranks_key

    own = digest_hex(repr(ranks).encode())[:12]
    _boards_made[own] = _boards_made.get(own, 0) + 1
    store = dist.distributed_c10d._get_default_store()
    store = _clone(store)
    rank = ranks.index(dist.get_rank())
    prefix = f"ckptd/{own}/{_boards_made[own]}/"
    return open_board(store, rank, len(ranks), prefix, ranks_key(), timeout_s)


def open_board(
    store: Any, rank: int, world: int, prefix: str, secret: bytes | None, timeout_s: float
) -> JobBoard:
    """Return the board of a new life of the ranks; see `JobBoard`.

    Raises
    ------
    CkptdError
        Not all of them come within `timeout_s`, or they have different secrets.
    """
    store.set_timeout(timedelta(seconds=timeout_s))
    opening = JobBoard(store, rank, world, f"{prefix}opening/", secret)
    life = Agreement(opening, timeout_s).life()
    return JobBoard(store, rank, world, f"{prefix}{life.hex()}/", secret, life)
