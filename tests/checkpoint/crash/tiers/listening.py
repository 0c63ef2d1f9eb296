"""Has the ledger hear what a trainer's handles say, and by whom a promise is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.save.client import WriterClient
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.save.messages import SaveRequest
from ckptd.checkpoint.torch.job import Lineage
from ckptd.errors import CkptdError
from tests.checkpoint.crash.tiers.ledger import Claiming, Held, Ledger, Promised, Refused

__all__ = ["listen"]

_ENDED = ("durable", "failed")


def listen(ledger: Ledger, life: int, rank: int, on_agent: Callable[[int], None]) -> None:
    """Listen from now on; once, in a trainer's own process.

    Parameters
    ----------
    on_agent
        Called with the process of the agent to which a save is handed over.
    """
    _listen_to_handles(ledger, life, rank)
    begin, claim = WriterClient.begin, Lineage.claim_for_load

    def told_begin(self: WriterClient, save: SaveRequest, *args: Any) -> None:
        on_agent(self.pid)
        ledger.write(
            Held(
                life=life,
                rank=rank,
                step=save.step,
                generation=save.generation,
                attempt=save.attempt,
                agent=self.pid,
                near=save.near,
                root=save.root,
            )
        )
        begin(self, save, *args)

    def told_claim(self: Lineage, parent: CommitName, **named: Any) -> None:
        if rank == 0:
            ledger.write(Claiming(life=life, rank=0, step=parent.step))
        claim(self, parent, **named)

    WriterClient.begin = told_begin  # type: ignore[method-assign]
    Lineage.claim_for_load = told_claim  # type: ignore[method-assign]


def _listen_to_handles(ledger: Ledger, life: int, rank: int) -> None:
    """Write after the handle has said it: a promise that was not written is not held against it."""
    settle, advance, fail = SaveTracker.settle, SaveTracker.advance, SaveTracker.fail

    def promised(handle: SaveTracker, tier: str) -> None:
        ledger.write(
            Promised(
                life=life,
                rank=rank,
                step=handle.step,
                generation=handle.generation,
                attempt=handle.attempt,
                tier=tier,
            )
        )

    def refused(handle: SaveTracker, tier: str, error: CkptdError) -> None:
        text = error.message[:300]
        ledger.write(
            Refused(
                life=life, rank=rank, step=handle.step, tier=tier, kind=error.kind, message=text
            )
        )

    def told_settle(self: SaveTracker, tier: str, error: CkptdError | None = None) -> bool:
        news = settle(self, tier, error)
        if news and error is None:
            promised(self, tier)
        elif news and error is not None:
            refused(self, tier, error)
        return news

    def told_advance(self: SaveTracker, phase: str, done: int | None = None) -> None:
        before = self.progress.phase
        advance(self, phase, done)
        if phase == "durable" and before not in _ENDED and self.root:
            promised(self, "root")

    def told_fail(self: SaveTracker, error: CkptdError) -> None:
        before = self.progress.phase
        fail(self, error)
        if before not in _ENDED and self.root:
            refused(self, "root", error)

    SaveTracker.settle = told_settle  # type: ignore[method-assign]
    SaveTracker.advance = told_advance  # type: ignore[method-assign]
    SaveTracker.fail = told_fail  # type: ignore[method-assign]
