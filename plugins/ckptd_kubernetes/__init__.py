"""Jobs in pods of Kubernetes: ``ckptd kubernetes``."""

from __future__ import annotations

from ckptd.plugins import Verb

__all__ = ["VERB"]

VERB = Verb(
    "ckptd_kubernetes.verb:kubernetes",
    "Keep a job's launchers in pods, beside its controller."
    "\n\nPods are made from a PodTemplate, or are those of a Job or JobSet. Before the cluster"
    " takes a pod or node away, the controller is notified. Runs in a pod; see"
    " docs/guide/kubernetes.md."
    "\n\nExample: ckptd kubernetes --template worker --nodes 4 -- train.py",
)
