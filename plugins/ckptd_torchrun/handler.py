"""Unmodified torchrun as a launcher: ``torchrun --rdzv-backend=ckptd ...``.

torchrun looks for rendezvous handlers among the entry points of group ``torchrun.handlers``, and
asks the handler which of them train together. This one asks the controller. Each generation has a
fresh store, hosted by the agent of its first node; the agents' own threads never wait for anything
that another generation could leave undone.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from ckptd.elastic.torch.session import host_store
from ckptd.errors import NotFoundError
from ckptd_torchrun.node import JobOver, Joined
from ckptd_torchrun.side import Side, SideSettings
from ckptd_torchrun.store import GenerationStore, connect_store

__all__ = ["BACKEND", "CkptdRendezvous", "create", "register"]

BACKEND = "ckptd"
_LOG = logging.getLogger(__name__)
_LAST_S = 10.0


def register() -> Any:
    """Return what makes the handler; the entry point of group ``torchrun.handlers``."""
    return create


def create(parameters: RendezvousParameters) -> CkptdRendezvous:
    """Return the handler of an agent; its settings are those of ``--rdzv-conf``.

    Raises
    ------
    UsageError
        A setting makes no sense.
    """
    settings = SideSettings.read(
        parameters.endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        parameters.config,
    )
    return CkptdRendezvous(settings)


class CkptdRendezvous(RendezvousHandler):
    """Rendezvous of torchrun's agents: the controller decides which of them train together.

    Parameters
    ----------
    settings
        See `SideSettings`.
    """

    def __init__(self, settings: SideSettings) -> None:
        self._settings = settings
        self._side = Side(settings)
        self._hosted: TCPStore | None = None
        self._client: TCPStore | None = None
        self._store: GenerationStore | None = None
        self._agents = 1
        self._over = False
        self._leaving = threading.Lock()
        self._side.start()
        # Also where the agent ends by a signal, and torchrun does not call `shutdown`.
        atexit.register(self.shutdown)

    def get_backend(self) -> str:
        """Return ``ckptd``."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._settings.job

    @property
    def use_agent_store(self) -> bool:
        """Whether workers are clients of the store: rank 0 must not try to host one there."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node takes part in a generation, and return its part."""
        self._store = self._client = self._hosted = None
        try:
            joined = self._side.join(self._host, self._connect)
        except JobOver as over:
            # Not a RendezvousGracefulExitError: torchrun fails on that, and the job has ended well.
            sys.stderr.write(f"ckptd: {over.text}\n")
            raise SystemExit(over.code) from None
        except NotFoundError as error:
            raise RendezvousConnectionError(str(error)) from error
        return self._info(joined)

    def num_nodes_waiting(self) -> int:
        """Return 1 when the agent has to come to `next_rendezvous`; its workers are dead then."""
        return int(self._side.node.changed())

    def is_closed(self) -> bool:
        """Return whether this agent has left."""
        return self._over

    def set_closed(self) -> None:
        """Do nothing: an agent that ends does not end the job of the others."""

    def shutdown(self) -> bool:
        """Leave: the job of the others goes on. Idempotent."""
        with self._leaving:
            if not self._over:
                self._over = True
                atexit.unregister(self.shutdown)
                ended_well = self._side.node.code == 0
                if ended_well and self._hosted is not None and self._store is not None:
                    self._store.await_leaving(self._agents, _LAST_S)
                self._side.leave(_LAST_S)
        return True

    def _host(self, generation: int) -> tuple[str, int]:
        self._hosted = host_store(self._side.address)
        return self._side.address, self._hosted.port

    def _connect(self, host: str, port: int) -> None:
        self._client = connect_store(host, port)

    def _info(self, joined: Joined) -> RendezvousInfo:
        begin, node = joined.begin, self._side.node
        if self._client is None:
            raise RendezvousConnectionError("no store")
        self._agents = begin.nodes
        self._store = GenerationStore(self._client, node.over, node.succeeded)
        return RendezvousInfo(
            self._store,
            begin.node_rank,
            begin.nodes,
            RendezvousStoreInfo(joined.host, joined.port),
        )
