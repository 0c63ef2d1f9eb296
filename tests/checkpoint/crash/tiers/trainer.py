"""One rank of a torch job that saves to all tiers; its state follows from the step alone."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import ckptd
from ckptd.base.digest import digest_hex
from ckptd.checkpoint.save.handle import SaveHandle
from ckptd.errors import CkptdError, NotFoundError
from tests.checkpoint.crash.tiers.ledger import Begun, Closed, Raised, Restored
from tests.checkpoint.crash.tiers.listening import listen
from tests.checkpoint.crash.tiers.moments import Scene, enter, hook_trainer
from tests.checkpoint.crash.tiers.schedule import LifePlan, Schedule

__all__ = ["RankLife", "State", "be_launcher", "be_trainer", "warm_up"]

_SIZES = (96, 256, 96)
DEADLINE_S = 60.0
_log = logging.getLogger("ckptd.campaign")


class RankLife(msgspec.Struct, frozen=True):
    """What one trainer is to do."""

    scene: str
    schedule: Schedule
    plan: LifePlan
    rank: int

    @property
    def node(self) -> int:
        """Where it runs."""
        return self.plan.nodes[self.rank]

    @property
    def name(self) -> str:
        """By which it is found."""
        return f"trainer-{self.rank}-{self.node}"


class State:
    """A small network and its optimizer; `train` is a function of the step and what was before."""

    def __init__(self, life: int, rank: int) -> None:
        torch.manual_seed(7)
        first, middle, last = _SIZES
        self.model = torch.nn.Sequential(
            torch.nn.Linear(first, middle), torch.nn.Linear(middle, last)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.mark = torch.tensor([life, 0])
        self.seen = ckptd.PerRank({"rank": rank, "step": 0}, on_change="drop")
        self._life = life
        self._random = torch.Generator()

    def tree(self) -> dict[str, Any]:
        """Return what is saved."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "mark": self.mark,
            "seen": self.seen,
        }

    def train(self, step: int) -> None:
        """Take one step."""
        self._random.manual_seed(step)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=self._random)
        self.optimizer.step()
        self.mark = torch.tensor([self._life, step])
        self.seen.value["step"] = step

    def digests(self) -> tuple[str, str]:
        """Return the digest of all that is alike on all ranks, and that of the training alone."""
        raw = bytearray()
        for parameter in self.model.parameters():
            raw += parameter.detach().numpy().tobytes()
            for _, value in sorted(self.optimizer.state[parameter].items()):
                raw += value.numpy().tobytes()
        train = digest_hex(bytes(raw))
        return digest_hex(bytes(raw) + self.mark.numpy().tobytes()), train


def be_trainer(life: RankLife) -> None:
    """Live: load, train, save, close; in a process of its own."""
    scene = Scene(life.scene)
    for name, value in environment(scene, life.node).items():
        os.environ[name] = value
    torch.set_num_threads(1)
    signal.alarm(int(3 * DEADLINE_S))  # nobody waits for ever
    hook_trainer(scene, life.node)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {life.name} %(message)s")
    agent = f"agent-{life.node}"
    listen(scene.ledger, life.plan.number, life.rank, lambda pid: scene.register(agent, pid))
    enter(scene, life.name, life.node)
    _log.info("begins")
    _join(scene, life)
    _log.info("is connected")
    _live(scene, life)
    _log.info("ends after %.2f s of CPU", time.process_time())


def warm_up() -> None:
    """Import what a trainer's first step and save would, which takes seconds: forks have it."""
    for name in ("ckptd.store.local", "ckptd.store.net", "ckptd.store.pack", "psutil"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    State(0, 0).train(1)


def environment(scene: Scene, node: int) -> dict[str, str]:
    """Return what makes a process one of a node of this job."""
    return {
        "CKPTD_NODE": f"n{node}",
        "CKPTD_RUN_DIR": str(scene.folder / "run"),
        "CKPTD_BIND": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }


def _join(scene: Scene, life: RankLife) -> None:
    world = len(life.plan.nodes)
    if world == 1:
        return
    wait = timedelta(seconds=DEADLINE_S)
    port = scene.folder / f"port-{life.plan.number}"
    end = time.monotonic() + DEADLINE_S
    while not port.exists():
        if time.monotonic() > end:
            raise TimeoutError("the launcher has no job store")
        time.sleep(0.002)
    store = dist.TCPStore("127.0.0.1", int(port.read_text()), timeout=wait)
    dist.init_process_group("gloo", store=store, rank=life.rank, world_size=world, timeout=wait)


def be_launcher(scene: Scene, life: int) -> None:
    """Serve the job store of a life, as torchrun does; until this process is killed."""
    signal.alarm(int(3 * DEADLINE_S))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    half = scene.folder / f"port-{life}~"
    half.write_text(str(store.port))
    half.rename(scene.folder / f"port-{life}")
    signal.pause()


def _tiers(scene: Scene, life: RankLife) -> list[Any]:
    made = {
        "memory": lambda every: ckptd.Memory(every=every),
        "peer": lambda every: ckptd.Peer(every=every),
        "local": lambda every: ckptd.Local(
            str(scene.local(life.node)),
            every=every,
            keep=life.schedule.local_keep,
            throttle=life.schedule.throttle,
        ),
    }
    return [made[name](every) for name, every in life.schedule.tiers.items()]


def _live(scene: Scene, life: RankLife) -> None:
    number, rank = life.plan.number, life.rank
    state = State(number, rank)

    def raised(call: str, step: int, error: CkptdError) -> None:
        _log.error("%s raised", call, exc_info=error)
        scene.ledger.write(
            Raised(
                life=number,
                rank=rank,
                call=call,
                step=step,
                kind=error.kind,
                message=str(error)[:500],
            )
        )

    ck = ckptd.Checkpointer(
        scene.root,
        every=life.schedule.root_every,
        tiers=_tiers(scene, life),
        keep=life.schedule.keep,
        storage=ckptd.Storage(throttle=life.schedule.throttle),
        when_failed="warn",
        timeout_s=DEADLINE_S,
    )
    handles: list[SaveHandle] = []
    step = 0
    try:
        _log.info("has a checkpointer")
        first = _load(scene, life, ck, state) + 1
        _log.info("has loaded")
        for step in range(first, first + life.plan.steps):
            state.train(step)
            digest, train = state.digests()
            scene.ledger.write(Begun(life=number, rank=rank, step=step, digest=digest, train=train))
            try:
                handle = ck.save(step, state.tree())
            except CkptdError as error:
                raised("save", step, error)
            else:
                handles += [handle] if handle is not None else []
            time.sleep(life.plan.pause_s)
    except CkptdError as error:
        raised("load", 0, error)
    finally:
        _log.info("closes")
        try:
            ck.close()
        except CkptdError as error:
            raised("close", step, error)
    pending = {
        h.step: tuple(t for t, s in h.tiers.items() if s == "pending")
        for h in handles
        if not h.done
    }
    scene.ledger.write(Closed(life=number, rank=rank, pending=pending, last=step))


def _load(scene: Scene, life: RankLife, ck: ckptd.Checkpointer, state: State) -> int:
    number, rank = life.plan.number, life.rank
    try:
        step = ck.load(state.tree())
    except NotFoundError:
        scene.ledger.write(Restored(life=number, rank=rank, step=0))
        return 0
    report = ck.last_load
    assert report is not None
    writer, marked = (int(n) for n in state.mark)
    assert marked == step, f"the state is of step {marked}, not {step}"
    assert state.seen.value["step"] in (0, step), state.seen
    scene.ledger.write(
        Restored(
            life=number,
            rank=rank,
            step=step,
            generation=report.generation,
            digest=state.digests()[0],
            writer=writer,
            snapshot=report.snapshot,
            sources=dict(report.sources),
        )
    )
    return step
