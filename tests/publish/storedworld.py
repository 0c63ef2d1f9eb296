"""A publisher's ranks that write to a store, and workers that follow it, in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from ckptd.errors import CkptdError
from ckptd.lay.copies import Composition
from ckptd.publish import blocks, follow, pull, stored
from ckptd.publish.blocks import BlockDigests
from ckptd.publish.follow import StoredWeights
from ckptd.publish.messages import PublishedAbout, PublishedTensor
from ckptd.publish.stored import ShareWriter, StoreDesk, StoredRank
from ckptd.publish.versions import VersionTable
from ckptd.store.base import Store
from tests.processes import until
from tests.publish.deltaworld import WAIT_S, Arrays, DeltaServer, Weights, World

__all__ = ["SOURCE", "StoredPublisher", "StoredWorld", "small_blocks"]

SOURCE: list[object] = [None]


@contextmanager
def small_blocks(nbytes: int) -> Iterator[None]:
    """Have blocks of so few bytes that small tensors have many, and requests of so few."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, stored, follow):
            patch.setattr(module, "BLOCK_BYTES", nbytes)
        patch.setattr(follow, "_HEAD_BYTES", nbytes)
        patch.setattr(follow, "_PIECE_BYTES", 4 * nbytes)
        patch.setattr(follow, "_GAP_BYTES", nbytes // 2)
        patch.setattr(stored, "_TICK_S", 0.02)
        patch.setattr(pull, "published_layout", lambda about: SOURCE[0])
        yield


class _Memory(NamedTuple):
    nbytes: int
    data: memoryview


class StoredPublisher:
    """All ranks of one publisher, and the desk of rank 0."""

    def __init__(
        self, store: Store, ranks: list[Arrays], dtype: str, *, every: int = 4, keep: int = 2
    ) -> None:
        self.store = store
        self.tensors: list[tuple[PublishedTensor, ...]] = []
        self.slots: list[list[_Memory]] = []
        for arrays in ranks:
            tensors, at = [], 0
            for name, array in arrays.items():
                tensors.append(PublishedTensor(name, dtype, at, array.size))
                at += -(-array.nbytes // 64) * 64
            self.tensors.append(tuple(tensors))
            self.slots.append([_Memory(at, memoryview(bytearray(at))) for _ in range(2)])
        self.book = VersionTable(2, 60.0)
        self.epoch = f"e{id(self)}"
        about = PublishedAbout(self.epoch, len(ranks), "", {})
        self.desk = StoreDesk(store, self.epoch, len(ranks), self.book, lambda: about, every, keep)
        self.desk.claim(5.0)
        self.writers = [
            ShareWriter(store, self.desk.generation, r, StoredRank(self.slots[r][0].nbytes, t))
            for r, t in enumerate(self.tensors)
        ]
        self.number = 0
        self.error: CkptdError | None = None
        self._leaves = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.desk.run(lambda: self._leaves, lambda: self._leaves)
        except CkptdError as error:
            self.error = error

    def publish(self, ranks: list[Arrays]) -> int:
        """Publish a version, and return its number when it is in the store."""
        self.number += 1
        slot = self.book.place(self.number, self.number).slot
        for memories, tensors, arrays in zip(self.slots, self.tensors, ranks, strict=True):
            for tensor in tensors:
                raw = arrays[tensor.name].reshape(-1).view(np.uint8)
                memories[slot].data[tensor.start : tensor.start + raw.nbytes] = raw.data
        self.book.commit(self.number)
        for rank, writer in enumerate(self.writers):
            order = self.desk.next(self.number - 1, WAIT_S, rank)
            memory, old = self.slots[rank][slot], self.slots[rank][1 - slot]
            mine = {t.name: t for t in self.tensors[rank]}
            digests = BlockDigests(mine.values()).complete(memory, mine)
            share = writer.write(order, memory.data, digests, old.data if order.base else None)
            self.desk.done(rank, self.number, share)
        until(lambda: self.desk._base == self.number or self.error, "stored", within_s=WAIT_S)
        return self.number

    def close(self) -> None:
        self._leaves = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


class StoredWorld(World):
    """As `World`, through a store."""

    def __init__(
        self,
        composition: Composition,
        weights: Weights,
        store: Store,
        *,
        kind: str = "",
        **more: Any,
    ) -> None:
        SOURCE[0] = composition.source.bound
        self.store = store
        super().__init__(composition, weights, kind=kind)
        self._more = more
        self.publisher = self._publisher()
        self.places = [StoredWeights(store.url) for _ in self.plans]

    def _served(self) -> dict[int, DeltaServer]:
        return {}

    def _ranks(self) -> list[Arrays]:
        return [self.weights.arrays(self.source, r) for r in range(self.source.mesh.world)]

    def _publisher(self) -> StoredPublisher:
        return StoredPublisher(self.store, self._ranks(), self.weights.dtype.name, **self._more)

    def restart(self) -> None:
        """Have another publisher go on."""
        self.publisher.close()
        self.publisher = self._publisher()
        self.held = 0

    def publish(self, how: str) -> None:
        """Publish the next version."""
        self.weights.change(how)
        self.number = self.publisher.publish(self._ranks())

    def _staged(
        self,
        rank: int,
        held: pull.HeldTensors | None,
        in_place: bool,
    ) -> pull.StagedPull:
        place, plan = self.places[rank], self.plans[rank]
        found = place.newest(self.held, 0.0)
        assert found.number == self.number
        mirrors, received, _ = place.pull(plan, self.number, None, lambda: None)
        staged = plan.stage(self.number, mirrors, None, held)
        staged.report = replace(staged.report, bytes_received=received)
        return staged

    def mirror(self, rank: int = 0, giver: int = 0) -> Any:
        """Return what a worker has mirrored of a rank."""
        return self.places[rank]._mirrors[giver]

    def close(self) -> None:
        self.publisher.close()
        for place in self.places:
            with suppress(CkptdError):
                place.end()
