"""Which slot a save gets: never one that is needed, as long as there is another choice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptd.checkpoint.save import arena as module
from ckptd.checkpoint.save.arena import KEEPING, Slot, Slots
from ckptd.errors import ProcessError, SaveError


class SlotsMachine(RuleBasedStateMachine):
    """Saves that are taken, become complete on tiers, and are let go, in any order."""

    @initialize(wanted=st.integers(1, 4))
    def begin(self, wanted: int) -> None:
        self.wanted = wanted
        self.announced: list[int] = []
        self.slots = Slots(wanted, lambda slot: self.announced.append(slot.number))
        self.job = 0
        self.taken: dict[int, int] = {}
        self.kept: dict[str, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "slots"):
            self.slots.close()

    @precondition(lambda self: not self.slots.full)
    @rule(nbytes=st.integers(1, 9))
    def save(self, nbytes: int) -> None:
        before = set(self.slots._arena)
        needed = {*self.taken.values(), *self.kept.values()}
        slot = self.slots.acquire(nbytes, 1.0)
        assert slot.nbytes >= nbytes
        assert slot.number not in self.taken.values()
        if slot.number in needed:  # only where nothing else was left, nor could be made
            assert before <= needed
            assert len(before) >= self.wanted
            assert not self.taken, "better wait for a save that is under way"
        self.job += 1
        self.slots.take(slot, self.job)
        self.taken[self.job] = slot.number
        self.kept = {t: n for t, n in self.kept.items() if n != slot.number}

    @precondition(lambda self: self.slots.full)
    @rule()
    def save_too_many(self) -> None:
        with pytest.raises(SaveError) as caught:
            self.slots.acquire(1, 0.0)
        assert "earlier saves still occupy the arena" in caught.value.message

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), tier=st.sampled_from((*KEEPING, "local")))
    def complete(self, data: st.DataObject, tier: str) -> None:
        job = data.draw(st.sampled_from(sorted(self.taken)))
        self.slots.keep(tier, job)
        if tier in KEEPING:
            self.kept[tier] = self.taken[job]

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.taken)))
        self.slots.release(job)
        del self.taken[job]

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "slots"):
            assert self.slots._taken == {n: j for j, n in self.taken.items()}
            assert self.slots._kept == self.kept
            assert len(self.slots._arena) <= self.wanted
            assert set(self.slots._arena) <= set(self.announced)


SlotsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestSlots = SlotsMachine.TestCase


def test_a_second_slot_is_made_before_the_newest_snapshot_is_given_up() -> None:
    slots = Slots(2, lambda slot: None)
    first = slots.acquire(8, 1.0)
    slots.take(first, 1)
    slots.keep("memory", 1)
    slots.release(1)
    assert slots.acquire(8, 1.0) is not first
    slots.close()


def test_tiers_that_keep_different_snapshots_have_a_slot_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Memory every step, a peer every other one: neither loses what it has to the next save."""
    slots = Slots(None, lambda slot: None)
    for job in range(1, 9):
        before = dict(slots._kept)
        slot = slots.acquire(8, 1.0)
        assert slot.number not in before.values()
        slots.take(slot, job)
        slots.keep("memory", job)
        if job % 2:
            slots.keep("peer", job)
        slots.release(job)
    assert len(slots._arena) == 3
    assert not caplog.records
    slots.close()


def test_without_memory_for_another_slot_the_tier_is_given_up_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots = Slots(1, lambda slot: None)
    for job in (1, 2, 3):
        slots.take(slots.acquire(8, 1.0), job)
        slots.keep("memory", job)
        slots.release(job)
    assert sum("the memory tier holds no complete one" in r.message for r in caplog.records) == 1
    slots.close()


def test_a_slot_that_cannot_be_made_lets_saves_wait_for_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = Slots(3, lambda slot: None)
    slots.take(slots.acquire(8, 1.0), 1)

    def refuse(number: int, nbytes: int) -> Slot:
        raise SaveError("no memory", kind="no-memory")

    monkeypatch.setattr(module, "Slot", refuse)
    with pytest.raises(SaveError) as caught:
        slots.acquire(8, 0.01)
    assert "earlier saves still occupy the arena" in caught.value.message
    slots.release(1)
    assert slots.acquire(8, 1.0).number == 0
    slots.close()


def test_a_kept_slot_that_could_not_grow_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory was given up for the larger one, and the snapshot with it."""
    slots = Slots(1, lambda slot: None)
    first = slots.acquire(8, 1.0)
    first.begin(1)
    first.seal()
    slots.take(first, 1)
    slots.keep("memory", 1)
    slots.release(1)
    assert slots.kept == {"memory": 1}

    def refuse(number: int, nbytes: int) -> Slot:
        raise SaveError("no memory", kind="no-memory")

    with monkeypatch.context() as patch:
        patch.setattr(module, "Slot", refuse)
        with pytest.raises(SaveError, match="no memory"):
            slots.acquire(16, 1.0)
    assert slots.kept == {}
    assert slots.acquire(8, 1.0).nbytes == 8
    slots.close()


def test_after_a_failure_every_wait_ends() -> None:
    slots = Slots(1, lambda slot: None)
    slots.take(slots.acquire(8, 1.0), 1)
    slots.fail(ProcessError("gone"))
    with pytest.raises(ProcessError, match="gone"):
        slots.acquire(8, 60.0)
    slots.close()
