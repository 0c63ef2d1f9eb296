"""A stranger at torch's store, without the job's secret, keeps what he reads in earlier lives.

He may end a life, and cannot make a rank believe anything that no rank posted there in this life.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch.distributed import HashStore

import ckptd
from ckptd.base.net.signing import SECRET_VARIABLE
from ckptd.base.runtime import announcements
from ckptd.base.runtime.announcements import Announcements
from ckptd.base.runtime.ranks import LocalBoard, RankHeartbeat, wait
from ckptd.base.torch import ranks
from ckptd.base.torch.ranks import Agreement, JobBoard, open_board
from ckptd.errors import CkptdError, CorruptError, DeadlineError, RefusedError
from ckptd.testing.ranks import rank_outcomes, run_ranks
from tests.processes import PATIENCE_S

SECRET = b"a secret of no digits, but long"
WORLD = 5
SHORT_S = 0.3


@pytest.fixture(autouse=True)
def fan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few ranks make a tree of several levels."""
    monkeypatch.setattr(ranks, "_FAN", 2)
    monkeypatch.setattr(announcements, "_PATIENCE_S", SHORT_S)


def everywhere(world: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work(rank)`` in a thread a rank; return what each returned or raised."""

    def run(rank: int) -> Any:
        try:
            return work(rank)
        except CkptdError as error:
            return error

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(world)))


class Tapped:
    """A store of torch at which a stranger reads everything, and acts before ranks read."""

    def __init__(self, store: Any, act: Callable[[Any, str], None] = lambda *_: None) -> None:
        self.store, self.act = store, act
        self.seen: list[tuple[str, bytes]] = []
        self.lock = threading.RLock()

    def set(self, name: str, value: bytes) -> None:
        with self.lock:
            self.seen.append((name, value))
            self.store.set(name, value)

    def check(self, names: list[str]) -> bool:
        with self.lock:
            for name in names:
                if self.store.check([name]):
                    self.act(self.store, name)
            return bool(self.store.check(names))

    def compare_set(self, name: str, expected: str, desired: str) -> bytes:
        with self.lock:
            if self.store.check([name]):
                self.act(self.store, name)
            return bytes(self.store.compare_set(name, expected, desired))

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError
        return getattr(self.store, name)


def opened(store: Any, rank: int, world: int = WORLD, timeout_s: float = PATIENCE_S) -> JobBoard:
    return open_board(store, rank, world, "job/", SECRET, timeout_s)


@pytest.mark.parametrize("fan", [2, 3, 128])
@pytest.mark.parametrize("world", [2, 3, 7, 28])
def test_every_rank_has_a_part_in_the_name_of_a_life(
    world: int, fan: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_FAN", fan)

    def work(store: Any) -> Callable[[int], bytes]:
        return lambda rank: Agreement(JobBoard(store, rank, world, "", SECRET), PATIENCE_S).life()

    lives = [everywhere(world, work(HashStore())) for _ in range(2)]
    assert [len(set(life)) for life in lives] == [1, 1]
    assert lives[0][0] != lives[1][0]


def test_what_is_posted_in_one_life_is_refused_in_the_next() -> None:
    stores = [HashStore(), HashStore()]
    one, two = (everywhere(WORLD, lambda rank, store=s: opened(store, rank)) for s in stores)
    one[0].set("candidates", b"10")
    stores[1].set(f"{two[0]._prefix}candidates", stores[0].get(f"{one[0]._prefix}candidates"))
    assert one[1].peek("candidates") == one[1].clone().peek("candidates") == b"10"
    with pytest.raises(RefusedError, match="of this life of the job") as caught:
        two[1].peek("candidates")
    assert caught.value.kind == "bad-mac"
    assert str(caught.value.where).endswith("/candidates")
    one[0].set("round/2", b"10")  # another round, another rank
    stores[0].set(f"{one[0]._prefix}round/3", stores[0].get(f"{one[0]._prefix}round/2"))
    with pytest.raises(RefusedError):
        one[1].peek("round/3")


@pytest.mark.parametrize(
    "part", ["life/ask/0", "life/ask/2", "life/1", "life/2", "life/4", "life/of/0", "life/of/2"]
)
def test_a_rank_that_finds_no_number_of_its_own_is_in_no_life(part: str) -> None:
    """Whatever of the opening is replayed, again and again, the ranks that come in are in one."""
    earlier = Tapped(HashStore())
    everywhere(WORLD, lambda rank: opened(earlier, rank))
    old = dict(each for each in earlier.seen if each[0].endswith(part))
    assert old

    def replay(store: Any, name: str) -> None:
        if name in old:
            store.set(name, old[name])

    store = Tapped(HashStore(), replay)
    found = everywhere(WORLD, lambda rank: opened(store, rank, timeout_s=SHORT_S))
    errors = [each for each in found if isinstance(each, CkptdError)]
    assert errors
    assert {e.kind for e in errors} == {"board"}
    assert len({each._prefix for each in found if isinstance(each, JobBoard)}) <= 1


@pytest.mark.parametrize("secret", [SECRET, None])
def test_lives_follow_one_another_in_one_store(secret: bytes | None) -> None:
    """As with a launcher that keeps its store when it starts the ranks again."""
    store = HashStore()
    lives = []
    for step in (10, 20):
        boards = everywhere(
            WORLD, lambda rank: open_board(store, rank, WORLD, "job/", secret, PATIENCE_S)
        )

        def zero(rank: int, boards: list[JobBoard] = boards, step: int = step) -> Any:
            return Agreement(boards[rank], PATIENCE_S).on_rank_zero("candidates", lambda: step)

        assert everywhere(WORLD, zero) == [step] * WORLD
        lives.append(boards[0]._prefix)
    assert lives[0] != lives[1]


@pytest.mark.parametrize("late", [0, 1, 2, 3, 4])
def test_an_opening_that_was_cut_short_keeps_nobody_from_the_next(late: int) -> None:
    """All but one had come when the launcher ended them; what they posted is still there."""
    store = HashStore()

    def work(rank: int) -> Any:
        return None if rank == late else opened(store, rank, timeout_s=0.1)

    cut = everywhere(WORLD, work)
    assert {e.kind for e in cut if e is not None} == {"board"}
    boards = everywhere(WORLD, lambda rank: opened(store, rank))
    assert len({board._prefix for board in boards}) == 1


@pytest.mark.parametrize("without", [0, 1, 2, 4])
def test_a_rank_without_the_secret_is_named(without: int) -> None:
    store = HashStore()

    def work(rank: int) -> JobBoard:
        secret = None if rank == without else SECRET
        return open_board(store, rank, WORLD, "job/", secret, 3.0)  # one at least comes so far

    found = everywhere(WORLD, work)
    errors = [each for each in found if isinstance(each, CkptdError)]
    assert len(errors) == WORLD
    assert {e.kind for e in errors} <= {"bad-mac", "board"}
    refused = [e.where for e in errors if e.kind == "bad-mac"]
    assert refused
    assert all(str(where).endswith(f"/{without}") for where in refused)


class Vanishing(HashStore):
    """A store in which every value goes as soon as somebody has asked whether it is there."""

    def check(self, names: list[str]) -> bool:
        there = super().check(names)
        for name in names:
            self.delete_key(name)
        return there


def test_a_value_that_goes_while_it_is_read_keeps_nobody_waiting() -> None:
    """torch's `get` and `multi_get` wait for what is not there, by default five minutes."""
    store = Vanishing()
    store.set_timeout(timedelta(seconds=SHORT_S))
    board = JobBoard(store, 0, 2, "job/", SECRET)
    assert board.peek("one") is None
    board.set("one", b"1")
    assert board.peek("one") == b"1"
    with pytest.raises(DeadlineError, match="when it was read it had none") as caught:
        board.peek_all(["one"])
    assert caught.value.kind == "board"


class Counting(HashStore):
    """A store that counts the round trips to it."""

    calls = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "check", "compare_set", "multi_get", "add", "delete_key"):
            self.calls += 1
        return super().__getattribute__(name)


def test_rank_zero_opens_a_life_of_thousands_in_few_round_trips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_FAN", 128)
    store, world = Counting(), 4000

    number = bytes(16)
    monkeypatch.setattr(ranks.secrets, "token_bytes", lambda size: bytes(size))
    for rank in (*range(1, 128), *range(128, world, 128)):
        board = JobBoard(store, rank, world, "job/opening/", SECRET)
        board.set(f"life/{rank}", number + os.urandom(16))
    store.calls = 0
    opened(store, 0, world)
    assert store.calls < 10


def test_an_old_sign_of_a_rank_is_no_progress() -> None:
    """Replayed in turn, two signs of a rank that hangs kept those waiting that waited for it."""
    one = LocalBoard(0, 2)
    other = LocalBoard(1, 2, one)
    pulse = RankHeartbeat(one, "read")
    signs = iter(range(10**9))

    class Replayed(LocalBoard):
        def peek(self, key: str) -> bytes | None:
            at = next(signs)
            return (None, b"1", b"2")[at % 3] if at < 1000 else None

    pulse = RankHeartbeat(Replayed(0, 2, one), "read")
    with pytest.raises(DeadlineError, match="no progress"):
        wait(other, "never", 1, pulse=pulse, stall_s=0.05)
    assert next(signs) < 100


# -- the machine ----------------------------------------------------------------------------------


def plain(name: str) -> str:
    """Return a name without the life that is in it."""
    return re.sub("[0-9a-f]{32}/", "", name)


ACTS = ("replay", "replay", "another name", "swap", "delete", "garbage")


def script(store: Any, rank: int, life: int, truth: bool = False) -> tuple[list[Any], str]:
    """Return what a rank believed in this life, in order, and how it ended."""
    out: list[Any] = []
    try:
        agreement = Agreement(opened(store, rank, timeout_s=SHORT_S), SHORT_S)
        zero = agreement.on_rank_zero
        mine = b"%d of %d," % (rank, life)
        out.append(zero("candidates", lambda: [life]))
        out.append(agreement.all_reports("hosts", mine, b"".join))
        agreement.no_errors(None)
        out.append(zero("claim", lambda: 7 * life))
        out.append(agreement.in_tree("publishers", mine, b"".join))
        out.append(Announcements(agreement.board).word(lambda _: f"word{life}", 2.0))
        out.append(zero("candidates", lambda: [life, "again"]))
        bad = CorruptError(f"of life {life}", kind="digest")
        agreement.no_errors(bad if rank == 1 and life % 3 == 0 else None)
        out.append(zero("experts", lambda: f"experts {life}"))
    except CkptdError as error:
        return out, error.message if error.kind == "digest" else error.kind
    return out, "well"


def would_have_been(life: int) -> tuple[list[Any], str]:
    """What every rank believes of a life that no stranger disturbs, and how that ends."""
    reports = b"".join(b"%d of %d," % (rank, life) for rank in range(WORLD))
    word, again = f"word{life}", [life, "again"]
    out = [[life], reports, 7 * life, reports, word, again, f"experts {life}"]
    return (out[:-1], f"of life {life}") if life % 3 == 0 else (out, "well")


class StrangerMachine(RuleBasedStateMachine):
    """Lives of one job, one after another; a stranger keeps all that was ever in their stores."""

    def __init__(self) -> None:
        super().__init__()
        self.life = 0
        self.kept: list[tuple[str, bytes]] = []

    def live(self, acts: list[tuple[int, str, int]]) -> list[tuple[list[Any], str]]:
        self.life += 1
        left = list(acts)
        store = Tapped(HashStore())

        def act(inner: Any, name: str) -> None:
            if not left:
                return
            reads, what, pick = left[0]
            if reads:
                left[0] = reads - 1, what, pick
                return
            left.pop(0)
            if what == "delete":
                inner.delete_key(name)
            elif what == "garbage":
                inner.set(name, b"garbage")
            elif what == "swap":
                other = store.seen[pick % len(store.seen)][0]
                if inner.check([other]):
                    here, there = inner.get(name), inner.get(other)
                    inner.set(name, there)
                    inner.set(other, here)
            else:
                same = [v for n, v in self.kept if plain(n) == plain(name)]
                same = same if what == "replay" else []
                values = same or [v for _, v in self.kept + store.seen]
                inner.set(name, values[pick % len(values)])

        store.act = act
        found = everywhere(WORLD, lambda rank: script(store, rank, self.life))
        self.kept += store.seen
        return found

    @rule()
    def a_life_in_which_he_only_reads(self) -> None:
        for out, end in self.live([]):
            self.judge(out, end)

    @rule(
        acts=st.lists(
            st.tuples(st.integers(0, 12), st.sampled_from(ACTS), st.integers(0, 10**4)),
            min_size=1,
            max_size=6,
        )
    )
    def a_life_in_which_he_acts(self, acts: list[tuple[int, str, int]]) -> None:
        for out, end in self.live(acts):
            self.judge(out, end)

    def judge(self, out: list[Any], end: str) -> None:
        """A clear end, or what would have been."""
        believed, ended = would_have_been(self.life)
        assert out == believed[: len(out)]
        assert end in ("bad-mac", "board") or (out, end) == (believed, ended)


def test_a_stranger_ends_a_life_or_changes_nothing() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        StrangerMachine,
        settings=settings(max_examples=12, stateful_step_count=6, deadline=None),
    )


def test_lives_that_nobody_disturbs_end_as_they_would() -> None:
    machine = StrangerMachine()
    for _ in range(4):
        found = machine.live([])
        assert found == [would_have_been(machine.life)] * WORLD


# -- a job ----------------------------------------------------------------------------------------


def train(root: str, step: int, old: dict[str, bytes]) -> tuple[int | None, dict[str, bytes]]:
    """Load, and save `step`; a stranger puts `old` in the store just before rank 1 reads."""
    dist = torch.distributed
    store = dist.distributed_c10d._get_default_store()
    real = JobBoard.peek

    def peek(self: JobBoard, key: str) -> bytes | None:
        name = self._prefix + key
        if plain(name) in old and store.check([name]):
            store.set(name, old[plain(name)])
        return real(self, key)

    if dist.get_rank() == 1:
        JobBoard.peek = peek  # type: ignore[method-assign]
    state = {"w": torch.zeros(8)}
    with ckptd.Checkpointer(root, timeout_s=10.0 if old else PATIENCE_S) as ck:
        loaded = ck.load(state) if ck.latest() is not None else None
        assert loaded in (None, int(state["w"][0]))
        dist.barrier()
        told = {plain(key): store.get(key) for key in store.list_keys() if "ckptd/" in key}
        state["w"].fill_(step)
        if step:
            ck.save(step, state).durable(PATIENCE_S)
    return loaded, told


@pytest.mark.dist
@pytest.mark.parametrize("words", [("candidates",), ("candidates", "opening/life/"), ("",)])
def test_ranks_of_a_job_never_load_different_steps(tmp_path: Path, words: tuple[str, ...]) -> None:
    """With a MAC of the name and the value alone, rank 0 loaded step 20 and rank 1 step 10."""
    env, root = {SECRET_VARIABLE: SECRET.decode()}, str(tmp_path / "root")
    assert [loaded for loaded, _ in run_ranks(2, train, root, 10, {}, env=env)] == [None, None]
    found = run_ranks(2, train, root, 20, {}, env=env)
    assert [loaded for loaded, _ in found] == [10, 10]
    old = {k: v for k, v in found[0][1].items() if any(word in k for word in words)}
    assert any("candidates" in name for name in old)
    outcomes = rank_outcomes(2, train, root, 0, old, env=env, grace_s=30.0)
    for outcome in outcomes:  # what would have been, or a clear end
        if outcome.returned:
            assert outcome.value is not None
            assert outcome.value[0] == 20
        else:
            assert isinstance(outcome.error, CkptdError), outcomes
            assert outcome.error.kind in ("bad-mac", "board", "rank-died")
