"""``ckptd watch``: what runs under it ends as it would by itself, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptd.monitor.daemon.client import DaemonClient
from ckptd.monitor.daemon.place import daemons
from tests.cli.running import COMMAND, Cli
from tests.monitor.agent.writers import WRITER
from tests.processes import PATIENCE_S, lives, until

RANKS = f"""
import os, signal, subprocess, sys, time

WRITER = {WRITER!r}
folder, what = os.environ["CKPTD_RINGS"], sys.argv[1]
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
ranks = [
    subprocess.Popen([sys.executable, "-c", WRITER, folder, str(r), "2", "50", "0", ""], **pipes)
    for r in range(2)
]
for rank in ranks:
    rank.stdout.readline()

def say(rank, words):
    ranks[rank].stdin.write(words.encode() + b"\\n")
    ranks[rank].stdin.flush()

print("ranks", *(rank.pid for rank in ranks), flush=True)
if what == "crash":
    sys.stdin.readline()  # by then they are watched
    os.kill(ranks[1].pid, signal.SIGKILL)
    sys.stdin.readline()
if what == "sweep":
    sys.stdin.readline()
    for rank in ranks:
        rank.terminate()
if what == "hang":
    say(0, "more 30000")
    ranks[0].stdout.readline()
    say(0, "wait")
    say(1, "hold")
    sys.stdin.readline()
for number, rank in enumerate(ranks):
    if what == "well":
        say(number, "exit 0")
        rank.wait()
    rank.kill()
    rank.wait()
sys.exit(0 if what == "well" else 9)
"""
"""Two ranks without torch that end well, or of which one dies or hangs."""


def start(*args: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "watch", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )


def done(process: subprocess.Popen[str], words: str | None = None) -> tuple[int, str, str]:
    out, err = process.communicate(words, timeout=PATIENCE_S)
    return process.returncode, out, err


def told() -> Any:
    """Return the incidents of the only daemon here, if there are any by now."""
    for one in daemons(run_folder()):
        return DaemonClient(one.login).get("/incidents")["incidents"]
    return None


def ends_of(pids: list[int]) -> bool:
    """Whether the only daemon here knows the ends of these processes."""
    for one in daemons(run_folder()):
        told = DaemonClient(one.login).get("/ranks")
        alive = dict(zip(told["pid"], told["alive"], strict=True))
        return not any(alive.get(pid, True) for pid in pids)
    return True  # it has gone, since the command has


def both_report() -> bool:
    """Whether the only daemon here hears of two ranks: how one ends is known from then on."""
    return any(
        DaemonClient(one.login).get("/job")["ranks_reporting"] == 2 for one in daemons(run_folder())
    )


def crash(process: subprocess.Popen[str]) -> None:
    """Have a rank killed as soon as both are watched."""
    until(both_report, "two ranks")
    assert process.stdin is not None
    process.stdin.write("now\n")
    process.stdin.flush()
    until(told, "an incident")


def ranks(what: str) -> list[str]:
    return ["--", sys.executable, "-c", RANKS, what]


def run_folder() -> Path:
    return Path(os.environ["CKPTD_RUN_DIR"])


def beside() -> list[int]:
    """Return processes that work in this test's run folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid() and lives(int(name)):
            try:
                env = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if f"CKPTD_RUN_DIR={run_folder()}\0".encode() in env + b"\0":
                found.append(int(name))
    return found


def beside_of(part: str) -> int:
    """Return the process id of the daemon or of the watcher; 0 while there is none."""
    words = {"daemon": b"\0serve\0", "agent": b"ckptd.monitor.agent.watched"}
    for pid in beside():
        with suppress(OSError):
            if words[part] in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def another(part: str, first: int) -> bool:
    return beside_of(part) not in (0, first)


def nothing_is_left() -> None:
    until(lambda: not beside(), "the end of all processes")
    assert list(run_folder().iterdir()) == []


def test_a_job_that_ends_well() -> None:
    code, out, err = done(start(*ranks("well")))
    assert code == 0, err
    assert out.startswith("ranks ")
    assert "is watched: http://127.0.0.1:" in err
    assert "incident" not in err
    nothing_is_left()


def test_a_crash_is_told_and_the_exit_code_is_the_commands() -> None:
    process = start("--json", *ranks("crash"))
    crash(process)
    code, _, err = done(process, "enough\n")
    assert code == 9, err
    said = json.loads(err.splitlines()[-1])
    assert (said["verb"], said["exit_code"]) == ("watch", 9)
    first = said["incidents"][0]
    assert first["kind"] == "crash"
    assert [s["name"] for s in first["verdict"]["suspects"]] == ["1"]
    assert "signal 9" in first["verdict"]["suspects"][0]["detail"]
    nothing_is_left()


@pytest.mark.parametrize("whom", ["one", "all"])
def test_one_that_is_ended_from_outside_is_told_though_its_launcher_ends_the_others(
    whom: str,
) -> None:
    process = start(*ranks("sweep"))
    assert process.stdin is not None
    assert process.stdout is not None
    first, second = map(int, process.stdout.readline().split()[1:])
    until(both_report, "two ranks")
    if whom == "one":
        os.kill(second, signal.SIGTERM)
        until(lambda: ends_of([second]), "its end")
    process.stdin.write("go on\n")
    process.stdin.flush()
    if whom == "all":
        until(lambda: ends_of([first, second]), "both ends")
    _, _, err = done(process)
    assert ("crash: rank 1 (signal 15)" in err) == (whom == "one"), err
    nothing_is_left()


def test_a_hang_is_told_while_it_lasts() -> None:
    process = start("--floor", "train=1", "--floor", "init=1", *ranks("hang"))
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    # On a busy machine both may have stood still for a moment before.
    line = next(text for text in lines if "non-communication hang: rank 1" in text)
    assert "incident" in line
    assert " s. " in line
    code, _, _ = done(process, "enough\n")
    assert code == 9
    nothing_is_left()


def test_the_command_runs_although_no_daemon_can(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, out, err = done(start("--port", port, "--", "sh", "-c", "echo here; exit 7"))
    assert code == 7
    assert out == "here\n"
    assert "continues unwatched; to start a daemon: ckptd serve --job" in err
    nothing_is_left()


@pytest.mark.long
def test_the_command_runs_although_the_run_folder_is_not_ours(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    process = start("--", "sh", "-c", "exit 7", CKPTD_RUN_DIR=str(folder))
    code, _, err = done(process)
    assert code == 7
    assert "the command runs unwatched" in err


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_signals_are_passed_on(number: int) -> None:
    script = "import signal, sys\nfor n in (2, 15): signal.signal(n, lambda n, _: sys.exit(n))\n"
    script += "print('ready', flush=True)\nwhile True: signal.pause()"
    process = start("--", sys.executable, "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    code, _, err = done(process)
    assert code == number, err
    nothing_is_left()


@pytest.mark.long
def test_a_command_that_a_signal_ends() -> None:
    code, _, err = done(start("--", "sh", "-c", "kill -9 $$"))
    assert code == 128 + 9, err


@pytest.mark.long
def test_nothing_outlives_a_watch_that_is_killed() -> None:
    process = start("--", "cat")
    assert process.stderr is not None
    until(lambda: "is watched" in process.stderr.readline(), "a start")  # type: ignore[union-attr]
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    until(lambda: not beside(), "the end of daemon and agent")
    # Its folder goes with the next watch.
    code, _, _ = done(start("--", "true"))
    assert code == 0
    assert list(run_folder().glob("watch-*")) == []


def test_a_daemon_and_a_watcher_that_are_killed_are_started_again() -> None:
    process = start("--floor", "train=1", "--floor", "init=1", *ranks("crash"))
    until(both_report, "two ranks")
    for name in ("daemon", "agent"):
        first = until(partial(beside_of, name), name)  # 0 would be this very test
        os.kill(first, signal.SIGKILL)
        until(partial(another, name, first), name)
    crash(process)
    code, _, err = done(process, "enough\n")
    assert code == 9
    assert err.count("another one is started") == 2
    assert "crash: rank 1 (signal 9)" in err
    nothing_is_left()


@pytest.mark.long
def test_a_named_job_keeps_its_history_and_tells_its_ranks() -> None:
    code, out, _ = done(start("--job", "mine", "--", "sh", "-c", "echo $CKPTD_JOB $CKPTD_DAEMON"))
    assert (code, out) == (0, "mine\n")
    assert list(run_folder().glob("history-*"))
    assert not list(run_folder().glob("watch-*"))


@pytest.mark.long
def test_two_watches_tell_one_daemon() -> None:
    """As two nodes of a job do."""
    first = start("--job", "mine", "--", "cat")
    assert first.stderr is not None
    url = until(
        lambda: first.stderr.readline().partition("is watched: ")[2].strip(),  # type: ignore[union-attr]
        "a start",
    )
    second = start("--job", "mine", "--daemon", url, "--json", *ranks("crash"))
    crash(second)
    code, _, err = done(second, "enough\n")
    assert code == 9
    document = json.loads(err.splitlines()[-1])
    assert document["incidents"][0]["kind"] == "crash"
    assert "?token=" in url
    assert document["url"] == url.partition("/?")[0]
    assert first.poll() is None
    said = first.communicate("", timeout=PATIENCE_S)[1]
    assert "crash: rank 1" in said


@pytest.mark.long
def test_the_page_stays_if_wanted() -> None:
    process = start("--keep-serving", "--", "true")
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("the page stays" in text for text in lines)
    one = daemons(run_folder())[0]
    socket.create_connection(("127.0.0.1", int(one.url.rpartition(":")[2]))).close()
    process.send_signal(signal.SIGINT)
    code, _, _ = done(process)
    assert code == 0
    nothing_is_left()


@pytest.mark.parametrize(
    "args", [[], ["--", "no-such-command-here"], ["--floor", "lunch=3", "--", "true"]]
)
def test_what_cannot_be_run(cli: Cli, args: list[str]) -> None:
    result = cli("watch", *args)
    assert result.code == 2
    assert "error" in result.err


TRAIN = """
import os, signal, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
    if dist.get_rank() == 1 and os.path.exists(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.dist
def test_a_script_under_torchrun_needs_no_edit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    watched = (tmp_path / "watched").absolute()
    # torchrun leaves a folder of logs.
    process = start("--", *run, script, watched, OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    until(both_report, "two ranks")
    watched.touch()
    code, _, err = done(process)
    assert code == 1, err
    assert "crash: rank 1 (signal 9)" in err
    nothing_is_left()
