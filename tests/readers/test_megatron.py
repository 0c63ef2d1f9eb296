"""Megatron-core's torch_dist, to the names of Hugging Face by a layout program."""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.cli.running import Cli
from tests.readers.opening import fails, open_reader

MODEL = "megatron-tp2pp2/model-stacked"
OPTIMIZER = "megatron-tp2pp2-opt/optim-fully_reshardable"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def test_a_model_of_tp2_pp2(foreign: Path) -> None:
    reader = open_reader(foreign / MODEL)
    assert reader.info("decoder.layers.mlp.linear_fc1.weight").shape == (4, 48, 16)
    assert reader.commit.step == 7
    assert reader.objects()["args_like.tp"] == 2
    assert all("_extra_state" in n for n in reader.manifest.metadata["ckptd.foreign"]["left_out"])
    reader.tensors(reader.names)


@pytest.mark.parametrize("source", ["dist.lay", "megatron.dist", ""])
def test_to_hugging_face(foreign: Path, tmp_path: Path, cli: Cli, source: str) -> None:
    """By a program, by a shipped layout, or by the one that the files hint at."""
    layout = str(foreign / "megatron-tp2pp2" / source) if source == "dist.lay" else source
    said = ["--from", layout] if source else []
    said += [] if source == "dist.lay" else ["-e", "let kv = 2"]
    said += ["-e", "let v = 128"] if source == "megatron.dist" else []
    target = str(tmp_path / "hf")
    found = cli("reshard", str(foreign / MODEL), target, "--to", "hf.llama", "--format=hf", *said)
    assert found.code == 0, found.err
    wanted = dict(np.load(foreign / "megatron-tp2pp2" / "expected-hf.npz"))
    values = load_file(tmp_path / "hf" / "model.safetensors")
    assert sorted(values) == sorted(wanted)
    assert all(values[n].tobytes() == wanted[n].tobytes() for n in wanted)


def test_weights_and_moments_of_the_distributed_optimizer(
    foreign: Path, tmp_path: Path, cli: Cli
) -> None:
    """By a program of 22 lines; the shipped layouts do the same, and there and back."""
    layout = str(foreign / "megatron-tp2pp2-opt" / "opt.lay")
    target, other, back = (str(tmp_path / n) for n in ("root", "other", "back"))
    source = str(foreign / OPTIMIZER)
    shipped = cli("reshard", source, other, "--to", "hf.llama", "-e", "let kv = 2")
    assert shipped.code == 0, shipped.err
    assert cli("reshard", other, back, "--to", "megatron.dist").code == 0
    assert cli("diff", source, back).code == 0
    found = cli("reshard", source, target, "--from", f"{layout}:dist", "--to", f"{layout}:hf")
    assert found.code == 0, found.err
    wanted = dict(np.load(foreign / "megatron-tp2pp2-opt" / "expected-hf.npz"))
    exported = cli("export", target, str(tmp_path / "out"), "--section", ".")
    assert exported.code == 0, exported.err
    values: dict[str, np.ndarray] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        values |= load_file(path)
    assert set(wanted) <= set(values)
    assert all(values[n].tobytes() == wanted[n].tobytes() for n in wanted)


def test_other_forms_are_refused(foreign: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shutil.copytree(foreign / MODEL, folder)
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert fails(folder).kind == "unreadable-format"
    (folder / "metadata.json").write_text("[]")
    assert fails(folder).kind == "bad-json"


TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""What layers of Transformer Engine call the norms that Megatron's own layers have apart."""


def write_legacy(sample: Path, folder: Path) -> None:
    """Write the parameters of TP2 PP2 as Megatron's legacy form, its vocabulary filled up."""
    args = argparse.Namespace(
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=4,
        vocab_size=128,
        num_experts=None,
    )
    ranks = {
        tuple(int(part[2:]) for part in path.stem.split("_")[2:]): dict(np.load(path))
        for path in sample.glob("local_rank*_pp*_tp*.npz")
    }
    for (pp, tp), values in ranks.items():
        model = {}
        for name, value in values.items():
            if name.startswith(("embedding", "output")):
                both = np.concatenate([ranks[pp, 0][name], ranks[pp, 1][name]])
                value = both if tp == 0 else np.zeros_like(both)
            for ours, theirs in TE_NAMES.items():
                name = name.replace(ours, theirs)
            model[name] = torch.from_numpy(value)
        there = folder / f"mp_rank_{tp:02}_{pp:03}"
        there.mkdir(parents=True)
        torch.save({"model": model, "args": args, "iteration": 7}, there / "model_optim_rng.pt")


def test_the_legacy_form_names_the_command_that_reads_it(
    foreign: Path, tmp_path: Path, cli: Cli
) -> None:
    sample, folder = foreign / "megatron-tp2pp2", tmp_path / "iter_0000007"
    write_legacy(sample, folder)
    for place in (tmp_path, folder):
        error = fails(place)
        assert error.kind == "unreadable-format"
        assert "--ckpt-convert-format" in str(error.hint)
    command, _, _ = str(error.hint).partition(";")
    words = [w.replace("OUT", str(tmp_path / "hf")) for w in shlex.split(command)[1:]]
    found = cli(*words, "--to", "hf.llama", "--format", "hf")
    assert found.code == 0, found.err
    wanted = dict(np.load(sample / "expected-hf.npz"))
    values = load_file(tmp_path / "hf" / "model.safetensors")
    assert sorted(values) == sorted(wanted)
    assert all(values[n].tobytes() == wanted[n].tobytes() for n in wanted)
    shutil.rmtree(folder / "mp_rank_01_000")
    error = fails(folder)
    assert (error.kind, error.where) == ("missing-file", "mp_rank_1_0/")
