"""Roots that vanish, refill, go read-only and come back, under jobs that are killed.

``python -m tests.checkpoint.crash.roots FIRST LAST [--kills N]`` plays schedules. A schedule has
one place, and jobs that save there as fast as they can: with a worker of their own, packed, or
through a node's agent with snapshots in memory and in a folder. Meanwhile the root is renamed away
and brought back, an empty folder is left in its place as by an unmount, it is destroyed, made anew
by the next job while the old one still writes, and its file system goes read-only and back. Jobs,
and agents, are ended by SIGKILL at random moments.

The judge then looks at every root that was not destroyed:

- what `durable` confirmed loads bit for bit from the root that it was confirmed at, wherever that
  is by now; so nothing was confirmed in a folder that is no root. It is on the line, or beside it
  where the next life had looked for the newest step just before, and began from an older one;
- each commit that counts was made by a life of this very root, and holds what that life saved;
- a place without a root has nothing in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.base.runtime.agentlink import AgentPlace
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.format.names import CommitName, attempt_name
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.opening import root_spec
from ckptd.checkpoint.root.policy import Keep
from ckptd.checkpoint.save.client import AgentSpec, WriterClient
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.save.messages import SaveRequest
from ckptd.checkpoint.save.tiers import TierSpec
from ckptd.errors import CkptdError
from ckptd.store import StoreSpec
from tests.checkpoint.save.saving import fill, plan_of, values
from tests.processes import kill, lives

__all__ = ["KINDS", "Campaign", "Tally", "main"]

KINDS = ("plain", "packed", "memory", "folder")
PLAN = plan_of()
_SAVE_S = 20.0


def expected(seed: int) -> bytes:
    """Return the data section of a save of `seed`."""
    data = bytearray(PLAN.filemap.data_bytes(0))
    fill(PLAN, 0, values(seed), memoryview(data))
    return bytes(data)


def spec_of(place: Path, kind: str) -> StoreSpec:
    """Return the root's store."""
    return root_spec(str(place), compress=1 if kind == "packed" else None)


@dataclass(frozen=True)
class Life:
    """One process of a job, until it is killed."""

    place: Path
    kind: str
    ledger: Path
    name: str
    node: Path
    keep: int | None
    seed: int

    def run(self) -> None:
        """Go on from the newest checkpoint and save for ever."""
        store = spec_of(self.place, self.kind).open()
        catalogue = Catalogue(store)
        root_id = catalogue.create_or_open().root_id
        latest = catalogue.latest()
        if latest is not None and not is_exact(catalogue, latest):
            self.note("wrong", root_id, latest.step, 0)
        claimed = catalogue.claim(latest, 1, "load" if latest else "start")
        near: tuple[str, ...] = ()
        if self.kind in ("memory", "folder"):
            near = ("memory", "local") if self.kind == "folder" else ("memory",)
            folder = StoreSpec(str(self.node))
            tiers = tuple(TierSpec(t, 2, folder if t == "local" else None) for t in near)
            place = AgentPlace(self.name, "n0")
            agent = AgentSpec(place, tiers, 60.0, "")
            client = WriterClient(store.describe(), LocalBoard(), None, 2, agent)
            self.note("agent", root_id, 0, client.answer().pid)
        else:
            client = WriterClient(store.describe(), LocalBoard(), store)
        step = latest.step if latest else 0
        draw = random.Random(self.seed)
        handles: list[tuple[int, int, SaveTracker]] = []
        for number in range(1, 10_000):
            step += 1
            seed = draw.randrange(1 << 30)
            save = SaveRequest(
                job=client.next_job(),
                step=step,
                generation=claimed.generation,
                attempt=attempt_name(number, claimed.claim_id),
                plan=PLAN.digest,
                extra=(),
                objects=(),
                metadata={"seed": seed},
                keep=None if self.keep is None else Keep(self.keep),
                timeout_s=_SAVE_S,
                near=near,
                root_id=claimed.root,
                claim_id=claimed.claim_id,
            )
            total = PLAN.filemap.data_bytes(0)
            handle = SaveTracker(step, claimed.generation, save.attempt, total, near=near)
            self.note("begun", root_id, step, seed)
            slot = client.acquire(total, _SAVE_S)
            client.begin(save, PLAN, handle, f"save/{number}", slot)
            fill(PLAN, 0, values(seed), slot.data)
            slot.staged = total
            client.seal(save.job, slot)
            time.sleep(0.02)
            handles.append((step, seed, handle))
            while handles and (len(handles) > 1 or draw.random() < 0.5):
                self._settle(root_id, *handles.pop(0))

    def _settle(self, root_id: str, step: int, seed: int, handle: SaveTracker) -> None:
        try:
            handle.durable(_SAVE_S)
        except CkptdError as error:
            self.note(error.kind, root_id, step, seed)
            time.sleep(0.1)  # a job computes between its saves, and whoever kills it needs the CPU
            return
        self.note("durable", root_id, step, seed)

    def note(self, what: str, root_id: str, step: int, seed: int) -> None:
        """Write down what happened, outside of the root and at once."""
        line = json.dumps([what, root_id, step, seed]) + "\n"
        fd = os.open(self.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line.encode())
        os.close(fd)


def is_exact(catalogue: Catalogue, name: CommitName) -> bool:
    """Tell whether a checkpoint holds, to the bit, what its metadata says."""
    commit = catalogue.commit(name)
    manifest = catalogue.manifest_of(commit)
    raw = catalogue.store.get(manifest.files[0].path)
    found = raw[manifest.files[0].data_start :]
    return found == expected(commit.metadata["seed"]) and manifest.metadata == commit.metadata


@dataclass
class Tally:
    """What came of a campaign."""

    schedules: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    durable: int = 0
    judged: int = 0
    beside: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def text(counts: Counter[str]) -> str:
            return ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))

        return (
            f"{self.schedules} schedules; kills: {text(self.kills)}; roots: {text(self.happened)};"
            f" {self.durable} saves confirmed, {self.judged} of them there at the end and exact,"
            f" {self.beside} beside the line; refused:"
            f" {text(self.refused)}; {len(self.violations)} violations {self.violations[:3]}"
        )


class Campaign:
    """Plays schedules below a folder.

    Parameters
    ----------
    base
        On a file system of its own where `mounted`: it goes read-only.
    """

    def __init__(self, base: Path, *, mounted: bool, scratch: Path) -> None:
        self.base = base
        self.mounted = mounted
        self.scratch = scratch
        self.tally = Tally()

    def play(self, seed: int, kills: int) -> None:
        """Play one schedule."""
        _Schedule(self, seed, kills).run()
        self.tally.schedules += 1


class _Schedule:
    def __init__(self, campaign: Campaign, seed: int, kills: int) -> None:
        self.campaign = campaign
        self.tally = campaign.tally
        self.seed = seed
        self.draw = random.Random(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.kills = kills
        self.folder = campaign.base / f"s{seed}"
        self.folder.mkdir()
        self.place = self.folder / "root"
        self.ledger = campaign.scratch / f"ledger-{seed}"
        self.name = f"roots-{seed}-{uuid.uuid4().hex[:6]}"
        self.keep = self.draw.choice([None, 2])
        self.away: list[Path] = []
        self.destroyed: set[str] = set()
        self.alive: list[int] = []

    def run(self) -> None:
        while self.kills > 0:
            self._start()
            for _ in range(self.draw.randrange(4)):
                time.sleep(self.draw.random() * 0.3)
                self._happen()
            time.sleep(self.draw.random() * 0.4)
            # Sometimes the old life goes on beside the next one.
            if len(self.alive) > 1 or self.draw.random() < 0.7:
                self._kill()
        while self.alive:
            self._kill(count=False)
        for pid in self._agents():
            kill(pid)
        self._remount("rw")
        self._judge()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- lives

    def _start(self) -> None:
        life = Life(
            self.place,
            self.kind,
            self.ledger,
            self.name,
            self.campaign.scratch / f"node-{self.seed}",
            self.keep,
            self.draw.randrange(1 << 30),
        )
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                sink = os.open(self.campaign.scratch / "lives.log", os.O_WRONLY | os.O_CREAT)
                os.dup2(sink, 1)
                os.dup2(sink, 2)
                life.run()
            except CkptdError as error:
                life.note(error.kind, "", 0, 0)
            except BaseException as error:  # noqa: BLE001 - a defect is a violation
                life.note(f"defect {error!r}", "", 0, 0)
            finally:
                os._exit(0)
        self.alive.append(pid)
        before, end = len(self._entries()), time.monotonic() + 30.0
        while len(self._entries()) == before and lives(pid) and time.monotonic() < end:
            time.sleep(0.01)  # an agent takes its time to start

    def _kill(self, *, count: bool = True) -> None:
        agents = self._agents()
        if count and agents and self.draw.random() < 0.2:
            kill(agents[-1])
            self.tally.kills["agent"] += 1
            self.kills -= 1
        pid = self.alive.pop(0)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if count and os.WIFSIGNALED(status):
            self.tally.kills[self.kind] += 1
            self.kills -= 1

    def _agents(self) -> list[int]:
        return [seed for what, _, _, seed in self._entries() if what == "agent" and lives(seed)]

    def _entries(self) -> list[tuple[str, str, int, int]]:
        with contextlib.suppress(FileNotFoundError):
            lines = self.ledger.read_text().splitlines()
            return [tuple(json.loads(line)) for line in lines]
        return []

    # -- what befalls the root

    def _happen(self) -> None:
        what = self.draw.choice(["vanish", "vanish", "unmount", "destroy", "back", "ro", "rw"])
        try:
            getattr(self, f"_{what}")()
        except OSError:
            return  # not at this moment: read-only, or nothing there
        self.tally.happened[what] += 1

    def _vanish(self) -> None:
        away = self.folder / f"away{len(self.away)}"
        os.rename(self.place, away)
        self.away.append(away)

    def _unmount(self) -> None:
        self._vanish()
        self.place.mkdir()

    def _destroy(self) -> None:
        gone = self.folder / f"gone{uuid.uuid4().hex}"
        os.rename(self.place, gone)
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.destroyed.add(json.loads((gone / "ckptd.json").read_text())["root_id"])
        shutil.rmtree(gone, ignore_errors=True)

    def _back(self) -> None:
        if not self.away:
            raise FileNotFoundError
        if self.place.exists():
            os.rmdir(self.place)  # an empty mount point; a root stays
        os.rename(self.away[-1], self.place)
        self.away.pop()

    def _ro(self) -> None:
        if not self.campaign.mounted:
            raise PermissionError
        self._remount("ro")

    def _rw(self) -> None:
        self._remount("rw")

    def _remount(self, how: str) -> None:
        if self.campaign.mounted:
            # Busy while a file is open for writing: then it does not happen.
            command = ["mount", "-o", f"remount,{how}", str(self.campaign.base)]
            if subprocess.run(command, capture_output=True, timeout=20).returncode:
                raise PermissionError

    # -- the judge

    def _judge(self) -> None:
        entries = self._entries()
        begun = {(root, step, seed) for what, root, step, seed in entries if what == "begun"}
        durable = [(root, step, seed) for what, root, step, seed in entries if what == "durable"]
        for what, root, step, _ in entries:
            if what == "wrong" or what.startswith("defect"):
                self._violation(f"{what} {root} step {step}")
            elif what not in ("begun", "durable", "agent"):
                self.tally.refused[what] += 1
        self.tally.durable += len(durable)
        seen: set[str] = set()
        for folder in [self.place, *self.away]:
            if not (folder / "ckptd.json").exists():
                left = [p for p in folder.rglob("*") if p.is_file()] if folder.exists() else []
                if left:
                    self._violation(f"files where no root is: {left[:3]}")
                continue
            with spec_of(folder, self.kind).open() as store:
                catalogue = Catalogue(store)
                root_id = catalogue.open().root_id
                seen.add(root_id)
                self._judge_root(catalogue, root_id, begun, durable)
        for root in {root for root, _, _ in durable} - seen - self.destroyed:
            self._violation(f"durable at root {root}, which is nowhere")

    def _judge_root(
        self,
        catalogue: Catalogue,
        root_id: str,
        begun: set[tuple[str, int, int]],
        durable: list[tuple[str, int, int]],
    ) -> None:
        line = {n.step: n for n in catalogue.line() if catalogue.counts(n)}
        for step, name in line.items():
            commit = catalogue.commit(name)
            if (root_id, step, commit.metadata["seed"]) not in begun or commit.root != root_id:
                self._violation(f"step {step} of another life counts at {root_id}")
            if not is_exact(catalogue, name):
                self._violation(f"step {step} at {root_id} is not what was saved")
        there = {}
        for name in catalogue.commits():
            if catalogue.counts(name):
                there[name.step, catalogue.commit(name).metadata["seed"]] = name
        promised = [(step, seed) for root, step, seed in durable if root == root_id]
        for step, seed in promised:
            if (step, seed) not in there:
                # Also by saves that nobody was told of: their job was killed just after the commit.
                if self.keep is None or sum(later > step for later in line) < self.keep:
                    self._violation(f"durable step {step} at {root_id} is gone")
                continue
            self.tally.judged += 1
            self.tally.beside += there[step, seed] != line.get(step)
            if not is_exact(catalogue, there[step, seed]):
                self._violation(f"durable step {step} at {root_id} is not what was saved")

    def _violation(self, text: str) -> None:
        self.tally.violations.append(f"seed {self.seed} ({self.kind}): {text}")


@contextlib.contextmanager
def campaign(folder: Path) -> Iterator[Campaign]:
    """Make a campaign on a file system of its own; in `folder` where none can be mounted."""
    base, scratch = folder / "base", folder / "scratch"
    base.mkdir()
    scratch.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256m", "ckptd-test", str(base)]
    mounted = subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    try:
        yield Campaign(base, mounted=mounted, scratch=scratch)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(base)], check=True, timeout=20)


def main(arguments: list[str] | None = None) -> int:
    """Play schedules and print what came of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--kills", type=int, default=10, help="of each schedule")
    given: Any = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        with campaign(Path(folder)) as played:
            for seed in range(given.first, given.last + 1):
                played.play(seed, given.kills)
                print(f"seed {seed}: {played.tally}", flush=True)
    return bool(played.tally.violations)


if __name__ == "__main__":
    sys.exit(main())
