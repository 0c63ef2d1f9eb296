"""Kubernetes as a launcher: pods that the controller makes itself, or pods of a Job or JobSet.

A pod is a node. What Kubernetes says of pods and of the nodes below them (deletion, disruption,
taints, conditions) becomes machines and hints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence

from ckptd.elastic.launchers import Command, Hint, Launcher, Machine
from ckptd.errors import CkptdError, DeadlineError, NotFoundError, UsageError
from ckptd_kubernetes.api import Api, ApiError, Json
from ckptd_kubernetes.pods import JOB_LABEL, check_name, pod_of
from ckptd_kubernetes.state import (
    KILLED,
    Seen,
    is_ready,
    machine_of,
    notice_of,
    seen,
)
from ckptd_kubernetes.watch import Watch

__all__ = ["JobPods", "Kubernetes", "KubernetesPods", "template_of"]

_log = logging.getLogger("ckptd.elastic")
_NODES = "/api/v1/nodes"
_POLL_S = 0.2
_GRACE_S = 1
"""A kubelet that is there kills within it and says so. 0 would take the pod's name off the API
before anybody knows that its processes are dead."""
_LEAST_S = 1.0
"""For an answer of the API when the time is over: it says what was not done in time."""
_CLOSE_S = 30.0
_NOT_FOUND, _CONFLICT = 404, 409


class KubernetesPods(Launcher):
    """Common base of both launchers: pods that a selector finds.

    Parameters
    ----------
    api
        The API server.
    selector
        Of the job's pods.
    round_s
        Of the watches; see `Watch`.
    """

    def __init__(self, api: Api, selector: str, *, round_s: float = 60.0) -> None:
        self._api = api
        self._query = {"labelSelector": selector}
        self._round_s = round_s
        self._watches: tuple[Watch, Watch] | None = None
        self._hinted: set[tuple[str, str]] = set()
        self._ours: set[str] = set()
        """Pods that this launcher deleted: their end is not reported."""
        self._had: dict[str, str] = {}
        """The last pod that each node had, by its uid."""

    # -- what there is -----------------------------------------------------------------------------

    def machines(self, timeout_s: float) -> tuple[Machine, ...]:
        pods = self._pods(timeout_s)
        below = self._below(min(timeout_s, 5.0))
        found = [self._machine(n, pods.get(n), below) for n in {*self._names(pods), *pods}]
        return tuple(sorted(found, key=lambda m: m.name))

    def _machine(self, name: str, pod: Seen | None, below: dict[str, Json]) -> Machine:
        if pod is not None:
            self._had[name] = pod.uid
            return machine_of(name, pod, below.get(pod.machine))
        before = self._had.get(name)
        if before is None or before in self._ours:
            return Machine(name=name)
        # It was deleted from outside, and by now all trace of it is gone.
        return Machine(name=name, code=KILLED, reason="its pod was deleted")

    def hints(self, timeout_s: float) -> tuple[Hint, ...]:
        pods, below = self._followed(timeout_s), self._below(timeout_s)
        now: dict[tuple[str, str], Hint] = {}
        for pod in pods:
            notice = notice_of(pod, below.get(pod.machine))
            if notice is not None and pod.uid not in self._ours:
                # Not by its words, which may count down.
                now[pod.node, pod.uid] = Hint(node=pod.node, seconds=notice[0], reason=notice[1])
        fresh = [hint for key, hint in now.items() if key not in self._hinted]
        self._hinted = set(now)
        return tuple(fresh)

    def _names(self, pods: Collection[str]) -> Iterable[str]:
        """Return the nodes that the job has or had."""
        raise NotImplementedError

    def _pods(self, timeout_s: float) -> dict[str, Seen]:
        """Ask for all pods, by node; of several of one node the one that goes on."""
        query, found, now = {**self._query, "limit": "500"}, dict[str, Seen](), time.time()
        end = time.monotonic() + timeout_s
        while True:
            left = max(0.0, end - time.monotonic())
            page = self._api.call("GET", self._api.pods(), left, query=query)
            for pod in (seen(item, now) for item in page.get("items") or ()):
                before = found.get(pod.node)
                if before is None or (pod.runs, pod.leaving is None) > (
                    before.runs,
                    before.leaving is None,
                ):
                    found[pod.node] = pod
            more = (page.get("metadata") or {}).get("continue")
            if not more:
                return found
            query["continue"] = str(more)

    def _followed(self, timeout_s: float) -> list[Seen]:
        pods, _ = self._watching()
        if not pods.wait(timeout_s) and pods.failure is not None:
            raise _as_error(pods.failure)
        return [seen(pod, time.time()) for pod in pods.objects()]

    def _below(self, timeout_s: float) -> dict[str, Json]:
        """Return the Kubernetes nodes by name; none where that is not allowed."""
        _, nodes = self._watching()
        nodes.wait(timeout_s)
        return {str((n.get("metadata") or {}).get("name")): n for n in nodes.objects()}

    def _watching(self) -> tuple[Watch, Watch]:
        if self._watches is None:
            self._watches = (
                Watch(self._api, self._api.pods(), self._query, round_s=self._round_s),
                Watch(self._api, _NODES, {}, round_s=self._round_s),
            )
        return self._watches

    # -- ending ------------------------------------------------------------------------------------

    def stop(self, nodes: Sequence[str] | None, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        pods = self._pods(timeout_s)
        self._check(pods, nodes or ())
        going = [p for n, p in pods.items() if nodes is None or n in nodes]
        for pod in going:
            self._delete(pod, end)
        self._until_gone(going, end)

    def _check(self, pods: Collection[str], nodes: Iterable[str]) -> None:
        known = {*self._names(pods), *pods}
        strange = [n for n in nodes if n not in known]
        if strange:
            raise UsageError(
                "unknown node of this job",
                kind="unknown-node",
                wanted=", ".join(sorted(known))[:500],
                found=", ".join(map(repr, strange))[:500],
            )

    def _delete(self, pod: Seen, end: float) -> None:
        """Have this very pod deleted, not another one of its name."""
        self._ours.add(pod.uid)
        body: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": _GRACE_S,
            "preconditions": {"uid": pod.uid},
        }
        try:
            self._api.call("DELETE", self._api.pods(pod.name), _left(end), body=body)
        except ApiError as error:
            if error.status not in (_NOT_FOUND, _CONFLICT):
                raise

    def _until_gone(self, going: Sequence[Seen], end: float) -> None:
        uids = {p.uid for p in going}
        while uids:
            pods = [p for p in self._pods(_left(end)).values() if p.uid in uids]
            below = self._below(0.0)
            # Nothing more is known of a machine that is not ready: a lease ends what runs there.
            held = [p for p in pods if p.machine not in below or is_ready(below[p.machine])]
            if not held:
                return
            if time.monotonic() >= end:
                raise DeadlineError(
                    "pods are not gone in time", found=", ".join(p.name for p in held)[:500]
                )
            time.sleep(_POLL_S)

    def leave(self) -> None:
        """End the watches, and leave the pods alone. Idempotent."""
        for watch in self._watches or ():
            watch.close()
        self._watches = None

    def close(self) -> None:
        try:
            self.stop(None, _CLOSE_S)
        except CkptdError as error:
            _log.warning("pods of the job may be left: %s", error)
        self.leave()


class Kubernetes(KubernetesPods):
    """Pods that the controller makes itself, one a node; only it replaces them.

    Parameters
    ----------
    api
        The API server.
    job
        The job's name, for the label of its pods.
    nodes
        Names of its pods.
    command
        Of a node's launcher.
    template
        Of the pods, with ``metadata`` and ``spec``; see `template_of`.
    owner
        Object with whose deletion the pods go too, as an ownerReference.
    round_s
        Of the watches.

    Raises
    ------
    UsageError
        A name that Kubernetes does not take.
    """

    def __init__(
        self,
        api: Api,
        job: str,
        nodes: Sequence[str],
        command: Command,
        *,
        template: Json,
        owner: Json | None = None,
        round_s: float = 60.0,
    ) -> None:
        super().__init__(api, f"{JOB_LABEL}={check_name(job)}", round_s=round_s)
        self._job = job
        self._nodes = [check_name(n) for n in nodes]
        self._command = command
        self._template = template
        self._owner = owner
        self._left_behind: set[str] = set()

    def _names(self, pods: Collection[str]) -> Iterable[str]:
        return self._nodes

    def start(self, nodes: Sequence[str], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        pods = self._pods(timeout_s)
        self._check((), nodes)
        old = [p for n in nodes if (p := pods.get(n)) is not None and not _goes_on(p)]
        for pod in old:
            self._delete(pod, end)
        self._until_gone(old, end)
        for node in nodes:
            if node not in pods or pods[node] in old:
                self._create(node, end)

    def _create(self, node: str, end: float) -> None:
        pod = pod_of(
            self._template,
            job=self._job,
            node=node,
            command=self._command(node),
            avoid=self._left_behind,
            owner=self._owner,
        )
        try:
            self._api.call("POST", self._api.pods(), _left(end), body=pod)
        except ApiError as error:
            # A request that was repeated has made it already.
            if error.status != _CONFLICT:
                raise

    def replace(self, node: str, timeout_s: float) -> str:
        """Delete the pod; the next one has another name, and is not put on the same machine."""
        pods = self._pods(timeout_s)
        self._check((), [node])
        if (old := pods.get(node)) is not None:
            self._delete(old, time.monotonic() + timeout_s)
            self._left_behind |= {old.machine} - {""}
        base, taken = node.partition("-r")[0][:50], {*pods, *self._nodes}
        # Not a number that a pod had whose deletion goes on.
        new = next(n for k in range(1, len(taken) + 2) if (n := f"{base}-r{k}") not in taken)
        self._nodes = [n for n in self._nodes if n != node] + [new]
        return new


class JobPods(KubernetesPods):
    """Pods of a Job or JobSet, which makes each one again that is deleted, with the same hostname.

    So a node keeps its name, `stop` is what starts it again, and `start` has only to clear away
    pods that have ended. Nodes are known once they have been seen.

    Parameters
    ----------
    api
        The API server.
    selector
        Of the pods: ``batch.kubernetes.io/job-name=train`` or, for a JobSet,
        ``jobset.sigs.k8s.io/jobset-name=train``.
    round_s
        Of the watches.
    """

    def __init__(self, api: Api, selector: str, *, round_s: float = 60.0) -> None:
        super().__init__(api, selector, round_s=round_s)
        self._known: set[str] = set()

    def _names(self, pods: Collection[str]) -> Iterable[str]:
        self._known |= set(pods)
        return self._known

    def start(self, nodes: Sequence[str], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        pods = self._pods(timeout_s)
        self._check(pods, nodes)
        for pod in (pods[n] for n in nodes if n in pods):
            if not pod.runs:
                self._delete(pod, end)

    def replace(self, node: str, timeout_s: float) -> str:
        """Delete the pod: the Job makes another one of the same name where there is room.

        That is another machine if this one is cordoned or not ready; this launcher may not do that.
        """
        end = time.monotonic() + timeout_s
        pods = self._pods(timeout_s)
        self._check(pods, [node])
        if (old := pods.get(node)) is None:
            raise NotFoundError("the Job has no pod for this node now", kind="no-spare", where=node)
        self._delete(old, end)
        return node

    def close(self) -> None:
        """End the watches. The pods are the Job's, which would only make them again."""
        self.leave()


def template_of(api: Api, name: str, timeout_s: float) -> tuple[Json, Json]:
    """Return the template of a PodTemplate object, and a reference to it as the pods' owner.

    To delete that object ends the job.

    Raises
    ------
    ApiError
        There is none, or it may not be read.
    """
    found = api.call("GET", api.path("podtemplates", name), timeout_s)
    owner = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "name": name,
        "uid": (found.get("metadata") or {}).get("uid"),
    }
    return found.get("template") or {}, owner


def _goes_on(pod: Seen) -> bool:
    return pod.runs and pod.leaving is None


def _left(end: float) -> float:
    return max(_LEAST_S, end - time.monotonic())


def _as_error(error: Exception) -> CkptdError:
    if isinstance(error, CkptdError):
        return error
    return DeadlineError("cannot follow events of the Kubernetes API", found=str(error)[:500])
