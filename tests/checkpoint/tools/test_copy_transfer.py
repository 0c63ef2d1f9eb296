"""Copies between roots: whole or absent wherever they die, and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ckptd.base.digest import BLOCK_BYTES
from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.runtime.pool import run_all
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.format.names import LEASES, CommitName
from ckptd.checkpoint.format.records import Lease, encode_record
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import plan_gc, run_gc
from ckptd.checkpoint.root.leases import leases
from ckptd.checkpoint.root.working import Working
from ckptd.checkpoint.tools.copy import Copied, Transfer
from ckptd.checkpoint.tools.diff import diff
from ckptd.checkpoint.tools.verify import verify
from ckptd.errors import (
    CkptdError,
    ConflictError,
    CorruptError,
    DeadlineError,
    RefusedError,
    StoreError,
    UsageError,
)
from ckptd.store import StoreSpec, open_store
from ckptd.store.base import FaultRule, FaultSpec, Store
from ckptd.store.fault import Fault
from ckptd.store.memory import forget_memory
from tests.checkpoint.load.builder import Saved, build
from tests.cli.roots import by_columns, cut, flip, make_root, put, rank_file, values
from tests.processes import PATIENCE_S
from tests.sampling import sampled


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Catalogue]:
    with open_store(make_root(tmp_path / "source", (10, 20))) as store:
        yield Catalogue(store)


@pytest.fixture(params=["local", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = str(tmp_path / "target") if request.param == "local" else f"memory://{tmp_path}"
    with open_store(url) as store:
        yield store
    forget_memory(str(tmp_path))


def copy(source: Catalogue, store: Store, *steps: int) -> list[Copied]:
    with closing(Transfer(source, Catalogue(store))) as transfer:
        return [transfer.copy(source.commit(source.find(s))) for s in steps]


def assert_same(source: Catalogue, store: Store, step: int) -> None:
    """The copy is whole, and holds what the original holds, metadata included."""
    catalogue = Catalogue(store)
    name = catalogue.find(step)
    assert verify(catalogue, name).findings == ()
    original = source.find(step)
    assert diff(CkptdReader(source, original), CkptdReader(catalogue, name)).same
    a, b = source.commit(original), catalogue.commit(name)
    for field in ("metadata", "created", "world_size", "data_bytes"):
        assert getattr(a, field) == getattr(b, field)
    theirs, ours = source.manifest(original), catalogue.manifest(name)
    assert (theirs.meshes, theirs.witness) == (ours.meshes, ours.witness)
    assert [t.aliases for t in theirs.tensors] == [t.aliases for t in ours.tensors]


def forget_leases(store: Store) -> None:
    """Delete the leases of a machine that died, as when they run out."""
    store.delete([o.key for o in store.list(LEASES)])


def test_copies(source: Catalogue, target: Store) -> None:
    (done,) = copy(source, target, 10)
    assert (done.state, done.generation, done.files, done.reused_files) == ("copied", 1, 4, 0)
    (again,) = copy(source, target, 10)
    assert (again.state, again.generation) == ("present", 1)
    copy(source, target, 20)
    catalogue = Catalogue(target)
    assert [n.step for n in catalogue.line()] == [10, 20]
    assert leases(catalogue) == {}
    for step in (10, 20):
        assert_same(source, target, step)


def test_a_copy_continues_the_line_of_a_job(source: Catalogue, target: Store) -> None:
    catalogue = Catalogue(target)
    put(target, cut(values(1)), 15)
    (done,) = copy(source, target, 20)
    assert done.generation == 2
    assert [n.step for n in catalogue.line()] == [15, 20]
    assert catalogue.generation(2).reason == "cp"
    with pytest.raises(RefusedError, match="newest, 20") as caught:
        copy(source, target, 10)
    assert caught.value.kind == "behind"


def test_another_checkpoint_of_that_step_is_no_copy(source: Catalogue, target: Store) -> None:
    put(target, cut(values(1)), 20)
    with pytest.raises(RefusedError):
        copy(source, target, 20)


def test_into_itself(source: Catalogue) -> None:
    with pytest.raises(UsageError, match="the same root"):
        Transfer(source, Catalogue(source.store))


def test_files_of_older_checkpoints(tmp_path: Path, target: Store) -> None:
    with open_store(tmp_path / "source") as store:
        old = build(
            store,
            {
                "x": Saved.rows(np.arange(24.0).reshape(6, 4), 2),
                "y": Saved.whole(np.arange(5.0), 1),
            },
        )
        tensors = {
            "x": Saved(np.arange(24.0).reshape(6, 4), old.filemap.grids[0], [0, 2]),
            "new": Saved.whole(np.ones(3), 2),
        }
        tensors["x"].values[3:] = -1.0
        built = build(store, tensors, step=2, older=old.manifest.files)
        source = Catalogue(store)
        assert len(built.commit.folders) == 2
        (done,) = copy(source, target, 2)
        assert done.files == 3
        catalogue = Catalogue(target)
        commit = catalogue.commit(CommitName(2, 1))
        assert len(commit.folders) == 2
        assert_same(source, target, 2)
        run_gc(target, plan_gc(catalogue, 1, leftover_s=0.0, abandoned_s=0.0))
        assert_same(source, target, 2)


def test_objects_in_files(tmp_path: Path, target: Store) -> None:
    body = np.frombuffer(b'{"a":1}', np.uint8)
    tensors = {"w": Saved.whole(np.zeros(2)), "rng": Saved(body, Grid((Axis(((7, 1),)),)), [1])}
    with open_store(tmp_path / "source") as store:
        objects = (ObjectEntry("rng", tensor="rng", per_rank="reseed"),)
        put(store, tensors, 10, objects=objects, tied={})
        copy(Catalogue(store), target, 10)
        assert_same(Catalogue(store), target, 10)


# -- damage ----------------------------------------------------------------------------------------


def test_a_flipped_bit_stops_at_the_source(
    tmp_path: Path, source: Catalogue, target: Store
) -> None:
    flip(rank_file(str(tmp_path / "source"), 20, 3), -1)
    with pytest.raises(CorruptError) as caught:
        copy(source, target, 20)
    assert caught.value.kind == "digest"
    assert "r00003.safetensors, written by rank 3" in str(caught.value)
    assert "chunk model.layers.0.mlp.weight@6,0" in str(caught.value)
    assert Catalogue(target).line() == []
    copy(source, target, 10)
    assert_same(source, target, 10)


@pytest.mark.parametrize("victim", ["header", "index", "witness", "missing"])
def test_other_damage(tmp_path: Path, source: Catalogue, target: Store, victim: str) -> None:
    path = rank_file(str(tmp_path / "source"), 20, 3)
    match victim:
        case "header":
            raw = path.read_bytes()
            path.write_bytes(raw.replace(b"exp_avg@6", b"exp_avg@7"))
        case "index":
            flip(path.with_suffix(".digests"), -1)
        case "witness":
            flip(path.with_name("witness"), -1)
        case "missing":
            path.unlink()
    with pytest.raises(CorruptError):
        copy(source, target, 20)
    assert Catalogue(target).line() == []


def test_a_block_in_the_middle_of_a_large_file(tmp_path: Path, target: Store) -> None:
    array = np.random.default_rng(1).standard_normal((3 << 20,)).astype(np.float32)
    root = make_root(tmp_path / "source", (1,), tensors={"x": Saved.whole(array)})
    path = rank_file(root, 1, 0)
    with open_store(root) as store:
        copy(Catalogue(store), target, 1)
        assert_same(Catalogue(store), target, 1)
        flip(path, 4096 + 9 * BLOCK_BYTES + 5)
        with (
            pytest.raises(CorruptError, match="block 9 of"),
            closing(
                Transfer(Catalogue(store), Catalogue(open_store(f"memory://{tmp_path}/other")))
            ) as transfer,
        ):
            transfer.copy(Catalogue(store).commit(CommitName(1, 1)))


# -- death -----------------------------------------------------------------------------------------


@sampled(3)
@pytest.mark.parametrize(
    ("target", "action", "first"),
    [("memory", "die", 0), ("memory", "die-after", 1), ("local", "die", 2)],
    indirect=["target"],
)
def test_death_at_every_operation(
    source: Catalogue,
    target: Store,
    action: str,
    first: int,
    every: int,
    report: Callable[[str], None],
) -> None:
    """Absent or whole after each; the next copy succeeds and leaves nothing over."""
    number, tried, resumed = -first % every, 0, 0
    while True:
        number += every
        for info in list(target.list()):
            target.delete([info.key])
        rule = FaultRule(action=action, number=number)  # type: ignore[arg-type]
        faulty = Fault(target, FaultSpec((rule,)))
        try:
            copy(source, faulty, 10)
        except StoreError:
            tried += 1
        if len(faulty.operations) < number:
            break
        line = Catalogue(target).line()
        if line:
            assert_same(source, target, 10)
        forget_leases(target)
        (done,) = copy(source, target, 10)
        resumed += done.reused_files > 0
        assert_same(source, target, 10)
        assert len(Catalogue(target).generations()) == 1
        assert len(target.children("data/")) == 1
    assert tried > 20 // every
    assert resumed > 5 // every
    report(f"copy, {action}: {tried} deaths, {resumed} resumed from what was there")


KILLED = """
import sys
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.tools.copy import Transfer
from ckptd.checkpoint.format.names import CommitName
from ckptd.store.base import FaultRule, FaultSpec
from ckptd.store import StoreSpec
slow = FaultSpec((FaultRule("delay", op="commit", key="*r00003*", delay_s=60.0),))
source = Catalogue(StoreSpec(sys.argv[1]).open())
transfer = Transfer(source, Catalogue(StoreSpec(sys.argv[2]).wrapped(slow).open()))
transfer.copy(source.commit(CommitName(10, 1)))
"""


def test_killed_for_real_and_taken_up(tmp_path: Path, source: Catalogue) -> None:
    target = tmp_path / "target"
    args = [sys.executable, "-c", KILLED, source.store.url, str(target)]
    with subprocess.Popen(args) as running:
        try:
            _kill_and_take_up(running, source, target)
        finally:
            running.kill()


def _kill_and_take_up(running: subprocess.Popen[bytes], source: Catalogue, target: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while len(list(target.glob("data/*/*.digests"))) < 3:
        assert time.monotonic() < end
        assert running.poll() is None
        time.sleep(0.02)
    with open_store(target) as store:
        catalogue = Catalogue(store)
        with pytest.raises(ConflictError) as caught:
            copy(source, store, 10)
        assert "another process is writing here" in caught.value.message
        running.send_signal(signal.SIGKILL)
        running.wait(PATIENCE_S)
        assert catalogue.line() == []
        plan = plan_gc(catalogue, leftover_s=0.0)
        assert not [i for i in plan.items if i.kind == "leftover"], "a lease guards it"
        (done,) = copy(source, store, 10)
        assert (done.generation, done.reused_files) == (1, 3)
        assert_same(source, store, 10)
        assert leases(catalogue) == {}


def test_what_may_heal_is_tried_again(source: Catalogue, target: Store) -> None:
    """The file begins again, and progress does not count its bytes twice."""
    array = np.random.default_rng(1).standard_normal((3 << 20,)).astype(np.float32)
    put(source.store, {"x": Saved.whole(array)}, 30)
    faulty = Fault(target, FaultSpec((FaultRule("error", op="write", skip=2),)))
    seen: list[tuple[int, int]] = []
    with closing(
        Transfer(source, Catalogue(target), lambda *n: seen.append(n), bulk=faulty)
    ) as transfer:
        transfer.copy(source.commit(CommitName(30, 1)))
    assert sum(o.op == "writer" for o in faulty.operations) == 2
    assert seen[-1] == (array.nbytes, array.nbytes)
    assert max(done for done, _ in seen) == array.nbytes
    assert_same(source, target, 30)


def test_a_long_task_that_gets_on_has_not_stalled() -> None:
    def task(_: int) -> None:
        time.sleep(1.0)

    run_all([1], task, threads=1, stall_s=0.2, what="x", pulse=time.monotonic_ns)
    with pytest.raises(DeadlineError, match="no progress"):
        run_all([1], task, threads=1, stall_s=0.2, what="x")


# -- who is at work --------------------------------------------------------------------------------


def test_two_at_a_time(source: Catalogue, target: Store) -> None:
    catalogue = Catalogue(target)
    catalogue.create_or_open()
    first = Working.begin(catalogue, "cp")
    with pytest.raises(ConflictError, match="is writing here"):
        copy(source, target, 10)
    first.end()
    copy(source, target, 10)
    assert catalogue.generations() == [1]


def test_who_comes_a_moment_later_does_not_go_first(target: Store) -> None:
    catalogue = Catalogue(target)
    catalogue.create_or_open()
    generation = catalogue.claim(None, 0, "cp").generation
    name = CommitName(0, generation)
    both = sorted((Working(catalogue, generation, "cp") for _ in range(2)), key=lambda w: w.work_id)
    late, first = both
    real = late._refuse
    seen: list[str] = []

    def refuse(rivals: Callable[[str], bool]) -> None:
        real(rivals)
        if not seen:  # the other one begins, and is at work, between the late one's look and lease
            seen.append("looked")
            first.enter(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late, "_refuse", refuse)
        with pytest.raises(ConflictError) as caught:
            late.enter(name)
    assert "another process is writing here" in caught.value.message
    first.end()
    late.enter(name)
    late.end()


def test_a_holder_elsewhere_is_believed_until_its_lease_ends(
    source: Catalogue, target: Store
) -> None:
    copy(source, target, 10)
    lease = Lease(20, 1, time.time() + 60, f"cp elsewhere/1:{os.getpid()}")
    target.put("leases/far.json", encode_record(lease))
    with pytest.raises(ConflictError):
        copy(source, target, 20)
    old = msgspec.structs.replace(lease, expires=time.time() - 3600)
    target.put("leases/far.json", encode_record(old))
    copy(source, target, 20)


def test_a_job_that_begins_meanwhile_wins(source: Catalogue, target: Store) -> None:
    with closing(Transfer(source, Catalogue(target))) as transfer:
        transfer.copy(source.commit(CommitName(10, 1)))
        Catalogue(target).claim(CommitName(10, 1), 4, "load")
        with pytest.raises(ConflictError) as caught:
            transfer.copy(source.commit(CommitName(20, 1)))
    assert caught.value.kind == "superseded"
    assert [n.step for n in Catalogue(target).line()] == [10]


def test_a_target_that_cannot_decide(source: Catalogue) -> None:
    with StoreSpec("fsspec+memory://cannot-decide").open() as store:
        with pytest.raises(CkptdError) as caught:
            Transfer(source, Catalogue(store))
    assert caught.value.kind == "no-create-only"


def test_columns(tmp_path: Path, target: Store) -> None:
    array = np.arange(32, dtype=np.float32).reshape(4, 8)
    root = make_root(tmp_path / "columns", (10,), tensors={"x": by_columns(array)})
    with open_store(root) as store:
        copy(Catalogue(store), target, 10)
        assert_same(Catalogue(store), target, 10)
