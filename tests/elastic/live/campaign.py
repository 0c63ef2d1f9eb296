"""Random faults in real jobs: launchers, workers, controllers and agents that die, stop and return.

``python -m tests.elastic.live.campaign FIRST LAST [--out FILE]`` plays one job a seed. Each is a
small GPT on nodes of this machine under ``ckptd run``; faults come at random moments; then all
heals, and the job must end by itself or refuse plainly, and have trained what an uninterrupted run
trains.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ckptd.elastic.log import StoreLog
from ckptd.store import open_store
from ckptd.train.demo.elasticjob import ElasticSpec, RankRow, TrainedRow
from ckptd.train.demo.elasticjudge import lives_of, violations
from ckptd.train.demo.launch import read_rows
from ckptd.train.demo.nodes import Nodes, free_port

STEPS = 60
_PAUSE_S = 0.12
_START_S = 90.0
_HEAL_S = 120.0
_CLI = (sys.executable, "-c", "import sys; from ckptd.cli.main import main; main(sys.argv[1:])")
SETTINGS = {
    "silent_s": 3,
    "lease_s": 12,
    "settle_s": 2,
    "grow_s": 2,
    "nodes_s": 120,
    "gather_s": 20,
}
PLAIN_ENDS = ("no-progress", "no-nodes")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one schedule came to.

    Attributes
    ----------
    seed, nodes, faults
        What was played; each fault with the moment, seconds from the start of the job.
    end
        ``finished``, ``refused`` or ``stuck``.
    wrong
        What must never be and was.
    generations, lost
        That trained, and steps that were trained again.
    seconds
        From the start to the end.
    """

    seed: int
    nodes: int
    faults: list[str]
    end: str
    wrong: list[str]
    generations: int
    lost: int
    seconds: float
    words: str = ""


class Job:
    """A job and the hands that hurt it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.folder = folder
        self.planned = self.rng.choice([2, 3, 4])
        self.names = [f"n{k}" for k in range(self.planned + self.rng.choice([0, 0, 1]))]
        self.port = free_port()
        self.name = f"campaign-{seed}-{os.getpid()}"
        self.faults: list[str] = []
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.begun = time.monotonic()
        run = folder / "run"
        run.mkdir(mode=0o700)
        self.env = {"CKPTD_RUN_DIR": str(run), "CKPTD_SECRET": secrets.token_hex(16)}
        self.log_url = str(folder / "log")
        spec = ElasticSpec(root=str(folder / "root"), steps=STEPS, every=20, pause_s=_PAUSE_S)
        (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        flags = ["--job", self.name, "--nnodes", f"1:{self.planned}", "--nproc-per-node", "1"]
        flags += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--log", self.log_url, "--no-watch"]
        for key, value in SETTINGS.items():
            flags += ["--set", f"{key}={value}"]
        command = ["-m", "ckptd.train.demo.elasticjob", str(folder)]
        self.nodes = Nodes(folder, flags, command, self.env)

    # --- what is seen -----------------------------------------------------------------------------

    @property
    def rows(self) -> list[TrainedRow]:
        return read_rows(self.folder / "steps.jsonl", TrainedRow)

    @property
    def ranks(self) -> list[RankRow]:
        return read_rows(self.folder / "ranks.jsonl", RankRow)

    def step(self) -> int:
        return max((row.step for row in self.rows), default=0)

    def workers(self) -> list[psutil.Process]:
        """Return the ranks of the newest generation that live."""
        rows = self.ranks
        newest = max((row.generation for row in rows), default=0)
        return list(_living(row.pid for row in rows if row.generation == newest))

    def processes(self, words: str) -> list[psutil.Process]:
        """Return processes of this job whose command line has these words."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            line = " ".join(process.info["cmdline"] or ())
            ours = (process.info["environ"] or {}).get("CKPTD_SECRET") == self.env["CKPTD_SECRET"]
            if ours and words in line:
                found.append(process)
        return found

    def promised(self) -> dict[int, int]:
        """Return the last committed step before each generation, by the membership log."""
        with open_store(self.log_url) as store:
            return {r.generation: r.step for r in StoreLog(store).read()}

    # --- what is done -----------------------------------------------------------------------------

    def ctl(self, *words: str) -> None:
        """Order something; what is refused, or not heard, is no fault of ours."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [
                    *_CLI,
                    "ctl",
                    *words,
                    "--job",
                    self.name,
                    "--controller",
                    f"127.0.0.1:{self.port}",
                ],
                env={**os.environ, **self.env},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=20,
                check=False,
            )

    def then(self, seconds: float, what: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, what))

    def turn(self) -> None:
        """Do what is due."""
        self.nodes.look()
        now = time.monotonic()
        due = [what for at, what in self.later if at <= now]
        self.later = [(at, what) for at, what in self.later if at > now]
        for what in due:
            what()

    def until(self, look: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not look():
            if time.monotonic() > end:
                return False
            self.turn()
            time.sleep(0.05)
        return True

    def rest(self, seconds: float) -> None:
        self.until(lambda: False, seconds)

    # --- faults -----------------------------------------------------------------------------------

    def fault(self) -> None:
        """Let one thing go wrong."""
        kinds = [
            self.kill_worker,
            self.kill_worker,
            self.stop_worker,
            self.kill_node,
            self.kill_node,
            self.stop_node,
            self.kill_controller,
            self.kill_zygote,
            self.kill_agent,
            self.restart,
            self.exclude,
            self.drain,
            self.pause,
        ]
        kind = self.rng.choice(kinds)
        at = time.monotonic() - self.begun
        what = kind()
        self.faults.append(f"{at:.1f} s: {kind.__name__.replace('_', ' ')}{what}")

    def _one(self) -> str:
        alive = self.nodes.alive()
        return self.rng.choice(alive) if alive else self.names[0]

    def kill_worker(self) -> str:
        workers = self.workers()
        if workers:
            _send(self.rng.choice(workers), signal.SIGKILL)
        return ""

    def stop_worker(self) -> str:
        """Stop a rank; somebody notices after a while, as the monitor would."""
        workers = self.workers()
        if not workers:
            return ""
        victim = self.rng.choice(workers)
        _send(victim, signal.SIGSTOP)
        self.then(self.rng.uniform(0.5, 3), lambda: self.ctl("restart"))
        self.then(self.rng.uniform(3, 20), lambda: _send(victim, signal.SIGCONT))
        return ""

    def kill_node(self) -> str:
        name = self._one()
        if self.nodes.processes[name].poll() is None:
            self.nodes.kill(name)
            if self.rng.random() < 0.85:
                self.then(self.rng.uniform(0.2, 8), lambda: self._back(name))
        return f" {name}"

    def stop_node(self) -> str:
        """Freeze a launcher alone: its workers train on until their lease is over."""
        name = self._one()
        process = self.nodes.processes[name]
        _send(process, signal.SIGSTOP)
        self.then(self.rng.uniform(0.5, 20), lambda: _send(process, signal.SIGCONT))
        return f" {name}"

    def kill_controller(self) -> str:
        for process in self.processes(" controller "):
            _send(process, signal.SIGKILL)
        return ""

    def kill_zygote(self) -> str:
        found = self.processes("ckptd.train.zygote")
        if found:
            _send(self.rng.choice(found), signal.SIGKILL)
        return ""

    def kill_agent(self) -> str:
        found = self.processes("-m ckptd.agent ")
        if found:
            _send(self.rng.choice(found), signal.SIGKILL)
        return ""

    def restart(self) -> str:
        self.ctl("restart")
        return ""

    def exclude(self) -> str:
        name = self._one()
        self.ctl("exclude", name)
        self.then(self.rng.uniform(1, 8), lambda: self.ctl("add", name))
        return f" {name}"

    def drain(self) -> str:
        name = self._one()
        self.ctl("drain", name)
        self.then(self.rng.uniform(1, 8), lambda: self.ctl("add", name))
        return f" {name}"

    def pause(self) -> str:
        self.ctl("pause")
        for seconds in (2.0, 6.0, 12.0):
            self.then(seconds, lambda: self.ctl("resume"))
        return ""

    def _back(self, name: str) -> None:
        if self.nodes.processes[name].poll() is not None and not self.over():
            self.nodes.start(name)

    def over(self) -> bool:
        """Whether the job has ended: who was not killed has gone in good order, or refused."""
        return any(code is not None and code >= 0 for code in self.nodes.codes().values())

    # --- the whole --------------------------------------------------------------------------------

    def play(self) -> str:
        """Start, hurt, heal; return how it ended."""
        for name in self.names:
            self.nodes.start(name)
        if not self.until(lambda: self.step() >= 3 or self.over(), _START_S):
            return "stuck"
        for _ in range(self.rng.randint(1, 5)):
            gap = self.rng.choice([0.0, 0.3, 2.0, 5.0])
            self.rest(self.rng.uniform(0, 2 * gap))
            if self.over():
                break
            self.fault()
        self.until(lambda: not self.later or self.over(), 30.0)
        self.heal()
        if not self.nodes.wait(_HEAL_S):
            return "stuck"
        codes = [code for code in self.nodes.codes().values() if code is not None and code >= 0]
        return "finished" if codes and not any(codes) else "refused"

    def heal(self) -> None:
        for process in [*self.workers(), *self.nodes.processes.values()]:
            _send(process, signal.SIGCONT)
        for name in self.names:
            self._back(name)
        if not self.over():
            for name in self.names:
                self.ctl("add", name)
            self.ctl("resume")

    def words(self) -> str:
        """Return what the launchers said last."""
        texts = []
        for name in self.names:
            if self.nodes.log(name).exists():
                lines = self.nodes.log(name).read_text(errors="replace").splitlines()
                texts += [f"{name}: {line}" for line in lines[-12:]]
        return "\n".join(texts)


def _living(pids: Iterator[int] | Any) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def reference() -> dict[int, TrainedRow]:
    """Return the steps of the run that nobody disturbs."""
    with tempfile.TemporaryDirectory(prefix="ckptd-campaign-") as name:
        job = Job(Path(name), 0)
        job.planned, job.names = 1, ["n0"]
        with job.nodes:
            job.nodes.start("n0")
            if not job.nodes.wait(_HEAL_S):
                raise TimeoutError(f"the uninterrupted run does not end\n{job.words()}")
            if len(job.rows) != STEPS:
                raise RuntimeError(f"the uninterrupted run failed\n{job.words()}")
            return {row.step: row for row in job.rows}


def play(seed: int, right: dict[int, TrainedRow], keep: Path | None = None) -> Result:
    """Play one schedule; what is wrong is in the result."""
    folder = Path(tempfile.mkdtemp(prefix="ckptd-live-"))
    try:
        job = Job(folder, seed)
        with job.nodes:
            end = job.play()
            words = job.words()
        wrong = _wrong(job, end, right, words)
        lives = lives_of(job.rows, job.ranks)
        result = Result(
            seed=seed,
            nodes=len(job.names),
            faults=job.faults,
            end=end,
            wrong=wrong,
            generations=len(lives),
            lost=sum(life.lost for life in lives),
            seconds=time.monotonic() - job.begun,
            words=words if wrong else "",
        )
        if wrong and keep is not None:
            shutil.copytree(folder, keep / f"seed-{seed}", ignore=_sockets, dirs_exist_ok=True)
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [
        n for n in names if not (Path(folder) / n).is_file() and not (Path(folder) / n).is_dir()
    ]


def _wrong(job: Job, end: str, right: dict[int, TrainedRow], words: str) -> list[str]:
    if end == "refused" and any(kind in words for kind in PLAIN_ENDS):
        until = job.step()
    elif end != "finished":
        return [f"the job is {end}: {job.nodes.codes()}"]
    else:
        until = STEPS
    return violations(job.rows, job.ranks, right, until=until, promised=job.promised())


def main() -> int:
    """Play seeds; print each, and a line at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--out", type=Path, help="results as JSON lines")
    parser.add_argument("--keep", type=Path, help="folder for the files of jobs that went wrong")
    arguments = parser.parse_args()
    right = reference()
    results = []
    for seed in range(arguments.first, arguments.last):
        result = play(seed, right, arguments.keep)
        results.append(result)
        line = msgspec.json.encode(result).decode()
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(line + "\n")
    bad = sum(bool(r.wrong) for r in results)
    sys.stdout.write(f"{len(results)} schedules, {bad} with violations\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
