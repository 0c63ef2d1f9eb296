"""Agreeing on a save plan: exchanged only when the structure of the state changes."""

from __future__ import annotations

import contextlib

import msgspec

from ckptd.decoding import json_decoder
from ckptd.engine.holders import Holders
from ckptd.engine.structure import Group, SavePlan, Structure, build_plan
from ckptd.errors import CkptdError
from ckptd.format.digest import digest_hex
from ckptd.train.agree import Agreement

__all__ = ["Planner"]

_groups = json_decoder(dict[str, tuple[int, ...]])

_FAILED = "structure-failed"


class Planner:
    """Keeps the plan of the last structure.

    A rank whose structure did not change goes on with the plan it has and asks nobody. When the
    structure changes on every rank at one save (an optimizer's first step, say), all of them take
    part in one exchange: a digest a rank to rank 0, and the distinct structures to everybody.
    When it changes on some ranks only, those wait for the others in vain and say so.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._known = ""
        self.structure = ""
        """Digest of this rank's structure at the last call of `plan`."""
        self.holders: Holders | None = None
        """With whom this rank holds what in common, by the last plan; None in a job of one."""
        self._plan: SavePlan | None = None
        self._planned: Structure | None = None
        self._failures = 0

    def heed(self, error: CkptdError) -> None:
        """Plan afresh at the next save if that is what a failed save was about, on any rank.

        Where something else failed, on a rank alone perhaps, every rank goes on with the plan it
        has: one that asked for another would wait for ranks that ask nobody.
        """
        failures = self._count()
        if error.kind == "structure" or failures != self._failures:
            self._known, self._failures = "", failures

    def _count(self) -> int:
        """Return how often a rank could not agree on a plan."""
        board = self._agreement.board
        return 0 if board.world == 1 else board.count(_FAILED)

    def plan(self, structure: Structure, save: str = "") -> SavePlan:
        """Return the plan for this structure, the same on every rank.

        Parameters
        ----------
        save
            Names the save, the same on every rank; empty where every rank asks each time.

        Raises
        ------
        DeadlineError
            Some ranks did not take part: their structure did not change.
        UsageError
            Ranks disagree on the shape or dtype of a tensor.
        """
        if self._plan is not None and structure is self._planned and self.structure == self._known:
            return self._plan
        raw = structure.encode()
        own = self.structure = digest_hex(raw)
        if self._plan is not None and own == self._known:
            self._planned = structure
            return self._plan
        board = self._agreement.board
        if board.world == 1:
            groups = [Group(structure, (0,))]
        else:
            try:
                groups = self._exchange(own, raw, save)
            except CkptdError:
                self._known = ""
                with contextlib.suppress(CkptdError):  # what failed is told, not this
                    board.add(_FAILED)  # the others have a plan: they hear that it is of no use
                raise
        plan = build_plan(groups, board.world)
        self.holders = Holders(groups, board.rank) if board.world > 1 else None
        self._plan = plan
        self._known, self._planned = own, structure
        return self._plan

    def _exchange(self, own: str, raw: bytes, save: str) -> list[Group]:
        board = self._agreement.board

        def tabulate(digests: list[bytes]) -> bytes:
            ranks: dict[str, list[int]] = {}
            for rank, digest in enumerate(digests):
                ranks.setdefault(digest.decode(), []).append(rank)
            return msgspec.json.encode(ranks)

        table = self._agreement.all_reports("structure", own.encode(), tabulate, save)
        by_digest = _groups.decode(table)
        # Only the first rank of each group publishes its structure, under its digest.
        if by_digest[own][0] == board.rank:
            board.set(f"structure/{own}", raw)
        groups = []
        for digest, ranks in by_digest.items():
            key = f"structure/{digest}"
            body = raw if digest == own else self._agreement.wait(key, ranks[0], 600.0)
            groups.append(Group(Structure.decode(body), ranks))
        return groups
