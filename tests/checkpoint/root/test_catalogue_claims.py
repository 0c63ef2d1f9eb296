"""Small checkpoints that claim much: refused before anything is built in proportion to it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ckptd.base.digest import digest_hex
from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.manifest import (
    FileEntry,
    GridEntry,
    Manifest,
    TensorEntry,
    encode_manifest,
)
from ckptd.checkpoint.format.names import commit_key
from ckptd.checkpoint.format.records import encode_record
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.store import open_store
from tests.checkpoint.load.builder import Saved, build
from tests.checkpoint.root.checkpoints import error_of

RECOVER = Path(__file__).parents[3] / "docs" / "recover.py"
TENSORS = 1000
PIECES = 1_000_000
BYTES = 1 << 30
"""Address space of a verb on such a checkpoint: what Python and its libraries take, and some."""


def evil(root: Path, *, header: int, files: int = 1) -> Path:
    """Make a checkpoint of a few kB: a thousand tensors that share a table of a million pieces."""
    with open_store(root) as store:
        Catalogue(store).create_or_open()
        built = build(store, {"w": Saved.whole(np.zeros(4, np.uint8))})
        home = built.manifest.files[0]
        more = tuple(
            FileEntry(home.path.replace("r00000", f"r{i:05}"), 0, header, BYTES, home.index)
            for i in range(files)
        )
        manifest = msgspec.structs.replace(
            built.manifest,
            files=more,
            grids=(GridEntry((((1, PIECES),),)),),
            owners=(((0, 0, PIECES),),),
            tensors=tuple(
                TensorEntry(f"model.t{i}", "uint8", (PIECES,), 0, 0) for i in range(TENSORS)
            ),
            witness=None,
        )
        publish(root, manifest)
    assert sum(f.stat().st_size for f in root.rglob("*") if f.is_file()) < 300_000
    return root


def publish(root: Path, manifest: Manifest) -> None:
    with open_store(root) as store:
        catalogue = Catalogue(store)
        record = catalogue.commit(catalogue.line()[-1])
        name, raw = encode_manifest(manifest)
        store.put(record.folder + name, raw)
        digest = digest_hex(raw)
        record = msgspec.structs.replace(
            record, manifest=name, manifest_digest=digest, manifest_bytes=len(raw)
        )
        store.put(commit_key(record.name), encode_record(record))


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))


VERBS = [
    ("verify", "ROOT"),
    ("export", "ROOT", "OUT"),
    ("inspect", "ROOT"),
    ("cp", "ROOT", "OUT"),
    ("diff", "ROOT", "ROOT"),
    ("reshard", "ROOT", "OUT", "--to", "ddp"),
]


@pytest.mark.parametrize("header", [4096, 24_414 * 4096])
@pytest.mark.parametrize("verb", VERBS, ids=lambda v: v[0])
def test_chunks_are_bounded_by_headers(tmp_path: Path, verb: tuple[str, ...], header: int) -> None:
    """Claimed headers that are too short for them, and headers that are only claimed."""
    root = evil(tmp_path / "r", header=header, files=1 if header == 4096 else 900)
    places = {"ROOT": str(root), "OUT": str(tmp_path / "out")}
    code = "from ckptd.cli.main import main; main()"
    args = [places.get(a, a) for a in verb]
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=limited,
        check=False,
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in ((0, 3) if verb[0] == "inspect" else (3,)), done.stderr
    if done.returncode:
        assert "more chunks than the headers of its files can name" in done.stderr + done.stdout


def test_a_load_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import ckptd

    def never(*_: object) -> None:
        raise AssertionError("chunks were listed")

    root = evil(tmp_path / "r", header=24_414 * 4096, files=900)
    monkeypatch.setattr(FileMap, "chunks", never)
    state = {"model": {f"t{i}": torch.zeros(PIECES, dtype=torch.uint8) for i in range(3)}}
    with ckptd.Checkpointer(str(root)) as ck:
        error = error_of(lambda: ck.load(state, only="model.t0"))
    assert "more chunks than the headers of its files can name" in error.message


@pytest.mark.parametrize("claim", ["pieces", "cells"])
def test_recover_is_bounded(tmp_path: Path, claim: str) -> None:
    root = evil(tmp_path / "r", header=4096)
    with open_store(root) as store:
        catalogue = Catalogue(store)
        manifest = catalogue.manifest_of(catalogue.commit(catalogue.line()[-1]))
    many = 1 << 40
    table: dict[str, Any] = {
        "pieces": {"owners": (((0, 0, many),),)},
        "cells": {"owners": (((0, 0, 1),),), "grids": (GridEntry((((1, many),),)),)},
    }[claim]
    publish(root, msgspec.structs.replace(manifest, **table))
    commit = next((root / "commits").iterdir())
    command = [sys.executable, str(RECOVER), str(commit), "model.t0"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=limited,
        check=False,
        env={"OPENBLAS_NUM_THREADS": "1"},
    )
    assert (done.returncode, "than its files can hold" in done.stderr) == (1, True), done.stderr


def test_chunks_that_headers_justify_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is free here: those that stand in headers that are there are."""
    monkeypatch.setattr("ckptd.checkpoint.load.files.FREE_CHUNKS", 0)
    monkeypatch.setattr("ckptd.checkpoint.format.invariants.FREE_CHUNKS", 0)
    with open_store(tmp_path) as store:
        catalogue = Catalogue(store)
        catalogue.create_or_open()
        build(store, {"w": Saved.rows(np.arange(600, dtype=np.uint8), 300)})
        reader = CkptdReader(catalogue, catalogue.line()[-1])
        assert reader.tensor("w").tolist() == np.arange(600, dtype=np.uint8).tolist()
