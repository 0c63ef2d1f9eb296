"""Which commits count: the line of generations and their parents.

Starting, resuming and rolling back all claim a generation, which names its parent commit. A
commit counts when it is on the *line* of the newest generation: that generation's own commits,
then its parent's up to the parent commit, and so on. A zombie of an older generation lands
beside the line and is never seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ckptd.base.grouping import by_key
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.format.records import Generation
from ckptd.errors import CorruptError


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
    return list(_newest_first(newest, commits, read))[::-1]


def newest_on_line(
    newest: int, commits: Iterable[CommitName], read: Callable[[int], Generation]
) -> CommitName | None:
    """Return the last commit of `line`, reading no more generations than needed."""
    return next(_newest_first(newest, commits, read), None)


def _newest_first(
    newest: int, commits: Iterable[CommitName], read: Callable[[int], Generation]
) -> Iterator[CommitName]:
    by_generation = by_key((c.generation, c.step) for c in commits)
    generation, limit = newest, None
    while True:
        steps = sorted(by_generation.get(generation, ()), reverse=True)
        yield from (CommitName(s, generation) for s in steps if limit is None or s <= limit)
        parent = read(generation).parent
        if parent is None:
            return
        if parent.generation >= generation:
            raise CorruptError(
                "a generation's parent is not older than itself", where=f"generation {generation}"
            )
        generation, limit = parent.generation, parent.step
