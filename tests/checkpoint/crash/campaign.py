"""Death at every store operation of a save: find the operations, then die at each of them."""

from __future__ import annotations

import json
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

import ckptd.checkpoint.save.drain as filewriter
from ckptd.base.signatures import read_public
from ckptd.checkpoint.format.names import CommitName, commit_key
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.store.base import FaultAction, FaultRule, FaultSpec, TrustSpec, wrap
from tests.checkpoint.crash.judge import assert_exact, assert_only_legal, assert_previous, clean
from tests.checkpoint.crash.life import SLICE_BYTES, End, Life, live
from tests.checkpoint.crash.places import Place, S3Place
from tests.checkpoint.crash.zygote import Zygote

__all__ = ["Campaign", "Point", "Tally"]

_TRIES = 5
_READS = ("children", "get", "stat", "list")


@dataclass(frozen=True, slots=True)
class Point:
    """One operation of a save: its name, its key as a pattern, the how-manieth such one it is."""

    op: str
    key: str
    nth: int

    def rule(self, action: FaultAction) -> FaultRule:
        """Return the rule that strikes there."""
        return FaultRule(action, op=self.op, key=self.key, skip=self.nth - 1)


@dataclass
class Tally:
    """What came of a campaign."""

    operations: int = 0
    deaths: int = 0
    missed: int = 0
    committed: int = 0
    removed: int = 0
    by_op: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        ops = ", ".join(f"{n} {op}" for op, n in sorted(self.by_op.items()))
        return (
            f"{self.operations} operations ({ops}); {self.deaths} deaths: {self.committed} times"
            f" committed, {self.deaths - self.committed} absent; {self.removed} leftovers removed"
            + (f"; {self.missed} operations did not come again" if self.missed else "")
        )


@dataclass
class Campaign:
    """Kills one rank at each operation of a save, on a root that holds step 1.

    Attributes
    ----------
    zygote
        Runs the lives; None: they die in this process, by a store that does nothing any more.
    victim
        The rank that dies.
    keep
        Retention of the save; with 1, step 1 is deleted within the window.
    inner
        Die at the steps inside the operations as well.
    elsewhere
        The worker dies alone: its trainer goes on.
    after
        Die after each change as well as before the next step, though the store is the same.
    keys
        Paths of a private key that signs, and of the public one: nothing else is looked at then.
    """

    place: Place
    zygote: Zygote | None
    world: int = 1
    victim: int = 0
    keep: int | None = None
    inner: bool = False
    elsewhere: bool = False
    after: bool = True
    keys: tuple[str, str] | None = None
    tally: Tally = field(default_factory=Tally)

    def run(self, only: slice = slice(None)) -> Tally:
        """Die everywhere, before and after; `only` picks some of the points."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(filewriter, "SLICE_BYTES", SLICE_BYTES)
            return self._run(only)

    def _run(self, only: slice) -> Tally:
        self._make_template()
        points = self._find_points()
        self.tally.operations = len(points)
        self.tally.by_op.update(p.op for p in points)
        for point in points[only]:
            for action in self._actions(point):
                try:
                    self._die(point, action)
                except AssertionError as error:
                    error.add_note(f"died by {action} at {point}")
                    raise
        return self.tally

    def _actions(self, point: Point) -> tuple[FaultAction, ...]:
        # After a step that changes nothing, or is only announced (an inner one), everything is as
        # before the next step.
        changes = "." not in point.op and point.op not in _READS
        both = changes and (self.after or point.op == "put-new")
        if self.zygote is None:
            return ("die", "die-after") if both else ("die",)
        return ("kill", "kill-after") if both else ("kill",)

    # -- lives ---------------------------------------------------------------------------------

    def _live(
        self, step: int, generation: int, attempt: str, faults: FaultSpec | None = None
    ) -> list[End]:
        with tempfile.TemporaryDirectory(prefix="ckptd-board-") as board:
            lives = [
                Life(
                    spec=self.place.spec,
                    step=step,
                    generation=generation,
                    attempt=attempt,
                    faults=faults if rank == self.victim else None,
                    rank=rank,
                    world=self.world,
                    keep=self.keep,
                    elsewhere=self.elsewhere and faults is not None,
                    large=self.place.large,
                    board=board if self.world > 1 else None,
                    sign=self.keys[0] if self.keys else "",
                )
                for rank in range(self.world)
            ]
            # An S3 client takes long to make, so what needs no death uses the one that is there.
            here = isinstance(self.place, S3Place) and faults is None and self.world == 1
            if self.zygote is None or here:
                with ThreadPoolExecutor(self.world) as pool:
                    return list(pool.map(lambda life: live(life, self.place.store), lives))
            return self.zygote.run(*lives)

    def _make_template(self) -> None:
        catalogue = Catalogue(self.place.store)
        catalogue.create_or_open()
        generation = catalogue.claim(None, self.world, "start").generation
        assert self._live(1, generation, "0001") == [End()] * self.world
        self.place.freeze()

    def _find_points(self) -> list[Point]:
        with tempfile.NamedTemporaryFile("r", prefix="ckptd-log-") as log:
            faults = FaultSpec(inner=self.inner, log=log.name)
            assert self._live(2, 1, "0002", faults) == [End()] * self.world
            return list(self._points([json.loads(line) for line in log]))

    def _points(self, log: list[dict[str, Any]]) -> Iterator[Point]:
        seen: Counter[tuple[str, str]] = Counter()
        for entry in log:
            op, key = entry["op"], _pattern(entry["key"], self.place.spec.url)
            seen[op, key] += 1
            # How often rank 0 looks for the others' parts is another number each time.
            if self.world == 1 or seen[op, key] == 1 or op not in _READS:
                yield Point(op, key, seen[op, key])

    # -- one death -----------------------------------------------------------------------------

    def _die(self, point: Point, action: FaultAction) -> None:
        faults = FaultSpec((point.rule(action),), inner=self.inner)
        for _ in range(_TRIES):
            self.place.reset()
            ends = self._live(2, 1, "0002", faults)
            if not self._missed(ends):
                break
        else:
            self.tally.missed += 1
            return
        committed = self._check_ends(ends)
        self.tally.deaths += 1
        self.tally.committed += committed
        first, second = CommitName(1, 1), CommitName(2, 1)
        newest = second if committed else first
        self._check_root(newest, first)
        # Deaths that leave the same behind follow one another: each state meets both ways on.
        if self.tally.deaths % 2:
            self._clean()
            self._check_root(newest, first)
            self._resume(newest)
        else:
            self._retry(committed)
            self._clean()
            self._check_root(second, first)

    def _missed(self, ends: list[End]) -> bool:
        """Two ranks race: a folder that one of them syncs may not have been made by the other."""
        alive = self.zygote is not None and not self.elsewhere and not ends[self.victim].signal
        assert not alive or self.world > 1, f"did not come to that point: {ends}"
        return alive

    def _check_ends(self, ends: list[End]) -> bool:
        """The victim died, nobody claims success in vain, and nobody hangs (the zygote sees)."""
        committed = self.place.store.exists(commit_key(CommitName(2, 1)))
        victim = ends[self.victim]
        if self.zygote is None:
            assert committed or "is dead, by schedule" in victim.error.get("message", ""), victim
        elif self.elsewhere:
            assert committed or victim.error.get("class") == "ProcessError", victim
        else:
            assert victim.signal == signal.SIGKILL, victim
        for end in ends:
            assert committed or end != End(), "durable, but not committed"
        return committed

    def _check_root(self, newest: CommitName, previous: CommitName) -> None:
        store = self.place.seen()
        if self.keys:
            store = wrap(store, TrustSpec(read_public(self.keys[1])))
        assert Catalogue(store).latest() == newest
        assert_exact(store, newest, self.world, self.place.large)
        assert_previous(store, previous, newest, self.world, self.place.large, self.keep is None)

    def _clean(self) -> None:
        self.tally.removed += clean(self.place.store)
        assert_only_legal(self.place.store, self.place.raw(), self.keys and self.keys[1])

    def _retry(self, committed: bool) -> None:
        """The same life saves the same step again, with everything lying about."""
        ends = self._live(2, 1, "0003")
        for end in ends:
            if committed:
                assert end.error.get("class") == "ConflictError"
                assert "committed" in end.error["message"]
            else:
                assert end == End()

    def _resume(self, newest: CommitName) -> None:
        """The next life goes on from what is there."""
        generation = Catalogue(self.place.store).claim(newest, self.world, "resume").generation
        step = newest.step + 1
        assert self._live(step, generation, "0001") == [End()] * self.world
        self._check_root(CommitName(step, generation), newest)
        self._clean()


def _pattern(key: str, url: str) -> str:
    """Return `key` as a pattern that also fits another root and names that are new each time."""
    key = f"*{key.removeprefix(url)}" if key.startswith(url) else key
    return re.sub(r"(~|/deleting/(?:commit-)?|leases/|/signature-)[0-9a-f]+", r"\1*", key)
