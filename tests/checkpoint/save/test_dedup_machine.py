"""Changes, saves, retention, clean-ups, lives and deaths in any order: nothing referred to goes."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root import index as marks
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import plan_gc, run_gc
from ckptd.checkpoint.save.dedup import MOST_FOLDERS
from ckptd.errors import CkptdError, NotFoundError
from ckptd.store import StoreSpec
from ckptd.store.base import FaultRule, FaultSpec, Store
from ckptd.store.fault import Fault
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.save.referring import assert_holds, read_back
from tests.checkpoint.save.saving import Job, Keep, plan_of, values
from tests.processes import PATIENCE_S

_numbers = itertools.count()
SHAPES: dict[str, tuple[int, ...]] = {f"t{i}": (64, 256) for i in range(5)} | {"s": (3,)}
SHAPES |= {"large": (1024, 1024)}  # a small state is written whole, whatever changed
LONG_S = 1e9
OPENING = 8
"""More operations than opening the root takes."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean-up that died in the middle leaves marks, for which all wait."""
    monkeypatch.setattr(marks, "WAIT_S", 0.2)


names_of = st.sets(st.sampled_from(sorted(SHAPES)))
keeps = st.none() | st.builds(Keep, last=st.integers(1, 3))


class ReferringMachine(RuleBasedStateMachine):
    """One job that saves, dies and comes back, beside a clean-up of somebody else."""

    @initialize()
    def begin(self) -> None:
        self.name = f"refer-machine-{next(_numbers)}"
        self.store: Store = MemoryStore(self.name)
        self.arrays = values(0, SHAPES)
        self.model: dict[CommitName, dict[str, Any]] = {}
        self.seeds = itertools.count(1)
        self.step = 0
        self.job: Job | None = None
        self.live()

    def live(self, fault: FaultRule | None = None) -> Job:
        """Begin a life, which goes through a store of its own that may fail."""
        if self.job is not None:
            self.job.client.close(60.0)
        below = Fault(self.store, FaultSpec((fault,) if fault else ()))
        generation = Catalogue(self.store)
        generation.create_or_open()
        number = generation.claim(generation.latest(), 1, "test").generation
        spec = StoreSpec("memory://unused")
        self.job = Job(spec, store=below, plan=plan_of(SHAPES), generation=number)
        return self.job

    def change(self, names: set[str]) -> None:
        self.arrays = self.arrays | values(next(self.seeds), {n: SHAPES[n] for n in names})

    @rule(changes=st.lists(names_of, min_size=1, max_size=4), keep=keeps)
    def save(self, changes: list[set[str]], keep: Keep | None) -> None:
        assert self.job is not None
        for names in changes:
            self.change(names)
            self.step += 1
            self.job.save(self.step, self.arrays, keep=keep).durable(PATIENCE_S)
            self.model[CommitName(self.step, self.job.generation)] = self.arrays

    @rule()
    def live_again(self) -> None:
        self.live()

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 99))
    def load_an_older_one(self, pick: int) -> None:
        """Later checkpoints leave the line, and may be deleted later."""
        assert self.job is not None
        self.job.client.close(60.0)  # and with it the clean-up after its last save
        names = Catalogue(self.store).line()
        if not names:
            return
        name = names[pick % len(names)]
        with contextlib.suppress(NotFoundError):  # the mark of a clean-up that died is on it
            Catalogue(self.store).rollback(name.step)
            self.arrays = read_back(self.store, name)
            self.step = name.step
        self.live()

    @rule(keep=st.integers(1, 3), abandoned=st.booleans())
    def collect(self, keep: int, abandoned: bool) -> None:
        catalogue = Catalogue(self.store)
        grace = 0.0 if abandoned else LONG_S
        run_gc(self.store, plan_gc(catalogue, keep, abandoned_s=grace, leftover_s=LONG_S))

    @rule(names=names_of, number=st.integers(OPENING + 1, 70), after=st.booleans(), keep=keeps)
    def save_and_die(self, names: set[str], number: int, after: bool, keep: Keep | None) -> None:
        """The writing process dies at some operation; nothing that was committed may suffer."""
        job = self.live(FaultRule("die-after" if after else "die", number=number))
        for _ in range(2):
            self.change(names)
            self.step += 1
            name = CommitName(self.step, job.generation)
            self.model[name] = self.arrays
            try:
                job.save(self.step, self.arrays, keep=keep).durable(PATIENCE_S)
            except CkptdError:
                break
        self.live()

    @rule(keep=st.integers(1, 2), number=st.integers(1, 40))
    def collect_and_die(self, keep: int, number: int) -> None:
        plan = plan_gc(Catalogue(self.store), keep, abandoned_s=0.0, leftover_s=LONG_S)
        with contextlib.suppress(CkptdError):
            run_gc(Fault(self.store, FaultSpec((FaultRule("die", number=number),))), plan)

    @invariant()
    def every_checkpoint_is_what_was_saved(self) -> None:
        catalogue = Catalogue(self.store)
        for name in catalogue.commits():
            try:
                folders = catalogue.commit(name).folders
                assert len(folders) <= MOST_FOLDERS
                assert_holds(self.store, name, self.model[name])
            except CkptdError:
                # Retention of the last save may be at work: then the record is gone by now.
                assert name not in Catalogue(self.store).commits()

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.live()
            assert self.job is not None
            self.job.client.close(60.0)
            # What dead processes leased runs out.
            self.store.delete([o.key for o in self.store.list("leases/")])
            catalogue = Catalogue(self.store)
            run_gc(self.store, plan_gc(catalogue, 1, abandoned_s=0.0, leftover_s=0.0))
            self.every_checkpoint_is_what_was_saved()
            records = catalogue.records(catalogue.commits())
            assert len(records) <= 1
            wanted = {f.split("/")[1] + "/" for r in records.values() for f in r.folders}
            assert set(self.store.children("data/")) == wanted
        finally:
            self.store.close()
            forget_memory(self.name)


TestReferring = ReferringMachine.TestCase
TestReferring.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


@pytest.mark.long
class TestReferringCampaign(ReferringMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=600, stateful_step_count=40, deadline=None)
