"""The part `save` from start to end: train, kill, resume, resume again, reshard, compare."""

from __future__ import annotations

import contextlib
import shutil
import signal
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from ckptd.checkpoint.format.names import (
    CommitName,
    commit_key,
    file_key,
    parse_commit_name,
    parse_data_folder,
)
from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, DeadlineError, RefusedError
from ckptd_demo.judge import largest_gap, same_samples, state_differences
from ckptd_demo.processes import Life, read_rows, run_ckptd, started, wait_until
from ckptd_demo.report import Kill, LifeReport, Pace, Relaid
from ckptd_demo.spec import Cut, GptShape, RunSpec, SnapshotRow, StateRow, StepRow

__all__ = [
    "FIRST",
    "FULL",
    "LAYOUTS",
    "QUICK",
    "Comparison",
    "Folder",
    "Plan",
    "Story",
    "compare",
    "kill_in_save",
    "pace_of",
    "reshard_and_back",
    "step_seconds",
    "tell",
]

_MARKER = "ckptd-demo.json"


class Folder:
    """Paths of one demo.

    Attributes
    ----------
    checkpoints
        The root that the job saves to.
    copies
        Roots that loaded states are written to again, one a life.
    resharded
        A checkpoint in another layout.
    runs
        Reports and logs of the runs, a folder each.
    plot, elastic_plot, policy_plot, report
        The pictures and the result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.checkpoints = self.path / "checkpoints"
        self.copies = self.path / "copies"
        self.resharded = self.path / "resharded"
        self.runs = self.path / "runs"
        self.plot = self.path / "loss.png"
        self.elastic_plot = self.path / "elastic.png"
        self.policy_plot = self.path / "policy.png"
        self.report = self.path / "report.json"
        self._marker = self.path / _MARKER

    def prepare(self) -> None:
        """Make the folder; what an earlier demo left in it is removed, and nothing else ever.

        Raises
        ------
        RefusedError
            The path is in use and not by an earlier demo.
        """
        if self.path.exists() and not self._is_free():
            if not self._marker.is_file():
                raise RefusedError(
                    "the folder is in use, and not by an earlier demo",
                    where=str(self.path),
                    hint="name another: ckptd demo --dir DIR",
                )
            for ours in (
                self.checkpoints,
                self.copies,
                self.resharded,
                self.runs,
                self.plot,
                self.elastic_plot,
                self.policy_plot,
                self.report,
            ):
                _remove(ours)
        self.path.mkdir(parents=True, exist_ok=True)
        self._marker.write_text('{"made_by": "ckptd demo"}\n')

    def remove_copies(self) -> None:
        """Remove what only the comparison needed."""
        _remove(self.copies)

    def _is_free(self) -> bool:
        return self.path.is_dir() and not any(self.path.iterdir())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Random streams are per rank; for another number of ranks a load makes new ones from the saved.
_RESEEDED = frozenset({"rng"})
_EQUAL, _DIFFERENT = 0, 1


class _Tensor(msgspec.Struct):
    name: str
    bit_exact: bool


class _Object(msgspec.Struct):
    name: str


class _Document(msgspec.Struct):
    tensors: list[_Tensor]
    objects: list[_Object]


_documents = json_decoder(_Document)


class Comparison(msgspec.Struct, frozen=True):
    """How many tensors are bit for bit the same, and the names of whatever is not.

    `identical`: nothing at all differs, streams of random numbers included.
    """

    exact: int
    differing: list[str]
    identical: bool


def compare(left: str, right: str, deadline_s: float) -> Comparison:
    """Compare two checkpoints, each named as on the command line.

    Raises
    ------
    CkptdError
        They cannot be compared: one of them is not there, or bad.
    DeadlineError
        It took longer than `deadline_s` seconds.
    """
    done = run_ckptd(["diff", left, right, "--json"], deadline_s, fine=(_EQUAL, _DIFFERENT))
    document = _documents.decode(done.stdout)
    differing = [tensor.name for tensor in document.tensors if not tensor.bit_exact]
    differing += [entry.name for entry in document.objects if entry.name not in _RESEEDED]
    exact = sum(tensor.bit_exact for tensor in document.tensors)
    return Comparison(exact, differing, done.returncode == _EQUAL)


LAYOUTS = Path(__file__).with_name("demo.lay")


def reshard_and_back(folder: Folder, step: int, deadline_s: float) -> Relaid:
    """Reshard a step to two stages of two tensor ranks and back, and compare.

    Raises
    ------
    CkptdError
        A command failed; its output is in the error.
    DeadlineError
        One took longer than `deadline_s` seconds.
    """
    original, there = f"{folder.checkpoints}@{step}", str(folder.resharded)
    back = str(folder.copies / "resharded-back")
    run_ckptd(
        ["reshard", original, there, "--from", f"{LAYOUTS}:demo", "--to", f"{LAYOUTS}:stages"],
        deadline_s,
    )
    run_ckptd(["reshard", there, back, "--to", f"{LAYOUTS}:sharded"], deadline_s)
    found = compare(original, back, deadline_s)
    return Relaid(
        step=step,
        layout="TP 2 x PP 2",
        root=there,
        tensors=found.exact,
        identical=found.identical,
    )


def step_seconds(rows: Sequence[StepRow], pace: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps without and with saves.

    The first block warms up. The first step of each block is left out: it still has to do with the
    block before.
    """
    found: tuple[list[float], list[float]] = ([], [])
    for before, row in pairwise(rows):
        # What follows a step (its save) counts for the next one.
        block, place = divmod(before.step, pace)
        if block > 0 and place > 0:
            found[block % 2].append(row.seconds - before.seconds)
    return found


def pace_of(spec: RunSpec) -> Pace:
    """Return what a run that has ended shows.

    Raises
    ------
    CkptdError
        Its reports are not whole.
    """
    plain, saving = step_seconds(read_rows(spec.files.steps, StepRow), spec.pace)
    ended = read_rows(spec.files.snapshots, SnapshotRow)
    if not (plain and saving and ended):
        raise CkptdError("the run has not reported", where=spec.folder)
    return Pace(
        ranks=spec.cut.ranks,
        layout=str(spec.cut),
        saves=ended[-1].saves,
        complete=ended[-1].complete,
        step_s=statistics.median(plain),
        saving_step_s=statistics.median(saving),
    )


_HEADER_LENGTH_BYTES = 8
_READ_BYTES = 1 << 20


class _Target(NamedTuple):
    """A save under way: its name, the rank's data file, the rank and its writing process."""

    name: CommitName
    file: Path
    rank: psutil.Process
    worker: psutil.Process


def kill_in_save(
    life: Life, root: Path, step: int, previous: int, rank: int, deadline_s: float
) -> Kill:
    """Kill `rank` and its writer by SIGKILL once data bytes of its save of `step` are on disk.

    The save of step `previous` is committed by then: it is what a resume has to find. Returns when
    torchrun and the other ranks have ended. The processes that write for them may live on: what was
    handed to them they write, and they wait a while for the part that will never come.

    Raises
    ------
    DeadlineError
        The save did not begin, or torchrun did not end.
    CkptdError
        The job ended before the save began.
    """
    target = wait_until(lambda: _look(life, root, step, previous, rank), deadline_s)
    if target is None:
        raise life.failed(
            DeadlineError(f"no data byte of step {step} by rank {rank}", wanted=f"{deadline_s:g} s")
        )
    before = _commit_exists(root, target.name)
    for victim in (target.worker, target.rank):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
    at = _commit_exists(root, target.name)
    size, seen = target.file.stat().st_size, _data_bytes(target.file)
    life.wait(deadline_s)
    return Kill(
        step=step,
        generation=target.name.generation,
        rank=rank,
        pid=target.rank.pid,
        writer_pid=target.worker.pid,
        file=target.file.relative_to(root).as_posix(),
        file_bytes=size,
        data_bytes_seen=seen,
        commit_before=before,
        commit_at=at,
        commit_after=_commit_exists(root, target.name),
    )


def last_look(kill: Kill, root: Path) -> Kill:
    """Return `kill` with a last look for the commit record."""
    exists = _commit_exists(root, CommitName(kill.step, kill.generation))
    return msgspec.structs.replace(kill, commit_end=exists)


def _look(life: Life, root: Path, step: int, previous: int, rank: int) -> _Target | None:
    if life.process.poll() is not None:
        raise life.failed(CkptdError(f"{life.name} ended early"))
    process, worker = life.ranks().get(rank), life.workers().get(rank)
    found = _data_file(root, step, rank)
    if process is None or worker is None or found is None or not _data_bytes(found[1]):
        return None
    name, file = found
    if not _commit_exists(root, CommitName(previous, name.generation)):
        return None
    return _Target(name, file, process, worker)


def _commit_exists(root: Path, name: CommitName) -> bool:
    return (root / commit_key(name)).exists()


def _data_file(root: Path, step: int, rank: int) -> tuple[CommitName, Path] | None:
    for folder in (root / "data").glob("*"):
        parsed = parse_data_folder(folder.name)
        if parsed is not None and parsed[0].step == step:
            file = root / file_key(f"data/{folder.name}/", rank)
            return (parsed[0], file) if file.exists() else None
    return None


def _data_bytes(file: Path) -> int:
    """Return how far from its start the data section of `file` has bytes other than zero.

    Space is allocated before it is written, so the length of the file proves nothing; but weights
    and moments are hardly ever zero.
    """
    with file.open("rb") as stream:
        head = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
        if head == 0:
            return 0
        stream.seek(_HEADER_LENGTH_BYTES + head)
        end = at = 0
        while block := stream.read(_READ_BYTES):
            at += len(block)
            if kept := block.rstrip(b"\0"):
                end = at - len(block) + len(kept)
        return end


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
    cuts
        Layout of each life; with two lives the second goes to the last step, and no more is done
        than to kill, to resume and to compare.
    alone
        Layout of the run that is never interrupted.
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
    cuts: tuple[Cut, ...] = (Cut(dp=2, tp=2), Cut(dp=2), Cut(dp=3))
    alone: Cut = Cut(dp=2, tp=2)
    victim: int = 2
    save_s: float = 8.0
    pace: int = 6
    pace_blocks: int = 9
    deadline_s: float = 300.0

    @property
    def short(self) -> bool:
        """Whether there are two lives, and nothing after them."""
        return len(self.cuts) == 2

    @property
    def throttle(self) -> float:
        """Bytes per second of a rank in the first life: weights and two moments, 4 bytes each."""
        return self.shape.parameters * 12 / self.cuts[0].ranks / self.save_s


FULL = Plan(GptShape(), every=10, killed=30, stopped=40, steps=60, gap_steps=20)
# No writer is slower than its window needs, and the run beside it takes one process and not four.
QUICK = Plan(
    GptShape(layers=2, width=80, seq=64),
    every=5,
    killed=10,
    stopped=15,
    steps=25,
    gap_steps=10,
    alone=Cut(dp=1),
    save_s=3.0,
    pace_blocks=5,
)
FIRST = msgspec.structs.replace(QUICK, cuts=(Cut(dp=2, tp=2), Cut(dp=3)), stopped=20, steps=20)


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
    relaid: Relaid | None
    pace: Pace | None

    def reports(self, plan: Plan) -> list[LifeReport]:
        """Return what each life proves, against the uninterrupted run."""
        reference = self.reference.rows
        saved = {row.step: row for life in self.lives for row in life.states if _is(row, "saved")}
        return [_report(life, reference, saved, plan) for life in self.lives]

    def reference_report(self, plan: Plan) -> LifeReport:
        """Return the uninterrupted run in the same form."""
        return _report(self.reference, self.reference.rows, {}, plan)


def tell(folder: Folder, plan: Plan, say: Callable[[str], None]) -> Story:
    """Run the job two or three times and the uninterrupted one beside it.

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
        relaid = None
        if plan.short:
            lives = [first, teller.life(2, plan.cuts[1], plan.steps, "finished")]
        else:
            second = teller.life(2, plan.cuts[1], plan.stopped, "stopped")
            third = teller.life(3, plan.cuts[2], plan.steps, "finished")
            lives = [first, teller.compared(second), teller.compared(third)]
            relaid = teller.resharded(second.expected_from or 0)
        say("waiting for the uninterrupted run")
        reference.finish(plan.deadline_s)
        seconds = reference.trained_seconds
        lived = Lived("reference", reference.spec, None, [], "finished", seconds)
    pace = None if plan.short else teller.paced()
    return Story(lived, lives, last_look(kill, folder.checkpoints), relaid, pace)


class _Teller:
    def __init__(self, folder: Folder, plan: Plan, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._plan = plan
        self._say = say
        self._seen: set[CommitName] = set()
        self.reference = RunSpec(
            folder=str(folder.runs / "uninterrupted"),
            cut=plan.alone,
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
            raise CkptdError("nothing was committed before the kill")
        self._say(f"resuming from step {newest} on {cut.ranks} ranks ({cut})")
        copy = None if self._plan.short else str(self._folder.copies / f"life-{number}")
        spec = self._spec(number, cut, until, check_root=copy)
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
            snapshots=check_root is not None,
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
        tensors_by_diff=None if life.comparison is None else life.comparison.exact,
        nbytes=0 if loaded is None else loaded.nbytes,
        differing=differing,
        seconds=life.seconds,
    )
