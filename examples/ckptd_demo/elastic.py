"""A job whose nodes are stopped, killed and brought back, and what became of its training."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, DeadlineError
from ckptd_demo.elasticjob import FINISH, ElasticSpec, RankRow, TrainedRow
from ckptd_demo.judge import largest_difference, lives_of, violations
from ckptd_demo.processes import Nodes, free_port, read_rows, run_ckptd
from ckptd_demo.report import Check, Deed, Elastic

__all__ = ["checks_of_elastic", "elastic_run", "why_not"]

_specs = json_decoder(ElasticSpec)

NODES = 5
PLANNED = 4
_WARM_STEPS = 40
"""A job that has a past of some steps tells a pause from a hang."""
_AFTER_STEPS = 15
_NO_END = 1_000_000
FLOOR_S = 2.0
"""Silence in training that counts as a hang."""
_POLL_S = 0.1
_TAIL_LINES = 15


def why_not() -> str:
    """Return why no elastic job runs here, or an empty string."""
    if sys.platform != "linux":
        return "no elastic run: launchers need Linux"
    absent = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    return f"no elastic run without {', '.join(absent)}: pip install 'ckptd[monitor]'" * bool(
        absent
    )


def checks_of_elastic(told: Elastic) -> list[Check]:
    """Return what has to hold of an elastic run."""
    return [
        *(Check(f"elastic: {deed.what}: on {deed.ranks} ranks", deed.right) for deed in told.deeds),
        Check("elastic: no step lost, doubled or trained on other samples", not told.violations),
        Check("elastic: losses as of the uninterrupted run", told.gap <= told.tolerance),
    ]


def elastic_run(
    folder: Path, tolerance: float, deadline_s: float, say: Callable[[str], None]
) -> tuple[Elastic, list[TrainedRow]]:
    """Train on 4 of 5 nodes; stop a rank, kill a node, bring it back; compare.

    Parameters
    ----------
    folder
        New; everything goes there.
    tolerance
        Largest relative difference of a loss from the uninterrupted run's.
    deadline_s
        Longest wait for each step of the story.
    say
        Told in a few words what happens, the address of the page among it.

    Returns
    -------
    tuple
        What became of it, and its steps.

    Raises
    ------
    DeadlineError
        Something did not happen in time; the notes show the logs. No process is left.
    CkptdError
        The job ended.
    """
    teller = _Teller(folder / "elastic", deadline_s, say)
    with teller.nodes:
        deeds = teller.tell()
    alone = _Teller(folder / "alone", deadline_s, say)
    say("the same without interruption")
    with alone.nodes:
        alone.train_alone(teller.last)
    reference = {row.step: row for row in alone.rows}
    told = Elastic(
        nodes=NODES,
        ranks=PLANNED,
        steps=teller.last,
        url=teller.url.partition("?")[0],
        deeds=deeds,
        lives=lives_of(teller.rows, teller.ranks),
        recoveries=teller.recoveries,
        gap=largest_difference(teller.rows, reference),
        tolerance=tolerance,
        violations=violations(
            teller.rows,
            teller.ranks,
            reference,
            until=teller.last,
            promised={},
            tolerance=tolerance,
        ),
    )
    return told, teller.rows


class _Teller:
    def __init__(self, folder: Path, deadline_s: float, say: Callable[[str], None]) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._deadline_s = deadline_s
        self._say = say
        self._job = f"demo-{folder.name}-{os.getpid()}"
        self._controller = f"127.0.0.1:{free_port()}"
        spec = ElasticSpec(root=str(folder / "checkpoints"), steps=_NO_END, pause_s=0.08)
        (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        self._env = {"CKPTD_SECRET": secrets.token_hex(16)}
        flags = ["--job", self._job, "--nnodes", f"1:{PLANNED}", "--nproc-per-node", "1"]
        flags += ["--rdzv-endpoint", self._controller, "--log", str(folder / "log")]
        for setting in ("grow_s=2", "gather_s=30"):
            flags += ["--set", setting]
        self._flags = flags
        self._command = ["-m", "ckptd_demo.elasticjob", str(folder)]
        self.nodes = Nodes(folder, [*flags, "--no-watch"], self._command, self._env)
        self.url = ""
        self.last = 0
        self.recoveries: list[dict[str, Any]] = []

    # --- what is seen -----------------------------------------------------------------------------

    @property
    def rows(self) -> list[TrainedRow]:
        """Steps that were trained."""
        return read_rows(self._folder / "steps.jsonl", TrainedRow)

    @property
    def ranks(self) -> list[RankRow]:
        """Ranks that began a generation."""
        return read_rows(self._folder / "ranks.jsonl", RankRow)

    def _newest(self) -> list[RankRow]:
        rows = self.ranks
        newest = max((row.generation for row in rows), default=0)
        return [row for row in rows if row.generation == newest]

    def _status(self) -> dict[str, Any]:
        command = ["ctl", "status", "--job", self._job, "--controller", self._controller, "--json"]
        done = run_ckptd(command, self._deadline_s, env=self._env)
        status: dict[str, Any] = msgspec.json.decode(done.stdout)
        return status

    # --- the story --------------------------------------------------------------------------------

    def tell(self) -> list[Deed]:
        """Do one thing after the other; return what came of each."""
        self.url = self._serve()
        self.nodes.flags = [*self._flags, "--daemon", self.url.partition("/?")[0]]
        for number in range(NODES):
            self.nodes.start(f"n{number}")
        self._say(f"{PLANNED} ranks train on {NODES} nodes, one of them a spare; open {self.url}")
        self._until("its first steps", lambda: self._trained(0) >= _WARM_STEPS)
        deeds = [self._stop(), self._kill(), self._bring_back()]
        self.recoveries = self._status()["status"]["recoveries"]
        self._finish()
        return deeds

    def _serve(self) -> str:
        """Start the job's daemon, which no node's death takes along; return the URL of its page."""
        self.nodes.beside(
            ["serve", "--json", "--job", self._job, "--controller", self._controller],
            ["--floor", f"train={FLOOR_S:g}"],
        )
        said = self._until("its page", lambda: self.nodes.log("serve").read_text())
        login: str = msgspec.json.decode(said)["login"]
        return login

    def train_alone(self, steps: int) -> None:
        """Train so many steps on one node, undisturbed."""
        spec = _specs.decode((self._folder / "spec.json").read_bytes())
        spec = msgspec.structs.replace(spec, steps=steps, pause_s=0.0)
        (self._folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        self.nodes.start("n0")
        if not self.nodes.wait(self._deadline_s) or any(self.nodes.codes().values()):
            raise self._failed(CkptdError("the uninterrupted run failed"))

    def _stop(self) -> Deed:
        victim = next(row for row in reversed(self._newest()) if row.node != "n0")
        self._say(f"rank {victim.rank}, on {victim.node}, is stopped: it hangs, and all wait")
        process = psutil.Process(victim.pid)
        return self._deed(
            f"rank {victim.rank} on {victim.node} stopped",
            PLANNED,
            lambda: process.send_signal(signal.SIGSTOP),
            gone=victim.node,
        )

    def _kill(self) -> Deed:
        victim = next(row for row in reversed(self._newest()) if row.node != "n0")
        self._killed = victim.node
        self._say(f"node {victim.node} is killed, and no spare is left")
        return self._deed(
            f"node {victim.node} killed",
            PLANNED - 1,
            lambda: self.nodes.kill(victim.node),
            gone=victim.node,
        )

    def _bring_back(self) -> Deed:
        self._say(f"node {self._killed} comes back")
        return self._deed(
            f"node {self._killed} comes back", PLANNED, lambda: self.nodes.start(self._killed)
        )

    def _deed(self, what: str, ranks: int, do: Callable[[], Any], gone: str = "") -> Deed:
        """Do something, and wait until a new generation has trained some steps."""
        before = max(row.generation for row in self.rows)
        at = time.monotonic()
        do()
        self._until(f"steps after: {what}", lambda: self._trained(before) >= _AFTER_STEPS)
        first = next(row for row in self.rows if row.generation > before)
        members = {row.node for row in self.ranks if row.generation == first.generation}
        self._say(f"training again on {first.ranks} ranks after {first.at - at:.1f} s")
        return Deed(
            what=what,
            ranks=first.ranks,
            after_s=first.at - at,
            right=first.ranks == ranks and gone not in members,
        )

    def _trained(self, after: int) -> int:
        """Return how many steps the newest generation has trained, if it came after that one."""
        newest = max((row.generation for row in self.rows), default=0)
        return sum(row.generation == newest for row in self.rows) if newest > after else 0

    def _finish(self) -> None:
        (self._folder / FINISH).touch()
        if not self.nodes.wait(self._deadline_s):
            raise self._failed(DeadlineError("the elastic job does not end"))
        self.last = max(row.step for row in self.rows)

    def _until(self, what: str, look: Callable[[], Any]) -> Any:
        """Return what `look` says once that is true."""
        end = time.monotonic() + self._deadline_s
        while not (found := look()):
            if time.monotonic() > end:
                raise self._failed(DeadlineError(f"the elastic job: no sign of {what}"))
            if self.nodes.processes and not self.nodes.alive():
                raise self._failed(CkptdError("the elastic job ended"))
            self.nodes.look()
            time.sleep(_POLL_S)
        return found

    def _failed(self, error: CkptdError) -> CkptdError:
        for name in ("serve", *self.nodes.processes):
            lines = self.nodes.log(name).read_text(errors="replace").splitlines()
            error.add_note(f"--- {name}\n" + "\n".join(lines[-_TAIL_LINES:]))
        return error
