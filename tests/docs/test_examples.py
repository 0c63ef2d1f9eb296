"""docs/examples: what is there parses, and says what the code wants."""

from __future__ import annotations

import getpass
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ckptd.cli.main import app, installed_verbs
from ckptd.elastic.cli.run import separated
from tests.processes import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
UNIT = EXAMPLES / "ckptd-agent.service"
POD = EXAMPLES / "kubernetes-sidecar.yaml"


def settings(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        name, sep, value = line.partition("=")
        if sep and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def parses(command: list[str]) -> bool:
    """Whether ``ckptd`` takes a command line."""
    assert Path(command[0]).name == "ckptd"
    if command[1] == "run":
        command = [*command[:2], *separated(command[2:], {})]
    installed_verbs()
    app.parse_args(command[1:], exit_on_error=False, print_error=False)
    return True


def test_the_unit() -> None:
    found = settings(UNIT.read_text())
    (start,) = found["ExecStart"]
    assert parses(shlex.split(start))
    assert "--stay" in start
    (folder,) = found["RuntimeDirectory"]
    assert f"CKPTD_RUN_DIR=/run/{folder}" in found["Environment"]
    assert found["RuntimeDirectoryMode"] == ["0700"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/ckptd/bin/ckptd", sys.executable)
    text = text.replace("User=trainer", f"User={getpass.getuser()}")
    unit = tmp_path / UNIT.name
    unit.write_text(text)

    def verify() -> str:
        done = subprocess.run(
            ["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=PATIENCE_S
        )
        return "\n".join(line for line in done.stderr.splitlines() if "ckptd" in line)

    assert verify() == ""
    unit.write_text(text.replace("Type=exec", "Type=nonsense"))
    assert "nonsense" in verify()


def containers() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The Pod, its agent and its trainer."""
    (job,) = yaml.safe_load_all(POD.read_text())
    pod = job["spec"]["template"]["spec"]
    (agent,), (trainer,) = pod["initContainers"], pod["containers"]
    return pod, agent, trainer


def test_the_pod() -> None:
    pod, agent, trainer = containers()
    assert parses(agent["command"])
    assert parses(agent["startupProbe"]["exec"]["command"])
    assert parses(agent["livenessProbe"]["exec"]["command"])
    assert agent["restartPolicy"] == "Always"
    for shared in ("env", "envFrom", "volumeMounts", "image"):
        assert agent[shared] == trainer[shared]
    assert {"CKPTD_RUN_DIR", "CKPTD_JOB", "CKPTD_NODE"} <= {e["name"] for e in agent["env"]}
    # One user, for the Pod and not for a container.
    assert "runAsUser" in pod["securityContext"]
    assert not {"securityContext"} & {*agent, *trainer}
    (volume,) = pod["volumes"]
    (mount,) = agent["volumeMounts"]
    assert volume == {"name": mount["name"], "emptyDir": {}}
    # The volume is open to others; the first process makes the folder below it.
    (run,) = (e["value"] for e in agent["env"] if e["name"] == "CKPTD_RUN_DIR")
    assert Path(run).parent == Path(mount["mountPath"])


def test_the_cluster_knows_all_fields_of_the_pod() -> None:
    for each in yaml.safe_load_all(POD.read_text()):
        kubernetes_validate.validate(each, "1.34", strict=True)
