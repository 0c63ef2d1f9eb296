"""Runs one case live: daemon, agents and ranks, a fault, and what the daemon says of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ckptd.errors import CkptdError
from ckptd.monitor.ring import read
from ckptd.monitor.verdict import VerdictKind
from tests.monitor.faults.case import Case
from tests.monitor.faults.chain import Chain, nodes_of
from tests.monitor.faults.judge import Heard, Outcome, judge
from tests.monitor.faults.kinds import KINDS
from tests.monitor.faults.trainer import PLANTED, RESULT, STOP, Result
from tests.monitor.faults.zygote import Zygote
from tests.processes import until

__all__ = ["Scene", "replay", "results"]

AFTER_S = 1.0
"""How long a second, false alarm is waited for."""
LATE_S = 20.0
SLOW_S = 60.0
CALM_S = 3.0
END_S = 60.0
RECORDING = "recording"


class Scene:
    """One case, from its start to what is said of it."""

    def __init__(self, zygote: Zygote, case: Case, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.zygote, self.case, self.folder = zygote, case, folder

    def run(self) -> Outcome:
        """Live through the case; errors of the scene itself are in the outcome's note."""
        kind = KINDS[self.case.kind]
        with Chain(self.case, self.folder) as self.chain:
            try:
                self.start()
                note = self.until_heard() if kind.wanted else self.until_calm()
                heard = self.heard()
                (self.folder / RECORDING).write_bytes(self.chain.get("/recording?seconds=600"))
                note = note or ("" if kind.wanted else self.finish())
            except (OSError, RuntimeError, TimeoutError) as error:
                return Outcome(case=self.case, note=f"{type(error).__name__}: {error}")
            finally:
                self.zygote.end()
        outcome = judge(self.case, heard, nodes_of(self.case))
        return msgspec.structs.replace(outcome, note=note)

    def start(self) -> None:
        """Start the ranks, and wait until the daemon hears of all of them."""
        chain, nodes = self.chain, range(self.case.nodes)
        until(lambda: chain.job() is not None, "the daemon")
        self.pids = self.zygote.start(
            self.case, self.folder, chain.environment(), [chain.environment(n) for n in nodes]
        )

    def planted_at(self) -> float | None:
        """Return when the fault began, Unix seconds; None before."""
        path = self.folder / PLANTED
        return float(path.read_text()) if path.exists() else None

    # --- faults ---------------------------------------------------------------------------------

    def until_heard(self) -> str:
        """Wait for the fault, for what is said of it, and for what should not be said then."""
        until(self.planted_at, "the fault", END_S)
        if self.case.kind == "node":
            node = self.case.node(self.case.victim)
            self.chain.agents[node].send_signal(signal.SIGSTOP)
        limit = self.case.floor + (SLOW_S if self.case.kind == "slow" else LATE_S)
        try:
            until(self.chain_heard, "an incident", limit)
        except TimeoutError:
            return ""  # that nothing was said is the outcome
        time.sleep(AFTER_S)
        return ""

    def chain_heard(self) -> bool:
        told = self.chain.json("/incidents?limit=100")["incidents"]
        return any(incident["kind"] != VerdictKind.CANNOT_SAY for incident in told)

    def heard(self) -> list[Heard]:
        """Return all incidents, with the members of the groups that they name."""
        members = self.members()
        return [
            msgspec.structs.replace(one, members=tuple(sorted(_in(one, members))))
            for one in self.chain.heard(self.planted_at())
        ]

    def members(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for path in self.folder.glob("rings/*/*.ring"):
            try:
                view = read(path, 0)
            except CkptdError:
                continue  # damaged on purpose
            found |= {f"{group:016x}": ranks for group, ranks in view.members.items()}
        return found

    # --- nothing to be said ---------------------------------------------------------------------

    def until_calm(self) -> str:
        """Let the pause come and pass, or upset the monitor itself, and wait as a hang would."""
        self.chain.wait_for_ranks()
        kind, chain = self.case.kind, self.chain
        calm = self.case.floor + CALM_S
        if kind == "agent-killed":
            chain.kill(chain.agents[0])
            time.sleep(calm)
            chain.agents[0] = chain.start_agent(0)
            chain.wait_for_ranks()
        elif kind == "daemon-killed":
            chain.kill(chain.daemon)
            time.sleep(calm)
            chain.daemon = chain.start_daemon()
            chain.wait_for_ranks()
        elif self.case.pause_s:
            until(self.planted_at, "the pause", END_S)
            time.sleep(self.case.pause_s)
        time.sleep(calm)
        return ""

    def finish(self) -> str:
        """Let the job end by itself; return what is wrong about that."""
        (self.folder / STOP).touch()

        def ended() -> dict[int, int | None] | None:
            told = self.zygote.look()
            return told if all(code is not None for code in told.values()) else None

        codes = until(ended, "the ranks to end", END_S)
        if any(codes.values()):
            return f"ranks ended with {codes}"
        time.sleep(AFTER_S)
        said = self.heard()
        return f"at its end: {said[0].kind} {said[0].names}" if said else ""


def _in(heard: Heard, members: Mapping[str, tuple[int, ...]]) -> set[int]:
    groups = {n.split(" ", 1)[1] for n in heard.names if n.startswith("group ")}
    return {rank for group in groups for rank in members.get(group, ())}


def results(folder: Path, world: int) -> list[Result]:
    """Return what each rank said when it was done."""
    return [
        msgspec.json.decode((folder / RESULT.format(rank)).read_bytes(), type=Result)
        for rank in range(world)
    ]


def replay(folder: Path, case: Case) -> tuple[str, ...]:
    """Judge the recording of a case again; return the class and names of each incident."""
    command = [sys.executable, "-c", "import sys; from ckptd.cli.main import main; main()"]
    command += ["replay", str(folder / RECORDING), "--json", "--set", f"floor.train={case.floor}"]
    done = subprocess.run(command, capture_output=True, timeout=120, env=os.environ, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        return (f"error: {done.stderr.decode()[-300:]}",)
    told = msgspec.json.decode(done.stdout)
    return tuple(
        " ".join([i["kind"], *(f"{s['target']} {s['name']}" for s in i["suspects"])])
        for i in told["incidents"]
    )
