"""Points at which a process of a publish is killed: calls of the code itself.

Without PyTorch, which the server of a rank does not import.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FIRST_POINTS", "PARTIES", "POINTS", "Kill", "put_pid"]

PARTIES = tuple(f"{kind}-{i}" for kind in ("trainer", "server", "worker") for i in (0, 1))

POINTS: dict[str, tuple[str, str, str]] = {
    "trainer starts its server": ("trainer", "ckptd.publish.client:PublishClient", "ready"),
    "trainer chose a slot": ("trainer", "ckptd:Publisher", "_slot"),
    "trainer copies": ("trainer", "ckptd.checkpoint.torch.copy:Snapshot", "copy_now"),
    "trainer copies the rest": ("trainer", "ckptd.checkpoint.torch.copy:Snapshot", "copy_rest"),
    "trainer seals": ("trainer", "ckptd.checkpoint.save.arena:Slot", "seal"),
    "trainer counts its share": ("trainer", "ckptd:Publisher", "_count"),
    "trainer closes": ("trainer", "ckptd.publish.client:PublishClient", "close"),
    "server takes the place": ("server", "ckptd.publish.stored:StoreDesk", "_create_claim"),
    "server orders a version": ("server", "ckptd.publish.stored:StoreDesk", "_store_version"),
    "server writes its share": ("server", "ckptd.publish.stored:ShareWriter", "write"),
    "server syncs its share": ("server", "ckptd.publish.stored", "StoredShare"),
    "server writes an object": ("server", "ckptd.publish.stored:ShareWriter", "_put"),
    "server commits": ("server", "ckptd.publish.stored:StoreDesk", "_commit"),
    "server deletes": ("server", "ckptd.publish.stored:StoreDesk", "_trim"),
    "worker connects": ("worker", "ckptd.publish.link:ServerLink", "_greeted"),
    "worker asks for the newest": ("worker", "ckptd.publish.link:ServerLink", "newest"),
    "worker takes a hold": ("worker", "ckptd:Subscriber", "_stage"),
    "worker plans": ("worker", "ckptd:Subscriber", "_planned"),
    "worker looks into the store": ("worker", "ckptd.publish.follow:StoredWeights", "newest"),
    "worker reads an object": ("worker", "ckptd.publish.follow:StoredWeights", "get"),
    "worker fills its mirror": ("worker", "ckptd.publish.follow:Mirror", "_fill"),
    "worker proves its mirror": ("worker", "ckptd.publish.follow:Mirror", "_wrong"),
    "worker asks for tensors": ("worker", "ckptd.publish.pull:_Giver", "__init__"),
    "worker maps": ("worker", "ckptd.publish.link:ServerLink", "map"),
    "worker pulls": ("worker", "ckptd.publish.link:ServerLink", "read"),
    "worker applies changes": ("worker", "ckptd.publish.pull", "_take_held"),
    "worker has all": ("worker", "ckptd.publish.pull:StagedPull", "add"),
    "worker applies": ("worker", "ckptd.publish.pull:StagedPull", "apply"),
    "worker writes a part": ("worker", "ckptd.publish.pull", "_put"),
    "worker lets go": ("worker", "ckptd:Subscriber", "_let_go"),
    "worker closes": ("worker", "ckptd:Subscriber", "close"),
}
"""By name: whose call it is, the module or the class there, and the function that is called."""
FIRST_POINTS = frozenset({"trainer starts its server", "worker connects", "worker plans"})
"""Points of a first version: a later one does not come there."""


@dataclass(frozen=True)
class Kill:
    """What is killed, and when.

    Attributes
    ----------
    point
        One of `POINTS`.
    rank
        Whose call it is, of the trainer's or the rollout's ranks.
    victim
        One of `PARTIES`.
    nth
        At which of the calls, from 1.
    far
        Workers pull over sockets.
    to
        URL of a store that everything goes through, in place of connections.
    """

    point: str
    rank: int
    victim: str
    nth: int = 1
    far: bool = False
    to: str = ""

    def __str__(self) -> str:
        way = self.to.partition(":")[0] or ("socket" if self.far else "memory")
        return f"{self.victim} dies as {self.point} ({self.rank}, call {self.nth}, {way})"

    def arm(self, folder: Path) -> None:
        """In the process whose call it is: kill at the n-th call from now on."""
        _, where, name = POINTS[self.point]
        module, _, attribute = where.partition(":")
        owner: Any = importlib.import_module(module)
        owner = getattr(owner, attribute) if attribute else owner
        function = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
        static = isinstance(function, staticmethod)
        inner: Callable[..., Any] = function.__func__ if static else function
        calls = 0
        lock = threading.Lock()

        def at(*args: Any, **more: Any) -> Any:
            nonlocal calls
            with lock:
                calls += 1
                if calls == self.nth:
                    (folder / "killed").touch()
                    with suppress(ProcessLookupError):  # a worker that has had enough
                        os.kill(int((folder / self.victim).read_text()), signal.SIGKILL)
            return inner(*args, **more)

        setattr(owner, name, staticmethod(at) if static else at)


def put_pid(folder: Path, name: str, pid: int) -> None:
    (folder / f".{name}").write_text(str(pid))
    os.replace(folder / f".{name}", folder / name)
