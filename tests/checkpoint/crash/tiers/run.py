"""Runs schedules: ``python -m tests.checkpoint.crash.tiers.run SEED...`` or ``FIRST:LAST``
(exclusive).

One process that has imported torch and forks trainers and agents; it never starts a thread. Each
schedule has a folder of its own in memory, which stays when something is wrong with it.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ckptd.base.runtime.agentlink import AgentPlace, listen, locked
from ckptd.checkpoint.agent.node import NodeAgent
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.store import StoreSpec
from tests.checkpoint.crash.judge import assert_only_legal, clean
from tests.checkpoint.crash.tiers.judge import Verdict, judge
from tests.checkpoint.crash.tiers.ledger import Killed, Started
from tests.checkpoint.crash.tiers.moments import Scene, enter, fire, hook_agent, start_of
from tests.checkpoint.crash.tiers.outcome import Outcome
from tests.checkpoint.crash.tiers.schedule import LifePlan, Schedule, draw
from tests.checkpoint.crash.tiers.trainer import (
    RankLife,
    be_launcher,
    be_trainer,
    environment,
    warm_up,
)

__all__ = ["Runner", "main"]

LIFE_S = 90.0
END_S = 90.0
_POLL_S = 0.004


class Runner:
    """Runs one schedule."""

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.schedule = schedule
        self.scene = Scene(folder)
        self.scene.make()
        self._children: set[int] = set()
        self._faults: list[str] = []

    def run(self) -> Verdict:
        """Live all lives, judge, and look for what was left behind."""
        try:
            for plan in self.schedule.lives:
                self._live(plan)
                time.sleep(plan.gap_s)
            self._end_agents()
        finally:
            self._kill_all()
        verdict = judge(self.scene.ledger.read(), self.schedule.local_keep)
        verdict.faults += self._faults
        if not verdict.faults:
            verdict.faults += self._left_behind()
        return verdict

    # -- processes ---------------------------------------------------------------------------------

    def _fork(self, log: str, main: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            self._children.add(pid)
            return pid
        code = 1
        try:
            fd = os.open(self.scene.folder / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            faulthandler.register(signal.SIGQUIT, all_threads=True)
            main()
            code = 0
        except BaseException:  # noqa: BLE001 - the log tells it, and the exit status
            traceback.print_exc()
        finally:
            with suppress(ValueError):
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> dict[int, int]:
        """Return the children that ended, with their status."""
        ended = {}
        for pid in list(self._children):
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                self._children.discard(pid)
                ended[pid] = status
        return ended

    def _start_agent(self, node: int) -> None:
        """Start an agent with hooks where none is, as `connect_agent` would."""
        if self.scene.find(f"agent-{node}") is not None:
            return
        place = AgentPlace(self.scene.root, f"n{node}", str(self.scene.folder / "run"))
        with locked(place):
            if self._listens(place):
                return
            listener = listen(place)

        def be_agent() -> None:
            os.setsid()
            os.environ.update(environment(self.scene, node))
            hook_agent()
            enter(self.scene, f"agent-{node}", node)
            agent = NodeAgent(listener, place)
            signal.signal(signal.SIGTERM, lambda *_: agent.end())
            agent.run()

        pid = self._fork(f"agent-{node}.log", be_agent)
        self.scene.register(f"agent-{node}", pid)
        listener.close()

    @staticmethod
    def _listens(place: AgentPlace) -> bool:
        import socket

        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(str(place.socket))
            except OSError:
                return False
        return True

    # -- a life ------------------------------------------------------------------------------------

    def _live(self, plan: LifePlan) -> None:
        scene = self.scene
        scene.disarm()
        for path in scene.who.glob("trainer-*"):
            path.unlink()
        scene.ledger.write(Started(life=plan.number, nodes=plan.nodes, clean=not plan.arms))
        if plan.forked:
            for node in sorted(set(plan.nodes)):
                self._start_agent(node)
        for arm in plan.arms:
            scene.arm(plan.number, arm)
        launcher = self._fork("launcher.log", lambda: be_launcher(scene, plan.number))
        alive = {}
        for rank in range(len(plan.nodes)):
            life = RankLife(str(scene.folder), self.schedule, plan, rank)
            name = f"trainer-{plan.number}-{rank}.log"
            alive[self._fork(name, lambda life=life: be_trainer(life))] = rank
        self._attend(plan, alive)
        os.kill(launcher, signal.SIGKILL)

    def _attend(self, plan: LifePlan, alive: dict[int, int]) -> None:
        """Do what a launcher does: when one trainer died, end the others."""
        limit = time.monotonic() + LIFE_S
        began = died = 0.0
        while alive:
            self._thaw()
            for pid, status in self._reap().items():
                rank = alive.pop(pid, None)
                if rank is not None and status:
                    died = died or time.monotonic()
                    if not os.WIFSIGNALED(status):
                        self._fault(plan, f"trainer {rank} failed, see its log")
            now = time.monotonic()
            if died and now > died + plan.late_s:
                self._end(plan, alive)
            if now > limit:
                self._fault(plan, f"trainers {sorted(alive.values())} did not end")
                self._end(plan, alive, signal.SIGQUIT)
                time.sleep(1.0)
                self._end(plan, alive)
                limit = now + 20.0
            began = self._fire_by_time(plan, began, now)
            time.sleep(_POLL_S)

    def _end(self, plan: LifePlan, alive: dict[int, int], number: int = signal.SIGKILL) -> None:
        if number == signal.SIGKILL and alive:
            pids = {f"trainer-{rank}": pid for pid, rank in alive.items()}
            fact = Killed(life=plan.number, arm=-1, victims="rest", moment="launcher", pids=pids)
            self.scene.ledger.write(fact)
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGKILL:
            for pid in list(alive):
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
                self._children.discard(pid)
            alive.clear()

    def _fire_by_time(self, plan: LifePlan, began: float, now: float) -> float:
        timed = [arm for arm in plan.arms if arm.moment == "time"]
        if not timed:
            return began
        if not began:
            trainers = self.scene.named("trainer")
            return now if len(trainers) == len(plan.nodes) else 0.0
        for arm in timed:
            if now > began + arm.nth / 1000.0 and (self.scene.arms / str(arm.number)).exists():
                fire(self.scene, plan.number, arm)
        return began

    def _thaw(self, *, now: bool = False) -> None:
        for path in self.scene.folder.glob("stopped-*"):
            text = path.read_text()
            if now or (text and time.monotonic() > float(text)):
                path.unlink()
                with suppress(ProcessLookupError):
                    os.kill(int(path.name.removeprefix("stopped-")), signal.SIGCONT)

    def _fault(self, plan: LifePlan, what: str) -> None:
        self._faults.append(f"life {plan.number}: {what}")

    # -- the end -----------------------------------------------------------------------------------

    def _end_agents(self) -> None:
        """The last life has said goodbye: agents end by themselves."""
        self._thaw(now=True)
        self.scene.disarm()
        limit = time.monotonic() + END_S
        while left := self.scene.named("agent"):
            self._reap()
            if time.monotonic() > limit:
                self._faults.append(f"{left} did not end")
                for name in left:
                    if (pid := self.scene.find(name)) is not None:
                        os.kill(pid, signal.SIGQUIT)
                time.sleep(1.0)
                return
            time.sleep(_POLL_S)

    def _kill_all(self) -> None:
        self._thaw(now=True)
        for name in (*self.scene.named("trainer"), *self.scene.named("agent")):
            if (pid := self.scene.find(name)) is not None:
                os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 20.0
        while self._children and time.monotonic() < end:
            self._reap()
            time.sleep(_POLL_S)

    def _left_behind(self) -> Iterator[str]:
        """Yield what must not be there when everything is over."""
        run = sorted(p.name for p in (self.scene.folder / "run").iterdir())
        if rest := [n for n in run if not n.endswith((".lock", ".log"))]:
            yield f"sockets are left: {rest}"
        if running := self._relatives():
            yield f"processes are left: {running}"
        with StoreSpec(self.scene.root).open() as store:
            catalogue = Catalogue(store)
            catalogue.open()
            if catalogue.latest() is None:
                yield "the root has no checkpoint"
            clean(store, self.schedule.keep)
            try:
                assert_only_legal(store, _names(Path(self.scene.root)))
            except AssertionError as error:
                yield f"the root is not clean: {error}"
        for node in (0, 1):
            folder = self.scene.local(node)
            if half := [n for n in _names(folder) if "~" in n]:
                yield f"half files in {folder.name}: {half}"
            kept = sorted(p.name for p in (folder / "data").glob("*"))
            # Who begins anew clears once it has as many of its own as are to be kept.
            if len(kept) > self.schedule.local_keep * (1 + len(self.schedule.lives)) + 1:
                yield f"{folder.name} keeps {kept}"

    def _relatives(self) -> list[int]:
        """Return the processes of this job that still run."""
        found = []
        wanted = f"CKPTD_RUN_DIR={self.scene.folder}/run".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):
                given = (entry / "environ").read_bytes().split(b"\0")
                line = (entry / "cmdline").read_bytes()
                ours = wanted in given or str(self.scene.folder).encode() in line
                if ours and start_of(int(entry.name)):
                    found.append(int(entry.name))
        return found


def _names(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.relpath(os.path.join(parent, n), folder) for n in names)


def run_seed(seed: int, base: Path, keep: bool = False) -> Outcome:
    """Run a schedule; its folder stays where something is wrong."""
    folder = Path(tempfile.mkdtemp(prefix=f"s{seed}-", dir=base))
    schedule = draw(seed)
    began = time.monotonic()
    verdict = Runner(schedule, folder).run()
    if not verdict.faults and not keep:
        shutil.rmtree(folder)
    return Outcome(
        seed=seed,
        faults=verdict.faults,
        kills=[(k.victims, k.moment) for k in verdict.kills if k.arm >= 0],
        tiers=list(schedule.tiers),
        lives=verdict.lives,
        restored=dict(verdict.restored_from),
        promises=dict(verdict.promises),
        refused=dict(verdict.refused),
        raised=dict(verdict.raised),
        seconds=round(time.monotonic() - began, 2),
        folder=str(folder) if verdict.faults else "",
    )


def _seeds(texts: list[str]) -> Iterator[int]:
    for text in texts:
        first, colon, last = text.partition(":")
        yield from range(int(first), int(last)) if colon else (int(first),)


def main() -> int:
    """Run the seeds that are given; a line of JSON for each. Returns how many were wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds", nargs="+")
    parser.add_argument("--kills", type=int, default=0, help="stop after so many")
    parser.add_argument("--keep", action="store_true", help="keep all folders")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    warm_up()
    shm = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="ct-", dir=shm if shm.is_dir() else None))
    wrong = kills = 0
    for seed in _seeds(given.seeds):
        outcome = run_seed(seed, base, given.keep)
        print(msgspec.json.encode(outcome).decode(), flush=True)
        wrong += bool(outcome.faults)
        kills += len(outcome.kills)
        if given.kills and kills >= given.kills:
            break
    if not wrong and not given.keep:
        shutil.rmtree(base)
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 100))
