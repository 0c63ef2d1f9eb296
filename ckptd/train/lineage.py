"""A job's place in the root's history: which generation it is, and what it continues from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptd.engine.catalogue import Catalogue
from ckptd.errors import NotFoundError, RefusedError
from ckptd.format.names import CommitName
from ckptd.monitor.view import Phase
from ckptd.train.agree import Agreement
from ckptd.train.recorder import phase

__all__ = ["Lineage"]


class Lineage:
    """Claims the generation at the first save or load, and knows the last step.

    Attributes
    ----------
    generation
        Claimed generation; 0 before the first claim.
    last_step
        The step that was loaded or saved last; None when there is none.
    """

    def __init__(self, catalogue: Catalogue, agreement: Agreement, *, fresh_line: bool) -> None:
        self._catalogue = catalogue
        self._agreement = agreement
        self._fresh_line = fresh_line
        self._attempts = 0
        self.generation = 0
        self.last_step: int | None = None

    def newest(self) -> CommitName | None:
        """Return the newest commit of the line, the same on every rank."""
        found = self._agreement.on_rank_zero("newest", self._newest)
        return None if found is None else CommitName(*found)

    def _newest(self) -> tuple[int, int] | None:
        try:
            self._catalogue.open()
        except NotFoundError:
            return None
        name = self._catalogue.latest()
        return None if name is None else (name.step, name.generation)

    @phase(Phase.CKPT)
    def claim_for_save(self, step: int) -> None:
        """Claim a generation that continues the newest line, if none is claimed yet.

        Raises
        ------
        RefusedError
            kind ``behind``: the line has a commit at or after `step`.
        """
        if self.generation:
            return

        def claim() -> Any:
            self._catalogue.create_or_open()
            parent = None if self._fresh_line else self._catalogue.continue_line(step)
            return self._claim(parent, "start" if parent is None else "continue")

        self.generation, self.last_step = self._agreement.on_rank_zero("claim", claim)

    @phase(Phase.CKPT)
    def claim_for_load(self, parent: CommitName, *, committed: bool = True) -> None:
        """Claim a generation whose parent is what was loaded: a commit, or a snapshot without."""
        self.generation, self.last_step = self._agreement.on_rank_zero(
            "claim", lambda: self._claim(parent, "load", committed=committed)
        )
        self._attempts = 0

    def _claim(
        self, parent: CommitName | None, reason: str, *, committed: bool = True
    ) -> tuple[int, int | None]:
        world = self._agreement.board.world
        claimed = self._catalogue.claim(parent, world, reason, committed=committed)
        return claimed.generation, None if parent is None else parent.step

    def on_catalogue(self, function: Callable[[Catalogue], Any]) -> None:
        """Run `function` on rank 0's catalogue; an error is raised on every rank."""

        def run() -> None:
            self._catalogue.open()
            function(self._catalogue)

        self._agreement.on_rank_zero("catalogue", run)

    def next_attempt(self, step: int) -> str:
        """Return the attempt's name; every rank counts alike.

        Raises
        ------
        RefusedError
            kind ``behind``: `step` is earlier than the last one of this generation. The same step
            may be tried again: if it was committed after all, the handle says so.
        """
        if self.last_step is not None and step < self.last_step:
            raise RefusedError(
                f"step {step} is earlier than the last one",
                kind="behind",
                wanted=f"a step from {self.last_step} on",
                found=step,
                hint="to go back, load() the older step first",
            )
        self._attempts += 1
        return f"{self._attempts:04d}"
