"""Whether newcomers are worth a restart: a pure function."""

from __future__ import annotations

from ckptd.elastic.control.roster import Roster
from ckptd.elastic.membership import Record
from ckptd.elastic.policy import JobSpec, Shape, choose
from ckptd.errors import RefusedError

__all__ = ["grown"]


def grown(
    job: JobSpec, nodes: Roster, record: Record, members: frozenset[str], now: float, there_s: float
) -> Shape | None:
    """Return the shape on which a step is shorter once newcomers take part; None if there is none.

    Parameters
    ----------
    record, members
        The generation that runs, and its nodes.
    now
        The moment: nodes that are left out at it do not count.
    there_s
        How long a newcomer must have been there.
    """
    if record.shape == job.planned:
        return None
    new = {n.name for n in nodes if n.name not in members and now - n.came >= there_s}
    if not any(nodes[name].usable(now) for name in new):
        return None
    slots = [s for s in nodes.slots(now, record) if s.node in members or s.node in new]
    try:
        better = choose(job, slots, record.shape).shape
    except RefusedError:
        return None
    return better if job.step_cost(better) < job.step_cost(record.shape) else None
