"""Slots of a node whose devices fail."""

from __future__ import annotations

import pytest

from ckptd.elastic.launchers.slots import NodeSlots, is_device_error


def slots(count: int = 4, **environ: str) -> NodeSlots:
    return NodeSlots(count, environ)


def test_a_device_that_fails_a_new_process_too_is_out_of_use() -> None:
    found = slots()
    assert found.failed(1, "first", fresh=False, worked=True) is None
    assert found.environ() == {}
    assert found.failed(1, "second", fresh=True, worked=False) == 1
    assert found.in_use == [0, 2, 3]
    assert found.sick == ("slot 1: second",)
    assert found.environ() == {"CUDA_VISIBLE_DEVICES": "0,2,3"}
    for _ in range(2):
        gone = found.failed(2, "third", fresh=True, worked=False)
    assert gone == 3, "local rank 2 is slot 3 now"


@pytest.mark.parametrize(("fresh", "worked"), [(True, True), (False, False)])
def test_what_may_be_the_program_is_no_fault_of_the_device(fresh: bool, worked: bool) -> None:
    """An assertion in a step comes again in each process; an old process has its error still."""
    found = slots()
    for _ in range(5):
        assert found.failed(0, "assert", fresh=fresh, worked=worked) is None


def test_a_device_that_worked_meanwhile_begins_anew() -> None:
    found = slots()
    for worked in (False, True, False):
        gone = found.failed(0, "x", fresh=True, worked=worked)
    assert gone == 0
    found = slots()
    for _ in range(3):
        assert found.failed(0, "x", fresh=True, worked=True) is None


def test_the_last_slot_stays() -> None:
    found = slots(1)
    for _ in range(5):
        assert found.failed(0, "x", fresh=True, worked=False) is None


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
        assert found.failed(0, "x", fresh=True, worked=False) is None


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
