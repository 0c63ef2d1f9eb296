"""Whole worlds in one process: a thread a rank, arrays for tensors, values that name themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptd.base.runtime.ranks import LocalBoard
from ckptd.errors import CkptdError
from ckptd.lay.copies import Composition
from ckptd.lay.live import Transfers
from ckptd.lay.local import local_tensors
from ckptd.lay.stored import StoredForm
from ckptd.reshard.live.memory import ArrayMemory
from ckptd.reshard.live.move import Mover, MoveReport, MoveWatch, message_bytes
from ckptd.reshard.live.plan import Roles, make_plan
from ckptd.reshard.live.transport import Transport
from ckptd.types import DType, dtype_of
from tests.lay.world import local_elements
from tests.reshard.live.shm import ShmTransport

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass
class Values:
    """Gives each element a number of its own."""

    numbers: dict[Any, int] = field(default_factory=dict)

    def arrays(self, form: StoredForm, rank: int, dtype: DType) -> Arrays:
        """Return what a rank holds."""
        out = {}
        for tensor in local_tensors(form, rank):
            found = [self.number(e) for e in local_elements(form, tensor, rank).tolist()]
            out[tensor.name] = np.array(found, dtype=np.float64).astype(dtype.numpy)
        return out

    def number(self, element: Any) -> float:
        """Return the number of an element; a fill is its value."""
        if isinstance(element, float):
            return element
        return 1.0 + self.numbers.setdefault(element, len(self.numbers))


def boards(world: int) -> list[LocalBoard]:
    """Return the boards of the ranks of a world."""
    first = LocalBoard(0, world)
    return [first, *(LocalBoard(r, world, first) for r in range(1, world))]


def on_all(world: int, function: Callable[[int], Any]) -> list[Any]:
    """Call a function on all ranks, each in its own thread."""
    with ThreadPoolExecutor(world) as pool:
        return [f.result(100) for f in [pool.submit(function, r) for r in range(world)]]


def move(
    composition: Composition,
    budget: int,
    *,
    roles: Roles | None = None,
    kinds: tuple[str, str] = ("float32", "float32"),
    transport: Callable[[LocalBoard], Transport] | None = None,
    states: frozenset[str] | None = None,
) -> list[tuple[Arrays, Arrays, MoveReport]]:
    """Move everything from one layout to the other; what each process of the target has, and must.

    Parameters
    ----------
    composition
        The layouts.
    budget
        In bytes.
    roles
        Who is who; process and rank are the same number when None.
    kinds
        Types of source and target.
    transport
        Made for each process; shared memory when None.
    states
        What is moved; all states of both when None.
    """
    source, target = composition.source, composition.target
    roles = roles or Roles(tuple(range(source.mesh.world)), tuple(range(target.mesh.world)))
    world = max(*roles.source, *roles.target) + 1
    values = Values()
    given = {p: values.arrays(source, r, dtype_of(kinds[0])) for r, p in enumerate(roles.source)}
    wanted = {p: values.arrays(target, r, dtype_of(kinds[1])) for r, p in enumerate(roles.target)}
    where = boards(world)
    make = transport or (lambda board: ShmTransport(board, "move", 20.0))

    def one(process: int) -> tuple[Arrays, Arrays, MoveReport]:
        own = wanted.get(process, {})
        found = {n: np.full_like(a, 77) for n, a in own.items()}
        carrier = make(where[process])
        limit = message_bytes(budget, carrier)
        carrier.begin(limit)
        transfers = Transfers(composition)
        plan = make_plan(
            transfers,
            roles,
            process,
            states=states or frozenset(source.states.keys() & target.states.keys()),
            sources=memories(given.get(process, {}), kinds[0]),
            targets=memories(found, kinds[1]),
        )
        watch = MoveWatch(where[process], "watch", 20.0)
        mover = Mover(carrier, limit, watch, plan, transfers, roles, {})
        try:
            return found, own, mover.run()
        finally:
            carrier.close()

    return on_all(world, one)


def memories(arrays: Arrays, dtype: str) -> dict[str, ArrayMemory]:
    """Return arrays as memory."""
    kind = dtype_of(dtype)
    return {n: ArrayMemory(a.reshape(-1).view(np.uint8), kind) for n, a in arrays.items()}


def failures(world: int, function: Callable[[int], Any]) -> list[CkptdError | None]:
    """Call a function on all ranks and return what each raised."""

    def guarded(rank: int) -> CkptdError | None:
        try:
            function(rank)
        except CkptdError as error:
            return error
        return None

    return on_all(world, guarded)


def threads_named(name: str) -> int:
    """Return the number of living threads of a name."""
    return sum(t.name.startswith(name) and t.is_alive() for t in threading.enumerate())
