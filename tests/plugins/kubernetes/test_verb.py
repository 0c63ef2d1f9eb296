"""``ckptd kubernetes``: a job in pods, with a real controller and real launchers."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd_kubernetes.api import Api
from ckptd_kubernetes.launcher import Kubernetes
from ckptd_kubernetes.verb import _kept
from tests.cli.running import COMMAND, Cli
from tests.plugins.kubernetes.fakekube import FakeKube
from tests.processes import PATIENCE_S, until

SCRIPT = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / f"{os.environ['CKPTD_NODE']}-{os.environ['CKPTD_GENERATION']}").touch()
while not (folder / "end").exists():
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--template", "t", "--selector", "a=b"),
        ("--selector", "a=b", "--", "train.py"),
    ],
)
def test_it_must_be_known_whose_pods_these_are(cli: Cli, words: tuple[str, ...]) -> None:
    result = cli("kubernetes", *words)
    assert result.code == 2
    assert "give --template or --selector" in result.err


def test_outside_of_a_pod_it_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTD_SECRET", raising=False)
    assert "no secret" in cli("kubernetes", "--selector", "a=b").err
    monkeypatch.setenv("CKPTD_SECRET", "s")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = cli("kubernetes", "--selector", "a=b", "--json")
    assert (result.code, result.error["message"]) == (
        2,
        "this process does not run in a pod with a service account",
    )


# -- a whole job -----------------------------------------------------------------------------------


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    made = secrets.token_hex(16)
    monkeypatch.setenv("CKPTD_SECRET", made)
    # Sockets lie there, whose paths are short ones.
    with tempfile.TemporaryDirectory(prefix="ckptd-", dir="/tmp") as folder:
        monkeypatch.setenv("CKPTD_RUN_DIR", folder)
        yield made


@pytest.fixture
def controller(secret: str, tmp_path: Path) -> Iterator[str]:
    command = [*COMMAND, "controller", "--job", "train", "--nodes", "1:2"]
    command += ["--log", str(tmp_path / "log"), "--set", "grow_s=0", "--set", "settle_s=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.wait(PATIENCE_S)
    process.stdout.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_pods_that_are_deleted_come_back_and_the_job_ends(
    controller: str, secret: str, tmp_path: Path
) -> None:
    script, seen = tmp_path / "train.py", tmp_path / "seen"
    script.write_text(SCRIPT)
    seen.mkdir()

    def command(node: str) -> list[str]:
        run = [*COMMAND, "run", "--node", node, "--job", "train", "--rdzv-endpoint", controller]
        run += ["--nnodes", "1:2", "--no-watch", "--", str(script), str(seen)]
        return run

    def generations(node: str) -> list[int]:
        return sorted(int(p.name.rpartition("-")[2]) for p in seen.glob(f"{node}-*"))

    with FakeKube() as kube:
        api = Api(url=kube.url, namespace="jobs")
        spec = {"spec": {"containers": [{"name": "trainer"}]}}

        def launcher() -> Kubernetes:
            return Kubernetes(api, "train", ["t-0", "t-1"], command, template=spec)

        def first() -> None:
            until(lambda: generations("t-0") and generations("t-1"), "both run")
            os.kill(os.getpid(), signal.SIGTERM)

        def second() -> None:
            before = generations("t-1")[-1]
            kube.delete("t-1", 0)
            until(lambda: generations("t-1")[-1] > before, "it is back in another generation")
            (seen / "end").touch()

        waiting = threading.Thread(target=first, daemon=True)
        waiting.start()
        left = _kept(launcher(), "train", controller, secret.encode(), PATIENCE_S)
        assert (left.kind, left.exit_code) == ("left", 128 + signal.SIGTERM)
        waiting.join(PATIENCE_S)
        assert kube.names("pods") == ["t-0", "t-1"]
        acting = threading.Thread(target=second, daemon=True)
        acting.start()
        found = _kept(launcher(), "train", controller, secret.encode(), PATIENCE_S)
        acting.join(PATIENCE_S)
        assert (found.kind, found.exit_code) == ("done", 0)
        phases = {(kube.get("pods", n) or {})["status"]["phase"] for n in kube.names("pods")}
        assert phases == {"Succeeded"}
