"""One process at work on a reshard: its share of the files, and the commit if it is the last.

Everything about the target follows from the source and the two layouts, so that any number of
processes, on any machines, started together or one after the other, work at one result without
speaking to each other. A killed one is started again: files with a part are complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from ckptd.engine.catalogue import Catalogue
from ckptd.engine.commit import remove_parts
from ckptd.engine.reshard.execute import Budget, Executor
from ckptd.engine.reshard.finish import commit_parts, find_commit, missing_files
from ckptd.engine.reshard.place import OwnPlace
from ckptd.engine.reshard.reports import Resharded
from ckptd.engine.reshard.samples import Expected
from ckptd.engine.reshard.source import Source
from ckptd.engine.reshard.target import Target, share
from ckptd.engine.reshard.work import Work
from ckptd.engine.working import Working, refuse_behind, refuse_others
from ckptd.errors import UsageError
from ckptd.format.digest import digest_hex
from ckptd.format.names import ROOT_MARKER
from ckptd.store.base import Store

__all__ = ["REASON", "Job", "Share", "check_share"]

REASON = "reshard"
"""Begins the reason of generations that are claimed for this."""


class Share(msgspec.Struct, frozen=True):
    """The files of process `number` (from 1) of `count`."""

    number: int = 1
    count: int = 1

    def files(self, target: Target) -> list[int]:
        """Return the target files that this process writes: those with chunks."""
        mine = share(target.sizes, self.number - 1, self.count)
        return [f for f in mine if target.filemap.nchunks(f)]


class Job:
    """A reshard into a root.

    Parameters
    ----------
    source, target
        Both sides.
    catalogue
        The root that is written to; made when it is none yet.
    step
        Of the target.
    identity
        What is done, as text: source, layouts, options. Processes with the same one work together.
    bulk
        The root's store without a `Retry` around it.
    expected
        What the source's witness wants to see, by target tensor.
    progress
        Called with ``(bytes done, bytes in all)`` of this process.
    """

    def __init__(
        self,
        source: Source,
        target: Target,
        catalogue: Catalogue,
        *,
        step: int,
        identity: str,
        bulk: Store,
        expected: Mapping[int, Expected],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._catalogue = catalogue
        self._step = step
        self._attempt = f"rs{digest_hex(identity.encode())[:24]}"
        self._bulk = bulk
        self._expected = expected
        self._progress = progress

    def run(self, share: Share, budget: Budget) -> Resharded:
        """Write the files of one share, and commit if no other is missing.

        Raises
        ------
        CorruptError
            The source is damaged, or its witness does not agree. Nothing was committed.
        RefusedError
            Kind ``behind``: the target has this step, or a later one, and it is another one.
        ConflictError
            Kind ``at-work``: another process is at work on this very share.
        """
        begun = time.monotonic()
        self._catalogue.create_or_open()
        self._bulk.anchor(ROOT_MARKER)  # a store of its own, which has opened no root
        done = self._present(share)
        if done is not None:
            return done
        generation = self._catalogue.join(f"{REASON} {self._attempt}").generation
        place = OwnPlace(self._step, generation, self._attempt)
        reason = f"{REASON}-{share.number}/{share.count}"
        refuse_others(self._catalogue, generation, reason, "")
        working = Working(self._catalogue, generation, reason)
        try:
            working.touch(place.name)
            return self._work(place, working, share, budget, begun)
        finally:
            working.end()

    def _work(
        self, place: OwnPlace, working: Working, share: Share, budget: Budget, begun: float
    ) -> Resharded:
        def progress(done: int, total: int) -> None:
            working.touch(place.name)
            if self._progress is not None:
                self._progress(done, total)

        store = self._catalogue.store
        files = share.files(self._target)
        executor = Executor(self._source, self._target, budget, self._expected)
        work = Work(executor, self._target, place, store, self._bulk, files, progress)
        reused = work.run()
        known = find_commit(self._catalogue, place)
        commit = known or commit_parts(self._catalogue, place, self._target)
        if commit is not None:
            remove_parts(store, place.folder)
        missing = [] if commit else missing_files(store, place, Share().files(self._target))
        return Resharded(
            step=place.name.step,
            generation=place.name.generation,
            state="present" if known else "committed" if commit else "waiting",
            files=len(files),
            reused_files=reused,
            missing_files=len(missing),
            witness_values=work.checked,
            seconds=time.monotonic() - begun,
            **executor.spent.figures(),
        )

    def _present(self, share: Share) -> Resharded | None:
        """Return a report when the target's line has the result already."""
        line = self._catalogue.line()
        for name in line:
            if name.step == self._step and self._catalogue.commit(name).attempt == self._attempt:
                # Who committed may have been killed before it tidied up.
                place = OwnPlace(name.step, name.generation, self._attempt)
                remove_parts(self._catalogue.store, place.folder)
                return Resharded(
                    step=self._step,
                    generation=name.generation,
                    state="present",
                    files=len(share.files(self._target)),
                )
        refuse_behind(self._catalogue, line, self._step)
        return None


def check_share(text: str) -> Share:
    """Parse ``3/16``.

    Raises
    ------
    UsageError
        It is none.
    """
    number, slash, count = text.partition("/")
    good = slash and number.isdecimal() and count.isdecimal()
    if not good or not 1 <= int(number) <= int(count) <= 1 << 20:
        raise UsageError(
            "not a shard", kind="bad-argument", where="--shard", wanted="1/16 to 16/16", found=text
        )
    return Share(int(number), int(count))
