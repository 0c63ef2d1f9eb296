"""Lives, zombies, rollbacks, readers and deaths in any order: what is seen equals the model."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from ckptd.checkpoint.format.names import CommitName, lease_key
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.root import index as marks
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import GcPlan, apply_retention, plan_gc, run_gc
from ckptd.checkpoint.root.leases import Hold, Unheld, hold, hold_step
from ckptd.checkpoint.root.policy import Keep, select
from ckptd.errors import ConflictError, CorruptError, NotFoundError, RefusedError, StoreError
from ckptd.store.base import FaultRule, FaultSpec, Store
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.root.checkpoints import assert_whole, put_attempt
from tests.checkpoint.root.test_gc import Reckless

LONG_S = 1e9
_VOID_S = marks.VOID_S
_numbers = itertools.count()

which = st.integers(0, 99)
gaps = st.integers(1, 30)
losses = st.none() | st.integers(0, 5)
keeps = st.builds(
    Keep,
    last=st.none() | st.integers(1, 3),
    every_steps=st.none() | st.just(40),
    best=st.none() | st.sampled_from([("loss", "min", 1), ("loss", "max", 2)]),
)


@dataclass
class Model:
    """The definition, without names, records or listings."""

    parents: dict[int, CommitName | None] = field(default_factory=dict)
    commits: set[CommitName] = field(default_factory=set)
    pins: set[CommitName] = field(default_factory=set)
    metadata: dict[CommitName, dict[str, Any]] = field(default_factory=dict)
    """Metadata by commit that was added; the name of a deleted one does not come back."""
    tags: dict[str, CommitName] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        return max(self.parents, default=0)

    def counts(self, name: CommitName, generation: int) -> bool:
        if name.generation == generation:
            return True
        parent = self.parents[generation]
        if parent is None:
            return False
        if parent.generation == name.generation:
            return name.step <= parent.step
        return self.counts(name, parent.generation)

    @property
    def line(self) -> list[CommitName]:
        return sorted(c for c in self.commits if self.newest and self.counts(c, self.newest))

    @property
    def latest(self) -> CommitName | None:
        return max(self.line, default=None)

    def floor(self, generation: int) -> int:
        """The step that this generation began from."""
        parent = self.parents[generation]
        return -1 if parent is None else parent.step


class LineageMachine(RuleBasedStateMachine):
    """One root, one long-lived catalogue, and a fresh one for each look."""

    def make_store(self) -> Store:
        self.memory = f"machine-{next(_numbers)}"
        return MemoryStore(self.memory)

    def drop_store(self) -> None:
        forget_memory(self.memory)

    @initialize()
    def begin(self) -> None:
        # A clean-up that died here is over: nobody waits an hour for what it had in mind.
        marks.VOID_S = -LONG_S
        self.store = self.make_store()
        self.job = Catalogue(self.store)
        self.job.create_or_open()
        self.model = Model()
        self.flying: list[tuple[Commit, Hold | None]] = []
        self.held: list[Hold] = []
        self.attempts = itertools.count()
        self.begin_generation("resume", 0)

    # -- lives ---------------------------------------------------------------------------------

    def claimed(self, parent: CommitName | None) -> None:
        self.model.parents[self.model.newest + 1] = parent

    @rule(how=st.sampled_from(["resume", "older", "fresh"]), pick=which)
    def begin_generation(self, how: str, pick: int) -> None:
        """From the newest step; from any, of an abandoned line too; from nothing."""
        parent = self.job.latest()
        if how == "older" and self.model.commits:
            parent = sorted(self.model.commits)[pick % len(self.model.commits)]
        elif how == "fresh":
            parent = None
        assert self.job.claim(parent, 2, how).generation == self.model.newest + 1
        self.claimed(parent)

    @rule(pick=which, lead=st.integers(-20, 60))
    def resume_from_snapshot(self, pick: int, lead: int) -> None:
        """From a step of any generation that was restored, and perhaps never committed."""
        generation = 1 + pick % self.model.newest
        parent = CommitName(max(0, self.model.floor(generation) + lead), generation)
        try:
            claimed = self.job.claim(parent, 2, "snapshot", committed=False)
        except RefusedError as error:
            told = error.kind
        else:
            told = ""
            assert claimed.generation == self.model.newest + 1
        assert (told == "behind") == (parent.step <= self.model.floor(generation))
        if not told:
            self.claimed(parent)

    @rule(step=st.integers(0, 200))
    def continue_without_load(self, step: int) -> None:
        latest = self.model.latest
        try:
            assert self.job.continue_line(step) == latest
        except RefusedError as error:
            told = error.kind
        else:
            told = ""
        assert (told == "behind") == (latest is not None and step <= latest.step)

    @precondition(lambda self: self.model.commits)
    @rule(pick=which, all=st.booleans())
    def roll_back(self, pick: int, all: bool) -> None:
        names = sorted(self.model.commits)
        name = names[pick % len(names)]
        wanted = next((c for c in self.model.line if c.step == name.step), None)
        if wanted is None and all:
            wanted = max(c for c in names if c.step == name.step)
        try:
            self.job.rollback(name.step, all=all)
        except NotFoundError:
            assert wanted is None
        else:
            assert wanted is not None
            self.claimed(wanted)

    # -- saves ---------------------------------------------------------------------------------

    def held_latest(self, catalogue: Catalogue) -> Hold | None:
        held = hold_step(catalogue, None)
        assert not isinstance(held, Unheld)  # its lease can be written
        return held

    def attempt(self, step: int, generation: int, reuse: bool) -> tuple[Commit, Hold | None]:
        held = self.held_latest(self.job) if reuse else None
        commit = put_attempt(
            self.store,
            CommitName(step, generation),
            f"{next(self.attempts):04d}",
            reuse=held.commit if held else None,
        )
        return commit, held

    @rule(gaps=st.lists(gaps, min_size=1, max_size=4), reuse=st.booleans(), keep=st.none() | keeps)
    def save(self, gaps: list[int], reuse: bool, keep: Keep | None) -> None:
        """Some saves of the live job, with retention after each or without."""
        for gap in gaps:
            self.save_one(gap, reuse, keep)

    def save_one(self, gap: int, reuse: bool, keep: Keep | None) -> None:
        generation = self.model.newest
        latest = self.model.latest
        step = max(latest.step if latest else 0, self.model.floor(generation)) + gap
        commit, held = self.attempt(step, generation, reuse)
        self.job.publish(commit)
        self.model.commits.add(commit.name)
        if held:
            held.release()
        if keep is not None:
            self.expect_gc(keep, abandoned=False)
            apply_retention(self.job, keep)
            self.model.commits = self.after

    @rule(lead=st.integers(-30, 30), pick=which, old=st.booleans(), reuse=st.booleans())
    def begin_attempt(self, lead: int, pick: int, old: bool, reuse: bool) -> None:
        """Of the live generation or an older one; it may fly for as long as it likes."""
        generation = 1 + pick % self.model.newest if old else self.model.newest
        latest = self.model.latest
        step = max(0, (latest.step if latest else 0) + lead)
        self.flying.append(self.attempt(step, generation, reuse))

    @precondition(lambda self: self.flying)
    @rule(pick=which, reckless=st.booleans())
    def finish_attempt(self, pick: int, reckless: bool) -> None:
        """A reckless one is a zombie that has looked at the generations too early."""
        commit, held = self.flying.pop(pick % len(self.flying))
        name, model = commit.name, self.model
        live = name.generation == model.newest
        publisher = Reckless(self.store) if reckless else self.job
        try:
            publisher.publish(commit)
        except (ConflictError, CorruptError, RefusedError) as error:
            told = error.kind if error.kind in ("superseded", "behind") else error.message
        else:
            told = ""
        if held:
            held.release()
        if told == "":
            assert live or reckless
            assert name not in model.commits
            assert name.step > model.floor(name.generation)
            model.commits.add(name)
        elif told == "superseded":
            assert not live
            assert not reckless
        elif told == "behind":
            assert name.step <= model.floor(name.generation)
        elif "committed" in told:
            assert name in model.commits
        else:
            # gc took it for a leftover, rightly:
            assert "missing" in told or "is gone" in told
            assert not live or commit.folder in self.given_up

    # -- guards and readers --------------------------------------------------------------------

    @precondition(lambda self: self.model.commits)
    @rule(pick=which)
    def pin(self, pick: int) -> None:
        """Pin a checkpoint, or unpin it."""
        name = sorted(self.model.commits)[pick % len(self.model.commits)]
        if name in self.model.pins:
            assert self.job.unpin(name)
            self.model.pins.remove(name)
        else:
            self.job.pin(name)
            self.model.pins.add(name)

    @precondition(lambda self: self.model.commits)
    @rule(pick=which, tag=st.sampled_from(["a", "b"]), number=st.none() | st.integers(1, 9))
    def tag(self, pick: int, tag: str, number: int | None) -> None:
        """Put a tag on a checkpoint, or move it; the process may die at some operation."""
        name = sorted(self.model.commits)[pick % len(self.model.commits)]
        rules = () if number is None else (FaultRule("die", number=number),)
        try:
            Catalogue(Fault(self.store, FaultSpec(rules))).tag(name, tag)
        except StoreError:
            found = Catalogue(self.store).tags().get(tag)
            assert found in (self.model.tags.get(tag), name)
            if found is not None:
                self.model.tags[tag] = found
        else:
            self.model.tags[tag] = name
        # The lease of one that died ends after an hour; here at once.
        held = [*self.held, *(h for _, h in self.flying if h)]
        ours = {lease_key(h.lease_id) for h in held}
        self.store.delete([o.key for o in self.store.list("leases/") if o.key not in ours])

    @precondition(lambda self: self.model.tags)
    @rule()
    def untag(self) -> None:
        self.job.untag(self.model.tags.popitem()[0])

    @precondition(lambda self: self.model.commits)
    @rule(pick=which, dead=st.booleans())
    def lease(self, pick: int, dead: bool) -> None:
        """A reader takes any checkpoint; a dead one's lease has run out."""
        names = sorted(self.model.commits)
        held = hold(self.job, names[pick % len(names)], seconds=-LONG_S if dead else 3600.0)
        if not dead:
            self.held.append(held)

    @precondition(lambda self: self.held)
    @rule(pick=which)
    def release(self, pick: int) -> None:
        held = self.held.pop(pick % len(self.held))
        assert_whole(self.store, [held.commit.name])
        held.release()

    @rule(fresh=st.booleans(), keep=st.booleans())
    def read_latest(self, fresh: bool, keep: bool) -> None:
        held = self.held_latest(Catalogue(self.store) if fresh else self.job)
        assert (held.commit.name if held else None) == self.model.latest
        if held is None:
            return
        assert_whole(self.store, [held.commit.name])
        if keep:
            self.held.append(held)
        else:
            held.release()

    # -- metrics that come later ----------------------------------------------------------------

    @precondition(lambda self: self.model.commits)
    @rule(pick=which, loss=losses, fresh=st.booleans())
    def annotate(self, pick: int, loss: int | None, fresh: bool) -> None:
        """An evaluation ends, in this process or in another."""
        name = sorted(self.model.commits)[pick % len(self.model.commits)]
        (Catalogue(self.store) if fresh else self.job).annotate(name, {"loss": loss})
        self.model.metadata.setdefault(name, {})["loss"] = loss

    @precondition(lambda self: self.model.commits)
    @rule(pick=which, loss=losses, number=st.integers(1, 12), after=st.booleans())
    def annotate_and_die(self, pick: int, loss: int | None, number: int, after: bool) -> None:
        name = sorted(self.model.commits)[pick % len(self.model.commits)]
        fault = FaultRule("die-after" if after else "die", number=number)
        old, new = self.model.metadata.get(name, {}), {"loss": loss}
        try:
            Catalogue(Fault(self.store, FaultSpec((fault,)))).annotate(name, new)
        except StoreError:
            found = self.seen(Catalogue(self.store))[name]
            assert found in (old, new)
            new = found
        self.model.metadata[name] = new

    @precondition(lambda self: self.model.commits)
    @rule(keep=keeps, abandoned=st.booleans(), pick=which, loss=losses)
    def annotate_after_the_plan(
        self, keep: Keep, abandoned: bool, pick: int, loss: int | None
    ) -> None:
        """A plan by metrics deletes nothing once there are others."""
        plan = self.plan(keep, abandoned)
        seen = self.seen(self.job)
        self.annotate(pick, loss, fresh=True)
        stale = keep.best is not None and self.seen(self.job) != seen
        run_gc(self.store, plan)
        if not stale:
            self.model.commits = self.after

    def seen(self, catalogue: Catalogue) -> dict[CommitName, dict[str, Any]]:
        records = catalogue.annotated(catalogue.records(catalogue.commits()))
        return {n: r.metadata for n, r in records.items()}

    # -- deletion ------------------------------------------------------------------------------

    given_up: frozenset[str] = frozenset()

    def expect_gc(self, keep: Keep, abandoned: bool) -> None:
        """Work out what must be left: the rule, and what is never deleted."""
        line, model = self.model.line, self.model
        guarded = model.pins | {h.commit.name for h in self.held} | {*model.tags.values()}
        guarded |= {h.commit.name for _, h in self.flying if h}
        records = {
            n: structs.replace(r, metadata=model.metadata.get(n, {}))
            for n, r in self.job.records(sorted(model.commits)).items()
        }
        kept = set(select([records[n] for n in line], keep).kept) | guarded
        if not line or not abandoned:
            kept |= model.commits - set(line)
        if not line:
            kept |= model.commits
        self.after = model.commits & (kept | set(line[-1:]))
        # Attempts of the live generation whose step, or a later one, is committed already.
        self.given_up |= {
            c.folder
            for c, _ in self.flying
            if any(n.generation == c.generation and n.step >= c.step for n in model.commits)
        }

    def plan(self, keep: Keep, abandoned: bool) -> GcPlan:
        self.expect_gc(keep, abandoned)
        # That other runs' commits stay unless this is asked for:
        # tests/checkpoint/torch/test_roots.py.
        return plan_gc(
            self.job,
            keep,
            abandoned_s=0.0 if abandoned else LONG_S,
            leftover_s=LONG_S,
            other_runs=True,
        )

    @rule(keep=keeps, abandoned=st.booleans())
    def collect(self, keep: Keep, abandoned: bool) -> None:
        report = run_gc(self.store, self.plan(keep, abandoned))
        assert report.skipped == ()
        self.model.commits = self.after

    @rule(keep=keeps, number=st.integers(1, 60), after=st.booleans(), again=st.booleans())
    def collect_and_die(self, keep: Keep, number: int, after: bool, again: bool) -> None:
        """Killed at some operation; the same plan may be run again, or never."""
        plan = self.plan(keep, True)
        fault = FaultRule("die-after" if after else "die", number=number)
        try:
            run_gc(Fault(self.store, FaultSpec((fault,))), plan)
        except StoreError:
            left = set(Catalogue(self.store).commits())
            assert self.after <= left <= self.model.commits
            self.model.commits = left
            if again:
                run_gc(self.store, plan)
                self.model.commits = self.after
        else:
            self.model.commits = self.after

    # -- what must always hold -----------------------------------------------------------------

    @invariant()
    def what_is_seen_equals_the_model(self) -> None:
        for catalogue in (Catalogue(self.store), self.job):
            assert catalogue.newest_generation() == self.model.newest
            assert catalogue.commits() == sorted(self.model.commits)
            assert catalogue.line() == self.model.line
            assert catalogue.latest() == self.model.latest
            assert catalogue.pins() == self.model.pins
            assert catalogue.tags() == self.model.tags
            assert self.seen(catalogue) == {
                n: self.model.metadata.get(n, {}) for n in self.model.commits
            }

    @invariant()
    def every_commit_is_whole(self) -> None:
        assert_whole(self.store, self.model.commits)

    def teardown(self) -> None:
        marks.VOID_S = _VOID_S
        if not hasattr(self, "store"):
            return
        try:
            self.nothing_is_left_for_ever()
        finally:
            self.store.close()
            self.drop_store()

    def nothing_is_left_for_ever(self) -> None:
        """The next life's gc finds all that deaths and zombies left."""
        for held in [*self.held, *(h for _, h in self.flying if h)]:
            held.release()
        self.flying.clear()
        self.held.clear()
        self.begin_generation("resume", 0)
        self.collect(Keep(last=None), True)
        self.what_is_seen_equals_the_model()
        records = self.job.records(sorted(self.model.commits))
        wanted = {f.split("/")[1] + "/" for r in records.values() for f in r.folders}
        assert set(self.store.children("data/")) == wanted
        assert list(self.store.list("leases/")) == []
        assert not [o.key for o in self.store.list("data/") if "/parts/" in o.key]


class LocalLineageMachine(LineageMachine):
    """The same on files."""

    def make_store(self) -> Store:
        shm = Path("/dev/shm")
        self.folder = tempfile.mkdtemp(dir=shm if shm.is_dir() else None)
        return LocalStore(self.folder)

    def drop_store(self) -> None:
        shutil.rmtree(self.folder)


TestLineage = LineageMachine.TestCase
TestLineage.settings = settings(max_examples=30, stateful_step_count=30)
TestLineageLocal = LocalLineageMachine.TestCase
TestLineageLocal.settings = settings(max_examples=12, stateful_step_count=25)


@pytest.mark.long
class TestLineageCampaign(LineageMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=3000, stateful_step_count=60)
