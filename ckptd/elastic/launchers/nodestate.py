"""State of a node: fence, generation, ended workers, its place in the network (rack, topology).

In it: ``CKPTD_TOPOLOGY``, Slurm's topology, devices out of use, what each heartbeat says.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

from ckptd.base.runtime.agentlink import run_folder
from ckptd.elastic.linkspeed import measured, of_cards
from ckptd.elastic.messages import Begin, Ended, Fenced, NodeUp, SaidEvent

NO_ORDER = 1 << 20
"""Rank of a node that no generation has begun on."""


def _domains() -> tuple[str, ...]:
    """Return where this node is in the network; by Slurm's topology where nobody says it."""
    given = os.environ.get("CKPTD_TOPOLOGY", "").split("/")
    if given == [""]:
        given = os.environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")[:-1]  # the last is the node
    return tuple(name[:256] for name in given[:8])


class NodeState:
    """Fences and generations of one node, whatever starts its workers; used under one lock.

    Orders may come twice and late, and nothing goes back: a fence only rises, and a generation
    begins at most once.

    Parameters
    ----------
    node
        Its name.
    tell
        Sends an event to the controller.

    Attributes
    ----------
    life
        Names this launcher, among all that ever had the name of the node.
    fence, fenced
        No worker of an earlier generation than `fence` may run; none up to `fenced` runs.
    started, running
        The last generation that was started here, and the one that runs; 0 if none.
    rank
        Of this node in the newest generation.
    begun_at
        Second of `time.monotonic` at which the order to begin came.
    ended
        How the workers of the last generation have ended, as the controller knows it.
    """

    def __init__(self, node: str, tell: Callable[[SaidEvent], None]) -> None:
        self.node, self._tell = node, tell
        self.life, self._domains = secrets.token_hex(8), _domains()
        self._measured, self._of_cards = measured(run_folder()), of_cards()
        self.fence = self.fenced = self.started = self.running = 0
        self.rank = NO_ORDER
        self.begun_at = 0.0
        self.ended: Ended | None = None
        self._newest: Begin | None = None

    @property
    def begin(self) -> Begin | None:
        """The newest order to begin, unless a fence came after it."""
        begin = self._newest
        return begin if begin is not None and begin.generation >= self.fence else None

    @property
    def waiting(self) -> Begin | None:
        """The order to begin that was not carried out yet."""
        begin = self.begin
        return begin if begin is not None and begin.generation > self.started else None

    def up(
        self, slots: int, host: str, *, sessions: bool = False, sick: tuple[str, ...] = ()
    ) -> NodeUp:
        """Return what each beat tells the controller."""
        return NodeUp(
            node=self.node,
            life=self.life,
            slots=slots,
            fenced=self.fenced,
            running=self.running,
            sessions=sessions,
            host=host,
            sick=sick,
            pid=os.getpid(),
            domains=self._domains,
            link_bytes_per_s=self._measured,
            card_bytes_per_s=self._of_cards,
        )

    def order_begin(self, begin: Begin) -> bool:
        """Take an order to begin; return whether it is news."""
        newest = self._newest.generation if self._newest is not None else 0
        if begin.generation <= max(self.fenced, newest):
            return False
        self._newest, self.rank, self.begun_at = begin, begin.node_rank, time.monotonic()
        return True

    def order_fence(self, generation: int) -> bool:
        """Take an order to fence; return whether something is left to do for it."""
        if generation <= self.fenced:
            self._tell(Fenced(node=self.node, generation=self.fenced))
            return False
        self.fence = max(self.fence, generation)
        return True

    def start(self, begin: Begin) -> None:
        """Note that the workers of a generation are being started."""
        self.started = self.running = begin.generation
        self.ended = None

    def keep_fence(self, generation: int) -> None:
        """Note that no worker up to a generation runs here, nor can be started."""
        if self.running < generation:
            self.running = 0
        if self.fenced < generation:
            self.fenced = generation
            self._tell(Fenced(node=self.node, generation=generation))

    def tell_ended(self, ended: Ended) -> None:
        """Tell how workers have ended, unless the controller knows it."""
        if ended != self.ended:
            self.ended = ended
            self._tell(ended)
