"""Launchers as steps of a real Slurm allocation pass the contract, and live through lost nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckptd.elastic.launchers.base import Command, Launcher, MachineState
from ckptd.errors import RefusedError, StoreError, UsageError
from ckptd.testing.launchers import LauncherContract
from ckptd_slurm.launcher import SlurmLauncher
from tests.plugins.slurm.cluster import Cluster, slurm
from tests.processes import PATIENCE_S, until

__all__ = ["slurm"]


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.xdist_group("slurm")
@pytest.mark.timeout(600)
class TestSlurm(LauncherContract):
    @pytest.fixture
    def make(self, slurm: Cluster) -> Iterator[Callable[[Command], Launcher]]:
        with ExitStack() as stack:

            def make(command: Command) -> Launcher:
                environ = stack.enter_context(slurm.allocation(2))
                return stack.enter_context(SlurmLauncher(command, environ=environ))

            yield make

    def test_a_lost_node_keeps_no_other_from_starting_anew(self, slurm: Cluster) -> None:
        def command(node: str) -> list[str]:
            return [sys.executable, "-c", "import time; time.sleep(600)"]

        with slurm.allocation(4) as environ, SlurmLauncher(command, environ=environ) as launcher:
            names = [m.name for m in launcher.machines(60.0)]
            batch, lost = names[0], names[2]
            launcher.start(names, 60.0)
            until(lambda: len(slurm.steps(environ)) == 4, "four steps run")
            slurm.lose(lost)
            try:
                # At once, long before Slurm takes the node for dead.
                launcher.stop([batch], 60.0)
                launcher.start([batch], 60.0)
                until(lambda: len(slurm.steps(environ)) >= 4, "the step is there again")
                until(
                    lambda: _state(launcher, lost) is MachineState.DOWN, "Slurm has noticed", 120.0
                )
                running = {m.name for m in launcher.machines(60.0) if m.running}
                assert running >= set(names) - {lost}
                launcher.stop([lost], 60.0)
            finally:
                slurm.revive(lost)

    def test_a_drain_is_a_hint_once(self, slurm: Cluster) -> None:
        with slurm.allocation(2) as environ:
            launcher = SlurmLauncher(lambda node: ["true"], environ=environ, drain_s=7.0)
            node = launcher.machines(60.0)[1].name
            reason = "bad [cable] State=IDLE; $(touch x)"
            slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")
            try:
                (hint,) = launcher.hints(60.0)
                assert (hint.node, hint.seconds) == (node, 7.0)
                assert reason in hint.reason
                assert "DRAIN" in hint.reason
                assert launcher.hints(60.0) == ()
                assert _state(launcher, node) is MachineState.DRAINING
            finally:
                slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
            # It says for a moment that it does not respond.
            until(lambda: _state(launcher, node) is MachineState.UP, f"{node} is up again")
            assert launcher.hints(60.0) == ()


def test_local_steps_are_killed_though_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, does in (
        ("scontrol", '[ "$2" != hostnames ] || echo n1'),
        ("srun", f"trap '' TERM; echo $$ > {tmp_path}/pid; exec sleep 600"),
        ("squeue", "echo away >&2; exit 1"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environ = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    launcher = SlurmLauncher(lambda node: ["true"], environ=environ)
    launcher.start(["n1"], PATIENCE_S)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "it runs")
    with pytest.raises(StoreError, match="away"):
        launcher.stop(None, PATIENCE_S)
    until(lambda: launcher.running() == [], "its end")


def _state(launcher: Launcher, node: str) -> MachineState:
    return next(m.state for m in launcher.machines(60.0) if m.name == node)


def test_outside_of_an_allocation_it_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        SlurmLauncher(lambda node: ["true"], environ={"PATH": "/usr/bin"})
    assert "not in a Slurm allocation" in caught.value.message


def test_a_heterogeneous_job_is_refused() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_HET_SIZE": "2"}
    with pytest.raises(RefusedError) as caught:
        SlurmLauncher(lambda node: ["true"], environ=environ)
    assert "heterogeneous jobs (several components) are not supported" in caught.value.message
