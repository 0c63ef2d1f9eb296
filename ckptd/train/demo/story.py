"""The main job from start to end: train, kill, resume, resume again, compare."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from ckptd.errors import CkptdError
from ckptd.format.names import CommitName, parse_commit_name
from ckptd.train.demo.compare import Comparison, compare
from ckptd.train.demo.crash import Kill, kill_in_save
from ckptd.train.demo.folder import Folder
from ckptd.train.demo.judge import largest_gap, same_samples, state_differences
from ckptd.train.demo.launch import Life, read_rows, started
from ckptd.train.demo.pace import pace_of
from ckptd.train.demo.relaid import Relaid, reshard_and_back
from ckptd.train.demo.report import LifeReport, Pace
from ckptd.train.demo.spec import Cut, GptShape, RunSpec, StateRow, StepRow

__all__ = ["FULL", "QUICK", "Lived", "Plan", "Story", "tell"]


class Plan(msgspec.Struct, frozen=True):
    """Sizes of the demo.

    Attributes
    ----------
    every
        Steps from save to save.
    killed, stopped, steps
        The save of step `killed` is interrupted; the second life ends after step `stopped`, the
        third after `steps`. All are multiples of `every`.
    gap_steps
        Steps after each resume over which the losses are compared.
    victim
        The rank that is killed.
    save_s
        Seconds that a save takes in the first life, which writes slowly on purpose: the kill has a
        window to hit.
    pace, pace_blocks
        Steps of a block, and how many blocks, of the run that measures what saving costs.
    deadline_s
        Longest wait for the end of each life.
    """

    shape: GptShape
    every: int
    killed: int
    stopped: int
    steps: int
    gap_steps: int
    cuts: tuple[Cut, Cut, Cut] = (Cut(dp=2, tp=2), Cut(dp=2), Cut(dp=3))
    victim: int = 2
    save_s: float = 8.0
    pace: int = 6
    pace_blocks: int = 9
    deadline_s: float = 300.0

    @property
    def throttle(self) -> float:
        """Bytes per second of a rank in the first life: weights and two moments, 4 bytes each."""
        return self.shape.parameters * 12 / self.cuts[0].ranks / self.save_s


FULL = Plan(GptShape(), every=10, killed=30, stopped=40, steps=60, gap_steps=20)
QUICK = Plan(
    GptShape(layers=2, width=80, seq=64),
    every=5,
    killed=10,
    stopped=15,
    steps=25,
    gap_steps=10,
    pace_blocks=5,
)


class Lived(NamedTuple):
    """A life that has ended, with what was seen of it from outside."""

    name: str
    spec: RunSpec
    expected_from: int | None
    commits: list[int]
    end: str
    seconds: float
    comparison: Comparison | None = None

    @property
    def rows(self) -> list[StepRow]:
        """The steps it trained."""
        return read_rows(self.spec.files.steps, StepRow)

    @property
    def states(self) -> list[StateRow]:
        """The states it saved and loaded."""
        return read_rows(self.spec.files.states, StateRow)


class Story(NamedTuple):
    """The runs of a demo, all ended."""

    reference: Lived
    lives: list[Lived]
    kill: Kill
    relaid: Relaid
    pace: Pace

    def reports(self, plan: Plan) -> list[LifeReport]:
        """Return what each life proves, against the uninterrupted run."""
        reference = self.reference.rows
        saved = {row.step: row for life in self.lives for row in life.states if _is(row, "saved")}
        return [_report(life, reference, saved, plan) for life in self.lives]

    def reference_report(self, plan: Plan) -> LifeReport:
        """Return the uninterrupted run in the same form."""
        return _report(self.reference, self.reference.rows, {}, plan)


def tell(folder: Folder, plan: Plan, say: Callable[[str], None]) -> Story:
    """Run the job three times and the uninterrupted one beside it.

    Parameters
    ----------
    folder
        Prepared.
    say
        Told in a few words what happens.

    Raises
    ------
    CkptdError
        A run failed or did not end in time; the notes show its logs. No process is left.
    """
    teller = _Teller(folder, plan, say)
    with ExitStack() as stack:
        # The first life is kept until the end: what its surviving writers do must not show.
        reference = stack.enter_context(started("the uninterrupted run", teller.reference))
        doomed = stack.enter_context(started("life 1", teller.doomed))
        say(f"training on {plan.cuts[0]}; beside it, the same without interruption")
        first, kill = teller.killed_life(doomed)
        second = teller.life(2, plan.cuts[1], plan.stopped, "stopped")
        third = teller.life(3, plan.cuts[2], plan.steps, "finished")
        lives = [first, teller.compared(second), teller.compared(third)]
        relaid = teller.resharded(second.expected_from or 0)
        say("waiting for the uninterrupted run")
        reference.finish(plan.deadline_s)
        seconds = reference.trained_seconds
        lived = Lived("reference", reference.spec, None, [], "finished", seconds)
    return Story(lived, lives, kill.at_the_end(folder.checkpoints), relaid, teller.paced())


class _Teller:
    def __init__(self, folder: Folder, plan: Plan, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._plan = plan
        self._say = say
        self._seen: set[CommitName] = set()
        self.reference = RunSpec(
            folder=str(folder.runs / "uninterrupted"),
            cut=plan.cuts[0],
            until=plan.steps,
            steps=plan.steps,
            shape=plan.shape,
            every=plan.every,
        )

    @property
    def doomed(self) -> RunSpec:
        """The life that is to be killed; it writes slowly."""
        return self._spec(1, self._plan.cuts[0], self._plan.steps, throttle=self._plan.throttle)

    def killed_life(self, life: Life) -> tuple[Lived, Kill]:
        """Wait until a save is under way, and kill a rank in it."""
        plan = self._plan
        kill = kill_in_save(
            life,
            self._folder.checkpoints,
            plan.killed,
            plan.killed - plan.every,
            plan.victim,
            plan.deadline_s,
        )
        self._say(
            f"rank {kill.rank} killed in the save of step {kill.step}, "
            f"with {kill.data_bytes_seen:,} data bytes written"
        )
        return self._lived(life, None, f"rank {kill.rank} killed"), kill

    def life(self, number: int, cut: Cut, until: int, end: str) -> Lived:
        """Resume from the newest checkpoint on another layout and train up to `until`."""
        newest = max((name.step for name in self._seen), default=None)
        if newest is None:
            raise CkptdError("nothing was committed before the kill", kind="demo-run")
        self._say(f"resuming from step {newest} on {cut.ranks} ranks ({cut})")
        spec = self._spec(
            number, cut, until, check_root=str(self._folder.copies / f"life-{number}")
        )
        with started(f"life {number}", spec) as life:
            life.finish(self._plan.deadline_s)
        return self._lived(life, newest, end)

    def compared(self, life: Lived) -> Lived:
        """Compare what `life` loaded with what it saved at once from its own layout."""
        left = f"{self._folder.checkpoints}@{life.expected_from}"
        right = str(life.spec.check_root)
        self._say(f"comparing {left} with {right}")
        return life._replace(comparison=compare(left, right, self._plan.deadline_s))

    def resharded(self, step: int) -> Relaid:
        """Take what the first life saved to another layout and back."""
        self._say(f"resharding step {step} to two stages of two tensor ranks, and back")
        return reshard_and_back(self._folder, step, self._plan.deadline_s)

    def paced(self) -> Pace:
        """Measure what saving at every step costs a step, with nothing running beside it."""
        plan = self._plan
        self._say("saving at every step, and not, by turns")
        spec = msgspec.structs.replace(
            self.reference,
            folder=str(self._folder.runs / "pace"),
            cut=plan.cuts[1],
            until=plan.pace * plan.pace_blocks,
            root=str(self._folder.copies / "pace"),
            snapshots=True,
            pace=plan.pace,
        )
        with started("the run that measures saves", spec) as life:
            life.finish(plan.deadline_s)
        return pace_of(spec)

    def _spec(
        self,
        number: int,
        cut: Cut,
        until: int,
        *,
        throttle: float | None = None,
        check_root: str | None = None,
    ) -> RunSpec:
        return msgspec.structs.replace(
            self.reference,
            folder=str(self._folder.runs / f"life-{number}"),
            cut=cut,
            until=until,
            root=str(self._folder.checkpoints),
            snapshots=throttle is None,
            throttle=throttle,
            check_root=check_root,
        )

    def _lived(self, life: Life, expected_from: int | None, end: str) -> Lived:
        names = (
            parse_commit_name(p.name) for p in (self._folder.checkpoints / "commits").glob("*")
        )
        new = {name for name in names if name is not None} - self._seen
        self._seen |= new
        commits = sorted(name.step for name in new)
        return Lived(life.name, life.spec, expected_from, commits, end, life.seconds)


def _is(row: StateRow, event: str) -> bool:
    return row.event == event


def _report(
    life: Lived, reference: list[StepRow], saved: dict[int, StateRow], plan: Plan
) -> LifeReport:
    rows = life.rows
    first = rows[0].step if rows else 0
    loaded = next((row for row in life.states if _is(row, "loaded")), None)
    differing: list[str] = []
    if life.expected_from is not None:
        differing = state_differences(saved.get(life.expected_from), loaded)
    if life.comparison is not None:
        differing += [f"ckptd diff: {name}" for name in life.comparison.differing]
    return LifeReport(
        name=life.name,
        ranks=life.spec.cut.ranks,
        layout=str(life.spec.cut),
        first_step=first,
        last_step=rows[-1].step if rows else 0,
        saves=life.commits,
        end=life.end,
        resumed_from=None if loaded is None else loaded.step,
        expected_from=life.expected_from,
        gap=largest_gap(rows, reference, range(first, first + plan.gap_steps)),
        gap_steps=plan.gap_steps,
        ids_equal=same_samples(rows, reference),
        state_exact=None if life.expected_from is None else not differing,
        tensors=0 if loaded is None else len(loaded.tensors),
        tensors_by_diff=0 if life.comparison is None else life.comparison.exact,
        nbytes=0 if loaded is None else loaded.nbytes,
        differing=differing,
        seconds=life.seconds,
    )
