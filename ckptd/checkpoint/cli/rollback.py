"""``ckptd rollback``: back to an older checkpoint, by one record.

In it: how many abandoned checkpoints are shown.
"""

from __future__ import annotations

from typing import Annotated

from ckptd.checkpoint.cli.address import CheckpointDocument, Where, needs_step, opened
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.cli.output import Json, Reply, flag
from ckptd.errors import CorruptError, first_few

_MOST_SHOWN = 8


class RollbackDocument(CheckpointDocument, frozen=True, kw_only=True, tag="rollback"):
    """The document that ``ckptd rollback --json`` prints.

    Attributes
    ----------
    root
        URL.
    step, generation
        The checkpoint that is now the newest.
    claimed
        The generation that says so.
    abandoned
        Commits that no longer count because of it. They are kept for a week, and can be taken up
        again.
    """

    claimed: int
    abandoned: tuple[CommitName, ...]


def rollback(
    where: Where,
    /,
    *,
    all: Annotated[
        bool, flag("Also look for the step on abandoned lines, newest generation first.")
    ] = False,
    json: Json = False,
) -> Reply:
    """Make an older checkpoint the newest that counts; moves and deletes nothing.

    Later checkpoints no longer count. In a job that still writes here the next save fails.
    """
    address = needs_step(where)
    with opened(address.root) as catalogue:
        name = address.find(catalogue, everywhere=all)
        before = _line(catalogue)
        claimed = catalogue.rollback(name.step, all=True, generation=name.generation)
        left = before - _line(catalogue)
        document = RollbackDocument(
            root=catalogue.store.url,
            step=name.step,
            generation=name.generation,
            claimed=claimed.generation,
            abandoned=tuple(sorted(left)),
        )
    return Reply(document, _show)


def _line(catalogue: Catalogue) -> set[CommitName]:
    """Return what counts; nothing where a root has lost records, which is what this verb mends."""
    try:
        return set(catalogue.line())
    except CorruptError:
        return set()


def _show(document: RollbackDocument) -> None:
    d = document
    print(f"step {d.step} is now the newest (generation {d.claimed})")
    if not d.abandoned:
        return
    last = d.abandoned[-1]
    print(f"no longer counted: {first_few([a.step for a in d.abandoned], _MOST_SHOWN)}")
    print(f"to undo: ckptd rollback {d.root}@{last.step}-g{last.generation}")
