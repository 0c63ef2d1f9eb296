"""The handle of a save that goes to several tiers."""

from __future__ import annotations

import gc
import weakref
from typing import Literal

import pytest

from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.errors import (
    CkptdError,
    DeadlineError,
    ProcessError,
    SaveError,
    StoreError,
    UsageError,
)

ERROR = SaveError("the peer is gone", kind="aborted")


def handle(*near: str, root: bool = False) -> SaveTracker:
    return SaveTracker(7, 1, "0001", 10, near=near, root=root)


def test_a_save_to_near_tiers_ends_when_the_last_of_them_has_settled() -> None:
    save = handle("memory", "peer")
    assert save.settle("peer", ERROR)
    assert not save.done
    assert save.progress.phase == "staging"
    with pytest.raises(DeadlineError):
        save.durable(0.0)
    assert save.settle("memory")
    assert save.done
    assert save.tiers == {"memory": "complete", "peer": "failed"}
    save.durable(tier="memory")
    for tier in (None, "peer"):
        with pytest.raises(SaveError):
            save.durable(tier=tier)


def test_a_state_may_change_when_it_is_copied_and_not_before() -> None:
    save = handle(root=True)
    with pytest.raises(DeadlineError):
        save.staged(0.0)
    save.advance("writing")
    save.staged(0.0)


def test_the_farthest_tier_decides() -> None:
    save = handle("memory", "local")
    save.settle("memory", ERROR)
    save.settle("local")
    save.durable()
    assert save.progress.phase == "durable"
    assert save.error is None


def test_near_tiers_that_fail_are_raised_by_nobody_else() -> None:
    save = handle("memory")
    save.settle("memory", ERROR)
    assert not save.error_unseen
    assert save.take_unseen_error() is None


def test_the_root_is_not_touched_by_what_near_tiers_do() -> None:
    save = handle("memory", root=True)
    save.settle("memory", ERROR)
    assert save.progress.phase == "staging"
    save.advance("durable")
    assert save.done
    save.durable()


def test_the_root_may_end_first() -> None:
    save = handle("memory", root=True)
    save.advance("durable")
    assert not save.done
    save.settle("memory")
    assert save.done


def test_what_is_settled_stays() -> None:
    save = handle("memory", "peer")
    assert save.settle("memory")
    assert not save.settle("memory", ERROR)
    assert not save.settle("local")
    assert save.tiers["memory"] == "complete"


def test_a_tier_that_the_save_does_not_go_to() -> None:
    with pytest.raises(UsageError) as caught:
        handle("memory").durable(tier="peer")
    assert "does not go to the tier" in caught.value.message


@pytest.mark.parametrize(
    ("near", "settled", "told"),
    [
        (["memory"], ["memory"], 1),
        (["memory", "peer"], ["memory"], 0),
        (["memory", "peer", "local"], ["memory", "local"], 0),
        (["memory", "peer"], ["memory", "peer"], 1),
        (["memory", "peer"], ["memory", "!peer"], 0),
        (["memory", "peer"], ["!peer", "memory"], 0),
        (["memory", "peer"], ["memory", "?peer"], 1),
        (["memory", "peer"], ["?peer", "memory"], 1),
        (["memory", "peer"], ["!memory", "!peer"], 0),
    ],
)
def test_a_step_counts_when_no_single_node_can_take_it_along(
    near: list[str], settled: list[str], told: int
) -> None:
    # A step was promised while only its own nodes had it, and one of them was lost: that the peer's
    # copy fails may be how it is learned.
    save, heard = handle(*near, root=True), list[str]()
    save.when_safe(lambda: heard.append("safe"))
    errors = {"!": ERROR, "?": StoreError("there is one node", kind="no-peer")}
    for tier in settled:
        save.settle(tier.lstrip("!?"), errors.get(tier[0]))
    assert min(len(heard), 1) == told


@pytest.mark.parametrize(
    ("memory", "peer", "unsure"),
    [
        (None, ERROR, True),
        (ERROR, ERROR, False),
        (None, ProcessError("the agent is gone, and its memory"), False),
        (None, None, False),
    ],
)
def test_what_is_near_though_the_peer_has_it_not(
    memory: CkptdError | None, peer: CkptdError | None, unsure: bool
) -> None:
    save = handle("memory", "peer", root=True)
    assert not save.peer_failed
    save.settle("memory", memory)
    save.settle("peer", peer)
    assert save.peer_failed is unsure


def test_the_folder_of_a_node_is_no_root() -> None:
    save, heard = handle("memory", "peer", "local"), list[str]()
    for tier, error in (("memory", None), ("peer", ERROR), ("local", None)):
        save.settle(tier, error)
    assert save.progress.phase == "durable"
    save.when_safe(lambda: heard.append("safe"))
    assert not heard


def test_a_step_at_the_root_counts_whatever_becomes_of_the_peer() -> None:
    save, heard = handle("memory", "peer", root=True), list[str]()
    save.advance("durable")
    save.when_safe(lambda: heard.append("safe"))
    assert heard


@pytest.mark.parametrize("why", ["not-due", "skipped"])
def test_a_handle_of_no_save_waits_for_nothing(why: Literal["not-due", "skipped"]) -> None:
    handle = SaveTracker.unsaved(7, 2, why)
    assert not handle
    handle.durable()
    handle.durable(0.0, tier="memory")
    handle.staged()
    assert (handle.step, handle.generation, handle.progress.phase) == (7, 2, why)
    assert handle.done
    assert handle.error is None
    assert handle.tiers == {}
    assert handle.seconds == 0.0
    assert why in repr(handle)


def test_a_handle_of_a_save_is_true_however_it_ends() -> None:
    handle = SaveTracker(1, 1, "0001", 10)
    assert handle
    handle.fail(ERROR)
    assert handle


class Loud(SaveError):
    default_kind = "loud"


def test_an_error_is_raised_again_and_again_and_keeps_no_frame_alive() -> None:
    class Big:
        pass

    def failing() -> weakref.ref[Big]:
        big = Big()
        try:
            try:
                raise OSError("no memory")
            except OSError as cause:
                raise Loud("it failed", where="w", found=1) from cause
        except Loud as error:
            error.add_note("at night")
            for tier in save.near:
                save.settle(tier, error)
            save.fail(error)
        return weakref.ref(big)

    def waiting(tier: str | None) -> weakref.ref[Big]:
        big = Big()
        with pytest.raises(Loud) as caught:
            save.durable(1.0, tier=tier)
        assert (caught.value.kind, caught.value.where, caught.value.found) == ("loud", "w", "1")
        assert "it failed" in str(caught.value)
        assert caught.value.__notes__ == ["at night"]
        return weakref.ref(big)

    save = SaveTracker(1, 1, "a", 10, near=("node",))
    kept = [failing(), waiting(None), waiting("node"), waiting(None)]
    gc.collect()
    assert [big() for big in kept] == [None] * 4
    assert isinstance(save.error, Loud)
