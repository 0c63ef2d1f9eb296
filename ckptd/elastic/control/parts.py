"""Cuts a generation into the part of each node: ranks, slots, which node hosts the job store."""

from __future__ import annotations

from ckptd.elastic.membership import Record
from ckptd.elastic.messages import Begin, RankAssignment


class Parts:
    """A generation, cut up by node. Node 0 has rank 0 and hosts the job store.

    Attributes
    ----------
    generation
        Which one.
    nodes
        In the order of node ranks.
    """

    def __init__(self, record: Record) -> None:
        self.generation = record.generation
        self._record = record
        seats: dict[str, list[RankAssignment]] = {}
        for rank, m in enumerate(record.members):
            seats.setdefault(m.node, []).append(RankAssignment(m.slot, rank, m.pp, m.dp, m.tp))
        self._seats = seats
        self.nodes = tuple(seats)
        self._ranks = {name: number for number, name in enumerate(seats)}

    def begin(self, node: str, level: int, mttr_s: float, mtbf_s: float) -> Begin | None:
        """Return the part of `node`; None if it has none."""
        if node not in self._seats:
            return None
        record, rank = self._record, self._ranks[node]
        return Begin(
            generation=record.generation,
            level=level,
            shape=record.shape,
            step=record.step,
            reason=record.reason,
            nodes=len(self.nodes),
            node_rank=rank,
            seats=tuple(self._seats[node]),
            world=len(record.members),
            hosts_store=rank == 0,
            mttr_s=mttr_s,
            mtbf_s=mtbf_s,
        )
