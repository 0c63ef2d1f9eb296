"""Near tiers of a node: memory, local folder, peer: what is complete, cleared, served.

In it: when a peer is tried again; snapshots that will never be complete.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptd.checkpoint.format.names import DATA, CommitName
from ckptd.checkpoint.root.index import attempts
from ckptd.checkpoint.save.agentmemory import AgentMemoryStore
from ckptd.checkpoint.save.arena import KEEPING
from ckptd.checkpoint.save.peers import KnownNode
from ckptd.checkpoint.save.tiers import NEAR, TierSpec
from ckptd.errors import CkptdError, StoreError
from ckptd.store import StoreSpec
from ckptd.store.base import Store

if TYPE_CHECKING:
    from ckptd.store.net import StoreServer

_log = logging.getLogger("ckptd")
_PEER_RETRY_S = 1.0
_LOST = 64
"""Snapshots of which it is remembered that they will never be complete."""


class NodeTiers:
    """The near tiers of one node, shared by the ranks on it. Thread-safe.

    Attributes
    ----------
    memory
        What lies in memory, guests included.
    here
        Where trainers of this node read it; empty before `serve_here`.
    neighbours
        Nodes that are named to the next trainers, as the last ones named them.
    """

    def __init__(self) -> None:
        self.memory = AgentMemoryStore()
        self.here = ""
        self.neighbours: tuple[KnownNode, ...] = ()
        self._lock = threading.RLock()
        self._arrived = threading.Condition()
        self._last_came = 0.0
        self._local: Store | None = None
        self._local_spec: StoreSpec | None = None
        self._local_keep = 1
        self._left: list[Store] = []
        self._keeping: list[str] = []
        self._peer: Store | None = None
        self._peer_of = ("", "")
        self._root_id = ""
        self._complete: dict[str, list[CommitName]] = {}
        self._lost: deque[tuple[str, CommitName]] = deque(maxlen=_LOST)
        self._used: dict[str, int] = {}
        self._key = ""
        self._servers: dict[str, StoreServer] = {}

    # -- the tiers ---------------------------------------------------------------------------------

    def prepare(self, tiers: tuple[TierSpec, ...]) -> None:
        """Open what `tiers` need. Every rank of a job names the same ones.

        Raises
        ------
        StoreError
            The folder cannot be opened.
        """
        with self._arrived:
            self._last_came = time.monotonic()
            self._arrived.notify_all()
        with self._lock:
            self._keeping = [tier.name for tier in tiers if tier.name in KEEPING]
        for tier in tiers:
            if tier.name == "peer":
                self.memory.segments.budget = tier.budget_bytes
            if tier.store is not None:
                with self._lock:
                    self._local_keep = tier.keep
                    if tier.store == self._local_spec:
                        continue
                    if self._local is not None:  # a new life names another one
                        self._leave_local(self._local)
                    self._local, self._local_spec = tier.store.open(), tier.store

    def wait_next(self, since: float, timeout_s: float) -> bool:
        """Return whether a trainer comes after `since` (`time.monotonic`), within `timeout_s`."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self._last_came > since, timeout_s)

    def _leave_local(self, store: Store) -> None:
        """Serve a folder no more; it stays open for what is still written there."""
        self._left.append(store)
        self._complete.pop("local", None)
        server = self._servers.pop("local", None)
        if server is not None:
            server.close()

    def belongs(self, root_id: str) -> None:
        """Name the root of what comes now; what is there of another one is cleared.

        A root that was deleted and made again has the same URL, and counts generations from 1.
        """
        with self._lock:
            old, self._root_id = self._root_id, root_id
            if old in ("", root_id):
                return
            self._complete.clear()
            self._lost.clear()
        _log.warning(
            "the root was replaced by another one: clearing the old root's snapshots from memory"
        )
        self.memory.clear_all()

    def store(self, tier: str) -> Store:
        """Return what a near tier is kept in.

        Raises
        ------
        StoreError
            This node has no folder. kind ``no-peer``: no other node is known.
        """
        with self._lock:
            found = {"memory": self.memory, "local": self._local, "peer": self._peer}[tier]
        if found is not None:
            return found
        if tier == "local":
            raise StoreError("the local tier of this node's agent has no folder")
        raise StoreError(
            "no other node can hold this node's snapshots",
            kind="no-peer",
            hint="the peer tier needs a job of several nodes; CKPTD_NODE names each node",
        )

    def set_peer(self, url: str, secret: str) -> None:
        """Set whose memory the peer tier is; an empty URL: there is no peer."""
        with self._lock:
            if (url, secret) == self._peer_of:
                return
            # Not tried for long: meanwhile a slot is taken, and the next save brings another peer.
            options = {"secret": secret, "retry_s": _PEER_RETRY_S}
            old, self._peer = self._peer, StoreSpec(url, options).open() if url else None
            self._peer_of = url, secret
        if old is not None:
            old.close()

    # -- what is there -----------------------------------------------------------------------------

    @contextmanager
    def using(self, folder: str) -> Iterator[None]:
        """Keep an attempt in the folder from being deleted within the block."""
        with self._lock:
            self._used[folder] = self._used.get(folder, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._used[folder] -= 1
                if not self._used[folder]:
                    del self._used[folder]

    def completed(self, tier: str, name: CommitName) -> None:
        """Note that every rank's share of a snapshot is on a tier; older ones are cleared.

        A tier is cleared for what survives as much as it does, so that whatever may die next
        leaves one whole snapshot.
        """
        with self._lock:
            names = self._complete.setdefault(tier, [])
            if name in names:
                return
            names.append(name)
            names.sort(key=age)
            names[:] = names[-max(8, self._local_keep) :]
        if tier == "local":
            self._clear_local()
        if tier in ("peer", "root"):
            self.memory.clear(lambda other: age(other) < age(name), guests=True)
        if tier in ("memory", "peer", "root"):
            self._clear_own()

    def is_complete(self, tier: str, name: CommitName) -> bool:
        """Tell whether a snapshot is complete on a tier, as far as is known here."""
        with self._lock:
            return name in self._complete.get(tier, ())

    def lost(self, tier: str, name: CommitName) -> None:
        """Note that a snapshot will never be complete on a tier; what guests left of it goes."""
        with self._lock:
            self._lost.append((tier, name))
        if tier == "peer" and not self.is_complete("peer", name):
            self.memory.clear(lambda other: other == name, guests=True)

    def is_lost(self, tier: str, name: CommitName) -> bool:
        """Tell whether a snapshot is known never to be complete on a tier."""
        with self._lock:
            return (tier, name) in self._lost

    def newest(self, tier: str) -> CommitName | None:
        """Return the newest snapshot that is complete on a tier, as far as is known here."""
        with self._lock:
            names = self._complete.get(tier)
            return names[-1] if names else None

    def complete_on(self, name: CommitName) -> tuple[str, ...]:
        """Return the near tiers on which a snapshot is complete, as far as is known here."""
        with self._lock:
            return tuple(t for t in NEAR if name in self._complete.get(t, ()))

    @property
    def folder(self) -> str | None:
        """URL of this node's folder, or None."""
        return None if self._local is None else self._local.url

    def _clear_own(self) -> None:
        """Take down own shares that no tier needs: those older than the newest complete ones.

        As long as a tier has none that is complete, what it is to have one day stays.
        """
        with self._lock:
            newest = [self.newest(tier) for tier in self._keeping]
            known = [name for name in newest if name is not None]
            bounds = [min(known, key=age)] if known and len(known) == len(newest) else []
            root = self.newest("root")
            bounds += [] if root is None else [root]
        if bounds:
            bound = max(map(age, bounds))
            self.memory.clear(lambda name: age(name) < bound, guests=False)

    def _clear_local(self) -> None:
        with self._lock:
            store = self._local
            names = self._complete["local"][-self._local_keep :]
            used = set(self._used)
        if store is None or len(names) < self._local_keep:
            return
        try:
            for folder, name, _ in attempts(store):
                if age(name) < age(names[0]) and folder not in used:
                    store.sweep(folder, older_than_s=0.0)  # what a death in mid-write left
                    store.delete([info.key for info in store.list(folder)])
        except CkptdError as error:
            _log.warning("old snapshots in %s could not be deleted: %s", store.url, error.message)

    # -- other nodes -------------------------------------------------------------------------------

    def serve_here(self, path: str) -> None:
        """Serve the snapshots in memory to the trainers of this node.

        Parameters
        ----------
        path
            Of a Unix socket: large objects are handed over as descriptors, without a copy.
        """
        self.here = self._serve("here", self.memory, f"ckptd+unix://{path}", read_only=True)

    def serve(self, bind: str, key: str = "") -> tuple[str, str, str]:
        """Serve this node's snapshots to other nodes, which may also put theirs into its memory.

        A new life of the job may have another secret than the last one: its key counts from then
        on, for every connection.

        Parameters
        ----------
        bind
            Address of this node by which the others reach it.
        key
            What they have to know, hexadecimal; empty: one is drawn.

        Returns
        -------
        memory, local, secret
            URLs, and their key if it was drawn here; `local` is empty without a folder.

        Raises
        ------
        UsageError
            The key is invalid.
        """
        from ckptd.store.net import new_secret

        with self._lock:
            if key not in ("", self._key) or not self._key:
                self._key = key or new_secret()
                for server in self._servers.values():
                    server.change_secret(self._key)
        host = f"[{bind}]" if ":" in bind else bind
        url = f"ckptd://{host}:0"
        memory = self._serve("memory", self.memory, url, allow=_guests_only)
        local = "" if self._local is None else self._serve("local", self._local, url)
        return memory, local, "" if key else self._key

    def _serve(self, name: str, store: Store, url: str, **options: Any) -> str:
        from ckptd.store.net import StoreServer

        with self._lock:
            if name not in self._servers:
                options.setdefault("read_only", name != "memory")
                self._servers[name] = StoreServer(store, url, secret=self._key, **options)
            return self._servers[name].url

    def hide(self) -> None:
        """Free the place where trainers of this node read, for the next agent. Idempotent."""
        with self._lock:
            server = self._servers.pop("here", None)
        if server is not None:
            server.close()

    def close(self) -> None:
        """End all servers and close all stores. Idempotent."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        for store in (self._peer, self._local, *self._left, self.memory):
            if store is not None:
                store.close()


def age(name: CommitName) -> tuple[int, int]:
    """Return what rises with the age of a job, through its generations."""
    return name.generation, name.step


def _guests_only(op: str, key: str) -> bool:
    """Other nodes put snapshots here, and delete nothing."""
    return op not in ("delete", "sweep") and (not key or key.startswith(DATA))
