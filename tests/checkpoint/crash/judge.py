"""What must hold after a death, whenever it came."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckptd.base.signatures import load_public, signature_key
from ckptd.checkpoint.format.names import (
    LEASES,
    ROOT_MARKER,
    WITNESS,
    CommitName,
    commit_key,
    digests_key,
    generation_key,
)
from ckptd.checkpoint.format.witness import DATA
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import plan_gc, run_gc
from ckptd.checkpoint.root.policy import Keep
from ckptd.checkpoint.root.signing import signed_keys
from ckptd.checkpoint.tools.verify import verify
from ckptd.store.base import Store
from tests.checkpoint.crash.life import expected_file

__all__ = ["assert_exact", "assert_only_legal", "assert_previous", "clean", "legal_keys"]


def assert_exact(store: Store, name: CommitName, world: int, large: bool) -> None:
    """The checkpoint is whole, every digest holds, and its bytes are those that were saved."""
    catalogue = Catalogue(store)
    report = verify(catalogue, name, deep=True)
    assert report.ok, report.findings
    assert report.read_bytes == report.data_bytes > 0
    commit = catalogue.commit(name)
    manifest = catalogue.manifest_of(commit)
    assert commit.metadata == manifest.metadata == {"loss": float(name.step)}
    assert [f.rank for f in manifest.files] == list(range(world))
    for file in manifest.files:
        raw = store.get(file.path) if file.data_start else b""
        wanted = expected_file(world, file.rank, name.step, commit.attempt, large)
        assert raw[file.data_start :] == wanted, file.path


def assert_previous(
    store: Store, name: CommitName, newest: CommitName, world: int, large: bool, kept: bool
) -> None:
    """What came before the newest is exact, unless that let retention take it."""
    if name != newest and (kept or store.exists(commit_key(name))):
        assert_exact(store, name, world, large)


def clean(store: Store, keep: int | None = None) -> int:
    """Run gc without grace until nothing is left to do; return how many things it removed.

    What the dead had leased has run out by then.
    """
    store.delete([lease.key for lease in store.list(LEASES)])
    plan = plan_gc(Catalogue(store), Keep(keep), abandoned_s=0.0, leftover_s=0.0)
    report = run_gc(store, plan)
    assert not report.skipped
    again = plan_gc(Catalogue(store), Keep(keep), abandoned_s=0.0, leftover_s=0.0)
    assert again.items == ()
    return len(report.deleted) + len(report.swept)


def legal_keys(store: Store, public: str | None = None) -> set[str]:
    """Every object that a root with these commits and generations has, and no other.

    With the path of a key each commit has a signature of it, and what that needs.
    """
    catalogue = Catalogue(store)
    keys = {ROOT_MARKER} | {generation_key(g) for g in catalogue.generations()}
    for name in catalogue.commits():
        commit = catalogue.commit(name)
        manifest = catalogue.manifest_of(commit)
        keys |= {commit_key(name), commit.folder + commit.manifest}
        if manifest.witness is not None and manifest.witness.kind != DATA:
            keys.add(commit.folder + WITNESS)
        for file in manifest.files:
            if file.data_start:
                keys |= {file.path} if file.digests else {file.path, digests_key(file.path)}
        if public:
            key = load_public(Path(public).read_bytes())
            keys |= signed_keys(commit, manifest)
            keys.add(signature_key(commit.folder, commit.write_id, key))
    return keys


def assert_only_legal(store: Store, raw: Iterable[str], public: str | None = None) -> None:
    """`raw` is every name in the place, temporary files and unfinished uploads included."""
    found, legal = sorted(raw), legal_keys(store, public)
    assert found == sorted(legal), sorted(legal.symmetric_difference(found))
