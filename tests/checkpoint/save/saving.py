"""A job of plain tensors without torch, for tests of the save path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptd.base.runtime.ranks import Board, LocalBoard
from ckptd.checkpoint.format.manifest import MeshEntry, TensorEntry
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.policy import Keep
from ckptd.checkpoint.save.client import WriterClient
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.save.messages import Blob, Extra, SaveRequest
from ckptd.checkpoint.save.structure import RankGroup, SavePlan, Structure, TensorCut, build_plan
from ckptd.store import StoreSpec
from ckptd.store.base import Store
from tests.processes import PATIENCE_S

SHAPES: dict[str, tuple[int, ...]] = {"w": (64, 48), "b": (48,), "s": (), "e": (0, 4)}


def values(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Any]:
    """Return float32 arrays that differ from seed to seed."""
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def tensor(
    name: str,
    shape: tuple[int, ...],
    mesh: MeshEntry | None = None,
    *placements: Any,
    aliases: tuple[str, ...] = (),
    dtype: str = "float32",
) -> tuple[TensorEntry, TensorCut]:
    """Return a tensor as a structure describes it."""
    return TensorEntry(name, dtype, shape, 0, 0, 0, aliases), TensorCut(mesh, placements)


def plan_of(shapes: Mapping[str, tuple[int, ...]] = SHAPES, world: int = 1) -> SavePlan:
    """Return the plan for replicated float32 tensors of a job of `world` ranks."""
    structure = Structure.of(tensor(n, s) for n, s in shapes.items())
    return build_plan([RankGroup(structure, tuple(range(world)))], world)


def fill(plan: SavePlan, rank: int, arrays: Mapping[str, Any], data: memoryview) -> int:
    """Copy what `rank` writes into a staging buffer; return the bytes."""
    target = np.frombuffer(data, dtype=np.uint8)
    end = 0
    for chunk in plan.filemap.chunks(rank):
        array = arrays[plan.tensors[chunk.tensor].name]
        box = chunk.piece.box
        part = array[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        raw = np.frombuffer(np.ascontiguousarray(part).tobytes(), dtype=np.uint8)
        target[chunk.start : chunk.end] = raw
        end = chunk.end
    return end


class Job:
    """One rank of a job: saves arrays through the real writing process."""

    def __init__(
        self,
        spec: StoreSpec,
        *,
        board: Board | None = None,
        store: Store | None = None,
        plan: SavePlan | None = None,
        generation: int | None = None,
        slots: int = 1,
    ) -> None:
        self.board = board or LocalBoard()
        self.plan = plan or plan_of(world=self.board.world)
        self.store = store or spec.open()
        self.catalogue = Catalogue(self.store)
        self.catalogue.create_or_open()
        if generation is None:
            generation = self.catalogue.claim(self.catalogue.latest(), 1, "test").generation
        self.generation = generation
        self.client = WriterClient(spec, self.board, store, slots)

    def request(self, step: int, attempt: str = "0001", **changes: Any) -> SaveRequest:
        """Return the message that a save of `step` sends."""
        fields: dict[str, Any] = {
            "extra": (),
            "objects": (),
            "metadata": {},
            "keep": None,
            "timeout_s": PATIENCE_S,
            "plan": self.plan.digest,
        }
        fields |= changes
        return SaveRequest(step, self.generation, attempt, self.client.next_job(), **fields)

    def save(
        self,
        step: int,
        arrays: Mapping[str, Any],
        bodies: Sequence[bytes] = (),
        *,
        replicas: tuple[tuple[str, str], ...] = (),
        blobs: tuple[Blob, ...] = (),
        **changes: Any,
    ) -> SaveTracker:
        """Save and return the handle; staging is complete."""
        save = self.request(step, **changes)
        total = self.plan.filemap.data_bytes(self.board.rank) + sum(map(len, bodies))
        handle = SaveTracker(step, self.generation, save.attempt, total)
        slot = self.client.acquire(total, PATIENCE_S)
        self.client.begin(save, self.plan, handle, f"save/{step}/{save.attempt}", slot)
        end = fill(self.plan, self.board.rank, arrays, slot.data)
        for body in bodies:
            slot.data[end : end + len(body)] = body
            end += len(body)
        slot.staged = end
        self.client.seal(save.job, slot, replicas, blobs)
        return handle

    def close(self) -> None:
        """End the writing process."""
        self.client.close(PATIENCE_S)
        self.store.close()


__all__ = ["SHAPES", "Blob", "Extra", "Job", "Keep", "fill", "plan_of", "values"]
