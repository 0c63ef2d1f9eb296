"""Peers: which node keeps whose snapshots, known nodes and for how many lives, lazy connection.

In it: how many nodes an agent remembers.

A job of thousands of nodes has as many agents. A rank needs a few files, which a few of them hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Annotated

import msgspec

from ckptd.base.grouping import by_key
from ckptd.decoding import converter
from ckptd.store.base import ReadOnlyStore, Store, Wrapper
from ckptd.store.memory import MemoryStore

MOST_AGO = 8
"""A node is forgotten that was part of none of so many lives."""
MOST_TOLD = 64
"""Nodes that one agent remembers; `followers` names 20 of 65,536."""
_IN_A_ROW = 8
_LEAST_FORMER = 64

_Url = Annotated[str, msgspec.Meta(max_length=512, pattern=r"^(ckptd://[^\s/?#@]+)?\Z")]


class KnownNode(msgspec.Struct, frozen=True):
    """Where the agent of a node serves what it keeps.

    Attributes
    ----------
    memory, local
        URLs, ``ckptd://`` or empty.
    secret
        For both; empty where it is derived from the job's.
    ago
        In how many lives before the one that named it the node was there last; 0: in that one.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    memory: _Url
    local: _Url
    secret: Annotated[str, msgspec.Meta(max_length=1024)]
    ago: Annotated[int, msgspec.Meta(ge=0, le=MOST_AGO)] = 0


_checked = converter(KnownNode)


def known_node(name: str, memory: str, local: str, secret: str) -> KnownNode | None:
    """Return what is remembered of a node of this life; None where it cannot be reached later."""
    node = KnownNode(name, memory, local, secret)
    try:
        return _checked(msgspec.to_builtins(node)) if memory or local else None
    except msgspec.ValidationError:
        return None


def older(node: KnownNode) -> KnownNode | None:
    """Return how the next life names a node that was not there in this one; None: not any more."""
    return msgspec.structs.replace(node, ago=node.ago + 1) if node.ago < MOST_AGO else None


def followers(names: Collection[str], node: str) -> list[str]:
    """Return the nodes that the agent of `node` remembers, of a sorted ring of all names.

    The next 8, then the 16th, 32nd, 64th and so on. A report is short (11 names of 100, 18 of
    10,000), and together the survivors still name every node that was there unless more than 8 in a
    row are gone; and those too where it is one row of at most half of all: spares often follow one
    another by name, and so do the nodes of a rack. A pure function.
    """
    line = sorted({*names, node})
    place, count = line.index(node), len(line)
    steps = [*range(1, _IN_A_ROW + 1), *(1 << n for n in range(4, count.bit_length()))]
    return [line[(place + step) % count] for step in steps if step < count]


def former_nodes(present: Collection[str], known: Iterable[KnownNode]) -> list[KnownNode]:
    """Return the known nodes that are not `present`, those that were there last first.

    As many as are present (64 at least): the table that all ranks get must not grow with what
    is gone. One name may come with two addresses, where its agent was another one in the end.
    """
    found: dict[tuple[str, str, str], KnownNode] = {}
    for node in known:
        key = node.name, node.memory, node.local
        if node.name not in present and (key not in found or node.ago < found[key].ago):
            found[key] = node
    nodes = sorted(found.values(), key=lambda n: (n.ago, n.name, n.memory, n.local))
    return nodes[: max(_LEAST_FORMER, len(present))]


def partners(domains: Mapping[str, str]) -> dict[str, str]:
    """Return for each node the one whose memory keeps its snapshots.

    Every node keeps those of one other as long as no domain has more than half of the nodes;
    the nodes of a larger one are dealt out evenly among the others. Where all are of one domain,
    domains count for nothing. A pure function: every rank computes the same.

    Parameters
    ----------
    domains
        The failure domain (host, rack, power supply) of each node, by its name.

    Returns
    -------
    dict
        Without an entry where there is no other node.
    """
    by_domain = by_key((domains[node], node) for node in sorted(domains))
    groups = sorted(by_domain.values(), key=lambda nodes: (-len(nodes), nodes[0]))
    line = [node for nodes in groups for node in nodes]
    if len(line) < 2:
        return {}
    if len(groups) == 1:
        return {node: line[(i + 1) % len(line)] for i, node in enumerate(line)}
    largest, others = groups[0], line[len(groups[0]) :]
    if len(largest) <= len(others):
        # Domains lie together in the line, none longer than the shift, and the shift is no longer
        # than what lies outside of any: so no node is paired with one of its own.
        shift = len(largest)
        return {node: line[(i + shift) % len(line)] for i, node in enumerate(line)}
    found = {node: others[i % len(others)] for i, node in enumerate(largest)}
    return found | {node: largest[i] for i, node in enumerate(others)}


_SERVED = replace(MemoryStore.capabilities, create_only=False, shared=True)
"""Of what agents serve: known without asking them."""


class Distant(ReadOnlyStore, Wrapper):
    """Read-only view of another node's store, connected to when it is first asked. Thread-safe.

    Parameters
    ----------
    url
        Where it is.
    open_store
        Opens it.
    """

    capabilities = _SERVED

    def __init__(self, url: str, open_store: Callable[[], Store]) -> None:
        self.url = url
        self.options = {}
        self._open_store = open_store
        self._lock = threading.Lock()
        self._store: Store | None = None

    @property
    def inner(self) -> Store:  # type: ignore[override]
        """The other node's, connected to by now."""
        with self._lock:
            self._store = self._store or self._open_store()
            return self._store

    def close(self) -> None:
        """Close it, if it was opened. Idempotent."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()
