"""The key-value store of one generation, made so that torchrun's agent cannot get stuck in it.

An agent shares ranks out and waits for its peers through the store, and it is lost if that fails or
takes for ever: a peer may have died meanwhile. So every wait ends when the generation does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, DistStoreError, Store, TCPStore

from ckptd.errors import TransientStoreError

__all__ = ["GenerationStore", "connect_store"]

_CONNECT = timedelta(seconds=10)
_FIRST_PAUSE_S = 0.001
_MOST_PAUSE_S = 0.1
_ROLES = "torchelastic/role_info/"
_LEFT = "ckptd/left"
_RANKS = "torchelastic/assigned_ranks/"
_END = "torchelastic/agent/terminal_state"
# What an agent reads when the generation is over: it goes on, alone, to where it is stopped.
_ALONE_ROLE = json.dumps({"role": "", "rank": 0, "local_world_size": 1}).encode()
_ALONE_RANKS = json.dumps([0, 1, 0, 1]).encode()


def connect_store(host: str, port: int) -> TCPStore:
    """Return a connection to the store of a generation.

    Raises
    ------
    TransientStoreError
        kind ``link-lost``: no process listens there any more.
    """
    try:
        return TCPStore(host, port, None, is_master=False, timeout=_CONNECT, wait_for_workers=False)
    except DistError as error:
        raise TransientStoreError(
            "the store of a generation cannot be reached",
            kind="link-lost",
            where=f"{host}:{port}",
            found=str(error)[:300],
        ) from error


class GenerationStore(Store):
    """Store of an agent for one generation.

    When the generation is over, ranks are those of a world of one: the agent goes on, and the
    workers that it starts are ended before they matter. Everything else fails at once.

    Parameters
    ----------
    store
        Connection to the store itself.
    over
        Whether the generation is over, from its fence on.
    succeeded
        Called when the agent reports that all its workers have ended successfully.
    """

    def __init__(
        self, store: TCPStore, over: Callable[[], bool], succeeded: Callable[[], None]
    ) -> None:
        super().__init__()
        self._store = store
        self._over = over
        self._succeeded = succeeded
        self._limit = timedelta(seconds=300)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key; does nothing when the generation is over."""
        try:
            self._store.set(key, value)  # type: ignore[arg-type]
        except DistError:
            if not key.startswith(_ROLES):
                raise

    def get(self, key: str) -> bytes:
        """Wait for a key, at most as long as the generation goes on."""
        try:
            self._await([key])
            return self._store.get(key)
        except DistError:
            if key.startswith(_ROLES):
                return _ALONE_ROLE
            if key.startswith(_RANKS):
                return _ALONE_RANKS
            raise

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several; see `get`."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Set several; see `set`."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return it."""
        if key.startswith(_END):
            self._succeeded()
        return self._store.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys, at most as long as the generation goes on."""
        self._await(keys, timeout)
        if keys[0].startswith(_END):
            self._store.add(_LEFT, 1)

    def await_leaving(self, agents: int, within_s: float) -> None:
        """Wait until so many agents have left the last barrier: they still ask this store."""
        end = time.monotonic() + within_s
        while self._store.add(_LEFT, 0) < agents and time.monotonic() < end:
            time.sleep(_MOST_PAUSE_S / 4)

    @property
    def timeout(self) -> timedelta:
        """For how long is waited."""
        return self._limit

    def set_timeout(self, timeout: timedelta) -> None:
        """Set for how long is waited."""
        self._limit = timeout

    def _await(self, keys: list[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or self._limit).total_seconds()
        pause = _FIRST_PAUSE_S
        # Not the store's own wait: it cannot be ended from here, and complains of each time-out.
        while not self._store.check(keys):
            if self._over():
                raise DistStoreError("the generation of this store is over")
            if time.monotonic() >= end:
                raise DistStoreError(f"{keys[:3]} were not set in the store in time")
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_S)
