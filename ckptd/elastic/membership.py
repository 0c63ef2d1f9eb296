"""`Record`: a generation in the membership log: members, layout, reason; its JSON and checks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec

from ckptd.decoding import json_decoder
from ckptd.elastic.placement import Coordinate, NodeSlot, SlotPosition
from ckptd.elastic.policy import Candidate, Shape
from ckptd.errors import CorruptError

_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Member(msgspec.Struct, frozen=True, array_like=True):
    """The node and slot at one place; members are listed in the order of ranks.

    Attributes
    ----------
    node, slot
        Where it runs.
    pp, dp, tp
        Its place.
    """

    node: _Word
    slot: _Count
    pp: _Count
    dp: _Count
    tp: _Count


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One generation.

    Attributes
    ----------
    generation
        Rises by one at least with each record.
    shape
        The layout's sizes.
    members
        Every rank.
    step
        The last step that was known to be committed; 0 if none. Training goes on from it or later.
    reason
        Why there is a new generation, in a few words.
    at
        Seconds since 1970, for people.
    by
        Which life of which controller decided: no two write the same bytes.
    level
        How deep the restart went: 0 regrouped living workers, 1 started workers, 2 launchers, 3 the
        job.
    failures
        Faults of the job so far; planned restarts are none.
    fruitless
        Generations in a row before this one that failed without a new committed step.
    out
        Nodes that an operator ordered out: the next controller does not use them either.
    resting
        Nodes that are left out for a time, and until when, in seconds since 1970.
    parked
        Whether the job was paused by order: the next controller does not start it either.
    chosen_at
        When the layout was chosen, as `at`, which an order of an operator renews; 0 in old records.
    why, candidates
        Why this layout, and all that were compared, best first: see `ckptd.elastic.policy.Choice`.
        Empty in old records.
    """

    generation: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    shape: Shape
    members: tuple[Member, ...]
    step: _Count
    reason: Annotated[str, msgspec.Meta(max_length=2000)]
    at: float
    by: _Word
    level: Annotated[int, msgspec.Meta(ge=0, le=3)] = 1
    failures: _Count = 0
    fruitless: _Count = 0
    out: tuple[_Word, ...] = ()
    resting: tuple[tuple[_Word, float], ...] = ()
    parked: bool = False
    chosen_at: float = 0.0
    why: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes that run at least one of its ranks."""
        return frozenset(m.node for m in self.members)

    def slots_of(self, node: str) -> tuple[NodeSlot, ...]:
        """Return the slots of `node` with the places that they have in this generation."""
        return tuple(
            NodeSlot(m.node, m.slot, Coordinate(m.pp, m.dp, m.tp))
            for m in self.members
            if m.node == node
        )


_decoder = json_decoder(Record)


def members_of(places: Sequence[SlotPosition]) -> tuple[Member, ...]:
    """Return the members of a choice's places."""
    return tuple(Member(p.slot.node, p.slot.number, *p.at) for p in places)


def encode_record(record: Record) -> bytes:
    """Return one line of JSON, without a newline."""
    return msgspec.json.encode(record)


def decode_record(raw: bytes, where: str) -> Record:
    """Return the record that `raw` holds.

    Raises
    ------
    CorruptError
        It is none, or its members are not the ranks of its shape.
    """
    try:
        record = _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise CorruptError(
            "a record of the membership log cannot be read", where=where, found=str(error)[:200]
        ) from error
    shape = record.shape
    places = [(m.pp, m.dp, m.tp) for m in record.members]
    expected = (
        (p, d, t) for p in range(shape.pp) for d in range(shape.dp) for t in range(shape.tp)
    )
    if min(shape.pp, shape.dp, shape.tp) < 1 or shape.world != len(places):
        same = False
    else:
        same = all(a == b for a, b in zip(places, expected, strict=True))
    if not same or len({(m.node, m.slot) for m in record.members}) != len(places):
        raise CorruptError(
            "the members of a generation are not the ranks of its layout",
            where=where,
            wanted=f"{shape}, each rank once",
            found=f"{len(places)} members",
        )
    return record


def check_log(records: Sequence[Record], where: str) -> None:
    """Refuse a log whose generations do not rise, or whose steps fall.

    A generation may be written again, with the same ranks, after an order of an operator.

    Raises
    ------
    CorruptError
        A record of a membership log is none, or the log goes backwards.
    """
    for before, after in pairwise(records):
        again = after.generation == before.generation and after.members == before.members
        rises = after.generation > before.generation or (again and _wish(after) != _wish(before))
        if not rises or after.step < before.step:
            raise CorruptError(
                "a membership log goes backwards",
                where=where,
                wanted=f"a generation after {before.generation}, from step {before.step} or later",
                found=f"generation {after.generation} from step {after.step}",
            )


def _wish(record: Record) -> tuple[object, ...]:
    return record.out, record.resting, record.parked
