"""Random faults in real jobs: launchers, ranks, controllers and agents that die, stop and return.

``python -m tests.elastic.live.campaign FIRST LAST [--each N] [--out FILE] [--keep FOLDER]`` plays a
schedule a seed, N one after the other in one job. A job is a small GPT on nodes of this machine
under ``ckptd run``. In a schedule faults come at random moments; then all heals, and the job must
train on, or have refused plainly. At its end it must have trained what an uninterrupted run trains.

``--soak MINUTES`` plays schedules from FIRST on for so long in one job of four nodes, each a
machine of its own (`tests.elastic.live.machines`), with a publisher and a worker that follows it.
After each schedule all four nodes must train again, and the worker must have a version of it. Each
restart must be told as what one of the faults does to a node that it met; and a node that alone was
killed, or lost its worker, once.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from ckptd.elastic.log import MembershipLog
from ckptd.store import open_store
from ckptd_demo.elasticjob import ElasticSpec, TrainedRow
from ckptd_demo.judge import largest_difference, violations
from ckptd_demo.processes import read_rows
from tests.elastic.live.faults import play_fault
from tests.elastic.live.job import MODES, SOAK, STEPS, LiveJob, spec_in
from tests.elastic.live.reference import reference

_START_S = 120.0
_HEAL_S = 120.0
_AFTER_STEPS = 3
_TOLERANCE = 1e-4
"""Of losses, relative, over `STEPS` steps on other numbers of ranks; a step that is lost or made
twice changes them by hundreds of times as much."""
_HELD, _MOST_MORE = ("MiB", "files", "threads"), (64, 12, 6)
"""Of these a process may have so many more later."""
_SIGNS: dict[str, tuple[str, ...]] = {
    "no space left": ("full disk",),
    " hang of ": ("stop worker", "zombies"),
    "ended with -9": ("kill worker", "kill zygote"),
    "job store has died": ("kill zygote",),
    "heartbeat": ("kill node", "stop node", "zombies", "cut node"),
    "the connection to": ("kill node",),
    "came back": ("kill node", "stop node", "zombies"),
}
"""What a restart's cause says, and the faults after which it is right of the node that it names."""
_NO_FAULT = ("growing from", "ordered: ", "not recorded in the log", "waiting for nodes")
PLAIN_ENDS = (75, 76, 77)
"""Exit codes: to be submitted again, no nodes, no progress."""


class Result(msgspec.Struct, kw_only=True):
    """What one schedule came to.

    Attributes
    ----------
    seed, mode, nodes, faults
        What was played; each fault with the moment, seconds from the start of the job.
    end
        ``progress``, ``refused`` or ``stuck``.
    generations
        The newest before and after.
    seconds
        From the first fault until it trained on.
    wrong
        What must never be and was. The last schedule of a job has what was found at its end.
    held
        MiB, descriptors and threads of each process that outlives generations, when it trained on.
    alone, told
        Of a soak: the node of the one fault with a culprit, or nothing; the causes of restarts that
        the controller has told.
    gap, excused
        Of the whole job, with its last schedule: the largest relative difference of a loss; and
        promises of near tiers that fell with all nodes that held them.
    """

    seed: int
    mode: str
    nodes: int
    faults: list[str]
    end: str
    generations: tuple[int, int]
    seconds: float
    wrong: list[str] = []
    held: dict[str, tuple[int, int, int]] = {}
    gap: float = 0.0
    excused: int = 0
    words: str = ""
    alone: str = ""
    told: list[str] = []


# --- a schedule -----------------------------------------------------------------------------------


def _schedule(job: LiveJob, seed: int) -> Result:
    """Hurt the job, heal it, and wait until it trains on."""
    job.rng, job.faults = random.Random(seed), []
    begun, before, told = time.monotonic(), _generation(job), _told(job)
    alone = job.mode == SOAK and job.rng.random() < 0.5
    for _ in range(1 if alone else job.rng.randint(1, 4)):
        gap = job.rng.choice([0.0, 0.5, 1.0, 4.0])
        job.rest(job.rng.uniform(0, 2 * gap))
        if job.over():
            break
        play_fault(job)
    job.until(lambda: not job.later or job.over(), 30.0)
    job.heal()
    healed, row_at = job.step(), time.monotonic()

    def trained() -> bool:
        new = [row for row in job.rows[-_AFTER_STEPS:] if row.at > row_at]
        whole = job.mode != SOAK or all(row.ranks == job.planned for row in new)
        return len(new) == _AFTER_STEPS and job.step() >= healed and whole

    def followed() -> bool:
        return job.mode != SOAK or job.taken() >= healed

    for _ in range(12):
        done = job.until(lambda: (trained() and followed()) or job.over(), _HEAL_S / 12)
        if done:
            break
        job.take_back()
    causes = _told(job)[len(told) :]
    culprit = _culprit(job.faults) if alone else ""
    wrong = [] if done else [f"all nodes train: {trained()}, the worker follows: {followed()}"]
    if culprit and [culprit in cause.split() for cause in causes].count(True) != 1:
        wrong.append(f"{culprit} is to be told once, told is {causes}")
    wrong += misread(job.faults, causes)
    return Result(
        seed=seed,
        mode=job.mode,
        nodes=len(job.names),
        faults=job.faults,
        end="progress" if done and not job.over() else "over" if done else "stuck",
        generations=(before, _generation(job)),
        seconds=round(time.monotonic() - begun, 1),
        held=job.held(),
        alone=culprit,
        told=causes,
        wrong=wrong if job.mode == SOAK else [],
    )


def _told(job: LiveJob) -> list[str]:
    """Return the cause of each generation so far, with the nodes of the ranks that it names."""
    with open_store(job.log_url) as store:
        records = MembershipLog(store).read()
    causes: dict[int, str] = {}
    members = records[0].members if records else ()
    for record in records:
        text = record.reason
        for rank in map(int, re.findall(r"rank (\d+)", text.partition(" hang of ")[2])):
            text += f" on {members[rank].node}" if rank < len(members) else ""
        causes.setdefault(record.generation, text)
        members = record.members
    return list(causes.values())


def misread(faults: Sequence[str], causes: Sequence[str]) -> list[str]:
    """Return the causes of restarts that none of the faults is, or is not on that node."""
    out = []
    for cause in causes:
        if any(sign in cause for sign in _NO_FAULT):
            continue
        after = next((kinds for sign, kinds in _SIGNS.items() if sign in cause), ())
        mine = [fault for fault in faults if fault.partition(": ")[2].startswith(after)]
        hurt = {word for fault in mine for word in fault.split()}
        # A cause that names a lost node goes on with what followed on other nodes: leave that out.
        told = re.sub(r"n\d: .*; (?=no heartbeat)|: rank .*|(?s:; a worker on .*)", "", cause)
        named = set(re.findall(r"\bn\d\b", told))
        anywhere = any(fault.endswith(("full disk", "kill zygote")) for fault in mine)
        if not after or not mine or not (anywhere or named <= hurt):
            out.append(f"told as {cause[-200:]!r} after {list(faults)}")
    return out


def _culprit(faults: Sequence[str]) -> str:
    """Return the node that one fault has met, if it is one after which a node is to be named."""
    _, _, what = faults[0].partition(": ") if faults else ("", "", "")
    words = what.split()
    named = ("kill worker", "kill node")
    return words[2] if len(words) > 2 and what.startswith(named) else ""


def _generation(job: LiveJob) -> int:
    return max((row.generation for row in job.ranks), default=0)


# --- a job ----------------------------------------------------------------------------------------


def play(
    seeds: Iterable[int],
    mode: str,
    right: Callable[[str, int], dict[int, TrainedRow]],
    keep: Path | None = None,
    tell: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Play schedules in one job, until it is over; what is wrong is in the results."""
    seeds = iter(seeds)
    first = next(seeds)
    folder = Path(tempfile.mkdtemp(prefix="ckptd-live-"))
    try:
        job = LiveJob(folder, first, mode)
        try:
            with job.nodes:
                results = _play(job, itertools.chain([first], seeds), tell)
                finished = _end(job, results)
        finally:
            job.close()
        steps = max(STEPS, *(row.step for row in job.rows), 0)
        _judge(job, results, finished, right(mode, steps))
        tell(results[-1])
        if any(result.wrong for result in results) and keep is not None:
            kept = keep / f"seed-{results[-1].seed}"
            shutil.copytree(folder, kept, ignore=_sockets, dirs_exist_ok=True)
        return results
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _play(job: LiveJob, seeds: Iterable[int], tell: Callable[[Result], None]) -> list[Result]:
    job.start()
    results: list[Result] = []
    if not job.until(lambda: job.step() >= 3 or job.over(), _START_S) or job.over():
        results.append(
            Result(
                seed=next(iter(seeds)),
                mode=job.mode,
                nodes=len(job.names),
                faults=[],
                end="not begun",
                generations=(0, 0),
                seconds=time.monotonic() - job.begun,
                wrong=[f"the job does not begin: {job.nodes.codes()}"],
                words=job.words(),
            )
        )
        return results
    for seed in seeds:
        if results:
            tell(results[-1])  # the judge has to see the last one first
        results.append(_schedule(job, seed))
        if results[-1].end != "progress":
            break
    return results


def _end(job: LiveJob, results: list[Result]) -> bool:
    """Let the job finish; return whether it did, and say of its last schedule how it ended."""
    last = results[-1]
    if last.end == "progress":
        job.finish()
    if last.end in ("progress", "over") and not job.nodes.wait(_HEAL_S):
        last.end = "stuck"
    codes = {code for code in job.nodes.codes().values() if code is not None and code >= 0}
    if last.end in ("progress", "over") and codes == {0}:
        last.end = "progress"
        return True
    if last.end in ("progress", "over") and len(codes) == 1 and codes <= set(PLAIN_ENDS):
        last.end = "refused"
    elif last.end in ("progress", "over", "stuck"):
        last.wrong += [f"the job is {last.end}: {job.nodes.codes()}; {job.status()}"[:3000]]
        last.words = job.words()
    return False


def _judge(
    job: LiveJob, results: list[Result], finished: bool, right: dict[int, TrainedRow]
) -> None:
    rows, ranks, last = job.rows, job.ranks, results[-1]
    if not rows or last.end == "not begun":
        return
    promised, last.excused = _promises(job)
    last.gap = largest_difference(rows, right)
    until = rows[-1].step if finished or last.wrong else max(row.step for row in rows)
    found = violations(
        rows,
        ranks,
        right,
        until=until,
        promised=promised,
        tolerance=_TOLERANCE,
    )
    if not finished:
        found = [text for text in found if not text.startswith("the last step is")]
    last.wrong += found + job.mixed() + grown([result.held for result in results])
    last.words = job.words() if last.wrong else ""


def grown(held: Sequence[dict[str, tuple[int, int, int]]]) -> list[str]:
    """Return what has grown in processes that lived through five schedules or more.

    Much of it goes up and down with the trainers that are there: it has grown where the least of
    the later half is above the most of the first one.
    """
    out = []
    for name in dict.fromkeys(name for one in held for name in one):
        seen = [one[name] for one in held if name in one][1:]  # the first is of its start
        half = len(seen) // 2
        for what, most, numbers in zip(_HELD, _MOST_MORE, zip(*seen, strict=True), strict=False):
            if half >= 2 and min(numbers[half:]) - max(numbers[:half]) > most:
                out.append(f"{name}: {max(numbers[:half])} {what}, then {min(numbers[half:])}")
    return out


def _promises(job: LiveJob) -> tuple[dict[int, int], int]:
    """Return what was promised to each generation, and how many promises fell.

    Near tiers hold a step on two nodes, or on one where there was no other. Where those cannot be
    reached, or were ordered out, when the next generation begins, that one goes on from what is
    left, at worst from the root; from then on what it makes is what counts.
    """
    out, since, fallen = {}, 0, 0
    for generation, step in sorted(job.promised().items()):
        began = [r.resumed for r in job.ranks if r.generation == generation]
        if since:
            made = [r.step for r in job.rows if since <= r.generation < generation]
            before = [r.resumed for r in job.ranks if r.generation == since]
            step = min(step, max([*made, *before], default=0))
        out[generation] = step
        if min(began, default=step) < step and _fell(job, generation, step):
            out[generation], since, fallen = 0, generation, fallen + 1
    return out, fallen


def _fell(job: LiveJob, generation: int, step: int) -> bool:
    """Whether those that held a step were away when the generation after it began."""
    ranks = [row for row in job.ranks if row.generation == generation]
    until = min((row.at for row in ranks), default=0.0)
    made = [row for row in job.rows if row.step == step and row.generation < generation]
    if not ranks or not made:
        return False
    last = max(made, key=lambda row: row.generation)
    holders = {row.node for row in job.ranks if row.generation == last.generation}
    away = {name for begun, end, name in job.away if begun <= until and end >= last.at}
    dead = {name for begun, end, name in job.away if last.at <= begun == end <= until}
    lost = holders & (away - ({row.node for row in ranks} - dead))
    return len(lost) >= min(2, len(holders))


def _sockets(folder: str, names: list[str]) -> list[str]:
    here = Path(folder)
    return [n for n in names if not (here / n).is_file() and not (here / n).is_dir()]


# --- the whole ------------------------------------------------------------------------------------


def campaign(
    seeds: Sequence[int],
    *,
    each: int,
    right: Callable[[str, int], dict[int, TrainedRow]],
    keep: Path | None = None,
    modes: Sequence[str] = MODES,
    tell: Callable[[Result], None] = lambda _: None,
    pause: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Play all seeds; a job has `each` of them, and the mode that its first seed says."""
    left, results = list(seeds), []
    while left:
        pause()
        part = left[:each]
        mode = modes[part[0] // each % len(modes)]
        played = play(part, mode, right, keep, tell)
        left = left[len(played) :]
        results += played
    return results


class References:
    """What uninterrupted runs train, by mode.

    Parameters
    ----------
    kept
        Folder to keep them in, for the next campaign.
    """

    def __init__(self, kept: Path | None = None) -> None:
        self._kept = kept
        self._found: dict[tuple[int, int], dict[int, TrainedRow]] = {}

    def __call__(self, mode: str, steps: int) -> dict[int, TrainedRow]:
        spec = spec_in(Path("/"), mode)
        key = (spec.microbatches, steps)
        if key not in self._found:
            self._found[key] = self._read(spec, steps)
        return self._found[key]

    def _read(self, spec: ElasticSpec, steps: int) -> dict[int, TrainedRow]:
        path = self._kept and self._kept / f"reference-{spec.microbatches}-{steps}.jsonl"
        if path is not None and path.exists():
            return {row.step: row for row in read_rows(path, TrainedRow)}
        right = reference(spec, steps)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in right.values()))
        return right


def _wait_while(path: Path | None) -> None:
    while path is not None and path.exists():
        time.sleep(5.0)


def main() -> int:
    """Play seeds; print each, and a line at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?", default=0)
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="in one job of four nodes")
    parser.add_argument("--each", type=int, default=5, help="schedules of a job")
    parser.add_argument("--modes", nargs="+", default=MODES, help="of jobs, in turn")
    parser.add_argument("--out", type=Path, help="results as JSON lines")
    parser.add_argument("--keep", type=Path, help="folder for the files of jobs that went wrong")
    parser.add_argument("--reference", type=Path, help="folder for uninterrupted runs")
    parser.add_argument("--quiet", type=Path, help="begin no job while this file exists")
    arguments = parser.parse_args()

    def tell(result: Result) -> None:
        line = msgspec.json.encode(result).decode()
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(line + "\n")

    references = References(arguments.reference)
    if arguments.soak is not None:
        end = time.monotonic() + 60 * arguments.soak
        seeds = itertools.takewhile(
            lambda _: time.monotonic() < end, itertools.count(arguments.first)
        )
        results = play(seeds, SOAK, references, arguments.keep, tell)
        return _sum(results)
    results = campaign(
        range(arguments.first, arguments.last),
        each=arguments.each,
        right=references,
        keep=arguments.keep,
        modes=arguments.modes,
        tell=tell,
        pause=lambda: _wait_while(arguments.quiet),
    )
    return _sum(results)


def _sum(results: Sequence[Result]) -> int:
    bad = sum(bool(r.wrong) for r in results)
    sys.stdout.write(f"{len(results)} schedules, {bad} with violations\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
