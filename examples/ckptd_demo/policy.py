"""The demo's policy: trained on some ranks, sampled from on others; a kill, and what holds."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import msgspec
import psutil

from ckptd.errors import CkptdError, DeadlineError
from ckptd_demo.policyjob import (
    END,
    LAST,
    STOP,
    TP,
    AppliedRow,
    PolicySpec,
    PublishedRow,
    applied_file,
    published_file,
    told_to,
)
from ckptd_demo.policyjob import main as be_rank
from ckptd_demo.processes import free_port, read_rows, wait_until
from ckptd_demo.report import Check, Outage, Policy, PolicyLife
from ckptd_demo.spec import Cut

__all__ = ["PolicyRows", "checks_of_policy", "run_policy"]

FIRST, SECOND = Cut(2, 2), Cut(3)
"""How the trainer is cut before and after it loses a rank."""
_KILLED = 1
_END_S = 20.0
_TAIL_LINES = 25
_PRELOADED = ["ckptd_demo.policyjob", "ckptd.checkpoint.torch", "torch._dynamo"]


class PolicyRows(msgspec.Struct, frozen=True):
    """Reports of the ranks."""

    published: list[PublishedRow]
    applied: list[list[AppliedRow]]

    @staticmethod
    def of(folder: Path) -> PolicyRows:
        """Read it as far as it is there."""
        applied = [read_rows(applied_file(folder, rank), AppliedRow) for rank in range(TP)]
        return PolicyRows(read_rows(published_file(folder), PublishedRow), applied)


class _Group:
    """The ranks of one start of a role."""

    def __init__(
        self, folder: Path, role: str, life: int, cut: Cut, to: str, steps: int = 0
    ) -> None:
        self.name = f"{role}-{life}"
        self._folder = folder
        self.processes: list[ForkServerProcess] = []
        self._seen: list[psutil.Process] = []
        port = free_port()
        # Forked off one that has imported torch: eleven imports would take most of the time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        for rank in range(cut.ranks):
            path = folder / f"{self.name}-{rank}.json"
            spec = PolicySpec(str(folder), role, life, rank, cut.ranks, port, cut, steps, to)
            path.write_bytes(msgspec.json.encode(spec))
            process = context.Process(target=be_rank, args=(str(path), str(self._log(rank))))
            process.start()
            self.processes.append(process)
            with contextlib.suppress(psutil.NoSuchProcess):  # it has failed: `ended` says so
                self._seen.append(psutil.Process(process.pid))

    def _log(self, rank: int) -> Path:
        return self._folder / f"{self.name}-{rank}.log"

    def ended(self) -> bool:
        """Whether all of them have; one that failed is an error."""
        codes = [p.exitcode for p in self.processes]
        for rank, code in enumerate(codes):
            if code:
                raise self.failed(rank, CkptdError(f"{self.name} failed", found=code))
        return None not in codes

    def failed(self, rank: int, error: CkptdError) -> CkptdError:
        """Return an error with the end of a log."""
        lines = self._log(rank).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        error.add_note("\n".join([str(self._log(rank)), *lines]))
        return error

    def end(self) -> None:
        """End what is left, with what it started."""
        found: list[psutil.Process] = []
        for process in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process, *process.children(recursive=True)]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=_END_S)


def run_policy(
    folder: Path, steps: int, deadline_s: float, say: Callable[[str], None], to: str = ""
) -> tuple[Policy, PolicyRows]:
    """Train and sample; kill a rank of the rollout, then go on with a trainer of fewer ranks.

    Parameters
    ----------
    steps
        Fewest of each life of the trainer.
    to
        URL of a store that weights go through; empty: connections.

    Raises
    ------
    CkptdError, DeadlineError
        Some process failed, or something did not happen within `deadline_s` seconds.
    """
    folder.mkdir(parents=True)
    begun = time.monotonic()
    with _groups() as start:
        say(f"policy: {FIRST} trains, a rollout of TP {TP} samples")
        trainer = start(_Group(folder, "trainer", 1, FIRST, to, steps))
        rollout = start(_Group(folder, "rollout", 1, Cut(1, TP), to))

        def until(what: str, look: Callable[[PolicyRows], object]) -> None:
            def seen() -> bool | None:
                for group in (trainer, rollout):
                    group.ended()
                return bool(look(PolicyRows.of(folder))) or None

            left = deadline_s - (time.monotonic() - begun)
            if wait_until(seen, max(0.0, left)) is None:
                error = DeadlineError(f"not seen: {what}", wanted=f"{deadline_s:g} s in all")
                raise trainer.failed(0, rollout.failed(0, error))

        def finish(life: int) -> None:
            told_to(folder, life, LAST).touch()
            until("the last version of a life, applied", lambda r: _all_applied(r, life))
            told_to(folder, life, END).touch()
            until("the trainer's end", lambda r: trainer.ended())

        until("a third version applied", lambda r: min(map(len, r.applied)) >= 3)
        rollout.processes[_KILLED].kill()
        killed_at = time.time()
        say(f"policy: rank {_KILLED} of the rollout is killed; the trainer goes on")
        rollout.end()
        rollout = start(_Group(folder, "rollout", 2, Cut(1, TP), to))
        until("the rollout back", lambda r: all(a[-1].life == 2 for a in r.applied))
        say("policy: the rollout is back")
        finish(1)
        say(f"policy: the trainer goes on as {SECOND}, from its checkpoint")
        trainer = start(_Group(folder, "trainer", 2, SECOND, to, steps))
        finish(2)
        (folder / STOP).touch()
        until("the rollout's end", lambda r: rollout.ended())
    rows = PolicyRows.of(folder)
    return _told(rows, killed_at, to), rows


def _all_applied(rows: PolicyRows, life: int) -> bool:
    """Whether every rank of the rollout holds the last weights of a life."""
    newest = rows.published[-1]
    if not newest.last or newest.life != life:
        return False
    return all(a[-1].step == newest.step and a[-1].at > newest.at for a in rows.applied)


@contextlib.contextmanager
def _groups() -> Iterator[Callable[[_Group], _Group]]:
    """Give a function that notes what is to be ended on leaving."""
    known: list[_Group] = []

    def note(group: _Group) -> _Group:
        known.append(group)
        return group

    try:
        yield note
    finally:
        for group in known:
            group.end()


def _told(rows: PolicyRows, killed_at: float, to: str) -> Policy:
    every = [row for applied in rows.applied for row in applied]
    wanted = {(r.life, r.step): r.logits for r in rows.published}
    epochs = list(dict.fromkeys(row.epoch for row in every))
    lives = []
    for life in (1, 2):
        mine = [r for r in rows.published if r.life == life]
        rewards = [r.reward for r in mine if r.reward is not None]
        lives.append(
            PolicyLife(
                str(FIRST if life == 1 else SECOND),
                mine[0].ranks,
                mine[0].step,
                mine[-1].step,
                len([r for r in mine if not r.skipped]),
                rewards[0],
                rewards[-1],
                max(r.seconds for r in mine[1:]),
            )
        )
    first = [next(r for r in applied if r.life == 2) for applied in rows.applied]
    newest = max(r.step for r in rows.published if r.at < killed_at)
    return Policy(
        lives=lives,
        versions=len({(row.epoch, row.number) for row in every}),
        equal=sum(
            row.logits == wanted[epochs.index(row.epoch) + 1, row.step][row.rank] for row in every
        ),
        applied=len(every),
        together=[
            [(r.epoch, r.number) for r in rows.applied[0] if r.life == life]
            == [(r.epoch, r.number) for r in rows.applied[1] if r.life == life]
            for life in (1, 2)
        ],
        outage=Outage(
            _KILLED,
            max(f.at for f in first) - killed_at,
            len([r for r in rows.published if killed_at < r.at < min(f.at for f in first)]),
            first[0].step,
            newest,
        ),
        bytes_needed=sum(row.bytes_needed for row in every),
        bytes_moved=sum(row.bytes_moved for row in every),
        bytes_unchanged=sum(row.bytes_unchanged for row in every),
        lag_s=sorted(row.lag_s for row in every)[len(every) // 2],
        most_lag_s=max(row.lag_s for row in every),
        to=to,
    )


def checks_of_policy(told: Policy) -> list[Check]:
    """Return what has to hold."""
    out = told.outage
    first, second = told.lives
    return [
        Check(
            f"policy: logits of all {told.applied} versions that ranks took are the trainer's,"
            " bit for bit",
            told.equal == told.applied > 0,
        ),
        Check("policy: both ranks of the rollout took the same versions", all(told.together)),
        Check("policy: the trainer went on while the rollout was gone", out.steps > 0),
        Check(
            "policy: the rollout came back with no older weights than it had",
            out.version >= out.newest,
        ),
        Check(
            f"policy: {second.ranks} ranks went on where {first.ranks} had stopped",
            second.first == first.last,
        ),
        Check(
            "policy: bytes moved are those needed, less what had not changed",
            told.bytes_moved + told.bytes_unchanged == told.bytes_needed or bool(told.to),
        ),
        Check("policy: the reward has grown", second.last_reward > first.first_reward),
    ]
