"""``ckptd doctor``: prints of what this machine, store and plugins can do."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from ckptd.base.runtime.host import environment, versions
from ckptd.checkpoint.tools.doctor import probe
from ckptd.cli.output import Document, Json, Reply, flag, option, print_text
from ckptd.errors import RefusedError, UsageError
from ckptd.parts import part
from ckptd.store import StoreSpec, registry_problems
from ckptd.store.probe import CREATE_ONLY, StoreCheck


class PluginRow(msgspec.Struct, frozen=True):
    """An installed store that cannot be used: its URL scheme, its package, and why."""

    scheme: str
    origin: str
    message: str


class RecoveryRow(msgspec.Struct, frozen=True):
    """One finding about recovery in process: ``ok``, ``info`` or ``warn``, and words for people."""

    status: Literal["ok", "info", "warn"]
    message: str


class DoctorDocument(Document, frozen=True, kw_only=True, tag="doctor"):
    """The document that ``ckptd doctor --json`` prints.

    Attributes
    ----------
    root
        URL; null when none was given.
    healthy
        Nothing failed.
    checks
        Findings about the store, each with name (``root``, ``durability``, ``space``, ``files``,
        ``write``, ``create-only``, ``listing``, ``ranges``, ``latency``, ``speed``), status
        (``ok``, ``info``, ``warn``, ``fail``) and message.
    plugins
        Installed packages that do not work.
    recovery
        What keeps `ckptd.elastic.session` from going on in the same process on NCCL.
    versions
        By package; null when it is not installed.
    environment
        Limits and settings of this process, without secrets.
    """

    root: str | None
    healthy: bool
    checks: tuple[StoreCheck, ...]
    plugins: tuple[PluginRow, ...]
    recovery: tuple[RecoveryRow, ...]
    versions: dict[str, str | None]
    environment: dict[str, str]


def doctor(
    root: Annotated[str | None, option("Path or URL; need not exist yet.")] = None,
    /,
    *,
    read_only: Annotated[bool, flag("Write nothing.")] = False,
    quick: Annotated[bool, flag("Do not measure speed.")] = False,
    cluster: Annotated[
        bool, flag("Probe the nodes of a job and their links instead; start it once per node.")
    ] = False,
    nodes: Annotated[
        str | None, option("--cluster: number of nodes, or their names (a,b,c).")
    ] = None,
    node_rank: Annotated[
        int | None, option("--cluster: number of this node; 0 coordinates.")
    ] = None,
    rendezvous: Annotated[
        str | None, option("--cluster: HOST:PORT where the coordinator listens.")
    ] = None,
    wait_s: Annotated[float, Parameter(help="--cluster: seconds to wait for all nodes.")] = 30.0,
    limit_s: Annotated[
        float, Parameter(help="--cluster: seconds for the tests and probes.")
    ] = 60.0,
    probe_bytes: Annotated[int, Parameter(help="--cluster: bytes of a probe.")] = 4 << 20,
    json: Json = False,
) -> Reply | int:
    """Probe a root's store, plugins, versions and environment, or with --cluster a job's nodes.

    What it writes lies in a folder of its own below ROOT and is removed again. With --cluster it
    is started once per node and names nodes and links that are not well; CKPTD_SECRET must be the
    same on all.
    """
    if cluster:
        if root is not None:
            raise UsageError("--cluster takes no root", hint="run ckptd doctor ROOT separately")
        probed: Reply | int = part("cluster")(
            nodes, node_rank, rendezvous, wait_s, limit_s, probe_bytes
        )
        return probed
    checks: list[StoreCheck] = []
    if root is not None:
        for check in probe(StoreSpec(root), write=not read_only, speed=not quick):
            checks.append(check)
            if not json:
                print_text(f"{check.status:5} {check.name:12} {check.message}", 19)
    problems = tuple(PluginRow(p.scheme, p.origin, p.message) for p in registry_problems())
    document = DoctorDocument(
        root=root,
        healthy=not problems and all(c.status != "fail" for c in checks),
        checks=tuple(checks),
        plugins=problems,
        recovery=tuple(RecoveryRow(*row) for row in part("recovery")(os.environ)),
        versions=versions(),
        environment=environment(),
    )
    reply = Reply(document, _show, 0 if document.healthy else 1)
    if (refusal := _refusal(document)) is not None:
        reply.print(as_json=json)
        raise refusal
    return reply


def _show(document: DoctorDocument) -> None:
    for p in document.plugins:
        print_text(f"fail  plugin       {p.scheme}:// from {p.origin}: {p.message}", 19)
    for row in document.recovery:
        print_text(f"{row.status:5} recovery     {row.message}", 19)
    for name, version in document.versions.items():
        print(f"info  version      {name} {version or '(not installed)'}")
    for name, value in document.environment.items():
        print(f"info  environment  {name} = {value}")
    print("\nno problems found" if document.healthy else "\nproblems found: see `fail` above")


def _refusal(document: DoctorDocument) -> RefusedError | None:
    for check in document.checks:
        if check.name == CREATE_ONLY and check.status == "fail":
            return RefusedError(
                "this store cannot hold a checkpoint root",
                kind="no-create-only",
                where=document.root,
                wanted="a store with atomic create-if-absent",
                found=check.message,
                hint="the bucket itself (s3:// with If-None-Match, gs://, az://), or a folder on a "
                "file system with hard links (ext4, XFS, NFS, Lustre, most SMB)",
            )
    return None
