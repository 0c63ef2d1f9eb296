"""Environment variables of a worker: torchrun's (RANK, MASTER_ADDR, OMP_NUM_THREADS), ckptd's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ckptd.base.net.certificates import VARIABLES
from ckptd.base.net.handed import KEPT_FROM_RANKS
from ckptd.base.runtime.launched import LAUNCHER_VARIABLE
from ckptd.elastic.messages import (
    INTERRUPT_S,
    INTERRUPT_VARIABLE,
    LEASE_VARIABLE,
    Begin,
    RankAssignment,
)
from ckptd.elastic.nccl import DEFAULTS_VARIABLE, defaults_in

SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a launcher gives to all workers of its node.

    Attributes
    ----------
    job, node, run_id, role, max_restarts
        Names and numbers as the command line says.
    launcher, lease
        Socket of the launcher, and file of the lease.
    interrupt_s
        See `ckptd.elastic.launchers.node.NodeSettings`.
    """

    job: str
    node: str
    run_id: str
    role: str
    max_restarts: int
    launcher: Path
    lease: Path
    interrupt_s: float = INTERRUPT_S


def common(base: Mapping[str, str], told: JobFacts, slots: int) -> dict[str, str]:
    """Return what is the same for all workers of a node, over `base` without its secrets."""
    more = {
        "ROLE_NAME": told.role,
        "TORCHELASTIC_RUN_ID": told.run_id,
        "TORCHELASTIC_MAX_RESTARTS": str(told.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS_TO_HANDLE,
        "CKPTD_JOB": told.job,
        "CKPTD_NODE": told.node,
        LAUNCHER_VARIABLE: str(told.launcher),
        LEASE_VARIABLE: str(told.lease),
        INTERRUPT_VARIABLE: f"{told.interrupt_s:g}",
    }
    # As torchrun does, and right for programs without a session; see `ckptd.elastic.nccl`.
    unless = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if slots > 1:  # as torchrun does, lest every rank takes all cores
        unless["OMP_NUM_THREADS"] = "1"
    # A variable of a launcher around this one, unchanged since, was not the user's wish either.
    theirs = {name: base.get(name) for name in defaults_in(base)}
    ours = (n for n, value in unless.items() if n not in base or theirs.get(n) == value)
    more[DEFAULTS_VARIABLE] = ",".join(ours)
    kept = (*KEPT_FROM_RANKS, *VARIABLES)
    return {n: v for n, v in {**unless, **base, **more}.items() if n not in kept}


def of_seat(begin: Begin, seat: RankAssignment, local_rank: int) -> dict[str, str]:
    """Return the variables that a rank gets in its generation, but for those of its job store."""
    rank, world, shape = str(seat.rank), str(begin.world), begin.shape
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "ROLE_RANK": rank,
        "WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(len(begin.seats)),
        "GROUP_RANK": str(begin.node_rank),
        "GROUP_WORLD_SIZE": str(begin.nodes),
        # The same on all nodes: torch has it in keys of the job store.
        "TORCHELASTIC_RESTART_COUNT": str(begin.generation - 1),
        "CKPTD_GENERATION": str(begin.generation),
        "CKPTD_STEP": str(begin.step),
        "CKPTD_SHAPE": f"{shape.pp},{shape.dp},{shape.tp}",
        "CKPTD_PLACE": f"{seat.pp},{seat.dp},{seat.tp}",
    }


def of_store(host: str, port: int) -> dict[str, str]:
    """Return where the job store of the generation is."""
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
