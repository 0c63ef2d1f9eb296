"""The carrier over process groups keeps the contract, and so does one that reads memory itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import ckptd
from ckptd.checkpoint.save.arena import CONTROL_BYTES, Slot
from ckptd.errors import TransientStoreError, UsageError
from ckptd.publish.blocks import gather_blocks, read_bytes
from ckptd.publish.carrier import WeightCarrier
from ckptd.publish.messages import BlockRead, PublishedTensor
from ckptd.publish.torch.carrier import GroupCarrier, _GroupRead
from ckptd.testing.carrier import CarrierContract
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S, stop
from tests.publish.onesided import (
    OneSidedCarrier,
    QueuePair,
    RegionTable,
    RemoteRead,
    _part,
    _Read,
)

pytestmark = pytest.mark.dist


def make(publishers: Sequence[int]) -> WeightCarrier:
    return GroupCarrier(None, publishers, timeout_s=20.0)


class TestGroupCarrier(CarrierContract):
    make = staticmethod(make)


def make_onesided(publishers: Sequence[int]) -> WeightCarrier:
    return OneSidedCarrier(None, publishers, timeout_s=20.0)


class TestOneSidedCarrier(CarrierContract):
    make = staticmethod(make_onesided)


def test_parts_are_read_run_by_run_as_a_server_gathers_them() -> None:
    generator = np.random.default_rng(7)
    slot = Slot(0, 40_000)
    try:
        slot.begin(1)
        slot.put(0, generator.integers(0, 256, 40_000).astype(np.uint8))
        table = RegionTable()
        data = np.frombuffer(slot.data, np.uint8)
        key = table.register(int(data.__array_interface__["data"][0]) - CONTROL_BYTES, 41_000)
        pair = QueuePair(table.card)
        runs = 0
        for case in range(200):
            tensor = PublishedTensor("w", "bfloat16", 64 * int(generator.integers(0, 9)), 9000)
            shape = tuple(int(n) for n in generator.integers(1, 9, generator.integers(0, 4)))
            order = generator.permutation(len(shape))
            strides, step = [0] * len(shape), 1
            for d in order.tolist():
                strides[d] = step
                step *= shape[d] * int(generator.choice([1, 1, 1, 2, 3]))
            if step > 9000:
                continue
            block = BlockRead(0, int(generator.integers(0, 9)), shape, tuple(strides))
            wanted = np.zeros(read_bytes([tensor], [block]), np.uint8)
            gather_blocks(slot, [tensor], [block], wanted)
            part = _part(block, tensor, 0, 0)
            runs += len(part.offsets)
            room = np.zeros(part.total, np.uint8)
            pair.post(RemoteRead(case, key, part.offsets, part.nbytes, room))
            assert pair.poll(20.0) == (case, "")
            found = np.zeros_like(wanted)
            gather_blocks(_Read(len(room), room.data), [part.tensor], [part.block], found)
            assert found.tobytes() == wanted.tobytes(), block
        assert runs > 500
        beyond = RemoteRead(1, key, [41_000 - 8], 16, np.zeros(16, np.uint8))
        for wrong in (beyond, beyond._replace(key=key + 1), beyond._replace(offsets=[-8])):
            pair.post(wrong)
            assert pair.poll(20.0).error in {"not inside the region", "no region has this key"}
        table.withdraw(key)
        pair.post(beyond._replace(offsets=[0]))
        assert pair.poll(20.0) == (1, "no region has this key")
        pair.close()
    finally:
        slot.close()


def _frozen(at: str) -> bool:
    """Rank 0 publishes, and is stopped; rank 1 has the weights all the same."""
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)]
    carrier = make_onesided((0,))
    store = dist.distributed_c10d._get_default_store()
    layout = "mesh O = x:1\nspace s { w[n m] }\nlayout one of s on O { w = w[n m] }\n"
    full = torch.arange(6000.0).view(60, 100)
    if rank == 0:
        publisher = ckptd.Publisher(layout, at, process_group=alone[0], carrier=carrier)
        publisher.publish(1, {"m": {"w": full}}).wait(PATIENCE_S)
        store.set("pid", str(os.getpid()))
        store.wait(["done"])
        publisher.close()
        return True
    pid, into = int(store.get("pid")), torch.zeros(60, 100)
    stop(pid)
    try:
        with ckptd.Subscriber(layout, {"m": {"w": into}}, at, carrier=carrier) as subscriber:
            report = subscriber.update(30.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    store.set("done", "1")
    assert report is not None
    assert report.bytes_received == full.nbytes
    return torch.equal(into, full)


@pytest.mark.timeout(120)
def test_a_one_sided_read_takes_no_part_of_the_publisher(tmp_path: Path) -> None:
    assert run_ranks(2, _frozen, str(tmp_path / "at"), deadline_s=90.0) == [True, True]


_TIMEOUT_S = 1.0
Asked = list[tuple[int, str | int]]


def _ask(carrier: GroupCarrier, number: int, size: int) -> tuple[int, str | int]:
    into = np.zeros(size, np.uint8)
    try:
        carrier.ask(0, _GroupRead(number, (), ()), into)
    except TransientStoreError as error:
        return number, error.kind
    assert (into == into[0]).all()
    return number, int(into[0])


def _asks(how: str) -> Asked:
    """Rank 0 answers each number with bytes of that number; rank 1 asks."""
    carrier = GroupCarrier(None, (0,), timeout_s=_TIMEOUT_S)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:

        def read(number: int, *_: object) -> NDArray[np.uint8]:
            if how == "late" and number == 2:
                time.sleep(1.5 * _TIMEOUT_S)
            return np.full(1000, number, np.uint8)

        store.set("pid", str(os.getpid()))
        carrier.serve(read)
        store.wait(["done"])
        carrier.close()
        return []
    carrier._timeout_s = PATIENCE_S  # but where an answer is to be late
    found = [_ask(carrier, 1, 1000)]
    if how == "idle":
        time.sleep(2 * _TIMEOUT_S)
    elif how == "stopped":
        pid = int(store.get("pid"))
        stop(pid)
        carrier._timeout_s = _TIMEOUT_S
        found.append(_ask(carrier, 2, 1000))
        os.kill(pid, signal.SIGCONT)
    else:
        carrier._timeout_s = _TIMEOUT_S
        found.append(_ask(carrier, 2, 1000))
        time.sleep(_TIMEOUT_S)
    found += [_ask(carrier, 3, 1000), _ask(carrier, 4, 1000)]
    store.set("done", "1")
    carrier.close()
    return found


@pytest.mark.timeout(120)
def test_versions_may_be_further_apart_than_messages_may_take() -> None:
    assert run_ranks(2, _asks, "idle", deadline_s=60.0)[1] == [(1, 1), (3, 3), (4, 4)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["late", "stopped"])
def test_an_answer_that_comes_late_is_not_taken_for_the_next_one(how: str) -> None:
    first, late, *others = run_ranks(2, _asks, how, deadline_s=60.0)[1]
    assert first == (1, 1)
    assert late[1] in {"link-late", "link-lost"}
    assert [kind for _, kind in others] == ["link-lost"] * 2


def _refused() -> str:
    """Rank 0 cannot answer for a reason that does not go away; then it can."""
    carrier = GroupCarrier(None, (0,), timeout_s=20.0)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:

        def read(number: int, *_: object) -> NDArray[np.uint8]:
            if number == 1:
                raise UsageError("a value is too large", kind="unsavable", where="w.1")
            return np.full(1000, number, np.uint8)

        carrier.serve(read)
        store.wait(["done"])
        carrier.close()
        return ""
    with pytest.raises(UsageError, match="a value is too large") as caught:
        _ask(carrier, 1, 1000)
    assert _ask(carrier, 2, 1000) == (2, 2)
    store.set("done", "1")
    carrier.close()
    return f"{caught.value.kind} {caught.value.where}"


@pytest.mark.timeout(120)
def test_why_a_publisher_cannot_answer_is_what_the_worker_raises() -> None:
    assert run_ranks(2, _refused, deadline_s=60.0)[1] == "unsavable w.1"


_MALFORMED = (b"{", b"\xff\xff", b"[1]", b'{"class": 1}', b'{"message": {}}', b"[" * 3000)


def _told_nonsense() -> list[tuple[int, str | int]]:
    """Rank 0 answers with errors that are none, and then with what was asked for."""
    carrier = GroupCarrier(None, (0,), timeout_s=PATIENCE_S)
    if dist.get_rank() == 0:
        for raw in _MALFORMED:
            length = np.zeros(1, np.int64)
            carrier._through(carrier._transport.receive(1, length.view(np.uint8)))
            carrier._through(carrier._transport.receive(1, np.zeros(int(length[0]), np.uint8)))
            head = np.frombuffer(b"-" + len(raw).to_bytes(8, "little") + bytes(8), np.uint8)
            carrier._send(1, head, np.frombuffer(raw, np.uint8))
        carrier.serve(lambda number, *_: np.full(1000, number, np.uint8))
        dist.barrier()
        return []
    found = [_ask(carrier, number, 1000) for number in range(len(_MALFORMED) + 1)]
    dist.barrier()
    carrier.close()
    return found


@pytest.mark.timeout(120)
def test_an_error_that_is_none_ends_the_question_alone() -> None:
    found = run_ranks(2, _told_nonsense, deadline_s=110.0)[1]
    last = len(_MALFORMED)
    assert found == [*((number, "link-lost") for number in range(last)), (last, last)]
