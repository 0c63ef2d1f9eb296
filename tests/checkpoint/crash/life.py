"""One life of one rank: a save through the real worker, on a store that fails by schedule."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import msgspec
import numpy as np

from ckptd.base.runtime.ranks import Board, LocalBoard
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.policy import Keep
from ckptd.checkpoint.save.client import WriterClient
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.save.messages import SaveRequest
from ckptd.checkpoint.save.structure import SavePlan
from ckptd.errors import CkptdError
from ckptd.store import StoreSpec
from ckptd.store.base import FaultSpec, Store, wrap
from tests.checkpoint.crash.boards import FileBoard
from tests.checkpoint.save.saving import fill, plan_of

__all__ = ["End", "Life", "arrays_of", "live", "plan_for", "save_on", "shapes_of"]

DEADLINE_S = 60.0
SLICE_BYTES = 1 << 20
"""For `ckptd.checkpoint.save.drain`, so that a small state has several slices."""


class Life(msgspec.Struct, frozen=True):
    """What a rank is to do.

    Attributes
    ----------
    faults
        Of the worker's store.
    elsewhere
        The worker is a process of its own, so a kill ends only that; otherwise a thread, and a
        kill ends the trainer with it.
    large
        So large that an S3 writer takes several parts.
    board
        Folder of the board that the ranks share.
    first
        Make the root where there is none and claim a generation, on the faulty store too;
        `generation` does not count.
    sign
        See `SaveRequest`.
    """

    spec: StoreSpec
    step: int
    generation: int
    attempt: str
    faults: FaultSpec | None = None
    rank: int = 0
    world: int = 1
    keep: int | None = None
    elsewhere: bool = False
    large: bool = False
    board: str | None = None
    first: bool = False
    sign: str = ""
    timeout_s: float = DEADLINE_S


class End(msgspec.Struct, frozen=True):
    """How a life ended: by a signal, or with what its handle said (`error` empty: durable)."""

    signal: int = 0
    error: dict[str, str | None] = {}


def shapes_of(large: bool) -> dict[str, tuple[int, ...]]:
    """Three slices of a writer, or two parts of an S3 upload; a scalar and an empty tensor too."""
    return {"w": (1500 if large else 600, 1024), "b": (48,), "s": (), "e": (0, 4)}


@cache
def arrays_of(step: int, attempt: str, large: bool) -> dict[str, Any]:
    """Values that no other attempt has."""
    rng = np.random.default_rng(1000 * step + int(attempt))
    return {n: rng.random(s, dtype=np.float32) for n, s in shapes_of(large).items()}


@cache
def plan_for(world: int, large: bool) -> SavePlan:
    """Return the plan that every rank computes."""
    return plan_of(shapes_of(large), world)


def live(life: Life, store: Store | None = None) -> End:
    """Save once and end the worker, retention and all.

    `store` is used, and stays open, when no other process can open the same one.
    """
    board: Board = LocalBoard()
    if life.board is not None:
        board = FileBoard(life.board, life.rank, life.world)
    with contextlib.ExitStack() as stack:
        spec = life.spec if life.faults is None else life.spec.wrapped(life.faults)
        if store is not None and life.faults is not None:
            store = wrap(store, life.faults)
        elif store is None and not life.elsewhere:
            store = stack.enter_context(spec.open())
        client = WriterClient(spec, board, store)
        stack.callback(client.close, DEADLINE_S)
        try:
            if life.first:
                life = msgspec.structs.replace(life, generation=_begin(store or spec.open()))
            save_on(client, life).durable(DEADLINE_S)
        except CkptdError as error:
            return End(error=error.to_dict())
    return End()


def _begin(store: Store) -> int:
    """Do what a checkpointer does before its first save."""
    catalogue = Catalogue(store)
    catalogue.create_or_open()
    return catalogue.claim(catalogue.latest(), 1, "start").generation


def save_on(client: WriterClient, life: Life) -> SaveTracker:
    """Begin the save of `life` and stage all of it."""
    plan = plan_for(life.world, life.large)
    total = plan.filemap.data_bytes(life.rank)
    save = SaveRequest(
        job=client.next_job(),
        step=life.step,
        generation=life.generation,
        attempt=life.attempt,
        plan=plan.digest,
        extra=(),
        objects=(),
        metadata={"loss": float(life.step)} if life.rank == 0 else {},
        keep=None if life.keep is None else Keep(life.keep),
        timeout_s=life.timeout_s,
        sign=life.sign,
    )
    handle = SaveTracker(life.step, life.generation, life.attempt, total)
    slot = client.acquire(total, DEADLINE_S)
    client.begin(save, plan, handle, outcome_key(life.step, life.attempt), slot)
    fill(plan, life.rank, arrays_of(life.step, life.attempt, life.large), slot.data)
    slot.staged = total
    client.seal(save.job, slot)
    return handle


def outcome_key(step: int, attempt: str) -> str:
    """Key of the board under which rank 0 says how a save ended."""
    return f"save/{step}/{attempt}"


@cache
def expected_file(world: int, rank: int, step: int, attempt: str, large: bool) -> bytes:
    """Return the data section that `rank` must have written."""
    plan = plan_for(world, large)
    data = bytearray(plan.filemap.data_bytes(rank))
    fill(plan, rank, arrays_of(step, attempt, large), memoryview(data))
    return bytes(data)
