"""What foreign files hint at is used where the user is silent, and only there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckptd.lay.syntax import library
from ckptd.readers.hints import LAYOUTS, megatron_hints
from ckptd.readers.pickles import PickledObject
from ckptd.store import open_store
from tests.cli.running import Cli
from tests.readers.opening import foreign_stock, write_model


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A model as transformers saves it: 4 heads in 2 groups, 6 wide."""
    write_model(tmp_path / "llama")
    return tmp_path / "llama"


def hinted(folder: Path, **config: object) -> tuple[str, dict[str, int]]:
    """Return the hints of a model with a configuration."""
    save_file({"w": np.ones(3, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    stock = foreign_stock(open_store(folder))
    assert stock.hinted == bool(stock.lay)
    return stock.lay, dict(stock.sizes)


def test_layouts_of_models_are_shipped() -> None:
    assert set(LAYOUTS.values()) <= set(library.names())


@pytest.mark.parametrize(
    ("config", "wanted", "sizes"),
    [
        (
            {"model_type": "llama", "num_attention_heads": 8, "hidden_size": 64},
            "# layout hf.llama\n",
            {"kv": 8, "hd": 8},
        ),
        (
            {"model_type": "gpt_neox", "num_attention_heads": 8, "hidden_size": 64},
            "# layout hf.neox\n",
            {"kv": 8, "hd": 8, "n": 8},
        ),
        (
            {
                "model_type": "deepseek_v3",
                "num_attention_heads": 4,
                "first_k_dense_replace": 0,
                "num_hidden_layers": 5,
                "q_lora_rank": 6,
            },
            "# layout hf.deepseek_v3\nlet dense = 0\nlet main = 5\n",
            {"kv": 4, "n": 4},
        ),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 1}, "", {}),
        (
            {
                "model_type": "glm4_moe",
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "attention_bias": True,
                "first_k_dense_replace": 1,
                "num_hidden_layers": 5,
            },
            "# layout hf.glm4_moe\nlet dense = 1\nlet main = 5\n",
            {"kv": 2, "hd": 8},
        ),
        ({"model_type": "glm4_moe", "num_hidden_layers": 5}, "", {}),
        ({"model_type": "llama", "mlp_bias": True}, "", {}),
        ({"model_type": "qwen3", "attention_bias": True}, "", {}),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "", {}),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "", {}),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "", {}),
        ({"model_type": "t5"}, "", {}),
        ({"model_type": ["llama"]}, "", {}),
    ],
)
def test_of_a_configuration(
    tmp_path: Path, config: dict[str, Any], wanted: str, sizes: dict[str, int]
) -> None:
    assert hinted(tmp_path, **config) == (wanted, sizes)


STACKED = {"embedding.word_embeddings.weight": (128, 4), "decoder.layers.mlp.x": (2, 4)}


def test_of_the_names_and_arguments_of_megatron() -> None:
    """The classes that its arguments are of are records here."""
    args = PickledObject("argparse.Namespace")
    args.fields = {
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "group_query_attention": True,
        "kv_channels": 16,
        "vocab_size": 100,
    }
    lay, sizes = megatron_hints(STACKED, {"args": args})
    assert lay == "# layout megatron.dist\nlet vpad = 128\n"
    assert sizes == {"kv": 2, "hd": 16, "v": 100}
    args.fields = {**args.fields, "group_query_attention": False, "vocab_size": 999}
    assert megatron_hints(STACKED, {"args": args})[1] == {"kv": 8, "hd": 16, "v": 128}
    assert megatron_hints(STACKED, None)[1] == {"v": 128}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", "megatron.dist.layers"),
        ("decoder.layers.0.mlp.linear_fc1.weight_w", "megatron.dist.single"),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", "megatron.moe.dist"),
        ("decoder.layers.0.mlp.experts.experts.linear_fc2.weight", "megatron.moe.dist.layers"),
        ("decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight_v", "megatron.moe.dist.single"),
        ("decoder.layers.self_attention.linear_qkv.bias", "megatron.qwen2.dist"),
        ("decoder.layers.self_attention.q_layernorm.weight", "megatron.qwen3.dist"),
        ("decoder.layers.mlp.linear_fc1.bias", ""),
        ("decoder.layers.0.self_attention.q_layernorm.weight", ""),
        ("optimizer.distributed.dp_group_idx_0.param", ""),
    ],
)
def test_of_the_form_of_a_torch_dist(name: str, layout: str) -> None:
    found = megatron_hints({**STACKED, name: (2, 4)}, None)[0]
    assert found.partition("\n")[0] == (f"# layout {layout}" if layout else "")
    without = {n: s for n, s in STACKED.items() if not n.startswith("embedding")}
    assert megatron_hints({**without, name: (2, 4)}, None) == ("", {})


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "qwen3_moe"])
def test_qwen_in_megatron(tmp_path: Path, cli: Cli, model: str) -> None:
    """To torch_dist as a folder of Megatron's own, and back: the names say which model it is."""
    write_model(tmp_path / "model", model)
    source, out, back = (str(tmp_path / n) for n in ("model", "dist", "hf"))
    to = ("--to", f"megatron.{model}.dist", "--format", "torch_dist")
    assert cli("reshard", source, out, *to).code == 0
    sizes = ("-e", "let kv = 2", "-e", "let v = 32")
    found = cli("reshard", out, back, "--to", f"hf.{model}", "--format", "hf", *sizes)
    assert found.code == 0, found.err
    assert f"read with megatron.{model}.dist, as its files hint" in found.err
    assert cli("diff", source, back).code == 0


@pytest.mark.parametrize("model", ["mistral", "llama tied"])
def test_a_model_needs_no_program(tmp_path: Path, cli: Cli, model: str) -> None:
    """One with heads of their own width; one whose head is the embedding, which is there once."""
    write_model(tmp_path / "model", model)
    source, out, back = (str(tmp_path / n) for n in ("model", "dist", "hf"))
    found = cli("reshard", source, out, "--to", "megatron.dist")
    assert found.code == 0, found.err
    width = 8 if model == "mistral" else 6
    assert f"read with hf.llama, as its files hint: kv=2 hd={width}\n" in found.err
    assert cli("reshard", out, back, "--to", "hf.llama", "--format", "hf").code == 0
    assert cli("diff", source, back).code == 0


def test_the_users_word_goes_before_hints(llama: Path, tmp_path: Path, cli: Cli) -> None:
    """A layout that takes k for v, and a size that the configuration has wrong."""
    lay = tmp_path / "swapped.lay"
    lay.write_text(
        "layout swapped on none {\n"
        "  **.k_proj.weight = L{l}.v[(kv hd) h]\n"
        "  **.v_proj.weight = L{l}.k[(kv hd) h]\n"
        "  use hf.llama\n}\n"
    )
    source, out = str(llama), tmp_path / "out"
    found = cli(
        "reshard", source, str(out), "--from", str(lay), "--to", "hf.llama", "--format", "hf"
    )
    assert found.code == 0, found.err
    assert "contradicts the layout that its files hint at" in found.err
    values = load_file(out / "model.safetensors")
    wanted = load_file(llama / "model.safetensors")
    for mine, theirs in ("kv", "vk"):
        names = (f"model.layers.1.self_attn.{x}_proj.weight" for x in (mine, theirs))
        assert values[next(names)].tobytes() == wanted[next(names)].tobytes()


def test_a_hint_that_does_not_fit(llama: Path, tmp_path: Path, cli: Cli) -> None:
    """An error, that names both; a recipe needs no layout, and a size of the user mends it."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 3}))
    run = ("reshard", str(llama), str(tmp_path / "x"), "--dry-run", "--to")
    error = cli(*run, "megatron.dist", "--json").error
    assert error["kind"] == "lay-fit"
    assert error["wanted"] == "hf.llama kv=3 hd=6, as the files hint"
    assert "k_proj.weight [12,24]" in error["found"]
    cut = cli(*run, "fsdp")
    assert cut.code == 0
    assert "hf.llama kv=3 hd=6, does not fit" in cut.err
    assert cli(*run, "megatron.dist", "-e", "let kv = 2").code == 0


def test_hints_are_told(llama: Path, cli: Cli) -> None:
    source = str(llama)
    assert "\nlayout: hf.llama kv=2 hd=6\n" in cli("inspect", source).out
    assert cli("inspect", source, "--json").document["layout"] == "hf.llama kv=2 hd=6"
    checked = cli("lay", "check", "hf.llama", "--against", source)
    assert checked.code == 0, checked.out
    assert "the files hint at hf.llama kv=2 hd=6" in checked.err
    other = cli("lay", "check", "hf.gpt2", "--against", source, "--json")
    assert other.code == 1
    assert other.document["hint"] == "hf.llama kv=2 hd=6"
