"""Jobs in Slurm allocations: ``ckptd slurm``."""

from __future__ import annotations

from ckptd.plugins import Verb

__all__ = ["VERB"]

VERB = Verb(
    "ckptd_slurm.verb:slurm",
    "Train on all nodes of a Slurm allocation."
    "\n\nFor batch scripts: starts ckptd run as a step on each node. Options of ckptd run go before"
    " the script. The allocation survives lost nodes; USR1 saves and requeues."
    "\n\nExample: exec ckptd slurm --nproc-per-node 8 train.py",
    verbatim=True,
)
