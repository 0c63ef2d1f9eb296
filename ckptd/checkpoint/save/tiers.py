"""`Memory`, `Peer`, `Local`: tiers as a user writes them; how many snapshots, how long they linger.

A near tier holds, below the same keys as a root, the files and parts of the ranks, and no commit
record: a snapshot of which every rank's part is found is complete, and a load finishes it
(`ckptd.checkpoint.save.recover`). The root alone keeps checkpoints for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import msgspec

from ckptd.checkpoint.root.opening import root_spec
from ckptd.checkpoint.root.policy import Every, check_given, check_positive
from ckptd.errors import UsageError
from ckptd.store import StoreSpec

NEAR = ("memory", "peer", "local")
"""Names of near tiers, nearest first."""
ROOT = "root"
"""Name of the root among the tiers of a save."""
LINGER_S = 600.0
"""How long an agent keeps snapshots for the next life of a job whose trainers died, in seconds."""


class Memory(msgspec.Struct, frozen=True):
    """The memory of this node: survives the death of its trainers.

    Parameters
    ----------
    every
        When a snapshot goes here; an int means steps. None: whenever the root's rule says.
    agent_ttl_s
        How long the node's agent keeps snapshots for the next life of the job when its trainers
        died, in seconds. Of several tiers the longest counts.
    """

    name: ClassVar[str] = "memory"
    every: int | Every | None = None
    agent_ttl_s: float = LINGER_S

    def __post_init__(self) -> None:
        check_positive("agent_ttl_s", self.agent_ttl_s, (int, float))


class Peer(msgspec.Struct, frozen=True):
    """The memory of another node: survives the loss of this one.

    Parameters
    ----------
    every
        As for `Memory`.
    budget_bytes
        Memory that a node gives to other nodes' snapshots: two of each share, one whole and one
        on its way. None is as much as there is.
    agent_ttl_s
        As for `Memory`.
    """

    name: ClassVar[str] = "peer"
    every: int | Every | None = None
    budget_bytes: int | None = None
    agent_ttl_s: float = LINGER_S

    def __post_init__(self) -> None:
        check_positive("agent_ttl_s", self.agent_ttl_s, (int, float))
        check_given(self, (int,), "budget_bytes")


class Local(msgspec.Struct, frozen=True):
    """A folder on a disk of each node: survives its reboot.

    Parameters
    ----------
    url
        The folder, the same path on every node; holds the shares of the node's ranks.
    every
        As for `Memory`.
    keep
        Complete snapshots to keep.
    throttle
        Upper bound of the bytes a second that each rank writes; None is no bound.
    compress
        Level of zstd for data files, 1 to 22; None stores them plain.
    store_options
        As for the root.
    """

    name: ClassVar[str] = "local"
    url: str
    every: int | Every | None = None
    keep: int = 2
    throttle: float | None = None
    compress: int | None = None
    store_options: Mapping[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive("keep", self.keep, (int,))


Tier: TypeAlias = Memory | Peer | Local


class TierSpec(msgspec.Struct, frozen=True):
    """A near tier as the agent needs to know it.

    Attributes
    ----------
    name
        One of `NEAR`.
    keep
        Complete snapshots to keep.
    store
        Of a folder.
    budget_bytes
        Of memory for other nodes.
    """

    name: str
    keep: int = 1
    store: StoreSpec | None = None
    budget_bytes: int | None = None


def tier_specs(tiers: Iterable[Tier]) -> tuple[TierSpec, ...]:
    """Return what the agent needs to know of `tiers`, nearest first.

    Raises
    ------
    UsageError
        Something else than a tier, or two of one kind.
    """
    found: dict[str, TierSpec] = {}
    for tier in tiers:
        spec = _spec(tier)
        if spec.name in found:
            raise UsageError(f"{spec.name} tier given twice", where="tiers", wanted="one of each")
        found[spec.name] = spec
    return tuple(found[name] for name in NEAR if name in found)


def _spec(tier: object) -> TierSpec:
    match tier:
        case Memory():
            return TierSpec(tier.name)
        case Peer():
            return TierSpec(tier.name, budget_bytes=tier.budget_bytes)
        case Local():
            store = root_spec(tier.url, tier.store_options, tier.throttle, tier.compress)
            return TierSpec(tier.name, tier.keep, store)
    raise UsageError(
        "invalid tier",
        where="tiers",
        wanted="Memory(), Peer() or Local(folder); the url is the root, the last tier",
        found=repr(tier)[:200],
    )
