"""A worker's plan alone, with servers of arrays: every element of every pair of layouts arrives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ckptd.checkpoint.save.arena import Slot
from ckptd.errors import UsageError
from ckptd.lay.copies import Composition
from ckptd.lay.local import local_tensors
from ckptd.lay.stored import StoredForm
from ckptd.publish import pull
from ckptd.publish.blocks import BLOCK_BYTES, gather_blocks, read_bytes
from ckptd.publish.link import MappedVersion
from ckptd.publish.messages import (
    AskChanged,
    AskTensors,
    BlockRead,
    ChangedBlocks,
    PublishedAbout,
    PublishedTensor,
    TensorPlaces,
)
from ckptd.types import dtype_of
from tests.lay.test_copies import composed
from tests.lay.test_live import PAIRS
from tests.reshard.live.test_move import CASES, pair
from tests.reshard.live.world import Values, memories

KIND = "float32"


class ArrayServer:
    """Arrays of one rank in a slot, as a server gives them; `local` maps the slot."""

    def __init__(
        self, arrays: dict[str, np.ndarray[Any, Any]], *, local: bool, kind: str = KIND
    ) -> None:
        self.local = local
        self.asked = 0
        self._tensors: dict[str, PublishedTensor] = {}
        at = 0
        for name, array in arrays.items():
            self._tensors[name] = PublishedTensor(
                name, kind, at, array.nbytes // dtype_of(kind).itemsize
            )
            at += array.nbytes
        self.slot = Slot(0, at)
        self.slot.begin(1)
        for name, array in arrays.items():
            place = self._tensors[name].start
            self.slot.put(place, array.reshape(-1).view(np.uint8))
        self.slot.seal()
        self._known: tuple[PublishedTensor, ...] = ()

    def ask(self, question: Any, kind: Any, wait_s: float | None = None) -> Any:
        assert isinstance(question, AskTensors)
        absent = PublishedTensor("", "", 0, 0)
        self._known = tuple(self._tensors.get(n, absent) for n in question.names)
        return TensorPlaces(self._known)

    def map(self, number: int) -> MappedVersion:
        return MappedVersion(self.slot.fd, self.slot.nbytes, number)

    def reads(self, number: int, requests: Any) -> Iterator[Any]:
        for blocks, into in requests:
            assert read_bytes(self._known, blocks) == len(into)
            gather_blocks(self.slot, self._known, blocks, into)
            self.asked += len(into)
            yield into


Arrays = dict[str, np.ndarray[Any, Any]]


def pulled(
    monkeypatch: pytest.MonkeyPatch, composition: Composition, *, local: bool
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each parameter of each worker as it is and must be."""
    source, target = composition.source, composition.target
    values = Values()
    servers = {
        r: ArrayServer(parameters(values, source, r), local=local) for r in range(source.mesh.world)
    }
    monkeypatch.setattr(pull, "published_layout", lambda about: source.bound)
    about = PublishedAbout("epoch", source.mesh.world, "", {})
    try:
        for rank in range(target.mesh.world):
            wanted = parameters(values, target, rank)
            found = {n: np.full_like(a, 77) for n, a in wanted.items()}
            plan = pull.PullPlan(about, target.bound, rank, memories(found, KIND))
            before = sum(s.asked for s in servers.values())
            staged = plan.stage(1, servers, None)
            assert all((a == 77).all() for a in found.values())
            staged.apply()
            asked = sum(s.asked for s in servers.values()) - before
            assert asked == (0 if local else staged.report.bytes_needed)
            for name, array in wanted.items():
                yield name, found[name], array
    finally:
        for server in servers.values():
            server.slot.close()


def parameters(values: Values, form: StoredForm, rank: int) -> Arrays:
    names = {t.name for t in local_tensors(form, rank) if not t.state}
    found = values.arrays(form, rank, dtype_of(KIND))
    return {n: a for n, a in found.items() if n in names}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_element_of_a_pair_arrives(
    monkeypatch: pytest.MonkeyPatch, source: str, target: str
) -> None:
    for name, found, wanted in pulled(monkeypatch, composed(source, target), local=False):
        assert np.array_equal(found, wanted), name


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_every_element_of_a_shape_arrives(
    monkeypatch: pytest.MonkeyPatch, case: str, local: bool
) -> None:
    composition = pair(*CASES[case], n=40, m=36, e=4)
    for name, found, wanted in pulled(monkeypatch, composition, local=local):
        assert np.array_equal(found, wanted), name


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("how", "factor"), [("avg", 1), ("sum", 3)])
def test_replicas_are_combined(
    monkeypatch: pytest.MonkeyPatch, how: str, factor: int, local: bool
) -> None:
    composition = pair(f"d:3 t:2;a = a[n@t m] {how}(d)", "t:4;a = a[n@t m]", n=8, m=3)
    for name, found, wanted in pulled(monkeypatch, composition, local=local):
        assert np.array_equal(found, wanted * factor), name


def test_what_is_asked_for_is_checked_before_it_is_read() -> None:
    tensors = (PublishedTensor("a", "float32", 0, 10), PublishedTensor("b", "float32", 40, 1 << 30))
    assert read_bytes(tensors, (BlockRead(0, 0, (2, 5), (5, 1)), BlockRead(0, 9, (), ()))) == 44
    assert read_bytes(tensors, (BlockRead(0, 1, (3, 3), (3, 1), "bfloat16"),)) == 18
    for wrong in (
        BlockRead(0, 1, (2, 5), (5, 1)),
        BlockRead(0, 0, (11,), (1,)),
        BlockRead(0, 0, (2,), (1 << 61,)),
        BlockRead(2, 0, (1,), (1,)),
        BlockRead(0, 0, (1,), (1, 1)),
        BlockRead(0, 9, (3,), (-4,)),
        BlockRead(0, 0, (-1,), (1,)),
        BlockRead(1, 0, (1 << 25,), (1,)),
        BlockRead(1, 0, (1 << 25,), (1,), "bfloat16"),
        BlockRead(1, 0, (1 << 40,), (0,)),
    ):
        with pytest.raises(UsageError) as caught:
            read_bytes(tensors, (wrong,))
        assert caught.value.message in (
            "a part is not inside its tensor",
            "unknown part of a tensor",
            "too many bytes requested at once",
        )
    slot = Slot(0, 40)
    try:
        with pytest.raises(UsageError):
            gather_blocks(slot, tensors, (BlockRead(1, 0, (1,), (1,)),), np.empty(4, np.uint8))
    finally:
        slot.close()


class LateServer(ArrayServer):
    """One that has no digests yet, and waits for them as long as it is asked to."""

    def ask(self, question: Any, kind: Any, wait_s: float | None = None) -> Any:
        if isinstance(question, AskChanged):
            time.sleep(question.wait_s)
            return ChangedBlocks(False, BLOCK_BYTES, ())
        return super().ask(question, kind, wait_s)


def test_late_digests_of_many_servers_are_waited_for_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    composition = pair("t:4;a = a[n@t m]", "t:1;a = a[n m]", n=8, m=4)
    source, target, values = composition.source, composition.target, Values()
    servers = {
        r: LateServer(parameters(values, source, r), local=False) for r in range(source.mesh.world)
    }
    monkeypatch.setattr(pull, "published_layout", lambda about: source.bound)
    monkeypatch.setattr(pull, "_DIGESTS_S", 0.3)
    wanted = parameters(values, target, 0)
    found = {n: np.zeros_like(a) for n, a in wanted.items()}
    about = PublishedAbout("epoch", source.mesh.world, "", {})
    plan = pull.PullPlan(about, target.bound, 0, memories(found, KIND))
    steps: list[float] = []
    begun = time.monotonic()
    try:
        held = pull.HeldTensors(1, frozenset(found))
        plan.stage(1, servers, None, held, step=lambda: steps.append(time.monotonic())).apply()
    finally:
        for server in servers.values():
            server.slot.close()
    assert 0.3 <= steps[0] - begun <= steps[3] - begun < 1.1  # not one after the other
    assert all((found[n] == a).all() for n, a in wanted.items())
