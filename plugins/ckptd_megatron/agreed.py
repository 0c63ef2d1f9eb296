"""`agreed`: a step that any rank may fail alone ends on all ranks at once."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist
from torch.distributed.checkpoint import CheckpointException

__all__ = ["agreed"]


@contextmanager
def agreed(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Do something on every rank of a group; raise on all of them where it failed on some.

    What is done has no collectives, or fails only after them: the other ranks wait in the exchange
    that follows.

    Raises
    ------
    torch.distributed.checkpoint.CheckpointException
        It failed on a rank; it names the ranks and their errors.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - of any kind: it is raised on every rank below
        mine = error
    found: list[Any] = [_sendable(mine)]
    if dist.is_initialized():
        found *= dist.get_world_size(group)
        dist.all_gather_object(found, _sendable(mine), group)
    failures = {rank: each for rank, each in enumerate(found) if each is not None}
    if failures:
        raise CheckpointException(what, failures) from mine


def _sendable(error: Exception | None) -> tuple[BaseException, traceback.StackSummary] | None:
    """Return an error and where it was raised, as DCP does; one without pickle as its text."""
    if error is None:
        return None
    where = traceback.extract_tb(error.__traceback__)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - errors of others, whose constructors pickle cannot call
        return RuntimeError(f"{type(error).__name__}: {error}"), where
    return error, where
