"""Which commits count (spec section 2.3).

Starting, resuming and rolling back all claim a generation, which names its parent commit. A
commit counts when it is on the *line* of the newest generation: that generation's own commits,
then its parent's up to the parent commit, and so on. A zombie of an older generation lands
beside the line and is never seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.format.records import Generation
from ckptd.errors import CorruptError

__all__ = ["line", "newest_on_line"]


def line(
    newest: int, commits: Iterable[CommitName], read: Callable[[int], Generation]
) -> list[CommitName]:
    """Return the commits on the line of generation `newest`, oldest first.

    Parameters
    ----------
    newest
        The newest claimed generation.
    commits
        Every commit of the root, in any order.
    read
        Gives a generation's record; called once for each generation on the line.

    Raises
    ------
    CorruptError
        A generation's parent is not older than itself.
    """
    by_generation: dict[int, list[int]] = {}
    for c in commits:
        by_generation.setdefault(c.generation, []).append(c.step)
    out: list[CommitName] = []
    generation, limit = newest, None
    while True:
        steps = sorted(by_generation.get(generation, ()), reverse=True)
        out += [CommitName(s, generation) for s in steps if limit is None or s <= limit]
        parent = read(generation).parent
        if parent is None:
            return out[::-1]
        if parent.generation >= generation:
            raise CorruptError(
                "a generation's parent is not older than itself",
                kind="bad-record",
                where=f"generation {generation}",
            )
        generation, limit = parent.generation, parent.step


def newest_on_line(
    newest: int, commits: Iterable[CommitName], read: Callable[[int], Generation]
) -> CommitName | None:
    """Return the last commit of `line`, reading no more generations than needed."""
    by_generation: dict[int, list[int]] = {}
    for c in commits:
        by_generation.setdefault(c.generation, []).append(c.step)
    generation, limit = newest, None
    while True:
        steps = [s for s in by_generation.get(generation, ()) if limit is None or s <= limit]
        if steps:
            return CommitName(max(steps), generation)
        parent = read(generation).parent
        if parent is None or parent.generation >= generation:
            return None
        generation, limit = parent.generation, parent.step
