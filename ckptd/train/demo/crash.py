"""Kill a rank while its save is under way, and prove that it was."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from ckptd.errors import CkptdError, DeadlineError
from ckptd.format.names import CommitName, commit_key, file_key, parse_data_folder
from ckptd.train.demo.launch import Life, wait_until

__all__ = ["Kill", "kill_in_save"]

_HEADER_LENGTH_BYTES = 8
_READ_BYTES = 1 << 20


class Kill(msgspec.Struct, frozen=True):
    """What the kill hit, as seen from outside.

    Attributes
    ----------
    step, generation
        Of the interrupted save.
    rank, pid, worker_pid
        The killed rank, its process, and the process that wrote for it, killed with it.
    file
        The rank's data file, relative to the root.
    file_bytes
        Its length at the moment of the kill.
    data_bytes_seen
        Bytes of its data section, from the first one on, that had reached the file by then.
    commit_before, commit_at, commit_after, commit_end
        Whether the commit record existed just before the kill, just after it, when torchrun had
        ended, and when the whole demo had ended with every process of that life. All are False
        when the demo holds; one that was not looked for counts as True.
    """

    step: int
    generation: int
    rank: int
    pid: int
    worker_pid: int
    file: str
    file_bytes: int
    data_bytes_seen: int
    commit_before: bool
    commit_at: bool
    commit_after: bool
    commit_end: bool = True

    @property
    def landed(self) -> bool:
        """Whether the kill fell between the first data byte and the commit."""
        return self.data_bytes_seen > 0 and not self.committed

    @property
    def committed(self) -> bool:
        """Whether the interrupted save was ever seen committed."""
        return self.commit_before or self.commit_at or self.commit_after or self.commit_end

    def at_the_end(self, root: Path) -> Kill:
        """Return this with a last look for the commit record."""
        exists = _commit_exists(root, CommitName(self.step, self.generation))
        return msgspec.structs.replace(self, commit_end=exists)


class _Target(NamedTuple):
    """A save under way: its name, the rank's data file, the rank and its writing process."""

    name: CommitName
    file: Path
    rank: psutil.Process
    worker: psutil.Process


def kill_in_save(
    life: Life, root: Path, step: int, previous: int, rank: int, deadline_s: float
) -> Kill:
    """Kill `rank` and its writer by SIGKILL once data bytes of its save of `step` are on disk.

    The save of step `previous` is committed by then: it is what a resume has to find. Returns when
    torchrun and the other ranks have ended. The processes that write for them may live on: what was
    handed to them they write, and they wait a while for the part that will never come.

    Raises
    ------
    DeadlineError
        The save did not begin, or torchrun did not end.
    CkptdError
        The job ended before the save began.
    """
    target = wait_until(lambda: _look(life, root, step, previous, rank), deadline_s)
    if target is None:
        raise life.failed(
            DeadlineError(f"no data byte of step {step} by rank {rank}", wanted=f"{deadline_s:g} s")
        )
    before = _commit_exists(root, target.name)
    for victim in (target.worker, target.rank):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
    at = _commit_exists(root, target.name)
    size, seen = target.file.stat().st_size, _data_bytes(target.file)
    life.wait(deadline_s)
    return Kill(
        step=step,
        generation=target.name.generation,
        rank=rank,
        pid=target.rank.pid,
        worker_pid=target.worker.pid,
        file=target.file.relative_to(root).as_posix(),
        file_bytes=size,
        data_bytes_seen=seen,
        commit_before=before,
        commit_at=at,
        commit_after=_commit_exists(root, target.name),
    )


def _look(life: Life, root: Path, step: int, previous: int, rank: int) -> _Target | None:
    if life.process.poll() is not None:
        raise life.failed(CkptdError(f"{life.name} ended early", kind="demo-run"))
    process, worker = life.ranks().get(rank), life.workers().get(rank)
    found = _data_file(root, step, rank)
    if process is None or worker is None or found is None or not _data_bytes(found[1]):
        return None
    name, file = found
    if not _commit_exists(root, CommitName(previous, name.generation)):
        return None
    return _Target(name, file, process, worker)


def _commit_exists(root: Path, name: CommitName) -> bool:
    return (root / commit_key(name)).exists()


def _data_file(root: Path, step: int, rank: int) -> tuple[CommitName, Path] | None:
    for folder in (root / "data").glob("*"):
        parsed = parse_data_folder(folder.name)
        if parsed is not None and parsed[0].step == step:
            file = root / file_key(f"data/{folder.name}/", rank)
            return (parsed[0], file) if file.exists() else None
    return None


def _data_bytes(file: Path) -> int:
    """Return how far from its start the data section of `file` has bytes other than zero.

    Space is allocated before it is written, so the length of the file proves nothing; but weights
    and moments are hardly ever zero.
    """
    with file.open("rb") as stream:
        head = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
        if head == 0:
            return 0
        stream.seek(_HEADER_LENGTH_BYTES + head)
        end = at = 0
        while block := stream.read(_READ_BYTES):
            at += len(block)
            if kept := block.rstrip(b"\0"):
                end = at - len(block) + len(kept)
        return end
