"""What Slurm's commands print is read as it is meant, and is not believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.elastic.launchers.base import MachineState
from ckptd.errors import CkptdError, DeadlineError, StoreError
from ckptd_slurm.tools import Slurm, parse_nodes

LINE = (
    "NodeName={name} Arch=x86_64 CPUAlloc=1 Gres=(null) NodeAddr=10.0.0.7 "
    "OS=Linux 6.1 #1 SMP @0  RealMemory=1000 "
    "Sockets=2 Boards=1 State={state} ThreadsPerCore=1 Partitions=all  "
    "BootTime=2026-11-22T15:17:56 ExtSensorsTemp=n/s"
)
UP, DRAINING, DOWN = MachineState.UP, MachineState.DRAINING, MachineState.DOWN


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("IDLE", UP),
        ("ALLOCATED", UP),
        ("MIXED+PLANNED", UP),
        ("ALLOCATED+DRAIN", DRAINING),
        ("MIXED+MAINTENANCE+FAIL", DRAINING),
        ("ALLOCATED+REBOOT_REQUESTED", DRAINING),
        ("IDLE*", DOWN),
        ("DOWN", DOWN),
        ("DOWN*+DRAIN", DOWN),
        ("ALLOCATED*+DRAIN", DOWN),
        ("IDLE+NOT_RESPONDING", DOWN),
        ("IDLE+POWERED_DOWN", DOWN),
        ("IDLE+CLOUD+POWERING_UP", DOWN),
        ("idle~", UP),
    ],
)
def test_states(words: str, state: MachineState) -> None:
    said = parse_nodes(LINE.format(name="n1", state=words))
    assert {name: node.state for name, node in said.items()} == {"n1": state}
    assert said["n1"].words == words
    assert said["n1"].address == "10.0.0.7"


def test_a_reason_is_the_last_word() -> None:
    text = "\n".join(
        [
            LINE.format(name="n1", state="IDLE"),
            LINE.format(name="gpu-07.x", state="IDLE+DRAIN")
            + "   Reason=State=DOWN [sic] Reason=none [root@2026-11-22T22:20:00]",
            "",
        ]
    )
    said = parse_nodes(text)
    assert said["n1"].reason == ""
    assert said["gpu-07.x"].reason == "State=DOWN [sic] Reason=none"
    assert said["gpu-07.x"].state is DRAINING


@pytest.mark.parametrize("text", ["nonsense", "NodeName=n1 Arch=x", "NodeName=$(x) State=IDLE"])
def test_what_is_no_line_of_it_is_refused(text: str) -> None:
    with pytest.raises(StoreError) as caught:
        parse_nodes(text)
    assert "Slurm rejected the request" in caught.value.message


@pytest.fixture
def tools(tmp_path: Path) -> Slurm:
    """Commands that print their arguments, a line each."""
    for name in ("scontrol", "squeue", "scancel"):
        path = tmp_path / name
        path.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        path.chmod(0o755)
    return Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin"})


@pytest.mark.parametrize("job", ["", "-1", "1;true", "1 2", "--all"])
def test_only_numbers_are_jobs(tools: Slurm, job: str) -> None:
    for call in (tools.allocated, tools.steps, tools.requeue, tools.may_requeue):
        with pytest.raises(StoreError):
            call(job, 10.0)


@pytest.mark.parametrize("step", ["", "7", "7.0;true", "--signal=9", "7.batch"])
def test_only_numbers_are_steps(tools: Slurm, step: str) -> None:
    with pytest.raises(StoreError):
        tools.kill_step(step, 10.0)


def test_a_list_that_is_an_option_is_refused(tools: Slurm) -> None:
    with pytest.raises(StoreError):
        tools.hostnames("--help", 10.0)


def test_answers_that_are_no_names_are_refused(tools: Slurm) -> None:
    with pytest.raises(StoreError):
        tools.hostnames("$(touch x)", 10.0)


def test_a_command_that_fails_tells_why(tmp_path: Path) -> None:
    path = tmp_path / "scontrol"
    path.write_text("#!/bin/sh\necho no controller here >&2\nexit 1\n")
    path.chmod(0o755)
    with pytest.raises(StoreError, match="no controller here"):
        Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin"}).requeue("7", 10.0)


def test_a_command_that_hangs_is_left(tmp_path: Path) -> None:
    path = tmp_path / "scontrol"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    with pytest.raises(DeadlineError) as caught:
        Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin"}).requeue("7", 0.2)
    assert "the scheduler did not answer in time" in caught.value.message


def test_a_command_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CkptdError, match="is Slurm installed"):
        Slurm({"PATH": str(tmp_path)}).requeue("7", 10.0)
