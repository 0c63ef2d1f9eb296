"""Ranks of one host: each block is brought once; one rank's error is everybody's."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptd.base.digest import BLOCK_BYTES
from ckptd.base.grids.block import box_region
from ckptd.base.runtime.ranks import LocalBoard, RankHeartbeat, agree, identity, liveness, wait
from ckptd.checkpoint.load import hostgroup as hostbuffer
from ckptd.checkpoint.load.hostgroup import HostGroup, SharedMemory
from ckptd.checkpoint.load.plan import Want, read_plan
from ckptd.checkpoint.load.read import ReadReport, execute
from ckptd.errors import CkptdError, CorruptError, DeadlineError, StoreError, UsageError
from ckptd.store.base import MeterSpec, OpenFile, Store
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore
from ckptd.store.wrap import Meter
from ckptd.testing.ranks import rank_outcomes, run_ranks
from ckptd.types import Box
from tests.checkpoint.load.builder import Array, Built, Saved, build
from tests.processes import PATIENCE_S, until

WORLD = 4
ROWS, COLUMNS = 64, 65536  # 16 MiB, rows of 256 KiB


class Remote(Meter):
    """A local store that looks like one without files."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, MeterSpec())
        self.capabilities = dataclasses.replace(inner.capabilities, local_files=False)

    def local_path(self, key: str) -> Path | None:
        return None

    def open_file(self, key: str) -> OpenFile | None:
        return None


def values() -> Array:
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


def tensors() -> dict[str, Saved]:
    return {
        "rows": Saved.rows(values(), WORLD),
        "small": Saved.whole(np.arange(1000, dtype=np.int64), file=2),
    }


def columns(rank: int, world: int = WORLD) -> Box:
    width = COLUMNS // world
    return Box((0, rank * width), (ROWS, width))


def threads(world: int, work: Callable[[int, LocalBoard], Any]) -> list[Any]:
    """Call `work` in `world` threads that share a board; results or errors by rank."""
    first = LocalBoard(0, world)
    boards = [first, *(LocalBoard(r, world, first) for r in range(1, world))]
    out: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            out[rank] = work(rank, boards[rank])
        except BaseException as error:  # noqa: BLE001
            out[rank] = error

    started = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world)]
    for t in started:
        t.start()
    for t in started:
        t.join(PATIENCE_S)
        assert not t.is_alive()
    return out


def load_columns(
    built: Built, store: Store, rank: int, host: HostGroup, **options: Any
) -> tuple[Array, ReadReport]:
    box = columns(rank)
    target = np.full(box.shape, -1, np.float32)
    small = np.zeros(1000, np.int64)
    wants = [
        Want(0, (box_region(box),), target.reshape(-1)),
        Want(1, (box_region(Box((0,), (1000,))),), small),
    ]
    plan = read_plan(built.manifest, built.filemap, wants, store=store)
    try:
        report = execute(plan, store, host=host, **options)
    except CkptdError as error:
        error.add_note("untouched" if (target == -1).all() else "touched")
        raise
    assert (small == np.arange(1000)).all()
    assert (target == values()[:, box.offset[1] : box.end[1]]).all()
    return target, report


@pytest.fixture(params=["local", "remote"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    inner = LocalStore(tmp_path / "root")
    return Remote(inner) if request.param == "remote" else inner


@pytest.mark.parametrize("budget", [None, 6 << 20])
def test_rows_loaded_as_columns_are_fetched_once(store: Store, budget: int | None) -> None:
    built = build(store, tensors(), publish=False)
    reports: list[ReadReport] = [
        result[1]
        for result in threads(
            WORLD,
            lambda rank, board: load_columns(
                built,
                store,
                rank,
                HostGroup(board, "k", rank, range(WORLD)),
                budget_bytes=budget,
            ),
        )
    ]
    needed = sum(r.bytes_needed for r in reports)
    fetched = sum(r.bytes_fetched for r in reports)
    assert needed >= ROWS * COLUMNS * 4
    if budget is None:
        assert fetched <= 1.1 * needed
        assert max(r.bytes_fetched for r in reports) <= 1.5 * min(r.bytes_fetched for r in reports)
    else:
        assert {r.waves for r in reports} == {reports[0].waves}
        assert reports[0].waves > 1
        assert fetched <= needed + reports[0].waves * 3 * BLOCK_BYTES
    if isinstance(store, Remote):
        assert store.snapshot()["read_into"].moved_bytes == fetched


def test_nothing_is_left_on_the_board_or_in_memory(tmp_path: Path) -> None:
    store = Remote(LocalStore(tmp_path))
    built = build(store, tensors(), publish=False)
    before = set(os.listdir("/dev/shm"))
    left: dict[str, bytes] = {}

    def work(rank: int, board: LocalBoard) -> None:
        load_columns(built, store, rank, HostGroup(board, "k", rank, range(WORLD)))
        if rank == 0:
            left.update(board._values)

    assert threads(WORLD, work) == [None] * WORLD
    new = set(os.listdir("/dev/shm")) - before
    assert not [n for n in new if n.startswith(f"ckptd-{os.getpid()}-")]
    assert not [k for k in left if "needs" in k and k.endswith("/0")]
    assert [k for k in left if k.endswith("/all")] == ["k/written/all"]


def test_two_hosts_and_one_of_one_rank(store: Store) -> None:
    built = build(store, tensors(), publish=False)
    hosts = [(0, 2), (1, 3)]  # ranks of a host need not follow each other

    def work(rank: int, board: LocalBoard) -> ReadReport:
        members = next(h for h in hosts if rank in h)
        return load_columns(built, store, rank, HostGroup(board, "k", rank, members))[1]

    reports = threads(WORLD, work)
    total = sum(r.bytes_fetched for r in reports)
    assert total <= 2 * 1.1 * (ROWS * COLUMNS * 4)
    assert total >= 2 * ROWS * COLUMNS * 4


def test_one_ranks_error_is_everybodys(store: Store) -> None:
    built = build(store, tensors(), publish=False)
    key = built.manifest.files[3].path
    raw = bytearray(store.get(key))
    raw[-1] ^= 1
    store.put(key, bytes(raw))
    errors = threads(
        WORLD,
        lambda rank, board: load_columns(
            built, store, rank, HostGroup(board, "k", rank, range(WORLD))
        ),
    )
    for error in errors:
        assert isinstance(error, CorruptError)
        assert error.kind == "digest"
        assert "rank 3" in str(error)
        assert "tensor rows (chunk rows@48,0)" in str(error)
        assert not error.state_corrupted
        assert "untouched" in error.__notes__


def test_an_error_on_another_host_stops_everybody(store: Store, tmp_path: Path) -> None:
    built = build(store, tensors(), publish=False)

    def work(rank: int, board: LocalBoard) -> Any:
        members = (0, 1) if rank < 2 else (2, 3)
        empty: Store = LocalStore(tmp_path / "empty")
        if isinstance(store, Remote):
            empty = Remote(empty)
        chosen = empty if rank == 3 else store
        return load_columns(built, chosen, rank, HostGroup(board, "k", rank, members))

    for error in threads(WORLD, work):
        assert isinstance(error, CorruptError)
        assert "of the checkpoint is missing" in error.message
        assert "untouched" in error.__notes__


def test_ranks_of_a_host_with_different_stores(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    built = build(store, tensors(), publish=False)

    def work(rank: int, board: LocalBoard) -> Any:
        chosen = Remote(store) if rank == 1 else store
        return load_columns(built, chosen, rank, HostGroup(board, "k", rank, range(WORLD)))

    results = threads(WORLD, work)
    assert [type(r) for r in results] == [tuple] * WORLD, results


@pytest.mark.parametrize("file", range(WORLD))
def test_a_rank_with_copies_of_the_files_takes_nothing_unverified(
    tmp_path: Path, file: int
) -> None:
    """Others verify for it what they read, and not what it would copy from its own files."""
    store = LocalStore(tmp_path / "root")
    built = build(store, tensors(), publish=False)
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    entry = built.manifest.files[file]
    damaged = tmp_path / "copy" / entry.path
    whole = damaged.read_bytes()
    # In what rank 1 needs of each block, one after the other: most are verified by others.
    for at in range(columns(1).offset[1] * 4, entry.data_bytes, BLOCK_BYTES):
        raw = bytearray(whole)
        raw[entry.data_start + at] ^= 1
        damaged.write_bytes(raw)
        _load_beside_a_copy(tmp_path, built)


def _load_beside_a_copy(tmp_path: Path, built: Built) -> None:
    store = LocalStore(tmp_path / "root")

    def work(rank: int, board: LocalBoard) -> Any:
        chosen = LocalStore(tmp_path / "copy") if rank == 1 else store
        return load_columns(built, chosen, rank, HostGroup(board, "k", rank, range(WORLD)))

    results = threads(WORLD, work)
    if any(isinstance(r, CkptdError) for r in results):
        assert {r.kind for r in results} == {"digest"}
    else:
        assert [type(r) for r in results] == [tuple] * WORLD, results


def test_memory_that_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank then reads for itself: more bytes, the same values."""
    store = Remote(LocalStore(tmp_path))
    built = build(store, tensors(), publish=False)
    refused = threading.local()
    opened = SharedMemory.open

    def refuse(path: str, size: int) -> SharedMemory:
        if getattr(refused, "here", False):
            raise StoreError("no such memory here")
        return opened(path, size)

    monkeypatch.setattr(SharedMemory, "open", staticmethod(refuse))

    def work(rank: int, board: LocalBoard) -> ReadReport:
        refused.here = rank == 2
        return load_columns(built, store, rank, HostGroup(board, "k", rank, range(WORLD)))[1]

    reports = threads(WORLD, work)
    assert sum(r.bytes_fetched for r in reports) >= WORLD * ROWS * COLUMNS * 4


def test_no_room_in_memory_falls_back_to_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostbuffer, "SHM_FOLDER", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = SharedMemory.create(1 << 20)
    assert Path(memory.path).parent == tmp_path
    assert os.stat(memory.path).st_mode & 0o777 == 0o600
    memory.array[:] = 7
    other = SharedMemory.open(memory.path, 1 << 20)
    assert (other.array == 7).all()
    memory.unlink()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(StoreError) as caught:
        SharedMemory.create(1 << 20)
    assert caught.value.kind == "no-space"


def test_a_shared_file_of_another_size_is_refused(tmp_path: Path) -> None:
    memory = SharedMemory.create(1 << 20, str(tmp_path))
    with pytest.raises(StoreError, match="another user"):
        SharedMemory.open(memory.path, 1 << 19)


@pytest.mark.parametrize("members", [(1, 2), (), (0, 9)])
def test_a_group_that_is_none(members: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        HostGroup(LocalBoard(0, 4), "k", 0, members)


# --- waiting -------------------------------------------------------------------------------------


def test_agreement_when_all_is_well() -> None:
    assert threads(3, lambda _, board: agree(board, "k", None)) == [None] * 3


def test_agreement_on_the_lowest_error() -> None:
    def work(rank: int, board: LocalBoard) -> None:
        agree(board, "k", CorruptError(f"of {rank}", kind="digest") if rank else None)

    errors = threads(3, work)
    assert [e.message for e in errors] == ["of 1", "of 1", "of 2"]
    assert all(e.kind == "digest" for e in errors)
    assert "met by rank 1" in errors[0].__notes__


def test_a_rank_that_never_comes_is_named_on_all_others() -> None:
    def work(rank: int, board: LocalBoard) -> None:
        if rank != 2:
            agree(board, "k", None, pulse=RankHeartbeat(board, "k"), stall_s=0.3)

    errors = threads(3, work)
    assert isinstance(errors[0], DeadlineError)
    assert isinstance(errors[1], DeadlineError)
    assert "rank 2" in str(errors[0])
    assert "rank 2" in str(errors[1])


def test_a_slow_rank_with_a_pulse_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has beaten once more whenever it is looked at, and comes after five looks."""
    looks, enough, peek = itertools.count(1), threading.Event(), LocalBoard.peek

    def beats(board: LocalBoard, key: str) -> bytes | None:
        if "/pulse/" not in key:
            return peek(board, key)
        if (number := next(looks)) == 5:
            enough.set()
        return b"%d" % number

    def work(rank: int, board: LocalBoard) -> None:
        pulse = RankHeartbeat(board, "k")
        assert rank == 0 or enough.wait(PATIENCE_S)
        agree(board, "k", None, pulse=pulse, stall_s=0.01)

    monkeypatch.setattr(LocalBoard, "peek", beats)
    assert threads(2, work) == [None, None]


def test_giving_up_reaches_those_who_wait() -> None:
    def work(rank: int, board: LocalBoard) -> None:
        pulse = RankHeartbeat(board, "k")
        if rank == 1:
            pulse.give_up(CorruptError("bad", kind="digest"))
        else:
            wait(board, "never", 1, pulse=pulse, stall_s=30)

    error, _ = threads(2, work)
    assert isinstance(error, CorruptError)
    assert error.kind == "digest"


def test_liveness_of_processes() -> None:
    alive = liveness(identity())
    assert alive is not None
    assert alive()
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    other = liveness((pid, stat[19], identity()[2]))
    assert other is not None
    assert other()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not other()
    assert liveness((pid, "5", "another boot")) is None


# --- processes -----------------------------------------------------------------------------------


def process_rank(folder: str, remote: bool) -> tuple[int, int, int]:
    from ckptd.base.torch.ranks import board_of

    board = board_of(None, 60.0)
    store: Store = LocalStore(folder)
    if remote:
        store = Remote(store)
    built = build(MemoryStore(f"plan{board.rank}"), tensors(), publish=False)
    host = HostGroup(board, "k", board.rank, range(board.world))
    report = load_columns(built, store, board.rank, host)[1]
    moved = store.snapshot()["read_into"].moved_bytes if isinstance(store, Remote) else 0
    return report.bytes_needed, report.bytes_fetched, moved


@pytest.mark.dist
@pytest.mark.parametrize("remote", [False, True])
def test_processes_share_a_host(tmp_path: Path, remote: bool) -> None:
    build(LocalStore(tmp_path), tensors(), publish=False)
    results = run_ranks(WORLD, process_rank, str(tmp_path), remote)
    needed, fetched, moved = (sum(column) for column in zip(*results, strict=True))
    assert fetched <= 1.1 * needed
    assert moved == (fetched if remote else 0)


class Deadly(Remote):
    """Kills its process in the middle of a read."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def dying_rank(folder: str) -> str:
    from ckptd.base.torch.ranks import board_of

    board = board_of(None, 60.0)
    store = (Deadly if board.rank == 2 else Remote)(LocalStore(folder))
    built = build(MemoryStore(f"plan{board.rank}"), tensors(), publish=False)
    host = HostGroup(board, "k", board.rank, range(board.world), stall_s=8.0)
    try:
        load_columns(built, store, board.rank, host)
    except CkptdError as error:
        return f"{error.kind} {error.where} {error.__notes__}"
    return "loaded"


def shared_files() -> set[str]:
    """Names of all files that ranks of hosts share now."""
    return {n for n in os.listdir("/dev/shm") if re.fullmatch(r"ckptd-\d+-[0-9a-f]{16}", n)}


@pytest.mark.dist
def test_a_killed_rank_ends_the_read_on_all_others(tmp_path: Path) -> None:
    build(LocalStore(tmp_path), tensors(), publish=False)
    before = shared_files()
    outcomes = rank_outcomes(WORLD, dying_rank, str(tmp_path), grace_s=PATIENCE_S)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for rank in (0, 1, 3):
        assert "rank 2" in str(outcomes[rank].value)
        assert "untouched" in str(outcomes[rank].value)
    # Tests beside this one make and remove such files as well: what is left behind stays.
    until(lambda: not shared_files() - before)


def test_assignments_cover_every_block_once() -> None:
    from ckptd.base.grids.runs import count, merge
    from ckptd.checkpoint.load.hostgroup import make_schedule
    from ckptd.checkpoint.load.plan import BlockLine

    rng = random.Random(1)
    line = BlockLine([50 << 20, 0, 7 << 20, 300 << 20])
    for _ in range(50):
        needs = []
        for _ in range(rng.randrange(1, 6)):
            pairs = []
            for _ in range(rng.randrange(6)):
                file = rng.choice([0, 2, 3])
                size = [50, 0, 7, 300][file]
                lo = rng.randrange(size)
                pairs.append(
                    (line.first(file) + lo, line.first(file) + rng.randrange(lo, size) + 1)
                )
            needs.append(merge(np.array(pairs, np.int64).reshape(-1, 2)))
        everybody = merge(np.concatenate(needs))
        schedules = [
            make_schedule(line, needs, r, budget_blocks=1 << 20, gap=0) for r in range(len(needs))
        ]
        mine = [s.mine for s in schedules]
        assert (merge(np.concatenate(mine)) == everybody).all()
        assert sum(map(count, mine)) == count(everybody)
        if count(everybody):
            share = -(-count(everybody) // len(needs))
            assert max(map(count, mine)) <= share
