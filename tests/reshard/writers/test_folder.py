"""Folders of other formats: deaths at every operation, shares, what is there already."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptd.errors import CkptdError, NotFoundError, RefusedError, StoreError
from ckptd.reshard.execute import Budget
from ckptd.reshard.job import ReshardShare
from ckptd.reshard.reports import Resharded
from ckptd.reshard.writers import folder as folders
from ckptd.reshard.writers.dcp import DcpPlace
from ckptd.reshard.writers.folder import FolderJob, FolderPlace
from ckptd.reshard.writers.hf import HfPlace
from ckptd.reshard.writers.rankfiles import RanksPlace
from ckptd.reshard.writers.torchdist import TorchDistPlace
from ckptd.reshard.writers.universal import UniversalPlace
from ckptd.store import open_store
from ckptd.store.base import FaultRule, FaultSpec
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from tests.load.builder import Array
from tests.readers.opening import open_reader
from tests.reshard.llama import prepared, program, save
from tests.sampling import sampled

DATA = {f"w.{n}": np.arange(n * 6, dtype=np.float32).reshape(n, 6) for n in (3, 5, 8)}


@contextmanager
def job(kind: str, source: Path, out: Path, *, force: bool = False) -> Iterator[FolderJob]:
    with open_store(source) as store:
        to = "fsdp" if kind in ("dcp", "ranks") else "ddp"
        rules = ["mesh fsdp = dp:2"] if to == "fsdp" else []
        rules += ['files "rank{dp}/model.pt"'] if kind == "ranks" else []
        found = prepared(store, program(to, *rules))
        place: FolderPlace
        if kind == "dcp":
            place = DcpPlace(found.assembled, found.expected)
        elif kind == "universal":
            place = UniversalPlace(found.assembled, found.expected)
        elif kind == "torch_dist":
            place = TorchDistPlace(found.assembled, found.expected)
        elif kind == "ranks":
            place = RanksPlace(found.assembled, found.expected)
        else:
            place = HfPlace(found.assembled, found.expected, 100)
        source_of = found.stock.source
        yield FolderJob(source_of, place, out, identity=found.identity, force=force)


def run(kind: str, source: Path, out: Path, share: Any = None, **options: bool) -> Resharded:
    with job(kind, source, out, **options) as made:
        budget = Budget(32 << 20, 2 << 20, 8 << 20, 4 << 20, 2, 1)
        return made.run(share or ReshardShare(), budget)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with open_store(tmp_path / "source") as store:
        save(store, DATA)
    return tmp_path / "source"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def tensors(folder: Path) -> dict[str, Array]:
    reader = open_reader(folder)
    return reader.tensors(reader.names)


def same(found: dict[str, Array], wanted: dict[str, Array]) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[n], wanted[n]) for n in found)


@sampled(3)
@pytest.mark.parametrize("kind", ["hf", "dcp", "universal", "torch_dist", "ranks"])
def test_death_at_every_operation(
    kind: str, every: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint, or a whole one, after each; the next run completes it, with the same bytes."""
    run(kind, source, tmp_path / "calm")
    wanted = contents(tmp_path / "calm")
    tried, resumed, number = 0, 0, 0
    while True:
        number += every
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        spec = FaultSpec((FaultRule(action="die" if number % 2 else "die-after", number=number),))
        made: list[Fault] = []

        def opened(path: Path, spec: FaultSpec = spec, made: list[Fault] = made) -> Fault:
            made.append(Fault(LocalStore(path), spec))
            return made[-1]

        with monkeypatch.context() as patch:
            patch.setattr(folders, "LocalStore", opened)
            try:
                run(kind, source, out)
            except StoreError:
                tried += 1
        if len(made[0].operations) < number:
            break
        with suppress(NotFoundError):  # it is not taken for a checkpoint
            assert kind == "ranks" or same(tensors(out), DATA)
        if contents(out) != wanted:
            resumed += run(kind, source, out).reused_files > 0
        assert contents(out) == wanted
    assert tried > 10 // every
    assert resumed


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_death_while_files_get_their_names(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(kind, source, tmp_path / "calm")
    real, count = os.replace, 0

    def dies(*given: Any) -> None:
        nonlocal count
        count += str(given[0]).endswith(".partial")
        if count > 1:
            raise KeyboardInterrupt
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", dies)
        with pytest.raises(KeyboardInterrupt):
            run(kind, source, tmp_path / "out")
    with pytest.raises(CkptdError) as caught:
        tensors(tmp_path / "out")
    assert caught.value.kind in ("not-found", "missing-file")
    done = run(kind, source, tmp_path / "out")
    assert (done.state, done.reused_files) == ("committed", done.files - 1)
    assert contents(tmp_path / "out") == contents(tmp_path / "calm")


def test_shares_and_what_is_there(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("dcp", source, out, ReshardShare(2, 2)).state == "waiting"
    with pytest.raises(NotFoundError):
        tensors(out)
    assert run("dcp", source, out, ReshardShare(1, 2)).state == "committed"
    wanted = contents(out)
    (out / "notes.txt").write_text("mine")
    for kind in ("dcp", "hf"):
        with pytest.raises(RefusedError) as caught:
            run(kind, source, out)
        assert caught.value.kind == "exists"
    with pytest.raises(RefusedError):  # --force replaces what is of the same format
        run("hf", source, out, force=True)
    # What Megatron puts beside would make another checkpoint of it.
    (out / "metadata.json").write_text("{}")
    run("dcp", source, out, force=True)
    assert contents(out) == wanted | {"notes.txt": b"mine"}
    assert same(tensors(out), DATA)
    with pytest.raises(RefusedError):
        run("dcp", source, source, force=True)


def test_another_size_of_files_is_another_job(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("hf", source, out, ReshardShare(1, 2))
    with open_store(source) as store:
        found = prepared(store, program("ddp"))
        place = HfPlace(found.assembled, found.expected, 10**9)
        made = FolderJob(found.stock.source, place, out, identity=found.identity)
        done = made.run(ReshardShare(), Budget.of(64 << 20, store))
    assert (done.state, done.reused_files) == ("committed", 0)
    assert same(tensors(out), DATA)
