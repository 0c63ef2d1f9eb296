"""Megatron-core's torch_dist, to the names of Hugging Face by a layout program."""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.cli.running import Cli, Result
from tests.readers.opening import fails, open_reader

MODEL = "megatron-tp2pp2/model-stacked"
OPTIMIZER = "megatron-tp2pp2-opt/optim-fully_reshardable"


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


BUCKETS = "megatron-buckets/iter_0000002"


def reshard_buckets(cli: Cli, source: Path, folder: Path, *edits: tuple[str, str]) -> Result:
    """Reshard buckets into files of ranks, by the sample's layout with some text replaced."""
    text = (source / "local.lay").read_text()
    changed = text
    for old, new in edits:
        assert old in changed
        changed = changed.replace(old, new)
    mine, theirs = folder / "mine.lay", folder / "theirs.lay"
    mine.write_text(changed)
    theirs.write_text(text)
    layouts = ["--from", f"{mine}:buckets", "--to", f"{theirs}:ranks"]
    return cli("reshard", str(source), str(folder / "out"), *layouts, "--format", "ranks")


def compare_ranks(sample: Path, out: Path) -> list[str]:
    """Return what differs from what the optimizer said, of all ranks."""
    differ = []
    for path in sorted(sample.glob("local_*.npz")):
        wanted = dict(np.load(path))
        values = load_file(out / f"{path.stem.replace('local', 'rank')}.safetensors")
        assert sorted(values) == sorted(wanted)
        differ += [n for n in wanted if values[n].tobytes() != wanted[n].tobytes()]
    return differ


def test_buckets_by_the_order_of_a_layout(foreign: Path, tmp_path: Path, cli: Cli) -> None:
    """Bit for bit what the optimizer says, also where a tensor lies on two data-parallel ranks."""
    found = reshard_buckets(cli, foreign / BUCKETS, tmp_path)
    assert found.code == 0, found.err
    assert "order not verified" in found.err
    assert compare_ranks(foreign / "megatron-buckets", tmp_path / "out") == []


def test_an_order_that_fits_all_bounds_is_not_verified(
    foreign: Path, tmp_path: Path, cli: Cli
) -> None:
    """Two norms of one length at the same places: nothing but a diff tells them apart."""
    swapped = [("L{l}.n1[h]", "X"), ("L{l}.n2[h]", "L{l}.n1[h]"), ("X", "L{l}.n2[h]")]
    found = reshard_buckets(cli, foreign / BUCKETS, tmp_path, *swapped)
    assert found.code == 0, found.err
    assert "order not verified" in found.err
    differ = compare_ranks(foreign / "megatron-buckets", tmp_path / "out")
    assert {n.split(".", 3)[3].partition(".")[0] for n in differ} == {
        "input_layernorm",
        "pre_mlp_layernorm",
    }


PROJ = "  decoder.layers.{#l@pp}.self_attention.linear_proj.weight = L{l}.o[h (kv@tp rep hd)]\n"
NORM = "  decoder.layers.{#l@pp}.pre_mlp_layernorm.weight = L{l}.n2[h]\n"


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ([(PROJ, ""), (NORM, NORM + PROJ)], "is not cut where the layout says"),
        ([("order reverse ", "")], "elements, and the rules make"),
        ([("start/64 ", "")], "elements, and the rules make"),
        ([("let hd = 4", "let hd = 2")], "elements, and the rules make"),
        ([("group:4=(pp:2 tp:2)", "group:2=(pp:1 tp:2)")], "elements, and the rules make"),
        ([("group:4=(pp:2 tp:2)", "group:8=(pp:4 tp:2)")], "the file of a rank is missing"),
        ([("gbuf_idx_0", "gbuf_idx_1")], "no rule matches gbuf_idx_0.param"),
    ],
)
def test_a_layout_that_is_not_that_of_the_buckets(
    foreign: Path, tmp_path: Path, cli: Cli, edits: list[tuple[str, str]], message: str
) -> None:
    found = reshard_buckets(cli, foreign / BUCKETS, tmp_path, *edits)
    assert found.code != 0
    assert message in found.err, found.err
    assert not (tmp_path / "out").exists()


def test_the_shipped_layout_of_buckets_is_of_other_layers(
    foreign: Path, tmp_path: Path, cli: Cli
) -> None:
    """It has the norms of Transformer Engine, inside of the projections, and so another order."""
    said = ["-e", "from: mesh megatron_buckets = group:4=(pp:2 tp:2) dp:1"]
    said += ["-e", "let kv = 2", "-e", "let hd = 4", "--to", "hf.llama"]
    source, target = str(foreign / BUCKETS), str(tmp_path / "out")
    found = cli("reshard", source, target, "--from", "megatron.buckets", *said)
    assert "3200 elements, and the rules make 4224" in found.err


def edited(source: Path, folder: Path, change: Callable[[str], str | None]) -> Path:
    """Copy a folder of torch_dist, names of its tensors and values changed; None drops one."""
    shutil.copytree(source, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entries = metadata.state_dict_metadata.items()
    metadata.state_dict_metadata = {new: v for n, v in entries if (new := change(n)) is not None}
    metadata.storage_data = {
        dataclasses.replace(index, fqn=new): info
        for index, info in metadata.storage_data.items()
        if (new := change(index.fqn)) is not None
    }
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "optimizer.distributed.",
            "chained_1.optimizer.distributed.",
            "a layout cannot read the buckets",
        ),
        ("dp_group_idx_0.per_bucket_numel/", None, "does not record the length of its buckets"),
        (
            "dp_group_idx_1.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_1.exp_avg",
            None,
            "buckets of an optimizer are missing",
        ),
        ("float32).bucket_idx_1", "bfloat16).bucket_idx_1", "a layout cannot read the buckets"),
    ],
)
def test_buckets_that_are_not_whole(
    foreign: Path, tmp_path: Path, cli: Cli, old: str, new: str | None, message: str
) -> None:
    def change(name: str) -> str | None:
        return (None if new is None else name.replace(old, new)) if old in name else name

    source = edited(foreign / BUCKETS, tmp_path / "source", change)
    found = reshard_buckets(cli, source, tmp_path)
    assert found.code != 0
    assert message in found.err, found.err


def test_other_forms_are_refused(foreign: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shutil.copytree(foreign / MODEL, folder)
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert fails(folder).kind == "unreadable-format"
    (folder / "metadata.json").write_text("[]")
    assert "invalid metadata of a Megatron checkpoint" in fails(folder).message


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


def test_a_legacy_file_without_a_table_on_top_is_refused_with_a_command(tmp_path: Path) -> None:
    for rank in range(2):
        there = tmp_path / f"mp_rank_{rank:02}"
        there.mkdir()
        torch.save(3, there / "model_optim_rng.pt")
    error = fails(tmp_path)
    assert error.kind == "unreadable-format"
    assert 'from: files "mp_rank_{tp:02}/model_optim_rng.pt"' in str(error.hint)


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
    assert (error.message, error.where) == ("a file of the checkpoint is missing", "mp_rank_1_0/")
