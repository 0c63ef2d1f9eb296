"""Servers and a worker in one process, over sockets: any values, layouts and types."""

from __future__ import annotations

import os
import random
import socket
import threading
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.base.net.connection import Connection
from ckptd.base.runtime.channel import SocketChannel
from ckptd.checkpoint.save.arena import Slot
from ckptd.errors import CkptdError
from ckptd.lay.copies import Composition
from ckptd.lay.local import local_tensors
from ckptd.lay.stored import StoredForm
from ckptd.publish import pull
from ckptd.publish.link import ServerLink
from ckptd.publish.messages import (
    MOST_BODY,
    ORDER,
    PublishedAbout,
    PublishedTensor,
    ServerEntry,
    SetTensors,
    SlotMemory,
    VersionSealed,
)
from ckptd.publish.server import PublishServer, _Session
from ckptd.types import dtype_of
from tests.lay.world import local_elements
from tests.processes import until
from tests.reshard.live.world import memories

__all__ = ["DeltaServer", "Weights", "World"]

Arrays = dict[str, NDArray[Any]]
WAIT_S = 20.0
PATTERNS = ("few", "some", "many", "all", "none", "last bit", "one tensor", "and back")


class Weights:
    """Values of a model's elements, the same wherever they are cut; any bits, or normal numbers."""

    def __init__(self, dtype: str, seed: int, *, normal: bool = False) -> None:
        self.dtype = dtype_of(dtype)
        self._rng = np.random.default_rng(seed)
        self._numbers: dict[Any, int] = {}
        self._places: dict[tuple[int, int], dict[str, NDArray[np.int64]]] = {}
        self._normal = normal
        self._before = self.values = self._drawn(1 << 14)
        self.values[-1] = 0

    def _drawn(self, count: int) -> NDArray[Any]:
        if self._normal:
            return self._rng.standard_normal(count).astype(self.dtype.numpy)
        raw = self._rng.integers(0, 256, count * self.dtype.itemsize, dtype=np.uint8)
        if self.dtype.numpy == np.bool_:
            raw &= 1
        return raw.view(self.dtype.numpy)

    def change(self, how: str) -> None:
        """Make the next version."""
        part = {"few": 0.002, "some": 0.04, "many": 0.4, "all": 1.0, "last bit": 0.05}.get(how, 0.0)
        at = np.flatnonzero(self._rng.random(len(self.values)) < part)
        if how == "one tensor":
            at = np.arange(300)
        before, self.values = self.values, self.values.copy()
        if how == "and back":
            self.values = self._before
        elif how == "last bit" and not self._normal:
            raw = self.values.view(np.uint8).reshape(-1, self.dtype.itemsize)
            raw[at, 0] ^= 1
        else:
            self.values[at] = self._drawn(len(at))
        self.values[-1] = 0
        self._before = before

    def arrays(self, form: StoredForm, rank: int, dtype: str = "") -> Arrays:
        """Return what a rank holds."""
        key = id(form), rank
        if key not in self._places:
            self._places[key] = {
                t.name: np.array(
                    [self._place(e) for e in local_elements(form, t, rank).tolist()], np.int64
                )
                for t in local_tensors(form, rank)
                if not t.state
            }
        kind = dtype_of(dtype).numpy if dtype else self.dtype.numpy
        with np.errstate(all="ignore"):
            return {
                n: (self.values if not dtype else self.values.astype(kind))[at]
                for n, at in self._places[key].items()
            }

    def _place(self, element: Any) -> int:
        if isinstance(element, float):
            assert element == 0.0  # of what is padded
            return -1
        return self._numbers.setdefault(element, len(self._numbers))


class DeltaServer:
    """The server of one rank, in threads of this process, and a link to it over TCP."""

    def __init__(
        self, arrays: Arrays, dtype: str, *, slots: int = 2, budget: int = 1 << 20
    ) -> None:
        self._ours, theirs = socket.socketpair()
        self.server = PublishServer(SocketChannel(theirs, ORDER))
        tensors, at = [], 0
        for name, array in arrays.items():
            tensors.append(PublishedTensor(name, dtype, at, array.size))
            at += -(-array.nbytes // 64) * 64
        self._places = {t.name: t.start for t in tensors}
        self.server._do(SetTensors(tuple(tensors), budget), None)
        self.slots = [Slot(i, at) for i in range(slots)]
        for slot in self.slots:
            self.server._do(SlotMemory(slot.number, at), os.dup(slot.fd))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            sock = socket.create_connection(listening.getsockname())
            other, _ = listening.accept()
        ends = [Connection(s, "the other end", WAIT_S, MOST_BODY) for s in (sock, other)]
        for end in ends:
            end.codec.let_in()
        self.link = ServerLink(ends[0], ServerEntry("", "", "", "e"), WAIT_S)
        self._thread = threading.Thread(target=self._serve, args=(ends[1],), daemon=True)
        self._thread.start()

    def _serve(self, connection: Connection) -> None:
        with suppress(CkptdError):
            _Session(self.server, connection).run()
        connection.release()

    def publish(self, number: int, arrays: Arrays) -> None:
        until(lambda: not self.server._busy, "all is answered")  # nobody holds a slot here
        slot = self.slots[number % len(self.slots)]
        slot.begin(number)
        for name, array in arrays.items():
            slot.put(self._places[name], array.reshape(-1).view(np.uint8))
        slot.seal()
        self.server._do(VersionSealed(number, slot.number), None)

    def settle(self) -> None:
        """Return when the newest version is digested."""
        with self.server._digested:
            assert self.server._digested.wait_for(lambda: not self.server._pending, WAIT_S)

    def close(self) -> None:
        self.settle()
        self.link.close()
        self._thread.join(WAIT_S)
        self.server._end()
        self._ours.close()
        for slot in self.slots:
            slot.close()


class World:
    """A pair of layouts, versions of a model, and all workers, which hold one of them."""

    def __init__(self, composition: Composition, weights: Weights, *, kind: str = "") -> None:
        source, self.target = composition.source, composition.target
        self.source, self.weights, self._kind = source, weights, kind
        dtype = weights.dtype.name
        self.servers = self._served()
        self.number = 0
        self.held = 0
        about = PublishedAbout("e", source.mesh.world, "", {})
        world = self.target.mesh.world
        self.found = [
            {
                n: a ^ a if a.dtype.kind in "iub" else np.zeros_like(a)
                for n, a in self._of(r).items()
            }
            for r in range(world)
        ]
        self.plans = [
            pull.PullPlan(about, self.target.bound, r, memories(f, kind or dtype))
            for r, f in enumerate(self.found)
        ]

    def _served(self) -> dict[int, DeltaServer]:
        dtype = self.weights.dtype.name
        world = range(self.source.mesh.world)
        return {r: DeltaServer(self.weights.arrays(self.source, r), dtype) for r in world}

    def _of(self, rank: int) -> Arrays:
        return self.weights.arrays(self.target, rank, self._kind)

    def publish(self, how: str) -> None:
        """Publish the next version."""
        self.weights.change(how)
        self.number += 1
        for rank, server in self.servers.items():
            server.publish(self.number, self.weights.arrays(self.source, rank))

    def update(self, *, in_place: bool = False) -> list[pull.PullReport]:
        """Have all workers take the newest version, and compare every bit."""
        reports = []
        for rank in range(len(self.plans)):
            held = pull.HeldTensors(self.held, frozenset()) if self.held else None
            staged = self._staged(rank, held, in_place)
            staged.apply()
            reports.append(staged.report)
            for name, array in self._of(rank).items():
                assert self.found[rank][name].tobytes() == array.tobytes(), (
                    name,
                    rank,
                    self.number,
                )
        self.held = self.number
        return reports

    def _staged(
        self,
        rank: int,
        held: pull.HeldTensors | None,
        in_place: bool,
    ) -> pull.StagedPull:
        links = {r: s.link for r, s in self.servers.items()}
        budget = 5000 if in_place else None
        return self.plans[rank].stage(self.number, links, budget, held, in_place=in_place)

    def touch(self, draw: random.Random) -> None:
        """Write to the tensors of a worker, as nobody should."""
        arrays = draw.choice(self.found)
        array = arrays[draw.choice([n for n, a in arrays.items() if a.size])].reshape(-1)
        array.view(np.uint8)[draw.randrange(array.nbytes)] ^= 0x40

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
