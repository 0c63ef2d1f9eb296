"""Megatron's torch_dist; tests/interop loads it by Megatron."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.cli.running import Cli
from tests.readers.opening import open_reader

OPTIMIZER = "megatron-tp2pp2-opt/optim-fully_reshardable"
MODEL = "megatron-tp2pp2/model-stacked"
SIZES = ("-e", "let kv = 2", "-e", "let v = 128")


@pytest.mark.parametrize("source", [MODEL, OPTIMIZER])
def test_a_real_one_comes_back_as_it_was(
    source: str, foreign: Path, tmp_path: Path, cli: Cli
) -> None:
    theirs, root, ours = foreign / source, tmp_path / "root", tmp_path / "ours"
    args = ["--from", "megatron.dist", "--to", "hf.llama", *SIZES]
    assert cli("reshard", str(theirs), str(root), *args).code == 0
    back = ["--to", "megatron.dist", "--format", "torch_dist"]
    done = cli("reshard", str(root), str(ours), *back)
    assert done.code == 0, done
    one, other = open_reader(theirs), open_reader(ours)
    assert set(one.names) == set(other.names)
    for name in one.names:
        found, wanted = other.tensors([name])[name], one.tensors([name])[name]
        assert (found.dtype, found.tobytes()) == (wanted.dtype, wanted.tobytes())
    assert other.commit.step == one.commit.step
    about = (json.loads((f / "metadata.json").read_text()) for f in (theirs, ours))
    assert next(about) == next(about)
    common = torch.load(theirs / "common.pt", weights_only=True)
    assert torch.load(ours / "common.pt", weights_only=True) == common | {"checkpoint_version": 3.0}
    # What Megatron asks for beside the tensors, whether it is there or not.
    metadata = dcp.FileSystemReader(str(ours)).read_metadata()
    assert metadata.planner_data is None
    asked = set(dcp.FileSystemReader(str(theirs)).read_metadata().state_dict_metadata)
    assert asked <= set(metadata.state_dict_metadata)


def test_layers_one_by_one_and_what_is_dcps(foreign: Path, tmp_path: Path, cli: Cli) -> None:
    args = ["--from", "megatron.dist", "--to", "hf.llama", *SIZES]
    root, ours = str(tmp_path / "root"), str(tmp_path / "ours")
    assert cli("reshard", str(foreign / MODEL), root, *args).code == 0
    args = ["--to", "megatron.dist.single", "--format", "torch_dist"]
    assert cli("reshard", root, ours, *args).code == 0
    names = dcp.FileSystemReader(ours).read_metadata().state_dict_metadata
    assert "decoder.layers.3.self_attention.linear_qkv._extra_state/shard_0_1" in names
    # --force of DCP takes away what would make it Megatron's.
    args = ["--to", "fsdp", "--format", "dcp"]
    assert cli("reshard", root, ours, *args).code != 0
    assert cli("reshard", root, ours, *args, "--force").code == 0
    assert not (tmp_path / "ours/metadata.json").exists()
    assert not (tmp_path / "ours/common.pt").exists()
