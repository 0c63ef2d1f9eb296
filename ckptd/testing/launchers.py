"""`LauncherContract`: the tests that every launcher plug-in passes.

In it: names of nodes that must be refused; its time limit.

An author subclasses it with one fixture::

    class TestMine(LauncherContract):
        @pytest.fixture
        def make(self) -> Iterator[Callable[[Command], Launcher]]:
            yield lambda command: Mine(["a", "b"], command)

A launcher that it makes has two nodes at least, which share this machine's files and processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from ckptd.elastic.launchers.base import Command, Launcher, MachineState
from ckptd.errors import NotFoundError, UsageError

__all__ = ["BAD_NAMES", "LauncherContract"]

BAD_NAMES = [
    "",
    "nowhere",
    "-n9",
    "--help",
    "a b",
    "$(touch x)",
    ";true",
    "n[1-2]",
    "../n1",
    "n1,n2",
]
"""Names that no job has a node of."""

_LONG_S = 60.0

# Writes its own process and that of a child in a session of its own; both ignore what asks nicely.
_PROGRAM = """
import os, signal, sys, time
folder, node = sys.argv[1:]
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setsid()
    time.sleep(600)
    os._exit(0)
name = os.path.join(folder, node)
with open(name + ".new", "w") as file:
    file.write(f"{os.getpid()} {child} {node}")
os.rename(name + ".new", name)
while not os.path.exists(name + ".end"):
    time.sleep(0.02)
os.kill(child, signal.SIGKILL)
sys.exit(7)
"""


class LauncherContract:
    """Subclass with a fixture ``make`` that returns a maker of launchers, and closes them."""

    @pytest.fixture
    def command(self, tmp_path: Path) -> Command:
        """Give the command line of a launcher that only says that it is there."""
        program = tmp_path / "program.py"
        program.write_text(_PROGRAM)
        return lambda node: [sys.executable, str(program), str(tmp_path), node]

    @pytest.fixture
    def launcher(self, make: Callable[[Command], Launcher], command: Command) -> Launcher:
        """Give a launcher that has started nothing."""
        return make(command)

    def test_nodes_are_told_and_nothing_runs(self, launcher: Launcher) -> None:
        """Each node once, up and without a launcher."""
        machines = launcher.machines(_LONG_S)
        assert len(machines) >= 2
        assert len({m.name for m in machines}) == len(machines)
        assert all(m.state is MachineState.UP and not m.running for m in machines), machines
        assert launcher.hints(_LONG_S) == ()

    def test_each_node_gets_one_launcher(self, launcher: Launcher, tmp_path: Path) -> None:
        """One process a node; a second start changes nothing."""
        names = _names(launcher)
        launcher.start(names, _LONG_S)
        pids = {name: _pids(tmp_path, name) for name in names}
        launcher.start(names, _LONG_S)
        assert {m.name for m in launcher.machines(_LONG_S) if m.running} == set(names)
        assert {name: _pids(tmp_path, name) for name in names} == pids
        assert all(_live(pid) for pair in pids.values() for pid in pair)

    def test_stop_takes_one_node_and_all_of_it(self, launcher: Launcher, tmp_path: Path) -> None:
        """Processes that have left the session go as well; other nodes go on."""
        first, second = _names(launcher)[:2]
        launcher.start([first, second], _LONG_S)
        gone, stays = _pids(tmp_path, first), _pids(tmp_path, second)
        launcher.stop([first], _LONG_S)
        _until(lambda: not any(_live(pid) for pid in gone), "the launcher's processes are gone")
        assert all(_live(pid) for pid in stays)
        assert [m.name for m in launcher.machines(_LONG_S) if m.running] == [second]
        launcher.stop([first], _LONG_S)

    def test_a_stopped_node_starts_anew(self, launcher: Launcher, tmp_path: Path) -> None:
        """After a stop the same node can be started again."""
        first = _names(launcher)[0]
        launcher.start([first], _LONG_S)
        before = _pids(tmp_path, first)
        launcher.stop([first], _LONG_S)
        (tmp_path / first).unlink()
        launcher.start([first], _LONG_S)
        assert _pids(tmp_path, first)[0] not in before

    def test_a_launcher_that_ended_starts_anew(self, launcher: Launcher, tmp_path: Path) -> None:
        """Check that a launcher that ended by itself no longer counts as running."""
        first = _names(launcher)[0]
        launcher.start([first], _LONG_S)
        before = _pids(tmp_path, first)
        (tmp_path / f"{first}.end").touch()
        _until(lambda: not any(m.running for m in launcher.machines(_LONG_S)), "the end is noticed")
        (tmp_path / f"{first}.end").unlink()
        (tmp_path / first).unlink()
        launcher.start([first], _LONG_S)
        assert _pids(tmp_path, first)[0] not in before

    def test_unknown_names_start_nothing(self, launcher: Launcher, tmp_path: Path) -> None:
        """Names that the job does not have are refused, with all that was asked for beside them."""
        first = _names(launcher)[0]
        for name in BAD_NAMES:
            for call in (launcher.start, launcher.stop):
                with pytest.raises(UsageError) as caught:
                    call([first, name], _LONG_S)
                assert caught.value.kind == "unknown-node"
        assert not any(m.running for m in launcher.machines(_LONG_S))
        assert not (tmp_path / first).exists()

    def test_replace_gives_another_node_or_says_no(self, launcher: Launcher) -> None:
        """A new name that can be started on, or ``no-spare``."""
        names = _names(launcher)
        new = ""
        with suppress(NotFoundError):
            new = launcher.replace(names[0], _LONG_S)
        if not new:
            with pytest.raises(NotFoundError) as caught:
                launcher.replace(names[0], _LONG_S)
            assert caught.value.kind == "no-spare"
            assert _names(launcher) == names
        else:
            assert new not in names
            launcher.start([new], _LONG_S)

    def test_close_ends_all(self, launcher: Launcher, tmp_path: Path) -> None:
        """Nothing is left running, and a second close does nothing."""
        names = _names(launcher)
        launcher.start(names, _LONG_S)
        pids = [pid for name in names for pid in _pids(tmp_path, name)]
        launcher.close()
        launcher.close()
        _until(lambda: not any(_live(pid) for pid in pids), "all are gone")


def _names(launcher: Launcher) -> Sequence[str]:
    return [m.name for m in launcher.machines(_LONG_S)]


def _until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _LONG_S
    while not true():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.02)


def _pids(folder: Path, node: str) -> tuple[int, int]:
    path = folder / node
    _until(path.exists, f"{node} runs")
    own, child, name = path.read_text().split()
    assert name == node
    return int(own), int(child)


def _live(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
