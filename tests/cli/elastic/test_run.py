"""``ckptd run``: its command line, and the environment that its ranks get."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ckptd.elastic.cli import controller, run
from ckptd.elastic.cli.run import (
    JobOptions,
    TorchrunOptions,
    cpu_count,
    gpu_count,
    ranks_filter,
    separated,
    slots_of,
)
from ckptd.errors import UsageError
from tests.cli.running import COMMAND, Cli
from tests.processes import PATIENCE_S

SHOW = "import json, os, sys\nprint(json.dumps(dict(os.environ)), flush=True)\n"
NAMED = [
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "OMP_NUM_THREADS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
]
"""Variables that are the same under both."""
THEIR_OWN = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "_"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("train.py", "-- train.py"),
        ("train.py --job 3 -- x", "-- train.py --job 3 -- x"),
        ("--nproc_per_node 2 train.py --lr 1", "--nproc-per-node 2 -- train.py --lr 1"),
        ("--nproc_per_node=2 train.py", "--nproc-per-node=2 -- train.py"),
        ("--standalone -m pkg.train -m x", "--standalone -m -- pkg.train -m x"),
        ("-r 3 -t0:1 train.py", "-r 3 -t0:1 -- train.py"),
        ("--no-watch -- --odd.py a", "--no-watch -- --odd.py a"),
        ("--help", "--help --"),
    ],
)
def test_all_behind_the_script_is_the_scripts(given: str, wanted: str) -> None:
    assert separated(given.split(), {}) == wanted.split()


def test_torchruns_variables_are_taken_where_an_option_is_not_given() -> None:
    environ = {"PET_NNODES": "1:4", "PET_STANDALONE": "1", "PET_MODULE": "0", "PET_TEE": "3"}
    assert separated(["-t", "1", "train.py"], environ) == [
        *("-t", "1", "--nnodes=1:4", "--standalone", "--", "train.py")
    ]


def test_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert (gpu_count(), slots_of("gpu"), slots_of("auto"), slots_of("5")) == (2, 2, 2, 5)
    for visible, wanted in (("0,-1,1", 1), ("NoDevFiles", 0), ("GPU-a1, MIG-b2", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_count() == wanted
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert slots_of("auto") == slots_of("cpu") == cpu_count() >= 1
    for bad in ("gpu", "0", "-1", "many"):
        with pytest.raises(UsageError):
            slots_of(bad)
    assert ranks_filter("0, 2") == {0, 2}
    with pytest.raises(UsageError):
        ranks_filter("0;1")


def test_time_to_leave_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's kernels take longer than what a CPU does, and the controller waits as long."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for here, wanted in (((), 1.0), (("Ascend",), 8.0)):
        monkeypatch.setattr(
            "ckptd.base.runtime.accelerators.accelerators_here", lambda here=here: here
        )
        assert run._interrupt_s(None) == wanted
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert run._interrupt_s(None) == 8.0
    assert run._interrupt_s(0.5) == 0.5
    for bad in (0.0, -1.0, 1e9, math.nan):
        with pytest.raises(UsageError):
            run._interrupt_s(bad)
    assert run.controller_settings((), interrupt_s=8.0) == ()
    assert run.controller_settings((), interrupt_s=30.0) == ("fence_s=32",)
    given = ("fence_s=5",)
    assert run.controller_settings(given, interrupt_s=30.0) == given


@pytest.mark.parametrize("say", [run._print, controller._say])
def test_nobody_has_to_read_what_is_said(
    say: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)
    with suppress(BrokenPipeError), open(write, "w") as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        say("a word")
        monkeypatch.undo()


def test_any_free_port_of_one_machine_needs_no_endpoint() -> None:
    given = TorchrunOptions(rdzv_endpoint="localhost:0")
    options = run._options(("train.py",), given, JobOptions(node="n"), False)
    assert (options.endpoint, options.named) == ("", False)


def test_a_hangup_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in run._signals()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in run._signals()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "-m --no-python x",
        "--nnodes 0 x",
        "--nnodes 2:1 x",
        "--nnodes 2 x",
        "--nproc-per-node none x",
        "--tee 4 x",
        "--floor train x",
    ],
)
def test_what_makes_no_sense_is_refused(cli: Cli, words: str) -> None:
    result = cli("run", *words.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")


def test_a_job_of_several_machines_needs_a_secret(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTD_SECRET", raising=False)
    for endpoint in ("192.0.2.1:29400", "head:29400", "[2001:db8::1]:29400"):
        result = cli("run", "--nnodes", "2", "--rdzv-endpoint", endpoint, "train.py")
        assert (result.code, result.out) == (5, "")
        assert "without a secret" in result.err
        assert "CKPTD_SECRET" in result.err
        assert f"where:  {endpoint}" in result.err


def environments(command: list[str], script: Path) -> list[dict[str, str]]:
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "--tee", "0", str(script)],
        capture_output=True,
        text=True,
        # Without it they get what libraries have set behind Python's back: readline COLUMNS.
        env=dict(os.environ),
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda environ: str(environ["RANK"]))


@pytest.mark.long
def test_ranks_have_torchruns_environment(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    ours = environments([*COMMAND, "run", "--no-watch", "--rdzv-id", "id"], script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0"]
    backend = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "id"]
    theirs = environments([*torchrun, *backend], script)
    assert len(ours) == len(theirs) == 2
    for mine, its in zip(ours, theirs, strict=True):
        its["MASTER_ADDR"] = "localhost"  # or a name of this machine
        assert {name: mine[name] for name in NAMED} == {name: its[name] for name in NAMED}
        added = {name for name in its if os.environ.get(name) != its[name]}
        assert added <= {*NAMED, *THEIR_OWN}
        more = {name for name in mine if os.environ.get(name) != mine[name]} - added
        assert all(name.startswith("CKPTD_") for name in more), more
        assert mine["TORCHELASTIC_ERROR_FILE"].endswith(f"/{mine['LOCAL_RANK']}/error.json")


@pytest.mark.long
def test_an_option_that_the_controller_refuses_ends_the_launcher() -> None:
    done = subprocess.run(
        [*COMMAND, "run", "--no-watch", "--set", "no_such=1", "train.py"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2
    assert "NAME=NUMBER" in done.stderr


ASK = """
import os, subprocess, sys

if os.environ["RANK"] == "0":
    kept = {k: v for k, v in os.environ.items() if k[:6] != "CKPTD_" or k == "CKPTD_RUN_DIR"}
    ask = "from ckptd.cli.main import main; main()"
    ask = [sys.executable, "-c", ask, "ctl", "status", "--json"]
    sys.exit(subprocess.run(ask, env=kept, timeout=60).returncode)
"""


@pytest.mark.long
def test_a_job_without_a_name_is_told_of_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    done = subprocess.run(
        [*COMMAND, "run", "--no-watch", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["verb"] == "ctl status"
    assert not list(Path(os.environ["CKPTD_RUN_DIR"]).iterdir())
