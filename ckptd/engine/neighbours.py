"""Nodes that agents remember for the next life of their job, which may leave out living ones.

A node that is left out (a spare, an excluded one, one beyond the shape) may hold the only copy of a
share. Nobody of the new life would know that it exists, so each agent is told of some other nodes,
and says so to the trainers that come next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated

import msgspec

from ckptd.decoding import converter

__all__ = ["MOST_AGO", "MOST_TOLD", "KnownNode", "followers", "former_nodes", "known_node", "older"]

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
        In how many lives before the one that told of it the node was there last; 0: in that one.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    memory: _Url
    local: _Url
    secret: Annotated[str, msgspec.Meta(max_length=1024)]
    ago: Annotated[int, msgspec.Meta(ge=0, le=MOST_AGO)] = 0


_checked = converter(KnownNode)


def known_node(name: str, memory: str, local: str, secret: str) -> KnownNode | None:
    """Return what is remembered of a node of this life; None where nobody could reach it later."""
    node = KnownNode(name, memory, local, secret)
    try:
        return _checked(msgspec.to_builtins(node)) if memory or local else None
    except msgspec.ValidationError:
        return None


def older(node: KnownNode) -> KnownNode | None:
    """Return what is told of a node that was not there in this life either; None: no more."""
    return msgspec.structs.replace(node, ago=node.ago + 1) if node.ago < MOST_AGO else None


def followers(names: Collection[str], node: str) -> list[str]:
    """Return the nodes that the agent of `node` remembers, of a sorted ring of all names.

    The next 8, then the 16th, 32nd, 64th and so on. A report is short (11 names of 100, 18 of
    10,000), and together the survivors still name everybody who was there unless more than 8 in a
    row are gone; and those too where it is one row of at most half of all: spares often follow one
    another by name, and so do the nodes of a rack. A pure function.
    """
    line = sorted({*names, node})
    place, count = line.index(node), len(line)
    steps = [*range(1, _IN_A_ROW + 1), *(1 << n for n in range(4, count.bit_length()))]
    return [line[(place + step) % count] for step in steps if step < count]


def former_nodes(present: Collection[str], told: Iterable[KnownNode]) -> list[KnownNode]:
    """Return the nodes told of that are not `present`, those that were there last first.

    As many as are present (64 at least): the table that all ranks get must not grow with what
    is gone. One name may come with two addresses, where its agent was another one in the end.
    """
    found: dict[tuple[str, str, str], KnownNode] = {}
    for node in told:
        key = node.name, node.memory, node.local
        if node.name not in present and (key not in found or node.ago < found[key].ago):
            found[key] = node
    nodes = sorted(found.values(), key=lambda n: (n.ago, n.name, n.memory, n.local))
    return nodes[: max(_LEAST_FORMER, len(present))]
