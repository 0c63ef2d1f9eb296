from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.elastic.membership import (
    Member,
    Record,
    check_log,
    decode_record,
    encode_record,
    members_of,
)
from ckptd.elastic.placement import Coordinate, NodeSlot
from ckptd.elastic.policy import JobSpec, Shape, choose
from ckptd.errors import CorruptError


def record(shape: Shape, generation: int = 1, step: int = 0, by: str = "me") -> Record:
    slots = [NodeSlot(f"n{k}", j) for k in range(shape.pp * shape.dp) for j in range(shape.tp)]
    choice = choose(JobSpec(microbatches=shape.dp, planned=shape), slots)
    return Record(
        generation=generation,
        shape=shape,
        members=members_of(choice.places),
        step=step,
        reason="test",
        at=1.5,
        by=by,
        why=choice.why,
        candidates=choice.candidates,
    )


@given(st.builds(Shape, *[st.integers(1, 3)] * 3), st.integers(1, 1 << 60))
def test_what_is_written_is_read(shape: Shape, generation: int) -> None:
    wrote = record(shape, generation)
    assert decode_record(encode_record(wrote), "here") == wrote
    assert b"\n" not in encode_record(wrote)


def test_a_record_of_before_layouts_were_explained_is_read() -> None:
    new = record(Shape(dp=2))
    assert new.why
    assert new.candidates
    fields = msgspec.json.decode(encode_record(new))
    for name in ("chosen_at", "why", "candidates"):
        del fields[name]
    old = decode_record(msgspec.json.encode(fields), "here")
    assert old == msgspec.structs.replace(new, why=(), candidates=())


def test_slots_come_back_with_their_places() -> None:
    assert record(Shape(2, 1, 2)).slots_of("n1") == (
        NodeSlot("n1", 0, Coordinate(1, 0, 0)),
        NodeSlot("n1", 1, Coordinate(1, 0, 1)),
    )


@given(st.binary(max_size=300))
def test_any_bytes_are_a_record_or_an_error(raw: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        decode_record(raw, "here")
    assert (caught.value.message, caught.value.where) == (
        "a record of the membership log cannot be read",
        "here",
    )


@given(st.data())
def test_a_changed_record_is_one_or_an_error(data: st.DataObject) -> None:
    raw = bytearray(encode_record(record(Shape(1, 2, 2))))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptError):
        got = decode_record(bytes(raw), "here")
        assert len(got.members) == got.shape.world


def test_members_must_be_the_ranks_of_the_shape() -> None:
    good = record(Shape(dp=2))
    swapped = msgspec.structs.replace(good, members=good.members[::-1])
    twice = msgspec.structs.replace(
        good, members=(good.members[0], Member(good.members[0].node, 0, 0, 1, 0))
    )
    huge = msgspec.structs.replace(good, shape=Shape(1 << 40, 1 << 40, 1))
    for wrong in (swapped, twice, huge, msgspec.structs.replace(good, members=())):
        with pytest.raises(CorruptError, match="not the ranks"):
            decode_record(encode_record(wrong), "here")


def test_a_log_does_not_go_backwards() -> None:
    check_log([record(Shape(), 1, 3), record(Shape(), 4, 3)], "log")
    for second in (record(Shape(), 1, 3), record(Shape(), 2, 2)):
        with pytest.raises(CorruptError, match="backwards"):
            check_log([record(Shape(), 1, 3), second], "log")


def test_a_generation_may_be_written_again_for_what_people_ordered() -> None:
    began = record(Shape(dp=2), 2, 3)
    paused = msgspec.structs.replace(began, parked=True, by="another")
    check_log([began, paused, msgspec.structs.replace(paused, parked=False, out=("x",))], "log")
    assert decode_record(encode_record(paused), "log") == paused
    for other in (began, record(Shape(), 2, 3), msgspec.structs.replace(paused, step=2)):
        with pytest.raises(CorruptError, match="backwards"):
            check_log([began, msgspec.structs.replace(other, at=2.5)], "log")
