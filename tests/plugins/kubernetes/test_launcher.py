from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.elastic.launchers.base import Command, Hint, Launcher, Machine, MachineState
from ckptd.errors import DeadlineError, StoreError, UsageError
from ckptd.testing.launchers import LauncherContract
from ckptd_kubernetes.api import Api, ApiError, Json, in_cluster
from ckptd_kubernetes.launcher import JobPods, Kubernetes, KubernetesPods, template_of
from ckptd_kubernetes.pods import pod_of
from ckptd_kubernetes.watch import Watch
from tests.plugins.kubernetes.fakekube import FakeKube
from tests.processes import PATIENCE_S, until

TEMPLATE = {"spec": {"containers": [{"name": "trainer", "image": "x"}], "subdomain": "train"}}


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("secret\n")
    return path


@pytest.fixture
def kube() -> Iterator[FakeKube]:
    with FakeKube(token="secret") as made:
        yield made


@pytest.fixture
def api(kube: FakeKube, token: Path) -> Api:
    return Api(url=kube.url, namespace="jobs", token_file=token)


def sleeper(node: str) -> list[str]:
    return [sys.executable, "-c", "import time; time.sleep(600)"]


def launcher_of(api: Api, command: Command = sleeper) -> Kubernetes:
    return Kubernetes(api, "train", ["a", "b"], command, template=TEMPLATE)


@pytest.fixture
def launcher(api: Api) -> Iterator[Kubernetes]:
    with launcher_of(api) as made:
        yield made


class TestKubernetes(LauncherContract):
    @pytest.fixture
    def make(self, api: Api) -> Iterator[Callable[[Command], Launcher]]:
        made: list[Launcher] = []

        def maker(command: Command) -> Launcher:
            made.append(launcher_of(api, command))
            return made[-1]

        yield maker
        for launcher in made:
            launcher.close()


# -- pods ------------------------------------------------------------------------------------------


def machine(launcher: KubernetesPods, name: str) -> Machine:
    return next(m for m in launcher.machines(PATIENCE_S) if m.name == name)


def test_a_pod_has_its_name_its_command_and_what_the_template_says() -> None:
    template: dict[str, Any] = {
        "metadata": {"labels": {"team": "x"}},
        "spec": {
            "containers": [
                {"name": "other", "command": ["stay"]},
                {
                    "name": "trainer",
                    "args": ["gone"],
                    "env": [{"name": "CKPTD_NODE", "value": "?"}],
                },
            ],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [1]}, {}]
                    }
                }
            },
        },
    }
    before = repr(template)
    pod = pod_of(template, job="train", node="n0", command=["go"], avoid=["m1"], owner={"uid": "u"})
    assert repr(template) == before
    other, trainer = pod["spec"]["containers"]
    assert (other["command"], trainer["command"]) == (["stay"], ["go"])
    assert "args" not in trainer
    assert {e["name"]: e["value"] for e in trainer["env"]} == {
        "CKPTD_NODE": "n0",
        "CKPTD_JOB": "train",
    }
    assert pod["metadata"]["labels"] == {
        "team": "x",
        "ckptd.io/job": "train",
        "ckptd.io/node": "n0",
    }
    assert pod["metadata"]["ownerReferences"] == [{"uid": "u"}]
    assert (pod["spec"]["hostname"], pod["spec"]["restartPolicy"]) == ("n0", "Never")
    wanted = pod["spec"]["affinity"]["nodeAffinity"]
    terms = wanted["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    avoid = [{"key": "metadata.name", "operator": "NotIn", "values": ["m1"]}]
    assert [t["matchFields"] for t in terms] == [avoid, avoid]
    with pytest.raises(StoreError, match="no container"):
        pod_of({"spec": {}}, job="train", node="n0", command=[])


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a" * 64, "a.b"])
def test_names_that_no_pod_can_have_are_refused(api: Api, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        Kubernetes(api, "train", [name], sleeper, template=TEMPLATE)
    assert "invalid Kubernetes name" in caught.value.message


def test_the_template_is_an_object_that_owns_the_pods(kube: FakeKube, api: Api) -> None:
    kept = kube.put("podtemplates", {"metadata": {"name": "train"}, "template": TEMPLATE})
    template, owner = template_of(api, "train", PATIENCE_S)
    assert template == TEMPLATE
    assert owner["uid"] == kept["metadata"]["uid"]
    with pytest.raises(ApiError) as caught:
        template_of(api, "none", PATIENCE_S)
    assert (caught.value.status, caught.value.message) == (404, "the Kubernetes API refused")


def test_a_replaced_node_is_put_on_another_machine(kube: FakeKube, launcher: Kubernetes) -> None:
    launcher.start(["a", "b"], PATIENCE_S)
    old = (kube.get("pods", "a") or {})["spec"]["nodeName"]
    names = ["a"]
    for _ in range(2):
        new = launcher.replace(names[-1], PATIENCE_S)
        assert new not in names
        names.append(new)
        launcher.start([new], PATIENCE_S)
        assert (kube.get("pods", new) or {})["spec"]["nodeName"] != old
    until(lambda: kube.names("pods") == [names[-1], "b"], "the old pods are gone")


def test_a_pod_that_finds_no_machine_says_so(kube: FakeKube, launcher: Kubernetes) -> None:
    for name in kube.names("nodes"):
        taint = {"key": "full", "effect": "NoSchedule"}
        kube.change("nodes", name, "spec", taints=[taint])
    launcher.start(["a"], PATIENCE_S)
    found = machine(launcher, "a")
    assert (found.running, found.state) == (True, MachineState.UP)
    assert found.reason.startswith("Unschedulable")


def test_a_controller_that_comes_back_finds_its_pods(api: Api, launcher: Kubernetes) -> None:
    launcher.start(["a"], PATIENCE_S)
    again = launcher_of(api)
    assert machine(again, "a").running
    again.stop(["a"], PATIENCE_S)
    assert not machine(launcher, "a").running
    again.close()


def test_a_pod_on_a_machine_that_is_gone_does_not_hold_a_stop_up(
    kube: FakeKube, launcher: Kubernetes
) -> None:
    launcher.start(["a"], PATIENCE_S)
    pod = kube.get("pods", "a") or {}
    down = [{"type": "Ready", "status": "Unknown"}]
    kube.change("nodes", pod["spec"]["nodeName"], "status", conditions=down)
    until(lambda: machine(launcher, "a").state is MachineState.DOWN, "the machine is down")
    assert "is not ready" in machine(launcher, "a").reason
    launcher.stop(["a"], PATIENCE_S)
    assert kube.get("pods", "a") is not None  # nobody there carries the deletion out


def test_a_pod_that_does_not_go_is_told(kube: FakeKube, launcher: Kubernetes) -> None:
    launcher.start(["a"], PATIENCE_S)
    kube.deaf, kube._second_s, kube.answer_s = True, 600.0, 0.1  # the last is asked when it is late
    with pytest.raises(DeadlineError) as caught:
        launcher.stop(["a"], 0.5)
    assert "pods are not gone in time" in caught.value.message
    kube._second_s, kube.answer_s = 0.02, 0.0
    kube.delete("a", 0)


def test_a_pod_that_somebody_else_deleted_is_one_that_ended(
    kube: FakeKube, launcher: Kubernetes
) -> None:
    launcher.start(["a", "b"], PATIENCE_S)
    assert all(m.running and m.code is None for m in launcher.machines(PATIENCE_S))
    kube.delete("a", 0)
    until(lambda: kube.get("pods", "a") is None, "it is gone")
    assert (machine(launcher, "a").code, machine(launcher, "a").state) == (137, MachineState.UP)
    launcher.start(["a"], PATIENCE_S)
    assert (machine(launcher, "a").running, machine(launcher, "a").code) == (True, None)
    launcher.stop(["a"], PATIENCE_S)
    assert machine(launcher, "a").code is None


@pytest.mark.parametrize(("said", "code"), [(0, 0), (3, 3), (None, 137)])
def test_a_pod_that_ended_says_with_what(
    kube: FakeKube, api: Api, said: int | None, code: int
) -> None:
    quick = [sys.executable, "-c", f"raise SystemExit({said})"]
    with launcher_of(api, lambda _: quick) as launcher:
        launcher.start(["a"], PATIENCE_S)
        until(lambda: not machine(launcher, "a").running, "it has ended")
        if said is None:  # an evicted pod may have lost the states of its containers
            kube.change("pods", "a", "status", phase="Failed", containerStatuses=[])
        assert machine(launcher, "a").code == code


# -- hints -----------------------------------------------------------------------------------------


def hint(launcher: KubernetesPods) -> Hint:
    """Return the one hint that comes."""
    found = until(lambda: launcher.hints(PATIENCE_S), "a hint comes")
    assert len(found) == 1
    assert launcher.hints(PATIENCE_S) == ()
    return found[0]


def test_a_pod_that_somebody_deletes_is_told_once_with_its_grace(
    kube: FakeKube, launcher: Kubernetes
) -> None:
    launcher.start(["a", "b"], PATIENCE_S)
    assert launcher.hints(PATIENCE_S) == ()
    kube.deaf, kube._second_s = True, 600.0
    why = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    kube.change("pods", "b", "status", conditions=[why])
    assert hint(launcher).node == "b"
    kube.delete("a", 1000)
    found = hint(launcher)
    assert (found.node, found.reason) == ("a", "the pod is deleted")
    assert 0.0 < found.seconds <= 1000.0
    kube._second_s = 0.02
    kube.delete("a", 0)
    launcher.stop(["b"], PATIENCE_S)
    assert launcher.hints(PATIENCE_S) == ()  # our own doing is no news


@pytest.mark.parametrize(
    ("part", "fields", "seconds"),
    [
        ("spec", {"taints": [{"key": "node.kubernetes.io/unschedulable"}]}, 30.0),
        ("spec", {"taints": [{"key": "aws-node-termination-handler/spot-itn"}]}, 120.0),
        ("spec", {"taints": [{"key": "mine", "effect": "NoExecute"}]}, 0.0),
        ("spec", {"taints": [{"key": "soon", "effect": "NoExecute"}]}, 77.0),
        ("status", {"conditions": [{"type": "PreemptScheduled", "status": "True"}]}, 30.0),
    ],
)
def test_taints_and_conditions_of_a_machine_are_hints_until_taken_back(
    kube: FakeKube, api: Api, part: str, fields: dict[str, Any], seconds: float
) -> None:
    stays = {"key": "soon", "operator": "Exists", "tolerationSeconds": 77}
    template = {"spec": {**TEMPLATE["spec"], "tolerations": [stays]}}
    with Kubernetes(api, "train", ["a", "b"], sleeper, template=template) as launcher:
        launcher.start(["a", "b"], PATIENCE_S)
        below = (kube.get("pods", "a") or {})["spec"]["nodeName"]
        for _ in range(2):
            kube.change("nodes", below, part, **fields)
            found = hint(launcher)
            assert (found.node, found.seconds) == ("a", seconds)
            assert below in found.reason
            assert machine(launcher, "a").state is MachineState.DRAINING
            kube.change("nodes", below, part, **{k: [] for k in fields})
            up = MachineState.UP
            until(lambda: machine(launcher, "a").state is up, "taken back")  # noqa: B023
            assert launcher.hints(PATIENCE_S) == ()


@pytest.mark.parametrize(
    "taint",
    [
        {"key": "other", "effect": "NoSchedule"},
        {"key": "mine", "effect": "NoExecute", "value": "v"},
        {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"},
    ],
)
def test_a_taint_that_drives_nobody_out_is_no_hint(
    kube: FakeKube, api: Api, taint: dict[str, str]
) -> None:
    stays = {"key": "mine", "value": "v", "effect": "NoExecute"}
    template = {"spec": {**TEMPLATE["spec"], "tolerations": [stays]}}
    with Kubernetes(api, "train", ["a", "b"], sleeper, template=template) as launcher:
        launcher.start(["a", "b"], PATIENCE_S)
        below = [(kube.get("pods", n) or {})["spec"]["nodeName"] for n in "ab"]
        kube.change("nodes", below[0], "spec", taints=[taint])
        cordoned = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
        kube.change("nodes", below[1], "spec", taints=[cordoned])
        assert hint(launcher).node == "b"


def test_where_nodes_may_not_be_read_pods_still_tell(token: Path) -> None:
    with FakeKube(token="secret", nodes_allowed=False) as kube:
        api = Api(url=kube.url, namespace="jobs", token_file=token)
        with launcher_of(api) as launcher:
            launcher.start(["a"], PATIENCE_S)
            assert machine(launcher, "a").running
            why = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            kube.change("pods", "a", "status", conditions=[why])
            assert hint(launcher).reason.startswith("EvictionByEvictionAPI")


# -- pods of a Job ---------------------------------------------------------------------------------


def test_a_job_makes_deleted_pods_anew_under_the_same_node(kube: FakeKube, api: Api) -> None:
    kube.recreate = True
    for n in range(2):
        pod = pod_of(TEMPLATE, job="train", node=f"t-{n}", command=sleeper(""))
        kube.create({**pod, "metadata": {**pod["metadata"], "name": f"t-{n}-abcde"}})
    with JobPods(api, "ckptd.io/job=train") as launcher:
        names = [m.name for m in launcher.machines(PATIENCE_S)]
        assert names == ["t-0", "t-1"]
        before = kube.names("pods")
        launcher.stop(["t-0"], PATIENCE_S)
        until(lambda: machine(launcher, "t-0").running, "the Job made it anew")
        assert machine(launcher, "t-1").running
        assert len(set(kube.names("pods")) - set(before)) == 1
        assert launcher.replace("t-1", PATIENCE_S) == "t-1"
        until(lambda: not set(kube.names("pods")) & set(before), "both are other pods now")
        # What has ended by itself is cleared away, and so made anew.
        ended = until(
            lambda: [n for n in kube.names("pods") if n.startswith("t-0")], "t-0 is there"
        )[0]
        kube.change("pods", ended, "status", phase="Failed")
        until(lambda: not machine(launcher, "t-0").running, "it has ended")
        launcher.start(["t-0", "t-1"], PATIENCE_S)
        until(lambda: machine(launcher, "t-0").running, "it was made anew")
        with pytest.raises(UsageError):
            launcher.start(["t-2"], PATIENCE_S)
    assert len(kube.names("pods")) == 2  # they are the Job's


# -- the API ---------------------------------------------------------------------------------------


def test_a_token_that_is_replaced_is_read_again(kube: FakeKube, api: Api, token: Path) -> None:
    assert api.call("GET", api.pods(), PATIENCE_S)["items"] == []
    kube.token = "other"
    with pytest.raises(ApiError) as caught:
        api.call("GET", api.pods(), PATIENCE_S)
    assert caught.value.status == 401
    assert "token" in str(caught.value.hint)
    token.write_text("other")
    assert api.call("GET", api.pods(), PATIENCE_S)["items"] == []


def test_a_busy_server_is_asked_again_and_not_for_ever(kube: FakeKube, api: Api) -> None:
    kube.busy = 2
    assert api.call("GET", api.pods(), PATIENCE_S)["items"] == []
    assert len(kube.requests) == 3
    kube.busy = 10**6
    with pytest.raises(DeadlineError) as caught:
        api.call("GET", api.pods(), 0.3)
    assert "the Kubernetes API did not answer in time" in caught.value.message
    assert "429" in str(caught.value.found)


def test_an_answer_that_is_too_large_is_named(
    kube: FakeKube, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd_kubernetes.api._MOST_BYTES", 10)
    api = Api(url=kube.url, namespace="jobs", token_file=token)
    with pytest.raises(StoreError, match="too large") as caught:
        api.call("GET", api.pods(), PATIENCE_S, query={"limit": "5"})
    assert caught.value.where == kube.url + api.pods()


def test_a_server_that_is_not_there_is_told() -> None:
    api = Api(url="http://127.0.0.1:1", namespace="jobs")
    with pytest.raises(DeadlineError) as caught:
        api.call("GET", api.pods(), 0.2)
    assert "refused" in str(caught.value.found).lower()


@pytest.mark.parametrize("url", ["http://10.0.0.1:443", "ftp://x", "nothing", "https://"])
def test_addresses_that_would_show_the_token_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Api(url=url, namespace="jobs")
    assert "invalid address of a Kubernetes API" in caught.value.message


def test_long_lists_come_in_pages(kube: FakeKube, api: Api) -> None:
    kube.page = 2
    for n in range(5):
        kube.put("pods", {"metadata": {"name": f"p{n}", "labels": {"k": "v"}}, "spec": {}})
    assert len(JobPods(api, "k=v").machines(PATIENCE_S)) == 5
    watch = Watch(api, api.pods(), {"labelSelector": "k=v"})
    assert watch.wait(PATIENCE_S)
    assert len(watch.objects()) == 5
    watch.close()


@pytest.mark.parametrize("as_status", [True, False])
def test_a_watch_goes_on_after_ends_and_lists_again_after_410(
    kube: FakeKube, api: Api, as_status: bool
) -> None:
    kube.gone_as_status = as_status
    watch = Watch(api, api.pods(), {"labelSelector": "k=v"}, round_s=1.0)
    assert watch.wait(PATIENCE_S)

    def names() -> list[str]:
        return sorted(o["metadata"]["name"] for o in watch.objects())

    def put(name: str, label: str = "v") -> None:
        kube.put("pods", {"metadata": {"name": name, "labels": {"k": label}}, "spec": {}})

    put("a")
    put("other", "w")
    until(lambda: names() == ["a"], "a pod is seen")
    kube.cut_watches()
    put("b")
    until(lambda: names() == ["a", "b"], "another is seen after the end")
    assert watch.lists == 1
    kube.forget_history()
    until(lambda: watch.lists >= 2, "everything is listed again")
    kube.delete("a", 0)
    until(lambda: names() == ["b"], "a deletion is seen")
    watch.close()


def test_a_watch_that_is_ended_at_once_each_time_is_asked_for_less_and_less(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[float] = []

    def ended(server: Api, *_: object) -> Iterator[Json]:
        if server is api:  # a launcher of a test before may still watch, at its own pace
            began.append(time.monotonic())
        return iter(())

    monkeypatch.setattr(Api, "stream", ended)
    # On a busy machine a request that is ended at once may last for a second.
    monkeypatch.setattr("ckptd_kubernetes.watch._LASTED_S", 3600.0)
    watch = Watch(api, api.pods(), {})
    until(lambda: len(began) >= 5, "it is asked for again")
    watch.close()
    assert began[4] - began[0] >= 0.1 + 0.2 + 0.4 + 0.8
    assert watch.failure is None


def test_a_watch_outlives_refusals(kube: FakeKube, api: Api) -> None:
    kube.busy = 1
    kube.token = "other"
    watch = Watch(api, api.pods(), {})
    assert not watch.wait(PATIENCE_S)
    assert watch.failure is not None
    kube.token = "secret"
    until(lambda: watch.lists, "it is let in")
    watch.close()


def test_a_pod_finds_its_cluster_and_trusts_only_its_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    account = tmp_path / "account"
    account.mkdir()
    with pytest.raises(UsageError) as caught:
        in_cluster(account)
    assert "this process does not run in a pod with a service account" in caught.value.message
    pair = certificate(account / "ca.crt", tmp_path / "key")
    (account / "token").write_text("secret")
    (account / "namespace").write_text("jobs")
    with FakeKube(token="secret", tls=pair) as kube:
        host, _, port = kube.url.removeprefix("https://").partition(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        api = in_cluster(account)
        assert api.call("GET", api.pods(), PATIENCE_S)["items"] == []
        assert ("GET", "/api/v1/namespaces/jobs/pods") in kube.requests
        certificate(account / "ca.crt", tmp_path / "key2")
        stranger = in_cluster(account)
        with pytest.raises(DeadlineError) as late:
            stranger.call("GET", stranger.pods(), 0.3)
        assert "CERTIFICATE_VERIFY_FAILED" in str(late.value.found)


def certificate(path: Path, key: Path) -> tuple[Path, Path]:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=kube", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    return path, key
