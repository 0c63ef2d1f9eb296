"""Makes the status that people see (`Status`, a row for each node) of what the controller knows."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from ckptd.elastic.control.history import RecoveryHistory
from ckptd.elastic.control.roster import Node
from ckptd.elastic.control.statemachine import StateMachine
from ckptd.elastic.messages import NodeRow, Relaunch, Status


@dataclass(frozen=True)
class Setting:
    """The facts that do not change while a controller lives.

    Attributes
    ----------
    job
        Its name.
    log
        URL of the membership log.
    address, life
        Of the controller.
    """

    job: str
    log: str
    address: str
    life: str


def status_of(
    setting: Setting,
    machine: StateMachine,
    history: RecoveryHistory,
    relaunch: tuple[int, Relaunch] | None = None,
    ended: str = "",
    daemon: str = "",
) -> Status:
    """Return the status at this moment.

    Parameters
    ----------
    relaunch
        The newest wish to have launchers restarted, and the generation at which it came.
    ended
        How the job ended; empty while it goes on.
    daemon
        URL of the daemon that was announced last; empty if none was.
    """
    now, epoch = time.monotonic(), time.time()
    record = machine.record
    members = record.nodes if record is not None else frozenset[str]()
    known = [node for node in machine.nodes if node.life or node.name in members]
    return Status(
        job=setting.job,
        state=str(machine.state),
        reason=machine.reason,
        since=epoch - (now - machine.since),
        at=epoch,
        generation=machine.generation,
        step=machine.step,
        shape=record.shape if record is not None else None,
        world=len(record.members) if record is not None else 0,
        planned=machine.job.planned,
        nodes=tuple(_row(n, members, now) for n in sorted(known, key=lambda n: n.name)),
        recoveries=history.recoveries,
        goodput=history.goodput(now),
        told=history.told,
        log=setting.log,
        address=setting.address,
        life=setting.life,
        ended=ended,
        relaunch=relaunch[1].nodes if relaunch is not None else (),
        relaunch_generation=relaunch[0] if relaunch is not None else 0,
        daemon=daemon,
    )


def _row(node: Node, members: frozenset[str], now: float) -> NodeRow:
    out = node.out_until - now
    return NodeRow(
        name=node.name,
        host=node.host,
        up=node.up,
        slots=node.slots,
        running=node.running,
        fenced=node.fenced,
        out_until_s=None if out == math.inf else max(out, 0.0),
        faults=len(node.faults),
        spare=node.up and node.name not in members,
        sick=node.sick,
        silent_s=None if node.seen == -math.inf else max(now - node.seen, 0.0),
    )
