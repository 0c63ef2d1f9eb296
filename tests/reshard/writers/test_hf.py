"""Hugging Face folders as targets and sources: shares, leftovers, odd files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckptd.checkpoint.load.files import check_size
from ckptd.errors import CorruptError, NotFoundError, UsageError
from ckptd.reshard.execute import Budget
from ckptd.reshard.job import ReshardShare
from ckptd.reshard.prepare import prepare, source_program
from ckptd.reshard.reports import Resharded
from ckptd.reshard.writers.folder import FolderJob
from ckptd.reshard.writers.hf import HfPlace
from ckptd.store import open_store
from tests.checkpoint.load.builder import Array
from tests.readers.opening import foreign_stock
from tests.reshard.llama import (
    HF,
    everything,
    job_into,
    prepared,
    program,
    resharded,
    save,
    values,
)


def run(source: Path, folder: Path, share: ReshardShare, *, force: bool = False) -> Resharded:
    with open_store(source) as store:
        found = prepared(store, program(*HF), program(*HF))
        place = HfPlace(found.assembled, found.expected, 20_000)
        assert not place.left_out
        job = FolderJob(found.stock.source, place, folder, identity=found.identity, force=force)
        return job.run(share, Budget.of(64 << 20, store))


def models(folder: Path) -> dict[str, Array]:
    out: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= load_file(path)
    return out


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with open_store(tmp_path / "source") as store:
        save(store, values(states=False))
    return tmp_path / "source"


def test_shares_and_the_last_one_names_the_files(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    first = run(source, folder, ReshardShare(2, 2))
    assert first.state == "waiting"
    assert not list(folder.glob("*.safetensors"))
    assert not list(folder.glob("*.json"))
    second = run(source, folder, ReshardShare(1, 2))
    assert second.state == "committed"
    assert first.witness_values + second.witness_values > 5_000
    wanted = values(states=False)
    found = models(folder)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[n], v) for n, v in wanted.items())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in wanted.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(folder / file)
    assert {p.name for p in folder.iterdir()} == {
        *index["weight_map"].values(),
        "model.safetensors.index.json",
    }


def test_death_while_the_files_get_their_names(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    real = FolderJob._give_name
    named: list[object] = []

    def dies(*given: Any) -> None:
        if named:
            raise KeyboardInterrupt
        named.append(given)
        real(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderJob, "_give_name", dies)
        with pytest.raises(KeyboardInterrupt):
            run(source, folder, ReshardShare())
    assert len(list(folder.glob("*.safetensors"))) == 1
    done = run(source, folder, ReshardShare())
    assert (done.state, done.reused_files) == ("committed", done.files)
    assert models(folder).keys() == values(states=False).keys()


def test_a_layout_that_cuts_is_refused(source: Path) -> None:
    with open_store(source) as store:
        cut = program("fsdp", "mesh fsdp = dp:2", "use hf.llama", *HF[1:])
        found = prepared(store, cut, program(*HF))
        with pytest.raises(UsageError) as caught:
            HfPlace(found.assembled, {}, 10**9)
    assert "whole tensors" in str(caught.value)


# --- sources ------------------------------------------------------------------------------------


def test_elements_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    """A file whose tensors begin at odd offsets, larger than one window."""
    folder = tmp_path / "a"
    folder.mkdir()
    rng = np.random.default_rng(1)
    data: dict[str, Array] = {
        "a": rng.integers(0, 255, (7, 3), dtype=np.uint8),
        "b": rng.standard_normal((1200, 1500)).astype(np.float64),
        "c": rng.integers(0, 255, 5, dtype=np.uint8),
        "d": rng.standard_normal((300, 700)).astype(np.float32),
    }
    header: dict[str, object] = {}
    at = 0
    codes = {"uint8": "U8", "float64": "F64", "float32": "F32"}
    for name, v in data.items():
        offsets = [at, at + v.nbytes]
        header[name] = {"dtype": codes[v.dtype.name], "shape": v.shape, "data_offsets": offsets}
        at += v.nbytes
    raw = json.dumps(header).encode()
    body = struct.pack("<Q", len(raw)) + raw + b"".join(v.tobytes() for v in data.values())
    (folder / "odd.safetensors").write_bytes(body)
    with open_store(folder) as store, open_store(tmp_path / "b") as out:
        stock = foreign_stock(store, 1)
        to = program("fsdp", "mesh fsdp = dp:3")
        found = prepare(stock, source_program(stock, None), to)
        job_into(out, found).run(ReshardShare(), Budget(32 << 20, 2 << 20, 4 << 20, 2 << 20, 2, 1))
    assert all(np.array_equal(v, data[n]) for n, v in everything(tmp_path / "b").items())


def test_only_files_of_the_index_count_and_all_must_be_there(tmp_path: Path) -> None:
    save_file({"x": np.zeros(3)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"x": np.ones(3)}, tmp_path / "consolidated.safetensors")
    with open_store(tmp_path) as store:
        with pytest.raises(CorruptError) as caught:
            foreign_stock(store, 0)
        assert "two files have one tensor, or the same part of one" in caught.value.message
        index = tmp_path / "model.safetensors.index.json"
        index.write_text('{"weight_map": {"x": "model-00001-of-00001.safetensors"}}')
        assert [t.name for t in foreign_stock(store, 0).tensors] == ["x"]
        index.write_text('{"weight_map": {"x": "gone.safetensors"}}')
        with pytest.raises(CorruptError) as caught:
            foreign_stock(store, 0)
        assert (caught.value.message, caught.value.where) == (
            "a file of the checkpoint is missing",
            "gone.safetensors",
        )
        index.write_text("[]")
        with pytest.raises(CorruptError) as caught:
            foreign_stock(store, 0)
        assert "invalid index of a sharded model" in caught.value.message
    (tmp_path / "empty").mkdir()
    with open_store(tmp_path / "empty") as store, pytest.raises(NotFoundError):
        foreign_stock(store, 0)


def test_a_source_that_changes_is_noticed(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "hf", ReshardShare())
    with open_store(tmp_path / "hf") as store:
        stock = foreign_stock(store, 0)
        path = min((tmp_path / "hf").glob("*.safetensors"))
        path.write_bytes(path.read_bytes() + b"more")
        with pytest.raises(CorruptError) as caught:
            check_size(stock.source.store, stock.source.files[0])
    assert "a file has changed while it was read" in caught.value.message


def test_there_and_back_again(source: Path, tmp_path: Path) -> None:
    resharded(source, tmp_path / "b", program("fsdp", "mesh fsdp = dp:5"))
    found, wanted = everything(tmp_path / "b"), everything(source)
    assert all(np.array_equal(found[n], v) for n, v in wanted.items())
