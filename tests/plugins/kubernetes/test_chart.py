"""deploy/helm: Kubernetes and ckptd accept what the chart renders, in each of its three ways."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ckptd.elastic.control.states import ControllerSettings
from tests.docs.test_examples import parses

CHART = Path(__file__).parents[3] / "deploy/helm/ckptd"
HELM = shutil.which("helm", path=Path(sys.executable).parent) or shutil.which("helm")
KUBERNETES = "1.34"
MAKERS = ("controller", "jobset", "trainer")
OTHER = (
    "rdma.enabled=true",
    "podMonitor.enabled=true",
    "trainer.resourceClaims[0].name=gpus",
    "trainer.nodeSelector.gpu=h200",
)
REMOTE = ("claim=", "log=s3://bucket/log", "script={t.py}", "storeKeys=keys", "layout=")
MONITORED = ("podMonitor.enabled=true",)

pytestmark = pytest.mark.skipif(HELM is None, reason="no helm")


@cache
def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(HELM), *words], capture_output=True, text=True, timeout=120, check=False
    )


def text(*values: str) -> str:
    words = [word for value in values for word in ("--set", value)]
    done = helm("template", "train", str(CHART), "--namespace", "train", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(*values: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text(*values)) if each]


@pytest.fixture(params=[(), OTHER, REMOTE, MONITORED], ids=["plain", "rdma", "remote", "monitored"])
def values(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(request.param)


@pytest.fixture(params=MAKERS)
def maker(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def job(maker: str, values: tuple[str, ...]) -> list[dict[str, Any]]:
    """All objects of a job."""
    return objects(f"pods={maker}", *values)


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


def test_command_lines(job: list[dict[str, Any]]) -> None:
    verbs = set()
    for command in commands(job):
        assert parses(command)
        verbs.add(command[1])
        if command[1] == "kubernetes" and "--" in command:  # what its pods run
            assert parses(["ckptd", "run", *command[command.index("--") + 1 :]])
            verbs.add("run")
    assert verbs == {"controller", "ctl", "kubernetes", "run", "serve"}


def pods(part: Any) -> Iterator[dict[str, Any]]:
    """What holds containers, anywhere in an object."""
    if isinstance(part, dict):
        if "containers" in part:
            yield part
        part = list(part.values())
    for inner in part if isinstance(part, list) else []:
        yield from pods(inner)


def every(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def test_volumes_and_secrets_are_there(job: list[dict[str, Any]], values: tuple[str, ...]) -> None:
    for pod in pods(job):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in every(pod):
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounts) <= volumes
            env = {each["name"]: each for each in container["env"]}
            assert "secretKeyRef" in env["CKPTD_SECRET"]["valueFrom"]
            # The first process makes the folder below the volume.
            assert str(Path(env["CKPTD_RUN_DIR"]["value"]).parent) == mounts["run"]
            # A store's keys, or a volume: all write and read where the checkpoints are.
            assert ("checkpoints" in mounts) == ("claim=" not in values)
            assert ("envFrom" in container) == ("storeKeys=keys" in values)


def words(option: str, command: list[str]) -> str:
    (found,) = [w.partition("=")[2] for w in command if w.startswith(f"{option}=")]
    return found


def test_the_controller_is_where_pods_look_for_it(maker: str, job: list[dict[str, Any]]) -> None:
    lines = {line[1]: line for line in commands(job)}
    host, port = words("--host", lines["controller"]), words("--port", lines["controller"])
    run = lines.get("run") or lines["kubernetes"]
    assert words("--rdzv-endpoint", run) == f"{host}:{port}"
    assert words("--controller", lines["kubernetes"]) == f"127.0.0.1:{port}"
    for option in ("--nnodes", "--nproc-per-node"):
        other = {"--nnodes": "--nodes", "--nproc-per-node": "--slots"}[option]
        assert words(option, run) == words(other, lines["controller"])
    name, _, domain = host.partition(".")
    if "run" in lines:  # under hostNetwork the host's name is the machine's
        assert words("--node", run) == "train-node-0-$(JOB_COMPLETION_INDEX)"
    if maker != "controller":  # names that the JobSet gives: JOBSET-REPLICATEDJOB-INDEX-INDEX
        assert (name, domain) == ("train-controller-0-0", "train")
        chosen = words("--selector", lines["kubernetes"])
        assert chosen.split(",")[0] == "jobset.sigs.k8s.io/jobset-name=train"
        return
    service, template = of_kind("Service", job), of_kind("PodTemplate", job)
    deployed = of_kind("Deployment", job)["spec"]["template"]
    assert [str(each["port"]) for each in service["spec"]["ports"]] == [port]
    assert (name, domain) == (deployed["spec"]["hostname"], service["metadata"]["name"])
    assert deployed["spec"]["subdomain"] == template["template"]["spec"]["subdomain"] == domain
    assert words("--template", lines["kubernetes"]) == template["metadata"]["name"]
    for label, value in service["spec"]["selector"].items():
        for owner in (deployed, template["template"]):
            assert owner["metadata"]["labels"][label] == value


def test_the_controller_is_watched_and_has_a_daemon(
    job: list[dict[str, Any]], values: tuple[str, ...]
) -> None:
    (aside,) = [p for p in pods(job) if any(c[1] == "controller" for c in commands(p))]
    by_verb = {container["command"][1]: container for container in every(aside)}
    control, watch = by_verb["controller"], by_verb["serve"]
    port = words("--port", control["command"])
    probe = control["livenessProbe"]
    hung_s = probe["failureThreshold"] * (probe["periodSeconds"] + probe["timeoutSeconds"])
    assert hung_s + probe["terminationGracePeriodSeconds"] < ControllerSettings().lease_s
    for one in (probe["exec"]["command"], watch["command"]):
        assert words("--controller", one) == f"127.0.0.1:{port}"
        assert words("--job", one) == "train"
    (metrics,) = watch["ports"]
    assert str(metrics["containerPort"]) == words("--port", watch["command"])
    scraped = [each for each in job if each["kind"] == "PodMonitor"]
    assert len(scraped) == ("podMonitor.enabled=true" in values)
    if values != OTHER:  # its pods have the machines' addresses
        rules = of_kind("NetworkPolicy", job)["spec"]["ingress"]
        scrapes = [{"port": metrics["containerPort"]}]
        assert [rule["ports"] for rule in rules[1:]] == [scrapes for _ in scraped]
    for monitor in scraped:
        assert [e["port"] for e in monitor["spec"]["podMetricsEndpoints"]] == [metrics["name"]]


def test_pods_may_do_as_little_as_they_need(
    job: list[dict[str, Any]], values: tuple[str, ...]
) -> None:
    for pod in pods(job):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        trains = "shm" in {volume["name"] for volume in pod["volumes"]}
        assert pod.get("hostNetwork", False) == (trains and values == OTHER)
        for container in every(pod):
            least = container["securityContext"]
            assert not least["allowPrivilegeEscalation"]
            assert least["capabilities"] == {"drop": ["ALL"]}
            # A trainer writes where its code wants.
            assert least.get("readOnlyRootFilesystem", False) == (not trains)


def test_who_asks_the_cluster_may(maker: str, job: list[dict[str, Any]]) -> None:
    account = of_kind("ServiceAccount", job)["metadata"]["name"]
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        binding = of_kind(kind, job)
        assert [who["name"] for who in binding["subjects"]] == [account]
        role = of_kind(binding["roleRef"]["kind"], job)
        assert role["metadata"]["name"] == binding["roleRef"]["name"]
    for pod in pods(job):
        asks = any(command[1] == "kubernetes" for command in commands(pod))
        assert pod["automountServiceAccountToken"] == asks
        assert pod.get("serviceAccountName") == (account if asks else None)
    allowed = of_kind("Role", job)["rules"]
    assert ("create" in allowed[0]["verbs"]) == (maker == "controller")
    if maker == "controller":
        template = of_kind("PodTemplate", job)["metadata"]["name"]
        assert allowed[1]["resourceNames"] == [template]


def test_the_cluster_knows_all_fields(maker: str, job: list[dict[str, Any]]) -> None:
    """By the API's published schemas; what operators add (JobSet) has none, and its pods have."""
    without = set()
    for each in job:
        try:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            without.add(each["kind"])
            for pod in pods(each):
                whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
                kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    others = {"controller": set(), "jobset": {"JobSet"}, "trainer": {"TrainingRuntime", "TrainJob"}}
    assert without - {"PodMonitor"} == others[maker]
    wrong = of_kind("PodDisruptionBudget", job)
    wrong["spec"]["minAvailabel"] = wrong["spec"].pop("minAvailable")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_the_policy_and_the_budget_are_for_all_pods(
    job: list[dict[str, Any]], values: tuple[str, ...]
) -> None:
    wanted = {"ckptd.io/network": "train"}
    # Most network plugins take no pod of a machine's own network by its labels.
    policies = [each for each in job if each["kind"] == "NetworkPolicy"]
    assert len(policies) == (values != OTHER)
    assert all(each["spec"]["podSelector"] == {"matchLabels": wanted} for each in policies)
    # A number that may be away is known for pods of Deployments and the like alone.
    budget = of_kind("PodDisruptionBudget", job)["spec"]
    assert budget == {"minAvailable": 2 + 1, "selector": {"matchLabels": wanted}}
    templates = [part for part in holders(job) if "containers" in part.get("spec", {})]
    assert len(templates) == 2
    for template in templates:
        assert template["metadata"]["labels"].items() >= wanted.items()


def holders(part: Any) -> Iterator[dict[str, Any]]:
    """All mappings of an object."""
    if isinstance(part, dict):
        yield part
        part = list(part.values())
    for inner in part if isinstance(part, list) else []:
        yield from holders(inner)


def resources(job: list[dict[str, Any]]) -> dict[str, Any]:
    """What a trainer's pod asks for: of the TrainJob, or of the pod itself."""
    for each in job:
        if each["kind"] == "TrainJob":
            found: dict[str, Any] = each["spec"]["trainer"]["resourcesPerNode"]
            return found
    (pod,) = [pod for pod in pods(job) if any(v["name"] == "shm" for v in pod["volumes"])]
    (trainer,) = pod["containers"]
    asked: dict[str, Any] = trainer["resources"]
    return asked


def test_devices_are_asked_for(
    maker: str, job: list[dict[str, Any]], values: tuple[str, ...]
) -> None:
    asked = resources(job)
    assert asked["limits"]["nvidia.com/gpu"] == 8
    if values == OTHER:
        assert asked["limits"]["rdma/hca"] == 1
        assert asked["claims"] == [{"name": "gpus"}]
    else:
        assert {*asked} == {"requests", "limits"}
        assert "rdma/hca" not in asked["limits"]


@pytest.mark.parametrize("kind", ["ClusterRole", "Deployment", "PodMonitor", "ServiceAccount"])
def test_two_jobs_do_not_meet(kind: str) -> None:
    """Neither by the names of their objects nor by what these choose."""
    one, other = (of_kind(kind, objects(f"job={name}", *MONITORED)) for name in ("one", "other"))
    assert one["metadata"]["name"] != other["metadata"]["name"]
    assert one.get("spec", {}).get("selector", "a") != other.get("spec", {}).get("selector", "b")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("pods=slurm", "pods must be one of"),
        ("nodes.min=0", "greater than or equal to 1"),
        ("imag=x", "Additional property imag is not allowed"),
        ("job=A_b", "job: Does not match pattern"),
        ("script=train.py", "script: Invalid type"),
        ("claim=", "set log=s3://"),
        ("claim=,log=s3://b/l", "lies on a volume"),
        ("nodes.min=9", "min is above max"),
        ("job=on", "YAML reads the job's name"),
    ],
)
def test_a_wrong_value_is_named(value: str, said: str) -> None:
    done = helm("template", "train", str(CHART), "--set", value)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize("name", ["2026", "a.b", "a" * 43])
def test_a_release_that_no_host_may_be_called_after_is_refused(name: str) -> None:
    done = helm("template", name, str(CHART))
    assert done.returncode != 0
    assert "is no name of hosts" in done.stderr


def test_a_trainjob_is_made_after_its_runtime() -> None:
    made = objects("pods=trainer")
    kinds = [each["kind"] for each in made]
    assert kinds.index("TrainingRuntime") < kinds.index("TrainJob")
    assert of_kind("TrainJob", made)["metadata"]["annotations"] == {"helm.sh/hook": "post-install"}


def test_the_chart_is_in_order(maker: str) -> None:
    done = helm("lint", "--strict", str(CHART), "--set", f"pods={maker}")
    assert done.returncode == 0, done.stdout
    assert not [line for line in text(f"pods={maker}").splitlines() if line != line.rstrip()]
