"""What ``ckptd slurm`` starts where, without a cluster: test_job.py has one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import cast

import pytest

from ckptd.elastic.places import open_places
from ckptd.errors import RefusedError, UsageError
from ckptd_slurm import verb
from ckptd_slurm.launcher import SlurmLauncher
from ckptd_slurm.verb import _secret, plan_of
from tests.elastic.controlled import SECRET
from tests.elastic.test_dial import stranger
from tests.processes import free_port

NODES = ["n1", "n2", "n3", "gpu-07"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def environ(**more: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", **more}


def test_what_is_not_said_is_slurms(tmp_path: Path) -> None:
    plan = plan_of(["train.py", "--lr", "1"], environ(), NODES, "n1:29400", True)
    assert plan.job == "slurm-7"
    assert plan.folder == tmp_path / "ckptd-7"
    assert plan.log == str(tmp_path / "ckptd-7/log")
    own = plan.words[: plan.words.index("--")]
    assert plan.words[plan.words.index("--") :] == ("--", "train.py", "--lr", "1")
    assert {"--nnodes=1:4", "--job=slurm-7", "--rdzv-endpoint=n1:29400"} <= set(own)
    assert "--no-watch" not in own
    assert plan.daemon == ("--port", "0", "--controller", plan.log)
    command = plan.command("gpu-07")
    assert command[command.index("run") :][:3] == ["run", "--node", "gpu-07"]
    assert "levels=3" in plan.controller
    assert options(plan.controller) == {
        "--job": "slurm-7",
        "--log": plan.log,
        "--nodes": "1:4",
        "--slots": "1",
        "--set": "nodes_s=120",
    }


def test_what_is_said_counts() -> None:
    words = ["--nnodes", "2:4", "--nproc-per-node=8", "--job", "j", "--log=/shared/log"]
    words += ["--daemon", "http://d:1/", "--layout", "pp=2,tp=2", "--max-restarts", "3"]
    env = environ(CKPTD_SECRET="s" * 32)
    plan = plan_of([*words, "-m", "package.train"], env, NODES, "[fe80::1]:5", False)
    assert plan.folder is None
    assert plan.daemon is None
    said = options(plan.controller)
    assert said["--nodes"] == "2:4"
    assert (said["--slots"], said["--layout"], said["--log"]) == ("8", "pp=2,tp=2", "/shared/log")
    assert [w for w in plan.controller if "=" in w][-3:] == [
        "max_restarts=3",
        "levels=2",
        "nodes_s=120",
    ]


def test_the_daemon_has_the_options_of_the_watch() -> None:
    words = ["--port=8400", "--policy", "slow-rank=act", "--floor=train=5", "train.py"]
    plan = plan_of(words, environ(), NODES, "n1:29400", True)
    assert plan.daemon is not None
    assert plan.daemon[:2] == ("--port", "8400")
    assert plan.daemon[-2:] == ("--policy=slow-rank=act", "--floor=train=5")
    assert plan_of(["--no-watch", "train.py"], environ(), NODES, "n1:1", True).daemon is None


def test_a_level_that_is_set_stays() -> None:
    words = ["--set", "levels=1", "--set", "grow_s=5", "train.py"]
    plan = plan_of(words, environ(), NODES, "n1:29400", True)
    assert [w for w in plan.controller if w.startswith("levels")] == ["levels=1"]
    plan = plan_of(["--level", "2", "train.py"], environ(), NODES, "n1:29400", True)
    assert [w for w in plan.controller if w.startswith("level")] == ["levels=2"]


def test_a_controller_waits_for_sessions_as_long_as_launchers_do() -> None:
    for words, wanted in (
        ([], []),
        (["--interrupt", "5"], []),
        (["--interrupt", "30"], ["fence_s=32"]),
        (["--interrupt", "30", "--set", "fence_s=60"], ["fence_s=60"]),
    ):
        plan = plan_of([*words, "train.py"], environ(), NODES, "n1:29400", True)
        assert [w for w in plan.controller if w.startswith("fence_s")] == wanted


@pytest.mark.parametrize("option", ["--node=x", "--standalone", "--rdzv-endpoint=a:1", "-h"])
def test_options_for_one_node_are_refused(option: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of([option, "train.py"], environ(), NODES, "n1:29400", True)
    assert "ckptd slurm sets this option" in caught.value.message


@pytest.mark.parametrize("words", [["--no-such=1", "train.py"], ["--nproc-per-node=0", "train.py"]])
def test_what_a_node_would_refuse_is_refused_at_once(words: list[str]) -> None:
    with pytest.raises(UsageError):
        plan_of(words, environ(), NODES, "n1:29400", True)


def test_the_shell_of_salloc_on_a_login_node_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$2" != hostnames ] || echo n1\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in environ(SLURM_JOB_NODELIST="n1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    with pytest.raises(UsageError) as caught:
        verb.slurm("train.py")
    assert caught.value.where == "SLURMD_NODENAME"
    assert "sbatch" in str(caught.value)


def options(words: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("how", ["open", "link", "file", "others"])
@pytest.mark.parametrize("given", [True, False])
def test_a_folder_that_somebody_else_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, given: bool
) -> None:
    env = environ(CKPTD_SECRET="s" * 32) if given else environ()
    folder = tmp_path / "ckptd-7"
    if how == "link":
        (tmp_path / "theirs").mkdir()
        folder.symlink_to("theirs")
    elif how == "file":
        folder.mkdir(mode=0o700)
        (folder / "secret").write_text("known to others, and long")
        (folder / "secret").chmod(0o644)
    else:
        folder.mkdir()
        folder.chmod(0o777 if how == "open" else 0o700)
        if how == "others":
            monkeypatch.setattr("os.geteuid", lambda: 4711)
    plan = plan_of(["train.py"], env, NODES, "n1:29400", True)
    if given and how == "file":
        assert _secret(plan, env) == "s" * 32  # the file is not asked
        return
    with pytest.raises(RefusedError) as caught:
        _secret(plan, env)
    assert "the file of the job's secret is accessible to others" in caught.value.message


def test_a_requeued_job_has_the_secret_that_it_had(tmp_path: Path) -> None:
    plan = plan_of(["train.py"], environ(), NODES, "n1:29400", True)
    assert _secret(plan, environ()) == _secret(plan, environ())
    assert (tmp_path / "ckptd-7").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "ckptd-7/secret").stat().st_mode & 0o777 == 0o600


class _Reached(Exception):
    """The batch step has a controller, and asks for the nodes."""


class _Nodes:
    """An allocation up to its first question."""

    def machines(self, timeout_s: float) -> None:
        raise _Reached

    def close(self) -> None:
        pass


@pytest.mark.parametrize("says", ["shows controller", "shows rank"])
def test_a_requeued_job_starts_a_controller_where_a_stranger_answers(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None was started: what the record of the job's last life named only had to answer."""
    monkeypatch.setenv("CKPTD_SECRET", SECRET)
    before = {number: signal.getsignal(number) for number in verb._SIGNALS}
    (tmp_path / "parts").mkdir()
    with stranger(says) as address:
        words = ["--no-watch", "--job", "j", "--log", str(tmp_path / "log"), "train.py"]
        plan = plan_of(words, environ(), ["n1"], f"127.0.0.1:{free_port()}", True)
        open_places("j", plan.log).leader.take(0, address, "a life that is over")
        try:
            with pytest.raises(_Reached):
                nodes = cast(SlurmLauncher, _Nodes())
                verb._Batch(plan, nodes, dict(os.environ)).run(tmp_path / "parts")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    newest = open_places("j", plan.log).leader.newest()
    assert newest is not None
    assert newest.address == plan.endpoint
