"""Named points in trainers and agents; whoever comes to one that is armed kills the victims."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.checkpoint.crash.tiers.ledger import Killed, Ledger
from tests.checkpoint.crash.tiers.schedule import Arm

__all__ = ["ORPHAN_S", "Scene", "enter", "fire", "hook_agent", "hook_trainer", "main"]


ORPHAN_S = 3.0
"""For how long agents wait for the parts of the dead, which is a minute for users."""


class Scene:
    """The folder of one schedule: what is armed, who runs, and what was promised."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.ledger = Ledger(self.folder / "ledger")
        self.arms = self.folder / "arms"
        self.who = self.folder / "who"

    def make(self) -> None:
        """Make the folders."""
        for folder in (self.arms, self.who, self.folder / "run"):
            folder.mkdir(mode=0o700)

    @property
    def root(self) -> str:
        """The root of the job."""
        return str(self.folder / "root")

    def local(self, node: int) -> Path:
        """Return the folder of a node."""
        return self.folder / f"node-{node}"

    def register(self, name: str, pid: int) -> None:
        """Note who is process `pid`."""
        half = self.who / f"~{os.getpid()}-{threading.get_ident()}"
        half.write_text(f"{pid} {start_of(pid)}")
        half.rename(self.who / name)

    def find(self, name: str) -> int | None:
        """Return the process of that name, if it still runs."""
        try:
            pid, start = map(int, (self.who / name).read_text().split())
        except FileNotFoundError:
            return None
        return pid if start and start_of(pid) == start else None

    def named(self, kind: str) -> list[str]:
        """Return the names of all trainers or agents that run."""
        names = sorted(p.name for p in self.who.glob(f"{kind}-*"))
        return [name for name in names if self.find(name) is not None]

    def arm(self, life: int, arm: Arm) -> None:
        """Let a death wait for its moment."""
        half = self.folder / "arm"
        half.write_bytes(msgspec.json.encode((life, arm)))
        half.rename(self.arms / str(arm.number))

    def disarm(self) -> None:
        """Let nobody die any more."""
        for path in self.arms.iterdir():
            path.unlink(missing_ok=True)


def start_of(pid: int) -> int:
    """Return when a process began, which tells it from a later one of the same number; 0: gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


_scene: Scene | None = None
_me: tuple[str, int] = ("", -1)
_seen: Counter[tuple[str, str]] = Counter()
_turn = threading.Lock()
_SCENE = "CKPTD_TEST_SCENE"


def enter(scene: Scene, name: str, node: int) -> None:
    """Say who this process is."""
    global _scene, _me
    _scene, _me = scene, (name, node)
    scene.register(name, os.getpid())


def moment(name: str) -> None:
    """Come to a point."""
    scene = _scene
    if scene is None:
        return
    for entry in os.scandir(scene.arms):
        try:
            life, arm = msgspec.json.decode(Path(entry.path).read_bytes(), type=tuple[int, Arm])
        except FileNotFoundError:
            continue
        if arm.moment != name or arm.node not in (None, _me[1]):
            continue
        with _turn:
            _seen[entry.name, name] += 1
            due = _seen[entry.name, name] == arm.nth
        if due:
            fire(scene, life, arm, _me[0])


def fire(scene: Scene, life: int, arm: Arm, me: str = "") -> bool:
    """Kill the victims of `arm`, the caller last; False when somebody else has."""
    try:
        os.unlink(scene.arms / str(arm.number))
    except FileNotFoundError:
        return False
    names = _victims(scene, arm, me)
    pids = {name: pid for name in names if (pid := scene.find(name)) is not None}
    folders = (arm.of,) if arm.victims == "node" else ()
    scene.ledger.write(
        Killed(
            life=life,
            arm=arm.number,
            victims=arm.victims,
            moment=f"{arm.what} ({arm.moment})",
            pids=pids,
            folders=folders,
        )
    )
    agents = [p for n, p in pids.items() if n.startswith("agent") and n != me]
    if arm.freeze_s and agents:
        for pid in agents:
            _stop(scene, pid, 2 * arm.freeze_s)
        time.sleep(arm.freeze_s)
    if arm.thaw_s and (zombie := scene.find(f"agent-{arm.of}")) is not None:
        _stop(scene, zombie, arm.thaw_s)
    # What was promised while the signals are sent counts for nothing that dies by them.
    for name in sorted(pids, key=lambda n: n == me):
        if folders and name == me:
            _lose(scene, arm.of)
        _signal(pids[name], signal.SIGKILL)
    if folders and me not in pids:
        _lose(scene, arm.of)
    return True


def _stop(scene: Scene, pid: int, seconds: float) -> None:
    """Stop a process; whoever runs the schedule lets it go on, should this one die meanwhile."""
    (scene.folder / f"stopped-{pid}").write_text(str(time.monotonic() + seconds))
    _signal(pid, signal.SIGSTOP)


def _lose(scene: Scene, node: int) -> None:
    shutil.rmtree(scene.local(node), ignore_errors=True)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    if number == signal.SIGKILL and pid == os.getpid():
        time.sleep(60)  # the signal is on its way; nothing may happen meanwhile


def _victims(scene: Scene, arm: Arm, me: str) -> list[str]:
    trainers, agents = scene.named("trainer"), scene.named("agent")
    there = f"agent-{arm.of}"
    match arm.victims:
        case "trainer":
            mine = [n for n in trainers if n == me] or [n for n in trainers if _on(n, arm.of)]
            return (mine or trainers)[:1]
        case "trainers":
            return trainers
        case "agent":
            return [there]
        case "agents":
            return agents
        case "both" | "node":
            return [*(n for n in trainers if _on(n, arm.of)), there]
    return [*trainers, *agents]


def _on(trainer: str, node: int) -> bool:
    return trainer.endswith(f"-{node}")


# -- hooks -----------------------------------------------------------------------------------------


def _wrap(owner: Any, name: str, label: str) -> None:
    """Make `name` of a module or class a point, before and after."""
    inner: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(inner)
    def hooked(*args: Any, **named: Any) -> Any:
        moment(f"{label}:before")
        result = inner(*args, **named)
        moment(f"{label}:after")
        return result

    setattr(owner, name, hooked)


def _hook_stores() -> None:
    from ckptd.store.local import LocalStore, LocalWriter

    _wrap(LocalStore, "put", "store_put")
    _wrap(LocalStore, "delete", "store_delete")
    _wrap(LocalWriter, "write", "store_write")


def hook_trainer(scene: Scene, node: int) -> None:
    """Make the points of a trainer; once, in its own process."""
    _start_hooked(scene, node)
    import ckptd.checkpoint.torch.copy as copying
    import ckptd.checkpoint.torch.loader as loader
    from ckptd.checkpoint.save.arena import Slot
    from ckptd.checkpoint.save.client import WriterClient
    from ckptd.checkpoint.torch.job import Lineage
    from ckptd.checkpoint.torch.nearby import Nearby

    _wrap(copying.Snapshot, "copy_now", "copy_now")
    _wrap(copying.Snapshot, "copy_rest", "copy_rest")
    _wrap(copying, "_copy", "unit")
    _wrap(Slot, "seal", "slot_seal")
    _wrap(WriterClient, "begin", "begin")
    _wrap(WriterClient, "seal", "seal")
    _wrap(WriterClient, "_count_share", "reached")
    _wrap(WriterClient, "_complete", "complete")
    _wrap(Lineage, "_claim", "claim")
    _wrap(Nearby, "exchange", "meet")
    _wrap(Nearby, "sources", "sources")
    _wrap(loader.Loader, "_load_one", "load_one")
    _wrap(loader, "execute", "fetch")


def hook_agent() -> None:
    """Make the points of an agent; once, in its own process."""
    import ckptd.checkpoint.root.gc as gc
    import ckptd.checkpoint.save.commit as commit
    import ckptd.checkpoint.save.uploader as uploader
    import ckptd.checkpoint.save.writer as worker
    from ckptd.checkpoint.root.catalogue import Catalogue
    from ckptd.checkpoint.save.agentmemory import AgentMemoryStore
    from ckptd.checkpoint.save.neartiers import NodeTiers

    worker.ORPHAN_COMMIT_S = ORPHAN_S
    _hook_stores()
    _wrap(worker, "stage_shard", "digest")
    _wrap(gc, "apply_retention", "retention")
    _wrap(worker.SaveWriter, "_promote", "promote")
    _wrap(AgentMemoryStore, "keep", "keep")
    _wrap(AgentMemoryStore, "adopt", "adopt")
    _wrap(AgentMemoryStore, "put", "shelf_put")
    _wrap(AgentMemoryStore, "_put_guest", "guest")
    _wrap(uploader, "put_shard", "to_peer")
    _wrap(worker, "drain", "share")
    _wrap(commit, "gather_parts", "gather")
    _wrap(Catalogue, "publish", "publish")
    _wrap(NodeTiers, "completed", "completed")


def _start_hooked(scene: Scene, node: int) -> None:
    """Let agents that a trainer starts have hooks as well."""
    import ckptd.base.runtime.agentlink as agentlink

    popen = subprocess.Popen

    def start(command: list[str], **named: Any) -> Any:
        python, *rest = command
        assert rest[:2] == ["-m", "ckptd.checkpoint.agent"], rest
        code = "from tests.checkpoint.crash.tiers.moments import main; main()"
        os.environ[_SCENE] = f"{node} {scene.folder}"
        return popen([python, "-c", code, *rest[2:]], **named)

    agentlink.subprocess = types.SimpleNamespace(  # type: ignore[attr-defined]
        Popen=start, DEVNULL=subprocess.DEVNULL
    )


def main() -> None:
    """Be an agent that a trainer started."""
    from ckptd.checkpoint.agent.__main__ import main as be_agent

    node, _, folder = os.environ[_SCENE].partition(" ")
    hook_agent()
    enter(Scene(folder), f"agent-{node}", int(node))
    be_agent()
