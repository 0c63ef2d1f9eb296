"""The processes of a node: when its zygote is ready, and what is seen of it."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from ckptd.base.runtime.channel import SocketChannel
from ckptd.elastic.launchers import workerpool as module
from ckptd.elastic.launchers.output import Output
from ckptd.elastic.launchers.slots import NodeSlots
from ckptd.elastic.launchers.workerpool import Program, WorkerPool
from ckptd.elastic.launchers.workers import Worker
from ckptd.elastic.messages import MOST_BYTES, Attach, Begin, FromWorker, RankAssignment
from ckptd.elastic.policy import Shape
from ckptd.elastic.workerend import WorkerEnd
from tests.processes import until

pytestmark = pytest.mark.forks("small", "all")


@contextmanager
def a_pool(
    folder: Path, *argv: str, plain: bool
) -> Iterator[tuple[WorkerPool, Callable[..., None]]]:
    selector = selectors.DefaultSelector()
    pool = WorkerPool(
        Program(mode="script", argv=argv, environ=dict(os.environ), plain=plain),
        Output(None, folder, "j", "default"),
        selector,
        lambda _: None,
        lambda *_: None,
        lambda _: None,
        lambda _: None,
        NodeSlots(2, {}),
    )

    def turn() -> None:
        for key, _ in selector.select(0.05):
            key.data()

    try:
        yield pool, partial(until, turn=turn)
    finally:
        pool.close()
        selector.close()


def zygote() -> psutil.Process:
    (found,) = [
        p
        for p in psutil.Process().children()
        if p.status() != psutil.STATUS_ZOMBIE
        and any("ckptd.elastic.torch.session.zygote" in word for word in p.cmdline())
    ]
    return found


@pytest.mark.forks
@pytest.mark.parametrize("plain", [True, pytest.param(False, marks=pytest.mark.long)])
def test_it_is_ready_when_its_zygote_is_and_shows_what_runs(tmp_path: Path, plain: bool) -> None:
    with a_pool(tmp_path, "a folder/train.py", "--lr", "1", plain=plain) as (pool, wait):
        assert not pool.ready
        wait(lambda: pool.ready)
        assert zygote().cmdline()[-3:] == ["a folder/train.py", "--lr", "1"]


def test_a_zygote_that_dies_is_not_ready_until_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    with a_pool(tmp_path, "train.py", plain=True) as (pool, wait):
        wait(lambda: pool.ready)
        os.kill(zygote().pid, signal.SIGKILL)
        wait(lambda: not pool.ready)
        wait(lambda: pool.ready)


def test_a_zygote_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_pool(tmp_path, "train.py", plain=True) as (pool, _):
        assert not pool.ready
        monkeypatch.setattr(module, "_UNREADY_S", 0.0)
        assert pool.ready


def test_a_very_long_command_is_shown_in_part(tmp_path: Path) -> None:
    with a_pool(tmp_path, "train.py", *["x" * 100] * 10_000, plain=True) as (pool, wait):
        wait(lambda: pool.ready)
        shown = zygote().cmdline()
        assert "train.py" in shown
        assert sum(map(len, shown)) < 8192


def test_a_job_store_that_is_let_go_of_is_not_read(tmp_path: Path) -> None:
    with a_pool(tmp_path, "train.py", plain=True) as (pool, _):
        pool._start_host(1, "127.0.0.1")
        host = pool._host
        assert host is not None
        pool._end_host()  # a new generation begins
        pool._read_port(host)  # what was found readable before that


def test_ranks_are_started_without_files_where_none_can_be_made(tmp_path: Path) -> None:
    with a_pool(tmp_path, "train.py", plain=True) as (pool, _):
        (tmp_path / "logs" / "taken").touch()
        pool._output.folder = tmp_path / "logs" / "taken"
        assert pool._streams(0, 0).stdout == pool._streams(0, 0).error_file == ""


@pytest.mark.parametrize(
    ("kinds", "local_ranks"),
    [((), {0: 0, 2: 2, 3: 1}), (("NVIDIA",), {0: 0, 2: 2})],
    ids=["hosts alone", "devices"],
)
def test_a_process_keeps_its_local_rank_and_with_it_its_device(
    kinds: tuple[str, ...],
    local_ranks: dict[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four the second dies, and the next generation has three ranks here."""
    monkeypatch.setattr(module, "accelerators_here", lambda: kinds)
    with a_pool(tmp_path, "train.py", plain=True) as (pool, _):
        forked: list[int] = []
        monkeypatch.setattr(
            pool, "_fork", lambda begin, seat, local_rank: forked.append(local_rank)
        )
        ours, theirs = socket.socketpair()
        channel = SocketChannel(ours, FromWorker, MOST_BYTES)
        end = WorkerEnd(channel, 0, Attach(0, 0, 1, True))
        for number in (0, 2, 3):
            worker = Worker(
                number, 1, RankAssignment(number, number, 0, number, 0), number, session=True
            )
            worker.out, worker.end = True, end
            pool.workers.add(worker)
        seats = tuple(RankAssignment(slot, rank, 0, rank, 0) for rank, slot in enumerate((0, 2, 3)))
        shape = Shape(1, 3, 1)
        pool.start(
            Begin(
                generation=2,
                level=0,
                shape=shape,
                step=0,
                reason="a test",
                nodes=1,
                node_rank=0,
                seats=seats,
                world=3,
            ),
            "127.0.0.1",
        )
        seated = {w.number: w.local_rank for w in pool.workers.live() if w.generation == 2}
        assert seated == local_ranks
        assert sorted([*seated.values(), *forked]) == [0, 1, 2], "as torchrun and Slurm promise"
        for worker in pool.workers.live():
            worker.dead = True  # it was never there
        theirs.close()
        channel.close()
