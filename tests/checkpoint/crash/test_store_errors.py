"""Stores that err without dying: what may heal is tried again, the rest fails that save only."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.format.names import CommitName, commit_key
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.client import WriterClient
from ckptd.checkpoint.save.handle import SaveHandle
from ckptd.checkpoint.tools.verify import verify
from ckptd.errors import CkptdError, RefusedError, StoreError, TransientStoreError
from ckptd.store import StoreSpec
from ckptd.store.base import FaultRule, FaultSpec, RetrySpec, Store, wrap
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore, forget_memory
from ckptd.store.osio import Os
from ckptd.store.wrap import Retry
from tests.checkpoint.crash.judge import assert_only_legal, clean
from tests.checkpoint.crash.places import LocalPlace, S3Place
from tests.checkpoint.save.saving import Job, Keep, fill, plan_of, values
from tests.processes import PATIENCE_S
from tests.servers import MOTO, s3_url
from tests.store.proxy import Proxy, Request

SHAPES = {"w": (300, 1024), "b": (48,), "s": (), "e": (0, 4)}
STEP_2 = "*000000000002-g00000001*"
QUICK = RetrySpec(deadline_s=30.0, first_s=0.001, longest_s=0.01)
BRIEF = RetrySpec(deadline_s=0.2, first_s=0.01)


@pytest.fixture
def place(ram: Path) -> Iterator[LocalPlace]:
    place = LocalPlace(ram)
    yield place
    place.close()


def job_on(store: Store) -> Job:
    """A job whose worker is a thread on this very store; step 1 is saved."""
    job = Job(StoreSpec("memory://unused"), store=store, plan=plan_of(SHAPES))
    job.save(1, values(1, SHAPES), keep=Keep(2)).durable(PATIENCE_S)
    return job


def failure(handle: SaveHandle) -> CkptdError | None:
    try:
        handle.durable(PATIENCE_S)
    except CkptdError as error:
        return error
    return None


def assert_saved(store: Store, step: int) -> None:
    """The checkpoint is whole and holds what `values(step)` gave."""
    catalogue = Catalogue(store)
    [name] = [n for n in catalogue.commits() if n.step == step]
    assert verify(catalogue, name).findings == ()
    [file] = catalogue.manifest(name).files
    wanted = bytearray(file.data_bytes)
    fill(plan_of(SHAPES), 0, values(step, SHAPES), memoryview(wanted))
    assert store.get(file.path)[file.data_start :] == wanted


# -- errors of the operating system ----------------------------------------------------------------

ERRORS = {
    "no right to make the folder": ("os.mkdir", errno.EACCES, "permission"),
    "no right to make the file": ("os.open", errno.EACCES, "permission"),
    "full at once": ("os.fallocate", errno.ENOSPC, "no-space"),
    "full in the middle": ("os.pwrite", errno.ENOSPC, "no-space"),
    "over quota": ("os.pwrite", errno.EDQUOT, "no-space"),
    "a bad block": ("os.pwrite", errno.EIO, "store"),
    "data not durable": ("os.fdatasync", errno.EIO, "store"),
    "a record not durable": ("os.fsync", errno.EIO, "store"),
    "names not durable": ("os.fsync-folder", errno.EIO, "store"),
    "no rename": ("os.replace", errno.EIO, "store"),
    "no link": ("os.link", errno.EIO, "store"),
    "no links here": ("os.link", errno.EPERM, "no-create-only"),
}


@pytest.mark.parametrize("what", list(ERRORS))
def test_an_error_of_the_system_fails_that_save_only(what: str, place: LocalPlace) -> None:
    point, number, kind = ERRORS[what]
    rule = FaultRule("error", op=point, key=STEP_2, errno=number, times=0)
    fault = Fault(place.spec.open(), FaultSpec((rule,), inner=True))
    job = job_on(fault)
    error = failure(job.save(2, values(2, SHAPES), attempt="0002"))
    assert isinstance(error, RefusedError if kind == "no-create-only" else StoreError)
    assert error.kind == kind
    assert errno.errorcode[number] in (error.found or "")
    assert (error.where or "").startswith(str(place.root))
    assert job.catalogue.latest() == CommitName(1, 1)
    assert_saved(place.store, 1)
    job.save(3, values(3, SHAPES), attempt="0003").durable(PATIENCE_S)
    assert_saved(place.store, 3)
    job.close()
    clean(place.store)
    assert_only_legal(place.store, place.raw())


def test_every_single_error_of_the_system(place: LocalPlace) -> None:
    """EIO at each step inside each operation, once: never a wrong checkpoint, never a stuck job."""
    job_on(place.spec.open()).close()
    watching = Fault(place.spec.open(), FaultSpec(inner=True))
    job = Job(StoreSpec("memory://unused"), store=watching, plan=plan_of(SHAPES), generation=1)
    before = len(watching.operations)
    job.save(2, values(2, SHAPES), attempt="0002").durable(PATIENCE_S)
    job.close()
    points = [o for o in watching.operations[before:] if o.op.startswith("os.")]
    assert len(points) > 15
    durable = 0
    for step in range(len(points)):
        rule = FaultRule("error", op="os.*", errno=errno.EIO, skip=step)
        fault = Fault(place.spec.open(), FaultSpec((rule,), inner=True))
        job = Job(StoreSpec("memory://unused"), store=fault, plan=plan_of(SHAPES), generation=1)
        number = step + 3
        error = failure(job.save(number, values(number, SHAPES)))
        durable += error is None
        assert error is None or isinstance(error, StoreError)
        if error is None or place.store.exists(commit_key(CommitName(number, 1))):
            assert_saved(place.store, number)
        else:
            job.save(number, values(number, SHAPES), attempt="0002").durable(PATIENCE_S)
            assert_saved(place.store, number)
        job.close()
        clean(place.store, keep=1)
        assert_only_legal(place.store, place.raw())
    # Where the record is there, it is looked for, and some steps are tried again.
    assert 0 < durable < len(points) / 2


class Stingy(Os):
    """Writes at most so many bytes at a time, as a disk that fills up, or a signal, makes it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.calls = 0

    def pwrite(self, fd: int, data: memoryview, offset: int, path: str) -> int:
        self.calls += 1
        return super().pwrite(fd, data[: self.most], offset, path)


@pytest.mark.parametrize("most", [4096, 5000, 100_000])
def test_short_writes_are_gone_on_with(most: int, place: LocalPlace) -> None:
    system = Stingy(most)
    job = job_on(LocalStore(place.root, system=system))
    assert_saved(place.store, 1)
    assert system.calls > 1_200_000 // most
    job.close()


def test_a_torn_write_fails_the_save(place: LocalPlace) -> None:
    rule = FaultRule("torn", op="write", key=STEP_2)
    job = job_on(Fault(place.spec.open(), FaultSpec((rule,))))
    assert failure(job.save(2, values(2, SHAPES), attempt="0002")) is not None
    assert job.catalogue.latest() == CommitName(1, 1)
    assert_saved(place.store, 1)
    job.close()
    clean(place.store)
    assert_only_legal(place.store, place.raw())


# -- what may heal ---------------------------------------------------------------------------------

OPERATIONS = (
    "writer",
    "write",
    "commit",
    "put",
    "put-new",
    "get",
    "stat",
    "children",
    "list",
    "delete",
)


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    forget_memory("store-errors")
    yield MemoryStore("store-errors")
    forget_memory("store-errors")


@pytest.mark.parametrize("action", ["error", "lost"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_what_heals_is_tried_again(op: str, action: str, memory: MemoryStore) -> None:
    """Time-outs and 5xx twice in a row, with and without effect: the save is durable, once."""
    job_on(memory).client.close(60.0)
    rule = FaultRule(action, op=op, times=2)  # type: ignore[arg-type]
    fault = Fault(memory, FaultSpec((rule,)))
    job = Job(
        StoreSpec("memory://unused"),
        store=Retry(fault, QUICK),
        plan=plan_of(SHAPES),
        generation=1,
    )
    job.save(2, values(2, SHAPES), attempt="0002").durable(PATIENCE_S)
    job.client.close(60.0)
    assert fault._matches[0] >= 2, "it did not strike"
    assert Catalogue(memory).commits() == [CommitName(1, 1), CommitName(2, 1)]
    assert_saved(memory, 2)
    clean(memory)
    assert_only_legal(memory, [o.key for o in memory.list()])


@pytest.mark.parametrize("op", OPERATIONS)
def test_what_does_not_heal_is_a_clear_failure(op: str, memory: MemoryStore) -> None:
    job_on(memory).client.close(60.0)
    rule = FaultRule("error", op=op, times=0)
    store = Retry(Fault(memory, FaultSpec((rule,))), BRIEF)
    job = Job(StoreSpec("memory://unused"), store=memory, plan=plan_of(SHAPES), generation=1)
    job.client.close(60.0)
    job.client = WriterClient(StoreSpec("memory://unused"), LocalBoard(), store)
    error = failure(job.save(2, values(2, SHAPES), attempt="0002"))
    job.client.close(60.0)
    committed = memory.exists(commit_key(CommitName(2, 1)))
    if op in ("list", "delete"):  # only the parts are listed and deleted: the save is durable
        assert error is None
    else:
        assert isinstance(error, TransientStoreError)
        assert error.kind == "injected"
        assert (error.where or "").startswith(op)
    assert committed == (op in ("list", "delete"))
    assert_saved(memory, 1)
    clean(memory)
    job = Job(StoreSpec("memory://unused"), store=memory, plan=plan_of(SHAPES), generation=1)
    job.save(3, values(3, SHAPES)).durable(PATIENCE_S)
    job.client.close(60.0)
    assert_saved(memory, 3)


@pytest.mark.parametrize("retry", [True, False])
def test_a_lost_reply_to_the_commit(retry: bool, place: LocalPlace) -> None:
    """The record is there, the answer is not: committed exactly once, and the handle says so."""
    lost = FaultRule("lost", op="put-new", key="commits/*")
    spec = FaultSpec((lost,))
    fault = wrap(place.spec.open(), spec)
    job = Job(
        StoreSpec("memory://unused"),
        store=Retry(fault, QUICK) if retry else fault,
        plan=plan_of(SHAPES),
    )
    handle = job.save(1, values(1, SHAPES))
    handle.durable(PATIENCE_S)
    assert handle.progress.phase == "durable"
    assert job.catalogue.commits() == [CommitName(1, 1)]
    assert_saved(place.store, 1)
    job.close()


@pytest.mark.parametrize("action", ["lose", "503 SlowDown", "cut"])
@pytest.mark.parametrize("server", [MOTO])
def test_every_first_request_fails(
    server: str, action: str, request: pytest.FixtureRequest
) -> None:
    """Over real HTTP, each request once: its answer is lost, cut short, or says come back later."""
    options: dict[str, Any] = request.getfixturevalue(server)
    place = S3Place(s3_url(), options)
    met: set[str] = set()

    def first(asked: Request) -> str:
        name = f"{asked.method} {asked.path} {asked.query}"
        return "pass" if name in met or met.add(name) else action  # type: ignore[func-returns-value]

    shapes = {"w": (1500, 1024)}
    with Proxy(options["endpoint_url"]) as proxy:
        spec = StoreSpec(place.spec.url, {**place.spec.options, "endpoint_url": proxy.endpoint})
        spec = spec.wrapped(RetrySpec(first_s=0.01))
        job = Job(spec, plan=plan_of(shapes))
        proxy.rule = first
        job.save(1, values(1, shapes), keep=Keep(1)).durable(PATIENCE_S)
        job.client.close(60.0)
        proxy.rule = lambda asked: "pass"
        assert len(met) > 20
        assert job.catalogue.commits() == [CommitName(1, 1)]
        assert verify(job.catalogue, CommitName(1, 1)).findings == ()
        job.store.close()
    clean(place.store)
    assert_only_legal(place.store, place.raw())
    place.close()


# -- slowness --------------------------------------------------------------------------------------


def test_overlapping_saves_on_a_slow_store(place: LocalPlace) -> None:
    """Commits wait while later saves are written: each keeps its own values, in its own order.

    Rank 1 is late with all of its parts, so none of rank 0's saves can commit before all of them
    are written.
    """
    first = LocalBoard(0, 2)
    plan = plan_of(SHAPES, world=2)
    slow = FaultSpec((FaultRule("delay", op="put", times=0, delay_s=0.05),))
    spec = place.spec.wrapped(slow)
    rank_0 = Job(spec, board=first, plan=plan)
    rank_1 = Job(spec, board=LocalBoard(1, 2, first), plan=plan, generation=1)
    handles = [rank_0.save(s, values(s, SHAPES)) for s in (1, 2, 3)]
    rank_0.client.acquire(1, 60.0)  # all three are written
    assert not any(h.done for h in handles)
    handles += [rank_1.save(s, values(s, SHAPES)) for s in (1, 2, 3)]
    for handle in handles:
        handle.durable(PATIENCE_S)
    catalogue = Catalogue(place.store)
    assert [n.step for n in catalogue.line()] == [1, 2, 3]
    for name in catalogue.line():
        assert verify(catalogue, name).findings == ()
        for file in catalogue.manifest(name).files:
            wanted = bytearray(file.data_bytes)
            fill(plan, file.rank, values(name.step, SHAPES), memoryview(wanted))
            assert place.store.get(file.path)[file.data_start :] == wanted
    rank_0.close()
    rank_1.close()
