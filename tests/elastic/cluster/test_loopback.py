"""A machine whose loopback has no address of IPv4, and one that has none at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.running import COMMAND
from tests.monitor.cluster.namespaces import needs_namespaces

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

PROGRAM = "import os, sys; print('at', os.environ['MASTER_ADDR'])"


def run(folder: Path, links: str) -> subprocess.CompletedProcess[str]:
    """Run a job of one rank in a network of its own."""
    script = folder / "train.py"
    script.write_text(PROGRAM)
    job = [*COMMAND, "run", "--job", "v6", "--no-watch", "--nproc-per-node", "1", str(script)]
    return subprocess.run(
        ["unshare", "-n", "sh", "-c", f'{links}; exec "$@"', "sh", *job],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "CKPTD_RUN_DIR": os.environ["CKPTD_RUN_DIR"]},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_job_runs_without_ipv4(tmp_path: Path) -> None:
    needs_namespaces()
    done = run(tmp_path, "ip link set lo up; ip addr del 127.0.0.1/8 dev lo")
    assert (done.returncode, done.stdout) == (0, "at ::1\n"), done.stderr


def test_without_a_loopback_the_reason_is_said(tmp_path: Path) -> None:
    needs_namespaces()
    done = run(tmp_path, "true")
    assert done.returncode != 0
    assert "this machine has no loopback address" in done.stderr
    assert "ip link set lo up" in done.stderr
