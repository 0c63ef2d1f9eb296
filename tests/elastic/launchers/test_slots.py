"""Slots of a node whose devices fail."""

from __future__ import annotations

import pytest

from ckptd.elastic.launchers.slots import NodeSlots, is_device_error


def slots(count: int = 4, **environ: str) -> NodeSlots:
    return NodeSlots(count, environ)


def test_a_device_that_fails_a_new_process_too_is_out_of_use() -> None:
    found = slots()
    assert not found.failed(1, "first", fresh=False, worked=True)
    assert found.environ() == {}
    assert found.failed(1, "second", fresh=True, worked=False)
    assert found.in_use == [0, 2, 3]
    assert found.sick == ("slot 1: second",)
    assert found.environ() == {"CUDA_VISIBLE_DEVICES": "0,2,3"}
    assert [found.of(place) for place in range(4)] == [0, 2, 3, None]
    for _ in range(2):
        gone = found.failed(3, "third", fresh=True, worked=False)
        assert not found.failed(1, "it ended with the others", fresh=True, worked=False)
    assert gone
    assert found.in_use == [0, 2]


def test_a_program_that_fails_on_most_devices_takes_none_out_of_use() -> None:
    found = slots()
    for _ in range(5):
        for slot in range(4):
            assert not found.failed(slot, "assert", fresh=True, worked=False)
    for slot in (0, 1, 2):  # mended
        found.failed(slot, "assert", fresh=False, worked=True)
    assert found.failed(3, "lost", fresh=True, worked=False)


@pytest.mark.parametrize(("fresh", "worked"), [(True, True), (False, False)])
def test_what_may_be_the_program_is_no_fault_of_the_device(fresh: bool, worked: bool) -> None:
    """An assertion in a step comes again in each process; an old process has its error still."""
    found = slots()
    for _ in range(5):
        assert not found.failed(0, "assert", fresh=fresh, worked=worked)


def test_a_device_that_worked_meanwhile_begins_anew() -> None:
    found = slots()
    for worked in (False, True, False):
        gone = found.failed(0, "x", fresh=True, worked=worked)
    assert gone
    found = slots()
    for _ in range(3):
        assert not found.failed(0, "x", fresh=True, worked=True)


def test_the_last_slot_stays() -> None:
    found = slots(1)
    for _ in range(5):
        assert not found.failed(0, "x", fresh=True, worked=False)


@pytest.mark.parametrize(
    ("given", "left"), [("4,5,6,7", "4,6,7"), ("GPU-a,GPU-b, GPU-c,GPU-d", "GPU-a,GPU-c,GPU-d")]
)
def test_devices_are_those_that_the_launcher_was_given(given: str, left: str) -> None:
    found = slots(HIP_VISIBLE_DEVICES=given)
    for _ in range(2):
        found.failed(1, "x", fresh=True, worked=False)
    assert found.environ() == {"HIP_VISIBLE_DEVICES": left}


def test_ranks_with_several_devices_have_no_slot_that_could_be_left_out() -> None:
    found = slots(CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
    for _ in range(5):
        assert not found.failed(0, "x", fresh=True, worked=False)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("No CUDA GPUs are available", True),
        ("RuntimeError: HIP error: invalid device ordinal", True),
        ("CUDA error: out of memory", False),
        ("ValueError: shapes", False),
    ],
)
def test_words_of_a_device_error(text: str, is_one: bool) -> None:
    assert is_device_error(text) is is_one
