"""States of Kubernetes pods and nodes as machines and hints: pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from ckptd.elastic.launchers import Machine, MachineState
from ckptd_kubernetes.api import Json

__all__ = ["DRAIN_S", "KILLED", "Seen", "is_ready", "machine_of", "notice_of", "seen"]

KILLED = 137
"""Exit code of a shell for a process that was killed."""
DRAIN_S = 30.0
"""Default notice of a node's end, in seconds, as clouds give before they take a machine back."""
_TAINTS = {
    "node.kubernetes.io/unschedulable": DRAIN_S,
    "node.kubernetes.io/out-of-service": 0.0,
    "node.cloudprovider.kubernetes.io/shutdown": 0.0,
    "ToBeDeletedByClusterAutoscaler": DRAIN_S,
    "karpenter.sh/disrupted": DRAIN_S,
    "karpenter.sh/disruption": DRAIN_S,
    "cloud.google.com/impending-node-termination": DRAIN_S,
    "aws-node-termination-handler/spot-itn": 120.0,
    "aws-node-termination-handler/scheduled-maintenance": DRAIN_S,
    "aws-node-termination-handler/asg-lifecycle-termination": DRAIN_S,
}
"""Taints of nodes that are to go, and in how many seconds."""
_NOT_READY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_SCHEDULED = ("PreemptScheduled", "RedeployScheduled", "RebootScheduled", "TerminateScheduled")
"""Conditions of nodes that are to go."""
_RUNS = ("Pending", "Running", "Unknown")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """State of a pod, as the launcher needs it.

    Attributes
    ----------
    name, uid
        The pod's.
    node
        Name of the launcher's node: the hostname in the pod, which a Job gives to the next pod too.
    machine
        The Kubernetes node that it was put on; empty before.
    runs
        Whether it has not ended.
    code
        Exit code; None while it has not ended.
    leaving
        Seconds until it is killed, if it is being deleted; from `now`.
    raw
        All of it.
    """

    name: str
    uid: str
    node: str
    machine: str
    runs: bool
    code: int | None
    leaving: float | None
    raw: Json


def seen(pod: Json, now: float) -> Seen:
    """Return what matters of a pod; `now` in seconds since 1970."""
    meta, spec = _of(pod, "metadata"), _of(pod, "spec")
    name = str(meta.get("name", ""))
    deleted = meta.get("deletionTimestamp")
    runs = _of(pod, "status").get("phase", "Pending") in _RUNS
    return Seen(
        name=name,
        uid=str(meta.get("uid", "")),
        node=str(spec.get("hostname") or name),
        machine=str(spec.get("nodeName") or ""),
        runs=runs,
        code=None if runs else _code(pod),
        leaving=None if deleted is None else max(0.0, _seconds(str(deleted), now) - now),
        raw=pod,
    )


def machine_of(name: str, pod: Seen | None, machine: Json | None) -> Machine:
    """Return a node of the job.

    Parameters
    ----------
    name
        Its name.
    pod
        Its pod, if there is one.
    machine
        The Kubernetes node below the pod, if it is known.
    """
    if pod is None:
        return Machine(name=name)
    if not pod.runs:
        # The next pod may well be put on another machine.
        return Machine(
            name=name, code=pod.code, reason=str(_of(pod.raw, "status").get("reason", ""))
        )
    running = True
    if machine is not None and not is_ready(machine):
        reason = f"node {pod.machine} is not ready"
        return Machine(name=name, state=MachineState.DOWN, running=running, reason=reason)
    if (notice := notice_of(pod, machine)) is not None:
        return Machine(name=name, state=MachineState.DRAINING, running=running, reason=notice[1])
    return Machine(name=name, running=running, reason=_waiting(pod.raw))


def notice_of(pod: Seen, machine: Json | None) -> tuple[float, str] | None:
    """Return in how many seconds a pod will be gone, and why; None without such a notice.

    By its own deletion or disruption, or by a taint or condition of its node.
    """
    if not pod.runs:
        return None
    found = sorted((*_own(pod), *_of_node(pod, machine)))
    return found[0] if found else None


def _own(pod: Seen) -> Iterator[tuple[float, str]]:
    why = [c for c in _conditions(pod.raw) if _is(c, "DisruptionTarget", "True")]
    text = " ".join(f"{c.get('reason', '')}: {c.get('message', '')}" for c in why)
    if pod.leaving is not None:
        yield pod.leaving, text or "the pod is deleted"
    elif why:
        grace = _of(pod.raw, "spec").get("terminationGracePeriodSeconds")
        yield float(grace) if isinstance(grace, int) else DRAIN_S, text


def _of_node(pod: Seen, machine: Json | None) -> Iterator[tuple[float, str]]:
    if machine is None:
        return
    for taint in _items(_of(machine, "spec").get("taints")):
        key, effect = str(taint.get("key", "")), taint.get("effect")
        text = f"node {pod.machine}: taint {key}"
        if key in _TAINTS:
            yield _TAINTS[key], text
        elif effect == "NoExecute" and key not in _NOT_READY:
            left = _tolerated(pod.raw, taint)
            if left is not None:
                yield left, text
    for condition in _conditions(machine):
        if any(_is(condition, kind, "True") for kind in _SCHEDULED):
            yield DRAIN_S, f"node {pod.machine}: {condition.get('type')}"


def _tolerated(pod: Json, taint: Mapping[str, Any]) -> float | None:
    """Return how long a pod stays on a node with this taint; None for ever."""
    longest = 0.0
    for t in _items(_of(pod, "spec").get("tolerations")):
        exists = t.get("operator") == "Exists"
        same = t.get("key") == taint.get("key") or (exists and not t.get("key"))
        value = exists or str(t.get("value") or "") == str(taint.get("value") or "")
        if same and value and t.get("effect") in (None, "", "NoExecute"):
            seconds = t.get("tolerationSeconds")
            if not isinstance(seconds, int):
                return None
            longest = max(longest, float(seconds))
    return longest


def _code(pod: Json) -> int:
    """Return the exit code of the trainer's container; that of a kill where it is unknown."""
    for status in _items(_of(pod, "status").get("containerStatuses")):
        code = _of(_of(status, "state"), "terminated").get("exitCode")
        if isinstance(code, int) and (code or _of(pod, "status").get("phase") == "Succeeded"):
            return code
    return 0 if _of(pod, "status").get("phase") == "Succeeded" else KILLED


def _waiting(pod: Json) -> str:
    """Return why a pod does not run yet."""
    for c in _conditions(pod):
        if _is(c, "PodScheduled", "False"):
            return f"{c.get('reason', '')}: {c.get('message', '')}"[:500]
    return ""


def is_ready(machine: Json) -> bool:
    """Return whether the kubelet of a Kubernetes node answers."""
    found = [c for c in _conditions(machine) if c.get("type") == "Ready"]
    return not found or found[0].get("status") == "True"


def _conditions(item: Json) -> list[Json]:
    return _items(_of(item, "status").get("conditions"))


def _is(condition: Json, kind: str, status: str) -> bool:
    return condition.get("type") == kind and condition.get("status") == status


def _items(value: object) -> list[Json]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def _of(item: Json, name: str) -> Json:
    found = item.get(name)
    return found if isinstance(found, dict) else {}


def _seconds(text: str, default: float) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return default
