"""`Watcher`: looks at all ranks of a node 20 times a second, takes evidence, reports, obeys orders.

In it: how often it looks and reports; when a rank counts as stuck; when old rings are removed.

It needs nothing of the ranks, which may be stopped, spin, hold the GIL or be dead, and nothing of
the daemon, which may be away for as long as it likes.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Collection, Mapping
from itertools import count

from ckptd.errors import CkptdError
from ckptd.monitor.agent.evidence import EvidenceTaker
from ckptd.monitor.agent.health import Health
from ckptd.monitor.agent.processes import sleeps
from ckptd.monitor.agent.report import ReportMaker
from ckptd.monitor.agent.rings import Ring, Rings
from ckptd.monitor.agent.totals import RingTotals
from ckptd.monitor.agent.uplink import Uplink
from ckptd.monitor.job import Phase
from ckptd.monitor.report import AgentOrders, EvidenceReport, ProbeResult, Stack
from ckptd.monitor.ring import Counter
from ckptd.monitor.rules.limits import HangLimits

_log = logging.getLogger("ckptd.monitor")
POLL_S = 0.05
_IDLE_POLL_S = 0.5
"""While no rank lives: before the first, and in an agent that outlives its job."""
STUCK_S = 0.3
"""A rank that has not moved for this long is reported at once, with more of its calls."""
_MOVING_FACTOR = 3
"""While all ranks move, every third report is enough; an agent counts as silent only after four."""
_TALLY_S = 1.0
_CLEAN_S = 3600.0
_LEAST_PERIOD_S = 0.05
_MOST_PERIOD_S = 60.0
_AFTER_FAULT_S = 1.0
_END_S = 30.0
"""So long a last look may take: it reads files and asks py-spy, each with its own deadline."""


class Watcher:
    """Watches in a thread of its own from `start` on. To be closed, which does not close `uplink`.

    Parameters
    ----------
    job, node
        Names in the reports.
    rings
        What is watched; closed with the watcher.
    uplink
        The way to the daemon.
    secret
        The job's, for link probes.
    limits
        From half of these times on, evidence is taken, so that it is there when a verdict is.
    address
        Where this node answers link probes; empty if it does not.
    """

    def __init__(
        self,
        job: str,
        node: str,
        rings: Rings,
        uplink: Uplink,
        secret: bytes,
        *,
        limits: HangLimits | None = None,
        address: str = "",
    ) -> None:
        self._rings = rings
        self._uplink = uplink
        self._limits = limits or HangLimits()
        self._totals = RingTotals()
        self._health = Health()
        self._maker = ReportMaker(job, node, rings, self._totals, address, self._health)
        self._evidence = EvidenceTaker(secret, self._report)
        self._reports = count(1)
        self._reporting = threading.Lock()
        self._period_s = AgentOrders().period_s
        self._asked: set[int] = set()
        self._urgent = True
        self._sent_at = self._tallied_at = self._cleaned_at = -math.inf
        self._stuck: set[Ring] = set()
        self._looked_into: set[Ring] = set()
        self._waiting: dict[int, Ring] = {}
        self._poll = select.poll()
        self._ended: set[int] = set()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.POLLIN)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptd-watcher", daemon=True)
        self._faults: set[str] = set()

    def start(self) -> None:
        """Begin to watch."""
        self._health.start()
        self._thread.start()

    def close(self) -> None:
        """Look and report once more, and end."""
        self._ending.set()
        self._health.close()
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(_END_S)
        if self._thread.is_alive():  # it still uses what would be closed
            _log.warning("the watch did not end within %.0f s", _END_S)
            return
        self._evidence.close()
        self._totals.close()
        self._rings.close()
        os.close(self._wake)

    # --- the loop -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending.is_set():
            self._safely()
            lives = any(ring.alive for ring in self._rings.ranks.values())
            self._health.awake = lives
            pause_s = POLL_S if lives else _IDLE_POLL_S
            self._ended = {fd for fd, _ in self._poll.poll(pause_s * 1000)}
        self._urgent = True
        self._safely()

    def _safely(self) -> None:
        try:
            self._turn(time.monotonic())
        except Exception as error:  # noqa: BLE001 - whatever a rank wrote, the others are watched on
            if repr(error) not in self._faults and len(self._faults) < 16:
                self._faults.add(repr(error))
                _log.exception("a look at the ranks failed")
            self._ending.wait(_AFTER_FAULT_S)

    def _turn(self, now: float) -> None:
        for ring in self._rings.refresh(now):
            self._evidence.follow(ring.rank, ring.process.pid if ring.process else None)
            self._urgent = True
        dead = [ring for ring in list(self._rings.ranks.values()) if self._look(ring, now)]
        self._keep_evidence(now)
        self._follow()
        if dead:
            self._died(dead)
        for orders in self._uplink.orders():
            self._obey(orders)
        if now - self._tallied_at >= _TALLY_S or dead:
            self._tallied_at = now
            for ring, error in self._totals.add_up(list(self._rings.ranks.values()), now):
                self._rings.spoiled(ring, error)
        period = self._period_s * (1 if self._stuck else _MOVING_FACTOR)
        due = now - self._sent_at >= period or self._urgent
        # The last report waits behind one that is under way: it shows which ranks have ended.
        if due and (self._uplink.ready or self._ending.is_set()):
            self._sent_at, self._urgent = now, False
            stuck = {ring.rank for ring in self._stuck}
            asked, self._asked = self._asked, set()
            self._uplink.offer(self._maker.make(now, stuck, asked, self._uplink.taken))
        if now - self._cleaned_at >= _CLEAN_S:
            self._cleaned_at = now
            self._rings.clean()

    def _look(self, ring: Ring, now: float) -> bool:
        """Look at one rank; return whether it was found to have ended."""
        try:
            moved = ring.glance(now)
        except CkptdError as error:
            self._rings.spoiled(ring, error)
            return False
        fd = ring.process.fileno() if ring.process is not None else -1
        known = self._waiting.get(fd) is ring
        ended = ring.look(now, runs=fd not in self._ended if known else None)
        if moved and ring in self._stuck:
            # A daemon that takes it for stuck must learn at once that it moves.
            self._urgent = True
            self._stuck.discard(ring)
            self._looked_into.discard(ring)
        elif not moved and ring.alive and now - ring.moved > STUCK_S and ring not in self._stuck:
            self._stuck.add(ring)
            self._urgent = True
        return ended

    def _keep_evidence(self, now: float) -> None:
        """Take the stacks of ranks that have stood still for half of what would be too long."""
        new = {r for r in self._stuck - self._looked_into if now - r.moved > self._floor(r) / 2}
        if new:
            self._looked_into |= new
            least = min(now - ring.moved for ring in new)
            self._evidence.keep(_pids(new), f"it had not moved for {least:.1f} s")

    def _floor(self, ring: Ring) -> float:
        counters, limits = ring.counters, self._limits
        phase = counters[Counter.PHASE]
        known = Phase(phase) if 0 <= phase <= max(Phase) else Phase.TRAIN
        training = limits.floors[Phase.TRAIN]
        if known is Phase.INIT:  # it may be a loop without steps: only all ranks together tell
            return training
        floor = limits.floors.get(known, training)
        if counters[Counter.STEPS_DONE] < limits.warm_steps:
            floor = max(floor, limits.floors.get(Phase.INIT, floor))
        return floor

    def _follow(self) -> None:
        """Make the end of each process that is watched now wake the loop."""
        rings = {
            ring.process.fileno(): ring
            for ring in self._rings.ranks.values()
            if ring.alive and ring.process is not None and ring.process.fileno() >= 0
        }
        if rings == self._waiting:
            return
        for fd, ring in self._waiting.items():
            if rings.get(fd) is not ring:
                self._poll.unregister(fd)
        for fd, ring in rings.items():
            if self._waiting.get(fd) is not ring:
                self._poll.register(fd, select.POLLIN)
        self._waiting = rings
        here = set(self._rings.ranks.values())
        self._stuck &= here
        self._looked_into &= here

    def _died(self, dead: Collection[Ring]) -> None:
        """Take the stacks of the ranks that are left: their launcher may end them next."""
        self._urgent = True
        self._stuck.difference_update(dead)
        left = [ring for ring in self._rings.ranks.values() if ring.alive]
        for ring in dead:
            ring.answers = 1 if len(dead) == 1 and _singled_out(ring, left) else -1
        if any(ring.exit_code != 0 for ring in dead):
            which = ", ".join(str(ring.rank) for ring in dead)
            self._evidence.keep(_pids(left), f"rank {which} had just ended")

    # --- orders ---------------------------------------------------------------------------------

    def _obey(self, orders: AgentOrders) -> None:
        self._period_s = min(max(orders.period_s, _LEAST_PERIOD_S), _MOST_PERIOD_S)
        if orders.tell:
            self._maker.tell_again()
        self._asked.update(orders.calls)
        here = self._rings.ranks
        self._evidence.wanted(
            {
                rank: ring.process.pid if ring.alive and ring.process is not None else None
                for rank, ring in here.items()
                if rank in orders.stacks
            }
        )
        self._evidence.probe(tuple(p for p in orders.probes if p.from_node == self._maker.node))

    def _report(
        self, stacks: dict[int, Stack], logs: dict[int, str], probes: tuple[ProbeResult, ...]
    ) -> None:
        maker = self._maker
        with self._reporting:  # numbers go up in the order in which they are sent
            self._uplink.report(
                EvidenceReport(
                    job=maker.job,
                    source=maker.source,
                    number=next(self._reports),
                    stacks=stacks,
                    logs=logs,
                    probes=probes,
                )
            )


def _singled_out(ring: Ring, others: Collection[Ring]) -> bool:
    """Return whether a signal ended one rank, and its launcher has asked no other one to end.

    Most launchers end the others next, by the same signal. One that was itself asked to end is
    awake until it has signalled all; so nothing is concluded while it is.
    """
    process = ring.process
    if process is None or ring.exit_code not in (-signal.SIGTERM, -signal.SIGINT):
        return False
    beside = [other.process for other in others if other.process is not None]
    beside = [other for other in beside if other.parent == process.parent]
    if not beside or not sleeps(process.parent):
        return False
    return not any(other.asked_to_end(signal.SIGTERM) for other in beside)


def _pids(rings: Collection[Ring]) -> Mapping[int, int]:
    return {ring.rank: ring.process.pid for ring in rings if ring.process is not None}
