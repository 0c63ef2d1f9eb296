"""A node's launcher with a real controller, real ranks, and whatever dies killed by SIGKILL."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cli.running import COMMAND
from tests.processes import LEASE_S, PATIENCE_S, free_port, lives, stop, until

pytestmark = pytest.mark.forks("small", "all")

TRAIN = """\
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
world = f"rank {dist.get_rank()} of {dist.get_world_size()}"
generation = os.environ["CKPTD_GENERATION"]
step = 0
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 0:
        print(f"{world}: step 0 of {generation} in {os.getpid()}", flush=True)
    step += 1
    go_on = torch.tensor(float(not os.path.exists(sys.argv[1]) or step < 3))
    dist.all_reduce(go_on)  # all end at the same step
    if not go_on:
        break
    time.sleep(0.02)
print(f"{world}: done", flush=True)
del model  # before its group: see docs/guide/in-process.md
dist.destroy_process_group()
"""

LEASE = ("--set", f"lease_s={LEASE_S:g}")


class Launched:
    """A ``ckptd run`` and all that it has started."""

    def __init__(self, folder: Path, name: str, *flags: str, argv: tuple[str, ...] = ()) -> None:
        self.log = folder / f"{name}.log"
        self.end_file = folder / "end"
        script = folder / "train.py"
        script.write_text(TRAIN)
        command = argv or (str(script), str(self.end_file))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "run", "--no-watch", "--node", name, *LEASE, *flags, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self.seen: dict[int, psutil.Process] = {}

    def text(self) -> str:
        self.look()
        return self.log.read_text()

    def look(self) -> None:
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.seen.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            return

    def ranks(self, generation: int) -> list[int]:
        """Processes that have made their first step in that generation or a later one."""
        found = re.findall(r"rank (\d+) of \d+: step 0 of (\d+) in (\d+)", self.text())
        return [int(pid) for _, number, pid in sorted(found) if int(number) >= generation]

    def child(self, word: str) -> int:
        self.look()
        for pid, process in self.seen.items():
            if lives(pid) and any(word in part for part in process.cmdline()):
                return pid
        raise AssertionError(f"no {word} runs")

    def finish(self) -> int:
        self.end_file.touch()
        self.look()
        return self.process.wait(PATIENCE_S)

    def nothing_is_left(self) -> bool:
        return not any(lives(pid) for pid in self.seen)


def trains(launched: Launched, ranks: int, generation: int = 1) -> list[int]:
    def found() -> list[int]:
        pids = launched.ranks(generation)
        return pids if len(pids) >= ranks else []

    pids: list[int] = until(found, launched.text)
    return pids


def clean(launched: Launched) -> None:
    until(launched.nothing_is_left, launched.text)


@pytest.mark.dist
def test_a_rank_is_killed_and_all_go_on(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "n", "--nproc-per-node", "2")
    first = trains(launched, 2)
    os.kill(first[1], signal.SIGKILL)
    second = trains(launched, 2, generation=2)
    assert not set(first) & set(second)
    assert launched.finish() == 0, launched.text()
    assert launched.text().count("of 2: done") == 2
    assert f"(process {first[1]}) has ended: SIGKILL" in launched.text()
    clean(launched)


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("who", ["zygote", "controller", "job store"])
def test_what_helps_the_ranks_is_killed(tmp_path: Path, who: str) -> None:
    launched = Launched(tmp_path, "n", "--nproc-per-node", "2", "--set", "broken_s=0")
    first = trains(launched, 2)
    if who == "job store":
        zygote = psutil.Process(launched.child("ckptd.elastic.torch.session.zygote"))
        victim = next(p.pid for p in zygote.children() if p.pid not in first)
    else:
        victim = launched.child(
            {"zygote": "ckptd.elastic.torch.session.zygote"}.get(who, "controller")
        )
    os.kill(victim, signal.SIGKILL)
    if who == "controller":
        until(lambda: "another one is started" in launched.text(), launched.text)
        os.kill(first[0], signal.SIGKILL)  # and the next one acts
    trains(launched, 2, generation=2)
    assert launched.finish() == 0, launched.text()
    clean(launched)


@pytest.mark.dist
@pytest.mark.long
def test_a_launcher_is_killed_and_nothing_is_left(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "n", "--nproc-per-node", "2")
    trains(launched, 2)
    launched.look()
    launched.process.kill()
    launched.process.wait(PATIENCE_S)
    clean(launched)


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("host", [False, True], ids=["a member", "the controller's host"])
def test_a_node_is_lost_and_the_other_goes_on(tmp_path: Path, host: bool) -> None:
    port = free_port()
    meet = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--job", tmp_path.name)
    a = Launched(tmp_path, "a", *meet)
    until(lambda: _has_controller(a), a.text)
    b = Launched(tmp_path, "b", *meet)
    trains(a, 1)
    trains(b, 1)
    lost, kept = (a, b) if host else (b, a)
    lost.look()
    lost.process.kill()
    lost.process.wait(PATIENCE_S)
    until(lambda: "rank 0 of 1: step 0" in kept.text(), kept.text)
    clean(lost)
    assert kept.finish() == 0, kept.text()
    clean(kept)


@pytest.mark.dist
@pytest.mark.long
def test_another_machine_stands_in_for_a_lost_controller(tmp_path: Path) -> None:
    """Where a shared log tells where the next controller is, no port is needed in common."""
    log = f"file://{tmp_path}/log"
    meet = ("--nnodes", "1:2", "--log", log, "--job", tmp_path.name)
    a = Launched(tmp_path, "a", *meet)
    until(lambda: (tmp_path / "log").exists(), a.text)
    b = Launched(tmp_path, "b", *meet)
    trains(a, 1)
    trains(b, 1)
    holder = a if _has_controller(a) else b
    other = b if holder is a else a
    holder.process.kill()
    holder.process.wait(PATIENCE_S)
    until(lambda: "rank 0 of 1: step 0" in other.text(), other.text)
    assert other.finish() == 0, other.text()
    clean(other)
    clean(holder)


def _has_controller(launched: Launched) -> bool:
    for process in _running(launched):
        with suppress(psutil.Error):  # it has ended since
            if any("controller" in word for word in process.cmdline()):
                return True
    return False


def _running(launched: Launched) -> list[psutil.Process]:
    launched.look()
    return [p for pid, p in launched.seen.items() if lives(pid)]


@pytest.mark.dist
@pytest.mark.long
def test_a_stopped_rank_is_fenced_when_that_is_ordered(tmp_path: Path) -> None:
    job = tmp_path.name
    launched = Launched(tmp_path, "n", "--nproc-per-node", "2", "--job", job)
    first = trains(launched, 2)
    stop(first[0])
    subprocess.run([*COMMAND, "ctl", "restart", "--job", job], check=True, timeout=PATIENCE_S)
    trains(launched, 2, generation=2)
    assert not lives(first[0])
    assert launched.finish() == 0, launched.text()
    clean(launched)


@pytest.mark.dist
@pytest.mark.long
def test_a_launcher_that_was_stopped_for_long_kills_before_anything_else(tmp_path: Path) -> None:
    lease = ("--set", "lease_s=3", "--set", "silent_s=2")
    launched = Launched(tmp_path, "n", "--nproc-per-node", "2", *lease)
    first = trains(launched, 2)
    stop(launched.process.pid)
    # Ranks end by themselves when the lease has expired, before their next step.
    until(lambda: not any(map(lives, first)), launched.text)
    os.kill(launched.process.pid, signal.SIGCONT)
    until(lambda: "the lease has expired" in launched.log.read_text(), launched.text)
    trains(launched, 2, generation=2)
    assert launched.finish() == 0, launched.text()
    clean(launched)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("early", [False, True])
def test_a_signal_ends_it_in_good_order(
    tmp_path: Path, number: signal.Signals, code: int, early: bool
) -> None:
    launched = Launched(tmp_path, "n", "--nproc-per-node", "2")
    if early:
        until(lambda: "ckptd: generation" in launched.text(), launched.text)
    else:
        trains(launched, 2)
    launched.look()
    launched.process.send_signal(number)
    assert launched.process.wait(PATIENCE_S) == code, launched.text()
    assert "this node has left the job" in launched.text()
    clean(launched)


@pytest.mark.long
def test_who_fails_each_time_is_given_up(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys; sys.exit(9)")
    flags = ("--max-restarts", "0")
    launched = Launched(tmp_path, "n", *flags, argv=(str(script),))
    assert launched.process.wait(PATIENCE_S) == 9, launched.text()
    clean(launched)


@pytest.mark.long
def test_commands_and_files(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    flags = ("--no-python", "--nproc-per-node", "2", "--log-dir", str(logs), "--tee", "3")
    argv = ("bash", "-c", "echo out $RANK; echo err $RANK >&2")
    launched = Launched(tmp_path, "n", *flags, argv=argv)
    assert launched.process.wait(PATIENCE_S) == 0, launched.text()
    for rank in range(2):
        (out,) = logs.glob(f"*/attempt_0/{rank}/stdout.log")
        assert out.read_text() == f"out {rank}\n"
        assert f"[default{rank}]:out {rank}" in launched.text()
        assert f"[default{rank}]:err {rank}" in launched.text()
