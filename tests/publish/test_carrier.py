"""The carrier over process groups keeps the contract."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch.distributed as dist
from numpy.typing import NDArray

from ckptd.errors import TransientStoreError, UsageError
from ckptd.publish.carrier import WeightCarrier
from ckptd.testing.carrier import CarrierContract
from ckptd.testing.ranks import run_ranks
from ckptd.train.carrier import GroupCarrier, _GroupRead

pytestmark = pytest.mark.dist


def make(publishers: Sequence[int]) -> WeightCarrier:
    return GroupCarrier(None, publishers, timeout_s=20.0)


class TestGroupCarrier(CarrierContract):
    make = staticmethod(make)


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
    found = [_ask(carrier, 1, 1000)]
    if how == "idle":
        time.sleep(2 * _TIMEOUT_S)
    elif how == "stopped":
        pid = int(store.get("pid"))
        os.kill(pid, signal.SIGSTOP)
        found.append(_ask(carrier, 2, 1000))
        os.kill(pid, signal.SIGCONT)
    else:
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
                raise UsageError("a value is too large", kind="overflow", where="w.1")
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
    assert run_ranks(2, _refused, deadline_s=60.0)[1] == "overflow w.1"
