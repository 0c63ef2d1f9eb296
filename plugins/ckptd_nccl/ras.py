"""Answers of NCCL's own RAS about its communicators: a source beside the rings, with NCCL only.

RAS answers on port 28028 of each node (``ncclras -f json``, NCCL 2.28.7 and later) with how many
collectives of each kind every rank has launched. Two answers some seconds apart tell a communicator
that stands still from one that is busy. Made from NCCL's documentation and its source at 2.29; it
was not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from ckptd.decoding import json_decoder
from ckptd.errors import CorruptError
from ckptd.monitor import Suspect, SuspectKind, Verdict, VerdictKind

__all__ = ["RasCommunicator", "RasMissing", "RasRank", "RasReport", "parse", "stuck"]

REPORT_BYTES = 256 << 20
"""Largest answer that is read; about 700 bytes a rank and communicator."""

MOST_NAMED = 64

_Number = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class RasRank(msgspec.Struct, frozen=True):
    """A rank of a communicator that answered."""

    rank: _Number
    host: str
    pid: _Number
    collective_counts: dict[str, _Count] = {}

    @property
    def launched(self) -> int:
        """Collectives of all kinds."""
        return sum(self.collective_counts.values())


class _Absence(msgspec.Struct, frozen=True):
    unresponsive: bool = False
    considered_dead: bool = False


class RasMissing(msgspec.Struct, frozen=True):
    """A rank of a communicator that did not answer."""

    rank: _Number
    host: str
    pid: _Number
    status: _Absence = _Absence()


class RasCommunicator(msgspec.Struct, frozen=True):
    """One communicator; ranks are numbered within it."""

    hash: str
    size: _Number
    secondary_hash: str = ""
    ranks: tuple[RasRank, ...] = ()
    missing_ranks: tuple[RasMissing, ...] = ()


class RasReport(msgspec.Struct, frozen=True):
    """One answer of RAS."""

    nccl_version: str
    timestamp: str
    communicators: tuple[RasCommunicator, ...] = ()


_reports = json_decoder(RasReport)


def parse(data: bytes) -> RasReport:
    """Return what RAS answered in JSON; what its text says is for people and not read.

    Raises
    ------
    CorruptError
        It is too large, or no answer in JSON.
    """
    try:
        if len(data) > REPORT_BYTES:
            raise ValueError(f"more than {REPORT_BYTES} bytes")
        return _reports.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(
            "invalid answer of NCCL's RAS",
            wanted="what ncclras -f json prints, of NCCL 2.28.7 or later",
            found=str(error)[:200],
        ) from error


def stuck(before: RasReport, now: RasReport) -> Iterator[Verdict]:
    """Yield a verdict on each communicator that launched nothing between two answers.

    Ranks that are behind the others are suspected of not having come; those that did not answer, of
    what they may have done. Where all have launched as much and all answer, nothing is said: it
    may be idle. Kernels that were launched may still wait on the device.

    Parameters
    ----------
    before, now
        Answers of the same job, further apart than its longest rightful pause.
    """
    earlier = {(c.hash, c.secondary_hash): c for c in before.communicators}
    for one in now.communicators:
        old = earlier.get((one.hash, one.secondary_hash))
        if old is None or _counts(old) != _counts(one):
            continue
        most = max((r.launched for r in one.ranks), default=0)
        late = [r for r in one.ranks if r.launched < most]
        if late:
            yield _behind(one, late, most)
        elif one.missing_ranks:
            yield _silent(one)


def _counts(one: RasCommunicator) -> dict[int, dict[str, int]]:
    return {r.rank: r.collective_counts for r in one.ranks}


def _suspect(one: RasRank | RasMissing, confidence: float, detail: str) -> Suspect:
    # Its number is the communicator's own: only host and process say who it is in the job.
    where = f"rank {one.rank} of the communicator, process {one.pid} on {one.host}"
    return Suspect(
        SuspectKind.RANK, f"{one.host}/{one.pid}", round(confidence, 3), f"{where}: {detail}"
    )


def _behind(one: RasCommunicator, late: list[RasRank], most: int) -> Verdict:
    named = [_suspect(r, 0.6, f"{most - r.launched} behind") for r in late[:MOST_NAMED]]
    return Verdict(
        kind=VerdictKind.HANG,
        suspects=tuple(named),
        evidence=(
            f"communicator {one.hash}: {len(late)} of {one.size} ranks launched less than {most}",
            "no rank of it launched anything between two answers of RAS",
        ),
        rules_out=("a communicator that is only busy: its counts would move",),
        refuted_by="a later answer shows other counts, or the rank waits in another communicator",
        action="look at the named ranks' stacks and recorded calls",
        numbers={"behind": len(late), "ranks": one.size, "launched": most},
    )


def _silent(one: RasCommunicator) -> Verdict:
    named = one.missing_ranks[:MOST_NAMED]
    return Verdict(
        kind=VerdictKind.CANNOT_SAY,
        suspects=tuple(
            _suspect(m, 0.5 / len(named), "dead to RAS" if m.status.considered_dead else "silent")
            for m in named
        ),
        evidence=(
            f"communicator {one.hash}: {len(one.missing_ranks)} of {one.size} ranks do not answer",
            "no rank of it launched anything between two answers of RAS",
        ),
        rules_out=("a communicator that is only busy: its counts would move",),
        refuted_by="the missing ranks answer, or the counts move",
        action="look at the processes of the missing ranks",
        numbers={"missing": len(one.missing_ranks), "ranks": one.size},
    )
