"""Options of ``ckptd run``: torchrun's, and those that jobs need which go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ckptd.cli.output import flag

__all__ = ["JobOptions", "TorchrunOptions"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TorchrunOptions:
    """What torchrun takes as well, and what it means there."""

    nnodes: Annotated[str, Parameter(help="Nodes: how many, or MIN:MAX.")] = "1"
    nproc_per_node: Annotated[
        str, Parameter(help="Ranks on this node: a number, auto, cpu or gpu.")
    ] = "1"
    rdzv_endpoint: Annotated[
        str, Parameter(help="HOST:PORT of the controller, the same on all nodes.")
    ] = ""
    rdzv_id: Annotated[str, Parameter(help="Name of the job, if --job gives none.")] = "none"
    rdzv_backend: Annotated[str, Parameter(help="Accepted for torchrun, ignored.")] = "ckptd"
    rdzv_conf: Annotated[str, Parameter(help="Accepted for torchrun, ignored.")] = ""
    node_rank: Annotated[int, Parameter(help="Taken; the controller numbers nodes.")] = 0
    master_addr: Annotated[str, Parameter(help="With --master-port: the endpoint.")] = "127.0.0.1"
    master_port: Annotated[int | None, Parameter(help="See --master-addr.")] = None
    local_addr: Annotated[
        str, Parameter(help="Address of this node for the others; found out by default.")
    ] = ""
    standalone: Annotated[bool, flag("One node, whatever else is said.")] = False
    max_restarts: Annotated[
        int | None, Parameter(help="Faults after which the job fails; any number by default.")
    ] = None
    monitor_interval: Annotated[float, Parameter(help="Accepted for torchrun, ignored.")] = 0.1
    start_method: Annotated[str, Parameter(help="Accepted for torchrun, ignored.")] = "spawn"
    role: Annotated[str, Parameter(help="ROLE_NAME of workers.")] = "default"
    module: Annotated[
        bool, Parameter(name=("--module", "-m"), help="The script is the name of a module.")
    ] = False
    no_python: Annotated[bool, flag("The script is a command.")] = False
    run_path: Annotated[bool, flag("Taken: scripts are always run like that.")] = False
    log_dir: Annotated[
        Path | None, Parameter(help="Folder for files of workers.", show_default=False)
    ] = None
    redirects: Annotated[
        str,
        Parameter(name=("--redirects", "-r"), help="1 out, 2 err, 3 both to files; RANK:BITS,..."),
    ] = "0"
    tee: Annotated[
        str, Parameter(name=("--tee", "-t"), help="As --redirects, and to the console as well.")
    ] = "0"
    local_ranks_filter: Annotated[
        str, Parameter(help="Local ranks that may write to the console, such as 0,1.")
    ] = ""
    signals_to_handle: Annotated[str, Parameter(help="Accepted for torchrun, ignored.")] = ""
    shutdown_timeout: Annotated[
        int,
        Parameter(
            name=("--shutdown-timeout", "--grace"),
            help="Seconds from SIGTERM, or SIGINT, until workers that run on are killed.",
        ),
    ] = 30


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What torchrun does not know: names, layouts, the log, the watch, the controller."""

    job: Annotated[
        str | None,
        Parameter(help="Name of the job, the same on all nodes; CKPTD_JOB.", show_default=False),
    ] = None
    node: Annotated[
        str | None,
        Parameter(help="Name of this node, no other's; CKPTD_NODE, or its host name."),
    ] = None
    layout: Annotated[
        str | None, Parameter(help="pp=P,dp=D,tp=T at full size; all data-parallel by default.")
    ] = None
    pp: Annotated[str, Parameter(help="Other pipeline sizes that the layers allow: 1,2.")] = ""
    tp: Annotated[str, Parameter(help="Other tensor-parallel sizes that are allowed: 1,2.")] = ""
    microbatches: Annotated[
        int | None, Parameter(help="Micro-batches of a step on all ranks together.")
    ] = None
    memory: Annotated[
        str | None, Parameter(help="limit=B,replicated=B,sharded=B,activations=B in bytes.")
    ] = None
    log: Annotated[
        str | None,
        Parameter(help="Membership log that all nodes reach: a path, s3://..., etcd://..."),
    ] = None
    no_watch: Annotated[bool, flag("Without daemon and watcher.")] = False
    daemon: Annotated[
        str | None, Parameter(help="Tell the daemon at this URL, instead of one of its own.")
    ] = None
    port: Annotated[int, Parameter(help="Port of the daemon; 0 takes any that is free.")] = 0
    policy: Annotated[
        tuple[str, ...],
        Parameter(help="CLASS=ACTION: what is done about incidents of a class; see ckptd serve."),
    ] = ()
    floor: Annotated[
        tuple[str, ...],
        Parameter(help="PHASE=SECONDS: least time-out of a phase, such as train=30."),
    ] = ()
    level: Annotated[
        int | None,
        Parameter(
            help="How deep recovery may go: 1 workers are started anew, 2 launchers, 3 the job."
        ),
    ] = None
    no_restart_on: Annotated[
        str,
        Parameter(
            help="Exit codes that end the job: 2,64-78. 'repeat' holds besides: a code that comes"
            " twice from the same place before the first step; 'none' turns it off."
        ),
    ] = "repeat"
    setting: Annotated[
        tuple[str, ...],
        Parameter(name="--set", help="NAME=VALUE: a deadline or limit of the controller."),
    ] = ()
