"""Makes the status that people see (`Status`, a row for each node) of what the controller knows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
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
    ranks: dict[str, list[int]] = {}
    for rank, member in enumerate(record.members if record is not None else ()):
        ranks.setdefault(member.node, []).append(rank)
    known = [node for node in machine.nodes if node.life or node.name in ranks]
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
        nodes=tuple(
            _row(n, ranks.get(n.name, ()), now) for n in sorted(known, key=lambda n: n.name)
        ),
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
        chosen_at=(record.chosen_at or record.at) if record is not None else 0.0,
        why=record.why if record is not None else (),
        candidates=record.candidates if record is not None else (),
    )


def _row(node: Node, ranks: Sequence[int], now: float) -> NodeRow:
    out = max(node.out_until - now, 0.0)
    return NodeRow(
        name=node.name,
        host=node.host,
        up=node.up,
        slots=node.slots,
        running=node.running,
        fenced=node.fenced,
        out_until_s=None if out == math.inf else out,
        faults=len(node.faults),
        spare=node.up and not ranks,
        sick=node.sick,
        silent_s=None if node.seen == -math.inf else max(now - node.seen, 0.0),
        domains=node.domains,
        ranks=tuple(ranks),
        out_why=node.out_why if out else "",
    )
