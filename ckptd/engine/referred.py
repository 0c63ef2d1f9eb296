"""What the parts of a save refer to, held while the checkpoint is published."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ckptd.engine.catalogue import Catalogue
from ckptd.engine.job import Part
from ckptd.engine.leases import hold
from ckptd.engine.unchanged import Base, folder_of
from ckptd.errors import NotFoundError, SaveError

__all__ = ["leased"]


@contextlib.contextmanager
def leased(catalogue: Catalogue, parts: Sequence[Part]) -> Iterator[None]:
    """Hold what the parts refer to while a checkpoint is published that refers to it as well.

    Raises
    ------
    SaveError
        kind ``base-gone``: it was deleted meanwhile. kind ``structure``: ranks refer to different
        checkpoints, or to files that theirs does not keep.
    """
    bases = {p.base for p in parts if p.base is not None}
    if len(bases) > 1:
        raise SaveError(
            "ranks refer to different checkpoints",
            kind="structure",
            found=", ".join(sorted(f"{b.name} attempt {b.attempt}" for b in bases)[:4]),
        )
    if not bases:
        _check_folders(parts, ())
        yield
        return
    base = bases.pop()
    try:
        held = hold(catalogue, base.name, holder="commit")
    except NotFoundError:
        raise _gone(base, "nothing") from None
    try:
        if held.commit.attempt != base.attempt:
            raise _gone(base, f"attempt {held.commit.attempt}")
        _check_folders(parts, held.commit.folders)
        yield
    finally:
        held.release()


def _check_folders(parts: Sequence[Part], folders: Sequence[str]) -> None:
    for part in parts:
        strange = sorted({folder_of(r.file.path) for r in part.refers} - set(folders))
        if strange:
            raise SaveError(
                "a part refers to what its checkpoint does not keep",
                kind="structure",
                where=f"rank {part.rank}",
                wanted=f"one of {', '.join(folders[:8])}" if folders else "nothing",
                found=strange[0][:200],
            )


def _gone(base: Base, found: str) -> SaveError:
    return SaveError(
        "the checkpoint that this save refers to was deleted meanwhile",
        kind="base-gone",
        wanted=f"{base.name}, attempt {base.attempt}",
        found=found,
        hint="the next save writes everything",
    )
