"""One rank of a job with near tiers, without torch: talks to a real agent of its node."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ckptd.base.runtime.agentlink import AgentPlace
from ckptd.base.runtime.ranks import Board, LocalBoard
from ckptd.checkpoint.load.union import UnionSource
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.client import AgentSpec, WriterClient
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.save.messages import Partner, SaveRequest
from ckptd.checkpoint.save.recover import complete_snapshots
from ckptd.checkpoint.save.structure import SavePlan
from ckptd.checkpoint.save.tiers import TierSpec
from ckptd.store import StoreSpec, open_store
from ckptd.store.base import ThrottleSpec
from tests.checkpoint.save.saving import fill, plan_of, values
from tests.processes import PATIENCE_S

__all__ = ["NearJob", "Trainer", "newest_at", "values"]


def newest_at(root: str) -> int:
    """Return the newest step that is committed at a root; 0 without one."""
    latest = Catalogue(open_store(root)).latest()
    return 0 if latest is None else latest.step


class NearJob:
    """One rank of a job.

    Parameters
    ----------
    tiers
        Names; ``local`` needs `folder`.
    bind
        Where agents of other nodes reach this one's.
    throttle
        Bytes a second that are written to the root.
    """

    def __init__(
        self,
        root: str,
        *,
        node: str = "n0",
        tiers: Sequence[str] = ("memory",),
        folder: str = "",
        board: Board | None = None,
        generation: int | None = None,
        agent_ttl_s: float = 60.0,
        bind: str = "",
        slots: int | None = 2,
        name: str | None = None,
        throttle: float | None = None,
    ) -> None:
        self.board = board or LocalBoard()
        self.plan: SavePlan = plan_of(world=self.board.world)
        self.catalogue = Catalogue(open_store(root))
        self.catalogue.create_or_open()
        if generation is None:
            generation = self.catalogue.claim(self.catalogue.latest(), 1, "test").generation
        self.generation = generation
        self.near = tuple(tiers)
        specs = tuple(
            TierSpec(tier, 2, StoreSpec(folder) if tier == "local" else None) for tier in tiers
        )
        self.place = AgentPlace(name or root, node)
        agent = AgentSpec(self.place, specs, agent_ttl_s, bind)
        spec = StoreSpec(root)
        if throttle is not None:
            spec = spec.wrapped(ThrottleSpec(write_bytes_per_s=throttle))
        self.client = WriterClient(spec, self.board, None, slots, agent)
        self.attempts = 0

    @property
    def agent(self) -> int:
        """Process id of the agent."""
        return self.client.answer().pid

    def meet(self, other: NearJob) -> None:
        """Make another node's agent keep this one's shares."""
        answer = other.client.answer()
        self.client.set_peers(Partner(answer.memory, answer.secret))

    def save(
        self,
        step: int,
        arrays: Mapping[str, Any] | None = None,
        *,
        near: Sequence[str] | None = None,
        root: bool = False,
        staged: bool = True,
    ) -> SaveTracker:
        """Begin a save; without `staged` only half of it is copied."""
        self.attempts += 1
        save = SaveRequest(
            job=self.client.next_job(),
            step=step,
            generation=self.generation,
            attempt=f"{self.attempts:04d}",
            plan=self.plan.digest,
            extra=(),
            objects=(),
            metadata={},
            keep=None,
            timeout_s=PATIENCE_S,
            near=self.near if near is None else tuple(near),
            root=root,
        )
        total = self.plan.filemap.data_bytes(self.board.rank)
        handle = SaveTracker(step, self.generation, save.attempt, total, near=save.near, root=root)
        slot = self.client.acquire(total, PATIENCE_S)
        self.client.begin(save, self.plan, handle, f"save/{step}/{save.attempt}", slot)
        end = fill(self.plan, self.board.rank, arrays or values(step), slot.data)
        slot.staged = end if staged else end // 2
        if staged:
            self.client.seal(save.job, slot)
        return handle

    def snapshots(self, *others: NearJob) -> list[int]:
        """Return the steps of which the memories of these nodes hold everything."""
        sources = [
            UnionSource(StoreSpec(job.client.answer().here).open(), "memory")
            for job in (self, *others)
        ]
        try:
            return [s.step for s in complete_snapshots(sources)]
        finally:
            for source in sources:
                source.store.close()

    def close(self) -> None:
        """Say goodbye."""
        self.client.close(PATIENCE_S)


class Trainer:
    """A trainer in a process of its own, to be killed: runs `body`, with a `NearJob` as ``job``.

    ``say(x)`` in it is what `hear` returns.
    """

    def __init__(self, root: str, body: str, **options: Any) -> None:
        code = "from tests.processes import until\nfrom tests.checkpoint.save.nearjob import *\n"
        code += "def say(x): print(x, flush=True)\n"
        code += f"job = NearJob({root!r}, **{options!r})\n" + textwrap.dedent(body)
        code += "\nimport sys; sys.stdin.read()\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        """Return the next line that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the trainer ended"
        return line

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
