"""Jobs in Slurm allocations: ``ckptd slurm``."""

from __future__ import annotations

from ckptd.plugins import Verb

__all__ = ["VERB"]

VERB = Verb(
    "ckptd_slurm.verb:slurm",
    "Train on all nodes of a Slurm allocation: ckptd run as a step on each."
    "\n\nFor batch scripts: exec ckptd slurm train.py, with the options of ckptd run before the"
    " script. Lost nodes do not cost the allocation; USR1 saves and requeues.",
    verbatim=True,
)
