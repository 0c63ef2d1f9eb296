"""docs/examples: what is there parses, and says what the code wants."""

from __future__ import annotations

import getpass
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ckptd.cli.main import app, installed_verbs
from ckptd.elastic.cli.run import separated
from ckptd.elastic.control.states import ControllerSettings
from tests.processes import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
UNIT = EXAMPLES / "ckptd-agent.service"
POD = EXAMPLES / "kubernetes-sidecar.yaml"
JOBS = EXAMPLES / "kubernetes"


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
    # The volume is open to others; the folder below it is made by whoever comes first.
    (run,) = (e["value"] for e in agent["env"] if e["name"] == "CKPTD_RUN_DIR")
    assert Path(run).parent == Path(mount["mountPath"])


# --- jobs that restart, on Kubernetes -------------------------------------------------------------


def objects(name: str = "*.yaml") -> list[dict[str, Any]]:
    return [each for p in sorted(JOBS.glob(name)) for each in yaml.safe_load_all(p.read_text())]


def of_kind(kind: str, where: Any) -> dict[str, Any]:
    (found,) = [each for each in where if each["kind"] == kind]
    return found


def commands(part: Any) -> Iterator[list[str]]:
    """Command lines anywhere in an object."""
    if isinstance(part, dict):
        if "command" in part:
            yield [*part["command"], *part.get("args", [])]
        part = list(part.values())
    for inner in part if isinstance(part, list) else []:
        yield from commands(inner)


def test_command_lines_of_the_jobs() -> None:
    verbs = set()
    for command in commands(objects()):
        assert parses(command)
        verbs.add(command[1])
        if command[1] == "kubernetes" and "--" in command:  # what its pods run
            assert parses(["ckptd", "run", *command[command.index("--") + 1 :]])
    assert verbs == {"controller", "ctl", "kubernetes", "run", "serve"}


def pods(part: Any) -> Iterator[dict[str, Any]]:
    """What holds containers, anywhere in an object."""
    if isinstance(part, dict):
        if "containers" in part:
            yield part
        part = list(part.values())
    for inner in part if isinstance(part, list) else []:
        yield from pods(inner)


def test_volumes_and_secrets_of_the_jobs_are_there() -> None:
    for pod in pods(objects()):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounts) <= volumes
            env = {each["name"]: each for each in container["env"]}
            assert "secretKeyRef" in env["CKPTD_SECRET"]["valueFrom"]
            # The folder below the volume is made by whoever comes first.
            assert str(Path(env["CKPTD_RUN_DIR"]["value"]).parent) == mounts["run"]


def words(option: str, command: list[str]) -> str:
    (found,) = [w.partition("=")[2] for w in command if w.startswith(f"{option}=")]
    return found


def test_the_controller_is_where_pods_look_for_it() -> None:
    docs = objects("controller.yaml")
    deployed, template = of_kind("Deployment", docs), of_kind("PodTemplate", docs)
    pod = deployed["spec"]["template"]["spec"]
    service = of_kind("Service", objects("headless-service.yaml"))
    (port,) = service["spec"]["ports"]
    control, _, launch = (container["command"] for container in pod["containers"])
    host = f"{pod['hostname']}.{service['metadata']['name']}"
    assert words("--host", control) == host
    assert words("--port", control) == str(port["port"])
    assert words("--rdzv-endpoint", launch) == f"{host}:{port['port']}"
    assert words("--controller", launch) == f"127.0.0.1:{port['port']}"
    assert words("--template", launch) == template["metadata"]["name"]
    for label, value in service["spec"]["selector"].items():
        for owner in (deployed["spec"]["template"], template["template"]):
            assert owner["metadata"]["labels"][label] == value
    assert pod["subdomain"] == template["template"]["spec"]["subdomain"] == host.split(".")[1]


def test_each_controller_is_watched_and_has_a_daemon() -> None:
    found = 0
    for pod in pods(objects()):
        every = {
            c["command"][1]: c
            for c in (*pod.get("initContainers", ()), *pod["containers"])
            if "command" in c
        }
        if "controller" not in every:
            continue
        found += 1
        control, watch = every["controller"], every["serve"]
        port = words("--port", control["command"])
        probe = control["livenessProbe"]
        hung_s = probe["failureThreshold"] * (probe["periodSeconds"] + probe["timeoutSeconds"])
        assert hung_s + probe["terminationGracePeriodSeconds"] < ControllerSettings().lease_s
        for one in (probe["exec"]["command"], watch["command"]):
            assert words("--controller", one) == f"127.0.0.1:{port}"
            assert words("--job", one) == "train"
        (metrics,) = watch["ports"]
        assert str(metrics["containerPort"]) == words("--port", watch["command"])
        policy = of_kind("NetworkPolicy", objects("network.yaml"))
        assert policy["spec"]["ingress"][1]["ports"] == [{"port": metrics["containerPort"]}]
        monitor = of_kind("PodMonitor", objects("network.yaml"))
        assert [e["port"] for e in monitor["spec"]["podMetricsEndpoints"]] == [metrics["name"]]
    assert found == 3


def test_pods_may_do_as_little_as_they_need() -> None:
    for pod in pods(objects()):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            least = container["securityContext"]
            assert not least["allowPrivilegeEscalation"]
            assert least["capabilities"] == {"drop": ["ALL"]}
            # A trainer writes where its code wants.
            ours = container.get("command", ["", "run"])[1] != "run"
            assert least.get("readOnlyRootFilesystem", False) == ours


def test_who_asks_the_cluster_may() -> None:
    rules = objects("rbac.yaml")
    (account,) = [each["metadata"]["name"] for each in rules if each["kind"] == "ServiceAccount"]
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        binding = of_kind(kind, rules)
        assert [who["name"] for who in binding["subjects"]] == [account]
        role = of_kind(binding["roleRef"]["kind"], rules)
        assert role["metadata"]["name"] == binding["roleRef"]["name"]
    asking = [p for p in pods(objects()) if p.get("automountServiceAccountToken")]
    assert {pod["serviceAccountName"] for pod in asking} == {account}
    for pod in pods(objects()):
        controls = any(command[1] == "kubernetes" for command in commands(pod))
        assert (pod in asking) == (controls or "serviceAccountName" in pod)


KUBERNETES = "1.34"


def test_the_cluster_knows_all_fields() -> None:
    """By the API's published schemas; what operators add (JobSet) has none, and its pods have."""
    without = []
    for each in [*objects(), *yaml.safe_load_all(POD.read_text())]:
        try:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            without.append(each["kind"])
            for pod in pods(each):
                whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
                kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    assert sorted(without) == ["JobSet", "PodMonitor", "TrainJob", "TrainingRuntime"]
    wrong = of_kind("PodDisruptionBudget", objects("network.yaml"))
    wrong["spec"]["maxUnavailabel"] = wrong["spec"].pop("maxUnavailable")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_the_policy_and_the_budget_are_for_all_pods_of_the_job() -> None:
    wanted = {"ckptd.io/network": "train"}
    for kind, field in (("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")):
        assert of_kind(kind, objects("network.yaml"))["spec"][field] == {"matchLabels": wanted}
    templates = [part for part in holders(objects()) if "containers" in part.get("spec", {})]
    assert len(templates) == 6
    for template in templates:
        assert template["metadata"]["labels"].items() >= wanted.items()


def holders(part: Any) -> Iterator[dict[str, Any]]:
    """All mappings of an object."""
    if isinstance(part, dict):
        yield part
        part = list(part.values())
    for inner in part if isinstance(part, list) else []:
        yield from holders(inner)
