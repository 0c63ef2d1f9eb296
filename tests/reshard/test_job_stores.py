"""Reshards on stores that fail: at every operation, for a while, and with others at work."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptd.checkpoint.format.names import LEASES
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.tools.verify import verify
from ckptd.errors import ConflictError, RefusedError, StoreError
from ckptd.reshard.execute import Budget
from ckptd.reshard.job import ReshardShare
from ckptd.reshard.plan import Target
from ckptd.reshard.reports import Resharded
from ckptd.store import open_store
from ckptd.store.base import FaultRule, FaultSpec, Store
from ckptd.store.fault import Fault
from tests.checkpoint.load.builder import Built, build, random_saved
from tests.reshard.test_execute import MIB, check, job, recut_at_random, values
from tests.sampling import sampled

BUDGET = Budget(32 * MIB, 2 * MIB, 8 * MIB, 4 * MIB, 2, 1)


class Case:
    """A source, and a target that is another cut of it."""

    def __init__(self, store: Store, seed: int, big: int = 0) -> None:
        rng = random.Random(seed)
        self.store = store
        self.data: dict[str, np.ndarray] = values(rng, big=big)
        saved = {n: random_saved(rng, v, 3) for n, v in self.data.items()}
        self.built: Built = build(store, saved, step=4)
        self.target: Target = recut_at_random(self.built, rng, 4)

    def run(self, out: Store, share: ReshardShare | None = None) -> Resharded:
        return job(self.store, self.built, self.target, out).run(share or ReshardShare(), BUDGET)


def memory() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def contents(store: Store) -> dict[str, bytes]:
    """Return all data files and manifests."""
    return {i.key: store.get(i.key) for i in store.list("data/") if "/parts/" not in i.key}


@sampled(4)
@pytest.mark.parametrize("action", ["die", "die-after"])
def test_death_at_every_operation(action: str, every: int, report: Callable[[str], None]) -> None:
    """Absent or whole after each; the next run succeeds, with the same bytes."""
    with memory() as store, memory() as calm:
        case = Case(store, 3)
        case.run(calm)
        wanted = contents(calm)
        number, tried, resumed = -(action == "die") % every, 0, 0
        while True:
            number += every
            with memory() as out:
                rule = FaultRule(action=action, number=number)  # type: ignore[arg-type]
                faulty = Fault(out, FaultSpec((rule,)))
                try:
                    case.run(faulty)
                except StoreError:
                    tried += 1
                if len(faulty.operations) < number:
                    break
                if Catalogue(out).line():
                    check(out, case.data)
                out.delete([i.key for i in out.list(LEASES)])  # the dead one's, which still lives
                done = case.run(out)
                resumed += done.reused_files > 0
                assert contents(out) == wanted
                assert len(Catalogue(out).generations()) == 1
        assert tried > 20 // every
        assert resumed > 5 // every
        report(f"reshard, {action}: {tried} deaths, {resumed} resumed from what was there")


def test_what_heals_is_tried_again(report: Callable[[str], None]) -> None:
    error: dict[str, str | None] = {"class": "TransientStoreError", "message": "throttled"}
    with memory() as store, memory() as out:
        case = Case(store, 5, big=2)
        rules = tuple(
            FaultRule("error", op=op, key="*.safetensors", skip=skip, error=error)
            for op, skip in (("writer", 1), ("write", 3), ("commit", 1))
        )
        faulty = Fault(out, FaultSpec(rules))
        done = case.run(faulty)
        assert done.state == "committed"
        assert len([o for o in faulty.operations if o.op == "writer"]) > 4
        check(out, case.data)
        report(f"{len(faulty.operations)} operations, three of them failed for once")


def test_a_store_without_files() -> None:
    with memory() as store, memory() as out:
        case = Case(store, 6, big=4)
        done = case.run(out)
        assert done.rounds > 2
        check(out, case.data)
        latest = Catalogue(out).latest()
        assert latest is not None
        assert not verify(Catalogue(out), latest, deep=True).findings


def test_shares_at_the_same_time_end_in_one_commit(tmp_path: Path) -> None:
    with open_store(tmp_path / "a") as store, open_store(tmp_path / "calm") as calm:
        case = Case(store, 8, big=3)
        case.run(calm)
        done: dict[int, Resharded] = {}
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                with open_store(tmp_path / "b") as out:
                    done[number] = case.run(out, ReshardShare(number, 4))
            except BaseException as error:  # noqa: BLE001 - shown by the assertion below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in (1, 2, 3, 4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not errors
        assert any(d.state in ("committed", "present") for d in done.values())
        with open_store(tmp_path / "b") as out:
            assert len(Catalogue(out).generations()) == 1
            check(out, case.data)
            assert contents(out) == contents(calm)


def test_the_same_share_twice_at_once_is_refused() -> None:
    with memory() as store, memory() as out:
        case = Case(store, 9)
        rule = FaultRule("die", op="writer", key="*r00001*")
        with pytest.raises(StoreError):
            case.run(Fault(out, FaultSpec((rule,))))
        # Its lease is still there, and its process (this one) lives.
        with pytest.raises(ConflictError) as caught:
            case.run(out)
        assert "another process is writing here" in caught.value.message


def test_a_job_that_claims_the_root_meanwhile_wins() -> None:
    with memory() as store, memory() as out:
        case = Case(store, 10)
        case.run(out, ReshardShare(1, 2))
        catalogue = Catalogue(out)
        catalogue.claim(catalogue.latest(), 4, "start")
        done = case.run(out, ReshardShare(2, 2))
        # A new generation is claimed for the reshard; what the first one wrote lies beside it.
        assert done.state == "waiting"
        assert case.run(out).state == "committed"
        check(out, case.data)


def test_older_steps_are_refused() -> None:
    with memory() as store, memory() as out:
        case = Case(store, 11)
        build(out, {"x": random_saved(random.Random(1), np.zeros(4), 1)}, step=9)
        with pytest.raises(RefusedError) as caught:
            case.run(out)
        assert caught.value.kind == "behind"


def test_all_who_join_are_in_one_generation() -> None:
    with memory() as out:
        Catalogue(out).create_or_open()
        found: list[int] = []
        meet = threading.Barrier(6)

        def work() -> None:
            catalogue = Catalogue(out)
            meet.wait()
            found.append(catalogue.join("reshard x").generation)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert found == [1] * 6
        assert Catalogue(out).join("reshard y").generation == 2
        assert Catalogue(out).join("reshard y").generation == 2
        assert Catalogue(out).join("reshard x").generation == 3
