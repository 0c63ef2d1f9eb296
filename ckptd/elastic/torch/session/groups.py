"""Process groups of a generation: aborts them all at once (NCCL), destroys and forgets them.

``gloo`` has no abort; see `ckptd.elastic.torch.session.sockets`. Every other backend is taken to
have one like that of NCCL, which may wait for its device: collectives of another group that still
run there hold it up until that group is aborted as well (NVIDIA/nccl#1013, pytorch#119797). So no
abort is waited for before all have begun.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_log = logging.getLogger("ckptd.elastic")
_PREFIX = "ckptd-abort-"
_WITHOUT_ABORT = frozenset({"gloo", "mpi", "fake"})
_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)
"""Names of torch's tables of groups."""


class GroupAborts:
    """Aborts the groups of one generation, each in a thread of its own.

    torch's own way to abort several groups puts ``ncclGroupStart`` and ``ncclGroupEnd`` around
    their aborts (``_abort_process_group``). NCCL counts these for the thread that calls them, and
    `ProcessGroupNCCL.abort` aborts in a thread that it starts and waits for, so each abort is
    waited for before the next one begins. NVIDIA's resiliency extension uses a thread a group.

    Notes
    -----
    An abort asks the kernels of its communicators to quit before it waits for anything, so all of
    them quit once all aborts have begun. This never ran on NCCL: it was written after the sources
    of PyTorch 2.13 and runs in tests on groups that wait for one another as NCCL's do.
    """

    def __init__(self) -> None:
        self._threads: dict[Any, threading.Thread] = {}
        self._lock = threading.Lock()

    @property
    def begun(self) -> bool:
        """Whether any group is aborted: what devices compute from then on is of no use.

        A kernel behind a collective that was aborted runs, on whatever the collective has left.
        """
        return bool(self._threads)

    def begin(self) -> None:
        """Begin to abort all groups that have an abort and are not aborted yet; never waits."""
        with self._lock:
            new = [group for group in groups_with_abort() if group not in self._threads]
            for group in new:
                self._threads[group] = threading.Thread(
                    target=_abort, args=(group,), name=_PREFIX + _name(group), daemon=True
                )
            for group in new:
                self._threads[group].start()

    def wait(self, until: float) -> list[str]:
        """Wait until all aborts have ended, or until then by ``time.monotonic``.

        Returns
        -------
        list
            Names of the groups whose aborts have not ended. To destroy one of these would hang.
        """
        for thread in self._threads.values():
            thread.join(max(0.0, until - time.monotonic()))
        hung = [thread.name for thread in self._threads.values() if thread.is_alive()]
        return [name.removeprefix(_PREFIX) for name in hung]


def groups_with_abort() -> list[Any]:
    """Return the groups of which some device's collectives go through a backend with an abort.

    torch's other table has the backends that the program has named: none, more often than not.
    """
    configs: dict[Any, object] = dict(getattr(distributed_c10d._world, "pg_backend_config", {}))
    return [group for group, config in configs.items() if _backends(str(config)) - _WITHOUT_ABORT]


def _backends(config: str) -> set[str]:
    """Return the names in what torch has as ``cpu:gloo,cuda:nccl``."""
    return {word.rpartition(":")[2].lower() for word in config.split(",") if word}


def _name(group: Any) -> str:
    names: dict[Any, str] = getattr(distributed_c10d._world, "pg_names", {})
    return names.get(group) or repr(group)


def _abort(group: Any) -> None:
    try:
        group.abort()
    except (RuntimeError, AttributeError) as error:
        _log.warning("a group's collectives cannot be aborted: %s", error)


def destroy_groups() -> list[Any]:
    """Destroy all process groups, also where they were only half made.

    Returns
    -------
    list
        The groups, for `let_go`: to be kept until nothing else of the program has them.
    """
    world: Any = distributed_c10d._world
    groups = list(getattr(world, "pg_map", {}))
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except (RuntimeError, ValueError, AssertionError) as error:
        _log.warning("destroying process groups failed: %s", error)
    finally:
        # Where that has failed, or there was no default group yet, others still have their names.
        _forget_default_group()
        # Other ranks count groups from 0 in the next generation, and name them by that count.
        for table in _TABLES:
            getattr(world, table, {}).clear()
        world.group_count = 0
    return groups


def let_go(groups: list[Any], until: float) -> bool:
    """Release groups that are destroyed; tell whether they have ended in time.

    A group of gloo ends once its threads have carried out what was enqueued. Where Python has the
    last reference to it, that is waited for without the GIL; where something in C++ has it, as the
    reducer of DDP, with the GIL, which those threads may want: the process would hang for ever.

    Parameters
    ----------
    groups
        What `destroy_groups` has returned. Emptied.
    until
        When to wait no more, by ``time.monotonic``.
    """
    thread = threading.Thread(target=groups.clear, name="ckptd-groups", daemon=True)
    thread.start()
    thread.join(max(0.0, until - time.monotonic()))
    return not thread.is_alive()


def _forget_default_group() -> None:
    for name, args in (("_update_default_pg", (None,)), ("_unregister_all_process_groups", ())):
        if (function := getattr(distributed_c10d, name, None)) is not None:  # they are private
            function(*args)
