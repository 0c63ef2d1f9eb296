"""The pods that a controller makes: a template, and what is a node's own. Pure functions."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Sequence

from ckptd.errors import StoreError, UsageError
from ckptd_kubernetes.api import Json

__all__ = ["JOB_LABEL", "NODE_LABEL", "check_name", "pod_of"]

JOB_LABEL = "ckptd.io/job"
NODE_LABEL = "ckptd.io/node"
_CONTAINER = "trainer"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def check_name(name: str) -> str:
    """Return a name of a job or node, if it can be that of a pod, a host and a label.

    Raises
    ------
    UsageError
        It cannot.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            "invalid Kubernetes name",
            wanted="1 to 63 of a-z, 0-9 and -, with a letter or digit at both ends",
            found=name[:100],
        )
    return name


def pod_of(
    template: Json,
    *,
    job: str,
    node: str,
    command: Sequence[str],
    avoid: Collection[str] = (),
    owner: Json | None = None,
) -> Json:
    """Return the pod of a node.

    Parameters
    ----------
    template
        ``metadata`` and ``spec``, as in a PodTemplate. The container named ``trainer``, else the
        first, gets the command.
    avoid
        Kubernetes nodes that it must not be put on.
    owner
        Object with whose deletion the pod goes too.

    Raises
    ------
    StoreError
        The template has no container.
    """
    made = copy.deepcopy(template)
    meta, spec = made.setdefault("metadata", {}), made.setdefault("spec", {})
    containers = spec.get("containers") or []
    if not containers:
        raise StoreError("the pod template has no container", where=job)
    chosen = next((c for c in containers if c.get("name") == _CONTAINER), containers[0])
    chosen["command"] = list(command)
    chosen.pop("args", None)
    own = {"CKPTD_NODE": node, "CKPTD_JOB": job}
    kept = [e for e in chosen.get("env") or [] if e.get("name") not in own]
    chosen["env"] = kept + [{"name": k, "value": v} for k, v in own.items()]
    labels = {**(meta.get("labels") or {}), JOB_LABEL: job, NODE_LABEL: node}
    meta |= {"name": node, "labels": labels}
    if owner is not None:
        meta["ownerReferences"] = [owner]
    # A launcher that ended is not started again by the kubelet: the controller decides.
    spec |= {"hostname": node, "restartPolicy": "Never"}
    if avoid:
        _avoid(spec, sorted(avoid))
    return {"apiVersion": "v1", "kind": "Pod", **made}


def _avoid(spec: Json, machines: Sequence[str]) -> None:
    """Keep a pod from some nodes, beside whatever the template wants."""
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    wanted = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    # One of the terms must hold, and all of its fields: so each gets the same one more.
    terms = wanted.setdefault("nodeSelectorTerms", []) or [{}]
    rule = {"key": "metadata.name", "operator": "NotIn", "values": []}
    for term in terms:
        term.setdefault("matchFields", []).extend(
            {**rule, "values": [machine]} for machine in machines
        )
    wanted["nodeSelectorTerms"] = terms
