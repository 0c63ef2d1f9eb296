"""A disk that is really full, or really read-only: that save fails with path and cause, no more."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.handle import SaveHandle
from ckptd.checkpoint.tools.verify import verify
from ckptd.errors import CkptdError, StoreError
from ckptd.store.base import FaultRule, FaultSpec, Store
from tests.checkpoint.crash.judge import assert_only_legal, clean
from tests.checkpoint.crash.mounts import Mounted, tmpfs
from tests.checkpoint.crash.places import LocalPlace
from tests.checkpoint.save.saving import SHAPES, Job, Keep, fill, plan_of, values
from tests.processes import PATIENCE_S

__all__ = ["tmpfs"]

BIG = {"w": (1 << 20,)}  # 4 MiB
SMALL = dict(SHAPES)
PAGE = mmap.PAGESIZE


@pytest.fixture
def place(tmpfs: Mounted) -> Iterator[LocalPlace]:
    place = LocalPlace(tmpfs.path)
    yield place
    place.close()


def read(store: Store, step: int) -> bytes:
    """Verify a checkpoint and return its bytes."""
    catalogue = Catalogue(store)
    name = catalogue.find(step)
    assert verify(catalogue, name).findings == ()
    files = catalogue.manifest(name).files
    return b"".join(store.get(f.path)[f.data_start :] for f in files)


def written(job: Job, seed: int, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    data = bytearray(job.plan.filemap.data_bytes(0))
    fill(job.plan, 0, values(seed, shapes), memoryview(data))
    return bytes(data)


def failure(handle: SaveHandle) -> CkptdError | None:
    try:
        handle.durable(PATIENCE_S)
    except CkptdError as error:
        return error
    return None


def test_a_full_disk_fails_that_save_only(place: LocalPlace, tmpfs: Mounted) -> None:
    job = Job(place.spec, plan=plan_of(BIG))
    job.save(1, values(1, BIG)).durable(PATIENCE_S)
    ballast = tmpfs.fill(leave=1 << 20)
    handle = job.save(2, values(2, BIG), attempt="0002")
    with pytest.raises(StoreError) as caught:
        handle.durable(PATIENCE_S)
    error = caught.value
    assert error.kind == "no-space"
    assert (error.where or "").startswith(f"{place.root}/data/000000000002-g00000001-0002/r00000")
    assert "ENOSPC" in (error.found or "")
    # What the failed attempt had written is gone: the next one needs the room.
    assert tmpfs.free() >= (1 << 20) - 4 * PAGE
    assert read(place.store, 1) == written(job, 1, BIG)
    ballast.unlink()
    job.save(3, values(3, BIG), attempt="0003").durable(PATIENCE_S)
    assert read(place.store, 3) == written(job, 3, BIG)
    assert Catalogue(place.store).latest() == CommitName(3, 1)
    job.close()
    clean(place.store)
    assert_only_legal(place.store, place.raw())


def test_failed_attempts_make_room_for_later_saves(place: LocalPlace, tmpfs: Mounted) -> None:
    """Data was durable when the commit failed: retention takes it, not the gc of tomorrow."""
    rule = FaultRule("error", op="put", key="*manifest*", skip=1)
    spec = place.spec.wrapped(FaultSpec((rule,)))
    job = Job(spec, plan=plan_of(BIG))
    job.save(1, values(1, BIG), keep=Keep(1)).durable(PATIENCE_S)
    assert failure(job.save(2, values(2, BIG), attempt="0002", keep=Keep(1))) is not None
    left = tmpfs.free()
    job.save(3, values(3, BIG), attempt="0003", keep=Keep(1)).durable(PATIENCE_S)
    job.client.close(60.0)
    assert tmpfs.free() >= left + (4 << 20) - 8 * PAGE
    assert_only_legal(place.store, place.raw())
    assert read(place.store, 3) == written(job, 3, BIG)
    job.store.close()


def test_any_amount_of_room(
    place: LocalPlace, tmpfs: Mounted, report: Callable[[str], None]
) -> None:
    """From nothing to enough, page by page: the disk is full at another operation each time."""
    job = Job(place.spec, store=place.store)
    job.save(1, values(1)).durable(PATIENCE_S)
    outcomes: Counter[str] = Counter()
    places: set[str] = set()
    step, room = 1, 0
    while outcomes["durable"] < 3:
        step += 1
        assert step < 60, outcomes
        before = job.catalogue.latest()
        assert before is not None
        ballast = tmpfs.fill(leave=room * PAGE)
        handle = job.save(step, values(step))
        error = failure(handle)
        if error is not None:
            assert error.kind == "no-space"
            places.add((error.where or "").rpartition("/")[2])
            outcomes["no space"] += 1
            assert Catalogue(place.store).latest() == before
            ballast.unlink()
            job.save(step, values(step), attempt="0002").durable(PATIENCE_S)
        else:
            outcomes["durable"] += 1
            ballast.unlink()
        for at in {before.step, step}:
            assert read(place.store, at) == written(job, at, SMALL)
        clean(place.store, keep=2)
        room += 1
    report(f"{dict(outcomes)}; full at {', '.join(sorted(places))}")
    assert outcomes["no space"] > 5
    assert {"r00000.safetensors", "manifest.json"} <= places
    job.client.close(20.0)
    assert_only_legal(place.store, place.raw())


def test_a_full_disk_of_one_rank_is_named_on_all(place: LocalPlace, tmpfs: Mounted) -> None:
    """Rank 1 has a part to write that does not fit; rank 0's fits."""
    first = LocalBoard(0, 2)
    plan = plan_of({"a": (1 << 20,), "b": (16,)}, world=2)
    sizes = [plan.filemap.data_bytes(r) for r in (0, 1)]
    arrays = {"a": np.zeros(1 << 20, np.float32), "b": np.zeros(16, np.float32)}
    jobs = [Job(place.spec, board=first, plan=plan)]
    jobs.append(Job(place.spec, board=LocalBoard(1, 2, first), plan=plan, generation=1))
    tmpfs.fill(leave=max(sizes) // 2)
    handles = [j.save(1, arrays) for j in jobs]
    for handle in handles:
        with pytest.raises(CkptdError) as caught:
            handle.durable(PATIENCE_S)
        assert "no space left" in str(caught.value)
        assert f"{place.root}/data/000000000001-g00000001-0001/" in str(caught.value)
    (Path(tmpfs.path) / "ballast").unlink()
    for handle in [j.save(2, arrays, attempt="0002") for j in jobs]:
        handle.durable(PATIENCE_S)
    assert verify(jobs[0].catalogue, CommitName(2, 1)).ok
    for job in jobs:
        job.close()


def test_a_read_only_disk(place: LocalPlace, tmpfs: Mounted) -> None:
    job = Job(place.spec)
    job.save(1, values(1)).durable(PATIENCE_S)
    job.client.close(20.0)
    job = Job(place.spec, generation=1)
    tmpfs.remount("ro")
    with pytest.raises(StoreError) as caught:
        job.save(2, values(2)).durable(PATIENCE_S)
    assert caught.value.kind == "permission"
    assert "EROFS" in (caught.value.found or "")
    assert read(place.store, 1) == written(job, 1, SMALL)
    tmpfs.remount("rw")
    job.save(2, values(2), attempt="0002").durable(PATIENCE_S)
    assert read(place.store, 2) == written(job, 2, SMALL)
    job.close()
