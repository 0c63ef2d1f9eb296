"""How a checkpointer ends: in good order, or left where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.train.interrupt import whole

if TYPE_CHECKING:
    from ckptd.train.checkpointer import Checkpointer

__all__ = ["finish", "leave"]

_COPY_S = 0.3
"""For a copy within this machine that is under way; longer, and the snapshot is not sealed."""


def finish(checkpointer: Checkpointer, wait_s: float | None) -> None:
    """Let go of everything; the saves have ended.

    Parameters
    ----------
    wait_s
        For the writing process, in seconds; None leaves it to end by itself.
    """
    ck = checkpointer
    ck._watch.close()
    ck._saver.close()
    if ck._nearby is not None:
        ck._nearby.close()
    if ck._client is not None and wait_s is not None:
        ck._client.close(wait_s)
    ck._store.close()
    ck._telling.close()


@whole
def leave(checkpointer: Checkpointer) -> None:
    """Let go of everything as a process that dies does, without a wait for other ranks. Idempotent.

    Whoever keeps snapshots then takes this life of the job to be over, and awaits the next one.
    """
    ck = checkpointer
    if ck._closed:
        return
    ck._closed = True
    ck._watch.close()
    ck._saver.leave(_COPY_S)
    if ck._client is not None:
        ck._client.leave()
    if ck._nearby is not None:
        ck._nearby.close()
    ck._store.close()
    ck._telling.close()
    ck._handles = []
    ck._elastic.closed(ck)
