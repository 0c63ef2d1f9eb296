"""What an agent's memory holds, for visitors."""

from __future__ import annotations

from ckptd.errors import CkptdError
from ckptd.format.names import DATA, PARTS
from ckptd.save.commit import decode_plan, plan_key
from ckptd.save.messages import KeptSnapshot
from ckptd.save.neartiers import NodeTiers

__all__ = ["kept_snapshots"]


def kept_snapshots(near: NodeTiers) -> tuple[KeptSnapshot, ...]:
    """Return the snapshots of which shares lie in memory, oldest first."""
    own = {(held.save.folder, held.rank) for held in near.memory.shares()}
    sizes: dict[str, int] = {}
    parts: dict[str, list[int]] = {}
    for info in near.memory.list(DATA):
        name, _, rest = info.key.removeprefix(DATA).partition("/")
        folder = f"{DATA}{name}/"
        sizes[folder] = sizes.get(folder, 0) + info.size
        rank = rest.removeprefix(f"{PARTS}r")
        if rest.startswith(f"{PARTS}r") and rank.isdecimal():
            parts.setdefault(folder, []).append(int(rank))
    found = []
    for folder, (commit, attempt) in near.memory.folders().items():
        here, world = parts.get(folder, []), _world(near, folder)
        found.append(
            KeptSnapshot(
                step=commit.step,
                generation=commit.generation,
                attempt=attempt,
                ranks=tuple(r for r in here if (folder, r) in own),
                guests=tuple(r for r in here if (folder, r) not in own),
                world=world,
                bytes=sizes.get(folder, 0),
                whole=0 < world == len(here),
                complete=near.complete_on(commit),
            )
        )
    return tuple(sorted(found, key=lambda s: (s.generation, s.step, s.attempt)))


def _world(near: NodeTiers, folder: str) -> int:
    """Return how many ranks saved an attempt; 0 while its plan is not here, or is none."""
    key = plan_key(folder)
    try:
        return decode_plan(near.memory.get(key), key).world
    except CkptdError:
        return 0
