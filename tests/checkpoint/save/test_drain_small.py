"""A small save of one rank is three objects, and all that one does with it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ckptd.checkpoint.format import manifest as formats
from ckptd.checkpoint.format.invariants import check_manifest
from ckptd.checkpoint.format.manifest import GridEntry, Manifest, decode_manifest, encode_manifest
from ckptd.checkpoint.format.names import CommitName, commit_key
from ckptd.checkpoint.format.witness import Witness, WitnessPlan
from ckptd.checkpoint.load.witnesses import read_witness
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import missing_files
from ckptd.checkpoint.save.messages import Response
from ckptd.checkpoint.save.writer import SaveWriter
from ckptd.checkpoint.tools.copy import Transfer
from ckptd.checkpoint.tools.verify import verify
from ckptd.errors import CorruptError
from ckptd.store import StoreSpec, open_store
from ckptd.store.base import Store
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.save import snapshotting
from tests.checkpoint.save.referring import assert_holds
from tests.checkpoint.save.saving import Extra, Job, plan_of, values
from tests.processes import PATIENCE_S

SHAPES: dict[str, tuple[int, ...]] = {
    f"{kind}.{n}": shape
    for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq")
    for n in range(5)
    for shape in ((128, 128),)
} | {"step": (), "none": (0, 3)}
NAME = CommitName(7, 1)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "root")) as store:
        yield store


def saved(store: Store, arrays: dict[str, Any] | None = None, **options: Any) -> Manifest:
    """Save step 7 by a job of one rank, and return the manifest."""
    job = Job(StoreSpec("memory://unused"), store=store, plan=plan_of(SHAPES))
    handle = job.save(
        7, arrays or values(7, SHAPES), [b"[1, 2]"], extra=(Extra("o", 6),), **options
    )
    handle.durable(PATIENCE_S)
    manifest = job.catalogue.manifest(NAME)
    job.client.close(60.0)
    return manifest


def files_of(store: Store) -> dict[str, int]:
    return {o.key: o.size for o in store.list() if o.key.startswith(("data/", "commits/"))}


def flip(store: Store, key: str, at: int) -> None:
    path = store.local_path(key)
    assert path is not None
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_it_is_three_objects_of_little_more_than_the_state(root: Store) -> None:
    arrays = values(7, SHAPES)
    manifest = saved(root, arrays)
    found = files_of(root)
    assert len(found) == 3
    assert sum(found.values()) - sum(a.nbytes for a in arrays.values()) < 16 << 10
    assert manifest.requires == ("inline",)
    assert_holds(root, NAME, arrays | {"o": np.frombuffer(b"[1, 2]", np.uint8)})
    assert verify(Catalogue(root), NAME).findings == ()
    assert missing_files(Catalogue(root), Catalogue(root).commit(NAME)) is None


def test_what_did_not_change_is_written_again(root: Store) -> None:
    saved(root)
    job = Job(StoreSpec("memory://unused"), store=root, plan=plan_of(SHAPES))
    job.save(8, values(7, SHAPES)).durable(PATIENCE_S)
    name = CommitName(8, job.generation)
    assert len(job.catalogue.commit(name).folders) == 1
    assert len(files_of(root)) == 6
    job.client.close(60.0)


def test_a_reader_that_does_not_know_it_says_so(
    root: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(root)
    commit = Catalogue(root).commit(NAME)
    raw = root.get(commit.folder + commit.manifest)
    monkeypatch.setattr(formats, "SUPPORTED", formats.SUPPORTED - {"inline"})
    with pytest.raises(CorruptError, match="written by a newer ckptd") as caught:
        decode_manifest(raw, commit.manifest)
    assert caught.value.kind == "version"


def test_the_data_say_what_a_witness_of_several_ranks_says(root: Store) -> None:
    """Where nothing was cut there is nothing that could have been cut wrongly."""
    arrays = values(7, SHAPES)
    manifest = saved(root, arrays)
    plan = WitnessPlan.of(manifest)
    found = read_witness(root, manifest, plan)
    other = MemoryStore("small-witness")
    catalogue = Catalogue(other)
    catalogue.create_or_open()
    catalogue.claim(None, 2)
    snapshotting.commit(catalogue, plan_of(SHAPES, world=2), arrays, NAME)
    wanted = catalogue.manifest(NAME)
    theirs = read_witness(other, wanted, WitnessPlan.of(wanted))
    forget_memory("small-witness")
    assert isinstance(found, Witness)
    assert isinstance(theirs, Witness)
    assert [t.name for t in wanted.tensors] == [t.name for t in manifest.tensors if t.name != "o"]
    assert found.present.all()
    assert np.array_equal(found.values, theirs.values)


def test_a_copy_is_as_small(root: Store, tmp_path: Path) -> None:
    arrays = values(7, SHAPES)
    saved(root, arrays)
    with open_store(str(tmp_path / "copy")) as target:
        with closing(Transfer(Catalogue(root), Catalogue(target))) as transfer:
            copied = transfer.copy(Catalogue(root).commit(NAME))
        assert copied.state == "copied"
        name = CommitName(7, copied.generation)
        assert len(files_of(target)) == 3
        assert verify(Catalogue(target), name).findings == ()
        assert_holds(target, name, arrays | {"o": np.frombuffer(b"[1, 2]", np.uint8)})


def test_flipped_bits_are_found(root: Store) -> None:
    manifest = saved(root)
    (file,) = manifest.files
    flip(root, file.path, file.data_start + 70_000)
    assert {f.tensor for f in verify(Catalogue(root), NAME).findings} >= {"model.1"}
    with pytest.raises(CorruptError) as caught:
        read_witness(root, manifest, WitnessPlan.of(manifest))
    assert (caught.value.kind, caught.value.key) == ("digest", file.path)


def test_tables_of_more_data_than_there_are_are_refused_by_name(root: Store) -> None:
    manifest = saved(root)
    tensors = [msgspec.structs.replace(t, dtype="complex128") for t in manifest.tensors[:1]]
    broken = msgspec.structs.replace(manifest, tensors=(*tensors, *manifest.tensors[1:]))
    with pytest.raises(CorruptError, match="another length than their chunks") as caught:
        read_witness(root, broken, WitnessPlan.of(broken))
    assert manifest.files[0].path in str(caught.value.where)


CHANGES: dict[str, Callable[[Manifest], dict[str, Any]]] = {
    "other digests": lambda m: {
        "files": (msgspec.structs.replace(m.files[0], digests=m.files[0].digests[:-1] + b"x"),)
    },
    "digests of no file": lambda m: {
        "files": (*m.files, msgspec.structs.replace(m.files[0], data_start=0, data_bytes=0))
    },
    "no digests": lambda m: {"files": (msgspec.structs.replace(m.files[0], digests=b""),)},
    "two files": lambda m: {
        "files": (*m.files, msgspec.structs.replace(m.files[0], path=f"{m.folder}x.safetensors"))
    },
    "an older file": lambda m: {"attempt": "0002"},
    "too large": lambda m: {
        "files": (msgspec.structs.replace(m.files[0], data_bytes=(4 << 20) + 1),)
    },
    "two pieces": lambda m: {
        "grids": (*m.grids, GridEntry((((64, 2),), ((128, 1),)))),
        "owners": (*m.owners, ((0, 0, 2),)),
        "tensors": tuple(
            msgspec.structs.replace(t, grid=len(m.grids), owners=len(m.owners))
            if t.name == "model.0"
            else t
            for t in m.tensors
        ),
    },
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_rules(root: Store, change: str) -> None:
    manifest = saved(root)
    _, raw = encode_manifest(manifest)
    check_manifest(manifest, "m", len(raw))
    broken = msgspec.structs.replace(manifest, **CHANGES[change](manifest))
    with pytest.raises(CorruptError):
        check_manifest(broken, "m", len(raw))


def test_the_slot_is_free_when_the_checkpoint_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part says what was written: a process that takes over writes the slot again."""
    sent: list[str] = []
    plain = SaveWriter.send

    def send(self: SaveWriter, message: Response) -> None:
        sent.append(type(message).__name__)
        plain(self, message)

    monkeypatch.setattr(SaveWriter, "send", send)
    store = MemoryStore("small-slot")
    saved(store)
    keys = [o.key for o in store.list("data/")]
    forget_memory("small-slot")
    order = [name for name in sent if name in {"ShardStored", "SaveCommitted", "Freed"}]
    assert order == ["ShardStored", "SaveCommitted", "Freed"]
    assert not [key for key in keys if "/parts/" in key]


def test_what_is_deleted_is_remembered_no_more() -> None:
    """A job that saves for weeks and keeps three does not grow by a name for each save."""
    store = MemoryStore("small-names")
    catalogue = Catalogue(store)
    catalogue.create_or_open()
    catalogue.claim(None, 2)
    for step in range(1, 5):
        snapshotting.commit(catalogue, plan_of(world=2), values(step), CommitName(step, 1))
    assert len(catalogue.commits()) == 4
    store.delete([commit_key(CommitName(step, 1)) for step in range(1, 4)])
    assert catalogue.commits() == [CommitName(4, 1)]
    assert catalogue._known == {CommitName(4, 1)}
    forget_memory("small-names")
