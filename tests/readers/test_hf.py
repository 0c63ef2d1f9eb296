"""Safetensors as Hugging Face libraries, and DCP for them, write them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from ckptd.store import open_store
from tests.readers.opening import fails, foreign_stock, open_reader


def test_a_file_and_what_is_beside_it(tmp_path: Path) -> None:
    save_file({"w": np.arange(6.0).reshape(2, 3)}, tmp_path / "model.safetensors")
    torch.save({"lr": 1}, tmp_path / "optimizer.pt")
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    reader = open_reader(tmp_path)
    assert reader.tensor("w").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert reader.manifest.metadata["ckptd.foreign"]["unread"] == ["optimizer.pt"]
    stock = foreign_stock(open_store(tmp_path))
    assert not stock.has_sections
    assert stock.unread == ["optimizer.pt"]
    save_file({"v": np.ones(2)}, tmp_path / "other.safetensors")
    assert open_reader(tmp_path, "other.safetensors").names == ["v"]


def test_an_adapter(tmp_path: Path) -> None:
    name = "base_model.model.q_proj.lora_A.weight"
    save_file({name: np.ones((2, 4), np.float32)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert open_reader(tmp_path).names == [name]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (
            {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64},
            {"kv": 2, "hd": 8},
        ),
        ({"num_attention_heads": 8, "hidden_size": 64, "head_dim": 16}, {"kv": 8, "hd": 16}),
        ({"n_head": 4, "n_embd": 32}, {"kv": 4, "hd": 8}),
        ({}, {}),
        ([], {}),
        ({"num_attention_heads": "x", "hidden_size": 0}, {}),
        ({"num_attention_heads": 0, "hidden_size": 64}, {}),
    ],
)
def test_sizes_of_the_configuration(tmp_path: Path, config: object, sizes: dict[str, int]) -> None:
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dict(foreign_stock(open_store(tmp_path)).sizes) == sizes


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_that_dcp_wrote(tmp_path: Path) -> None:
    state = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    reader = open_reader(tmp_path)
    assert reader.tensor("a").tolist() == state["a"].tolist()
    assert sorted(reader.names) == ["a", "b"]


def sharded(folder: Path, offsets: list[list[int]], rows: int = 2) -> None:
    for n, offset in enumerate(offsets):
        info = json.dumps({"w": {"saved_offsets": offset}})
        values = np.full((rows, 3), float(n))
        path = folder / f"shard-{n:05d}-model-00001-of-00001.safetensors"
        save_file({"w": values}, path, metadata={"DCP_SHARDING_INFO": info})


def test_shards_make_a_whole(tmp_path: Path) -> None:
    sharded(tmp_path, [[0, 0], [2, 0], [0, 3], [2, 3]])
    reader = open_reader(tmp_path)
    assert reader.info("w").shape == (4, 6)
    assert reader.layout("w").words == "grid 2 x 2"
    assert reader.tensor("w")[3].tolist() == [1, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("offsets", [[[0, 0], [3, 0]], [[0, 0], [1, 0]], [[0, 0], [2, 1]]])
def test_shards_that_leave_holes_or_overlap(tmp_path: Path, offsets: list[list[int]]) -> None:
    sharded(tmp_path, offsets)
    assert fails(tmp_path).message in (
        "the parts of a tensor do not form a grid",
        "the parts of a tensor do not form a grid, or leave holes",
    )


@pytest.mark.parametrize("offsets", [[[0]], [[-1, 0]], [["x", 0]], [[1 << 70, 0]]])
def test_offsets_that_are_none(tmp_path: Path, offsets: list[list[int]]) -> None:
    sharded(tmp_path, offsets)
    assert re.search("DCP_SHARDING_INFO|two files have one tensor", fails(tmp_path).message)


def test_two_formats_in_one_folder(tmp_path: Path, foreign: Path) -> None:
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / ".metadata").write_bytes((foreign / "dcp/dcp-safetensors/.metadata").read_bytes())
    error = fails(tmp_path)
    assert (error.message, error.found) == (
        "checkpoints of several formats in one folder",
        "dcp, hf",
    )
    assert open_reader(tmp_path, "model.safetensors").names == ["w"]


@pytest.mark.parametrize("found", [1, 2])
def test_a_missing_shard_without_an_index(tmp_path: Path, found: int) -> None:
    save_file({"w": np.ones(3)}, tmp_path / f"model-0000{found}-of-00002.safetensors")
    error = fails(tmp_path)
    assert (error.message, error.where) == (
        "a file of the checkpoint is missing",
        f"shard {3 - found} of 2",
    )
    assert open_reader(tmp_path, f"model-0000{found}-of-00002.safetensors").names == ["w"]


def test_a_missing_part_of_dcp(tmp_path: Path) -> None:
    sharded(tmp_path, [[0, 0], [2, 0], [4, 0]])
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    error = fails(tmp_path)
    assert (error.message, error.where) == ("a file of the checkpoint is missing", "shard-00001-*")
    assert "shapes are computed" in str(error.hint)
    (tmp_path / "shard-00000-model-00001-of-00001.safetensors").unlink()
    assert "a file of the checkpoint is missing" in fails(tmp_path).message


def test_two_parts_of_one_place(tmp_path: Path) -> None:
    sharded(tmp_path, [[0, 0], [0, 0]])
    assert "two files have one tensor, or the same part of one" in fails(tmp_path).message


def test_a_whole_tensor_before_its_parts(tmp_path: Path) -> None:
    save_file({"w": np.ones((2, 3))}, tmp_path / "model-a.safetensors")
    sharded(tmp_path, [[0, 0]])
    assert "two files have one tensor, or the same part of one" in fails(tmp_path).message


def test_notes_of_a_header_are_no_tied_names(tmp_path: Path) -> None:
    notes = {"source": "a", "base_model": "a", "head.weight": "embed.weight"}
    tensors = {"a": np.ones(2), "embed.weight": np.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors", metadata=notes)
    assert sorted(open_reader(tmp_path).names) == ["a", "embed.weight", "head.weight"]
