"""Leases: a held checkpoint stays, and a reader that came too late gets an error."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from ckptd.checkpoint.format.names import CommitName, commit_key, lease_key
from ckptd.checkpoint.format.records import Lease
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import plan_gc, run_gc
from ckptd.checkpoint.root.leases import (
    LEASE_S,
    SLACK_S,
    Hold,
    expired,
    hold,
    hold_step,
    leases,
    renewed,
)
from ckptd.errors import ConflictError, CorruptError, NotFoundError
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore
from tests.checkpoint.root.checkpoints import Visited, save
from tests.processes import until

_names = itertools.count()


@pytest.fixture
def catalogue() -> Catalogue:
    made = Catalogue(MemoryStore(f"leases-{next(_names)}"))
    made.create_or_open()
    made.claim(None, 1)
    return made


def test_hold_and_release(catalogue: Catalogue) -> None:
    name = save(catalogue, 1, 1)
    before = time.time()
    with hold(catalogue, name, holder="test") as held:
        [(key, lease)] = leases(catalogue).items()
        assert key == lease_key(held.lease_id)
        assert (lease.step, lease.generation) == (1, 1)
        assert before + LEASE_S <= lease.expires <= time.time() + LEASE_S
        assert lease.holder.startswith("test ")
        assert held.commit == catalogue.commit(name)
    assert leases(catalogue) == {}
    held.release()


@pytest.mark.parametrize("left", [b"", b"\0" * 120])
def test_what_a_power_cut_left_of_a_lease_is_one_that_ran_out(
    catalogue: Catalogue, left: bytes
) -> None:
    """A lease is not flushed; without this, one of no bytes would stop each clean-up for ever."""
    first, newest = save(catalogue, 1, 1), save(catalogue, 2, 1)
    held = hold(catalogue, first)
    plan = plan_gc(catalogue, 1)
    assert [i.key for i in plan.items if i.kind == "commit"] == []
    catalogue.store.put(lease_key(held.lease_id), left)
    run_gc(catalogue.store, plan_gc(catalogue, 1))
    assert catalogue.commits() == [newest]
    assert leases(catalogue) == {}


def test_a_lease_that_says_something_else_still_stops_a_clean_up(catalogue: Catalogue) -> None:
    held = hold(catalogue, save(catalogue, 1, 1))
    catalogue.store.put(lease_key(held.lease_id), b"{\0\0\0")
    with pytest.raises(CorruptError):
        leases(catalogue)


def test_a_lease_costs_no_flush_and_a_claim_those_of_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "major", lambda device: 8)  # a disk of this host
    made = Catalogue(LocalStore(tmp_path))
    made.create_or_open()
    made.claim(None, 1)
    name = save(made, 1, 1)
    store = LocalStore(tmp_path)
    seen: list[tuple[str, str]] = []
    store.watch(lambda point, path: seen.append((point, path)))
    reader = Catalogue(store)
    with hold(reader, name):
        pass
    assert not [s for s in seen if "sync" in s[0]]
    reader.claim(name, 1, "load")
    assert [os.path.relpath(p, tmp_path) for s, p in seen if s == "os.fsync-folder"] == [
        ".",  # the name of the folder, which another process may have made just now
        "generations",
    ]
    [written] = [p for s, p in seen if s == "os.fsync"]
    assert Path(written).parent == tmp_path / "generations"


def test_holding_what_is_not_there_leaves_no_lease(catalogue: Catalogue) -> None:
    with pytest.raises(NotFoundError) as info:
        hold(catalogue, CommitName(9, 1))
    assert "is not committed" in info.value.message
    assert leases(catalogue) == {}


def test_renew(catalogue: Catalogue) -> None:
    name = save(catalogue, 1, 1)
    held = hold(catalogue, name, seconds=5.0)
    [first] = leases(catalogue).values()
    time.sleep(0.01)
    held.renew()
    [second] = leases(catalogue).values()
    assert second.expires > first.expires
    catalogue.store.delete([commit_key(name)])
    with pytest.raises(NotFoundError):
        held.renew()


def test_a_lease_is_renewed_for_as_long_as_a_block_runs(catalogue: Catalogue) -> None:
    name = save(catalogue, 1, 1)
    failures: list[str] = []
    with renewed(hold(catalogue, name, seconds=0.2), failures.append):
        [first] = leases(catalogue).values()
        until(lambda: next(iter(leases(catalogue).values())).expires > first.expires + 0.1)
        assert not failures
        catalogue.store.delete([commit_key(name)])
        until(lambda: bool(failures))
    assert failures[0].startswith("the lease was not renewed: ")
    assert leases(catalogue) == {}


def test_expiry_allows_for_clocks() -> None:
    lease = Lease(1, 1, expires=1000.0)
    assert not expired(lease, 999.0)
    assert not expired(lease, 1000.0 + SLACK_S)
    assert expired(lease, 1001.0 + SLACK_S)


def held_latest(catalogue: Catalogue) -> Hold:
    held = hold_step(catalogue, None)
    assert isinstance(held, Hold)
    return held


def test_hold_latest(catalogue: Catalogue) -> None:
    assert hold_step(catalogue, None) is None
    name = save(catalogue, 1, 1)
    with held_latest(catalogue) as held:
        assert held.commit.name == name


def test_hold_latest_takes_the_next_when_one_is_replaced() -> None:
    for number in range(1, 20):
        inner = MemoryStore(f"leases-{next(_names)}")
        live = Catalogue(inner)
        live.create_or_open()
        live.claim(None, 1)
        old = save(live, 1, 1)

        def replace(live: Catalogue = live, old: CommitName = old) -> None:
            save(live, 2, 1)
            live.store.delete([commit_key(old)])

        held = held_latest(Catalogue(Visited(inner, number, replace)))
        assert held.commit.step in (1, 2)
        # Never a lease on something else than what is held.
        assert [x.step for x in leases(live).values()] == [held.commit.step]


def test_hold_latest_gives_up(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "latest", lambda: CommitName(5, 1))
    with pytest.raises(ConflictError) as info:
        hold_step(catalogue, None)
    assert info.value.kind == "busy"


def test_a_damaged_lease_is_named(catalogue: Catalogue) -> None:
    catalogue.store.put("leases/x.json", b"?")
    with pytest.raises(CorruptError) as info:
        leases(catalogue)
    assert "leases/x.json" in str(info.value.where)
