"""Kill a rank while its save is under way, and prove that it was."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import msgspec
import psutil

from ckptd.errors import CkptdError, DeadlineError
from ckptd.format.names import file_key, parse_commit_name, parse_data_folder
from ckptd.train.demo.launch import Life, wait_until

__all__ = ["Kill", "commit_exists", "kill_in_save"]

_HEADER_LENGTH_BYTES = 8
_READ_BYTES = 1 << 20


class Kill(msgspec.Struct, frozen=True):
    """What the kill hit, as seen from outside.

    Attributes
    ----------
    step
        Of the interrupted save.
    rank, pid, worker_pid
        The killed rank, its process, and the process that wrote for it, killed with it.
    file
        The rank's data file, relative to the root.
    file_bytes
        Its length at the moment of the kill, above zero.
    data_bytes_seen
        Bytes of its data section, from the first one on, that had reached the file by then.
    commit_before, commit_at, commit_after
        Whether the commit record existed just before the kill, just after it, and when every
        process of that life had ended. All three are False when the demo holds.
    """

    step: int
    rank: int
    pid: int
    worker_pid: int
    file: str
    file_bytes: int
    data_bytes_seen: int
    commit_before: bool
    commit_at: bool
    commit_after: bool

    @property
    def landed(self) -> bool:
        """Whether the kill fell between the first data byte and the commit."""
        commits = self.commit_before or self.commit_at or self.commit_after
        return self.data_bytes_seen > 0 and not commits


def kill_in_save(life: Life, root: Path, step: int, rank: int, deadline_s: float) -> Kill:
    """Kill `rank` and its writer by SIGKILL once data bytes of its save of `step` are on disk.

    Returns when every process of that life has ended.

    Raises
    ------
    DeadlineError
        The save did not begin, or the processes did not end.
    CkptdError
        The job ended before the save began.
    """

    def look() -> tuple[Path, psutil.Process, psutil.Process] | None:
        if life.process.poll() is not None:
            raise life.failed(CkptdError(f"{life.name} ended early", kind="demo-run"))
        process, worker = life.ranks().get(rank), life.workers().get(rank)
        file = _data_file(root, step, rank)
        if process is None or worker is None or file is None or not _data_bytes(file):
            return None
        return file, process, worker

    target = wait_until(look, deadline_s)
    if target is None:
        raise life.failed(
            DeadlineError(f"no data byte of step {step} by rank {rank}", wanted=f"{deadline_s:g} s")
        )
    file, process, worker = target
    before = commit_exists(root, step)
    for victim in (worker, process):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
    at, size, seen = commit_exists(root, step), file.stat().st_size, _data_bytes(file)
    _await_end(life, deadline_s)
    return Kill(
        step=step,
        rank=rank,
        pid=process.pid,
        worker_pid=worker.pid,
        file=file.relative_to(root).as_posix(),
        file_bytes=size,
        data_bytes_seen=seen,
        commit_before=before,
        commit_at=at,
        commit_after=commit_exists(root, step),
    )


def commit_exists(root: Path, step: int) -> bool:
    """Whether any generation has committed `step`."""
    names = (parse_commit_name(path.name) for path in (root / "commits").glob("*"))
    return any(name is not None and name.step == step for name in names)


def _await_end(life: Life, deadline_s: float) -> None:
    """Wait for torchrun, the other ranks and the processes that write for them."""
    life.wait(deadline_s)
    if wait_until(lambda: not (life.ranks() or life.workers()) or None, deadline_s) is None:
        left = [*life.ranks().values(), *life.workers().values()]
        raise life.failed(
            DeadlineError(
                "processes outlived their job",
                where=", ".join(str(process.pid) for process in left),
                wanted=f"an end within {deadline_s:g} s",
            )
        )


def _data_file(root: Path, step: int, rank: int) -> Path | None:
    for folder in (root / "data").glob("*"):
        parsed = parse_data_folder(folder.name)
        if parsed is not None and parsed[0].step == step:
            file = root / file_key(f"data/{folder.name}/", rank)
            return file if file.exists() else None
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
