"""Jobs in Slurm allocations: ``ckptd slurm``."""

from __future__ import annotations

from ckptd.plugins import Verb

__all__ = ["VERB"]

VERB = Verb(
    "ckptd_slurm.verb:slurm",
    "Train on all nodes of a Slurm allocation."
    "\n\nckptd run is a step on each node. For batch scripts, with options of ckptd run before the"
    " script. Lost nodes do not cost the allocation; USR1 saves and requeues."
    "\n\nExample: exec ckptd slurm --nproc-per-node 8 train.py",
    verbatim=True,
)
