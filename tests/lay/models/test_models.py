"""Shipped layouts and what Hugging Face transformers saves: names, shapes, and what cells mean.

``models.json`` was recorded from the library by ``make.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import MismatchError
from ckptd.lay.bind import bind_stored
from ckptd.lay.resolve import Bound, resolve
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax import parse
from tests.lay.agreement.brute import Brute

MODELS: dict[str, Any] = json.loads(Path(__file__).with_name("models.json").read_text())["models"]
LAYOUTS = {"gpt_neox": "hf.neox", "llama tied": "hf.llama", "mistral": "hf.llama"}
PREDICTED = ("E", "head", "ne", "nh", "nf", "proj.e", "proj.h")


def bound(model: str, program: str = "") -> Bound:
    """Bind the layout of a model to what the library saved of it."""
    config, shapes = MODELS[model]["config"], MODELS[model]["shapes"]
    heads = config.get("num_attention_heads", config.get("n_head"))
    sizes = {"kv": config.get("num_key_value_heads", heads), "n": heads}
    if model == "deepseek_v3":
        program += f"let dense = {config['first_k_dense_replace']}\nlet main = 3\n"
    resolved = resolve([parse(program, "t.lay")], LAYOUTS.get(model, f"hf.{model}"))
    return bind_stored(resolved, {n: tuple(s) for n, s in shapes.items()}, sizes)


@pytest.mark.parametrize("model", MODELS)
def test_each_tensor_has_a_rule_and_each_rule_its_tensors(model: str) -> None:
    """Also those that a model has not: tied heads, layers that predict further tokens."""
    found = bound(model)
    meaning = Brute(found)
    stored = {n: list(c.shape) for n, (_, c) in meaning.stored().items() if "exp_avg" not in n}
    stored = {n: s for n, s in stored.items() if not n.startswith("optim.")}
    tied = {"lm_head.weight"} if model in ("gpt2", "llama tied") else set()
    assert {n: s for n, s in stored.items() if n not in tied} == MODELS[model]["shapes"]
    families = {f.name for e in found.layout.equations for f in e.families.values()}
    missing = set(found.layout.families) - families
    absent = {f"L{{l}}.T.{n}" for n in PREDICTED} if model == "deepseek_v3" else set()
    assert missing == absent | ({"head"} if model == "llama tied" else set())


def at(model: str, name: str, *index: int) -> str:
    """Return the cell of the space that an element of a stored tensor is."""
    meaning = Brute(bound(model))
    return meaning.numbering.name(int(meaning.stored()[name][1][index]))


def test_gate_and_up_take_turns_in_columns_of_gpt_oss() -> None:
    """``gate, up = gate_up[..., ::2], gate_up[..., 1::2]``, as the library takes them apart."""
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert at("gpt_oss", name, 2, 5, 6) == "L{l}.X{e}.g{'l': 1, 'e': 2, 'f': 3, 'h': 5}"
    assert at("gpt_oss", name, 2, 5, 7) == "L{l}.X{e}.u{'l': 1, 'e': 2, 'f': 3, 'h': 5}"


def test_a_head_of_neox_has_its_q_k_and_v_side_by_side() -> None:
    """``qkv.view(heads, 3 * size).chunk(3, -1)``: head 1 begins at 18 = 3 * 6."""
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    cells = [at("gpt_neox", name, 18 + i * 6 + 2, 4) for i in range(3)]
    assert cells == [f"L{{l}}.{t}{{'l': 0, 'n': 1, 'hd': 2, 'h': 4}}" for t in "qkv"]


def test_a_head_of_deepseek_has_its_part_without_positions_first() -> None:
    """8 rows without positions and 4 with them a head; then 8 of the key and 6 of the value."""
    q, kv = (f"model.layers.2.self_attn.{n}_b_proj.weight" for n in ("q", "kv"))
    assert at("deepseek_v3", q, 12 + 7, 1) == "L{l}.q.b.n{'l': 2, 'n': 1, 'nope': 7, 'rq': 1}"
    assert at("deepseek_v3", q, 12 + 8, 1) == "L{l}.q.b.r{'l': 2, 'n': 1, 'rope': 0, 'rq': 1}"
    assert at("deepseek_v3", kv, 14 + 8, 0) == "L{l}.kv.b.v{'l': 2, 'n': 1, 'vd': 0, 'rkv': 0}"


def test_layers_that_predict_further_tokens_are_kept_or_dropped() -> None:
    """DeepSeek's own checkpoints have them behind the last layer; the library reads none."""
    model = MODELS["deepseek_v3"]["shapes"]
    more = {
        n.replace("layers.2", "layers.3"): tuple(s) for n, s in model.items() if "layers.2" in n
    }
    extra = {
        "embed_tokens.weight": (32, 24),
        "enorm.weight": (24,),
        "hnorm.weight": (24,),
        "eh_proj.weight": (24, 48),
        "shared_head.norm.weight": (24,),
        "shared_head.head.weight": (32, 24),
    }
    shapes = {n: tuple(s) for n, s in model.items()} | more
    shapes |= {f"model.layers.3.{n}": s for n, s in extra.items()}
    sizes = {"n": 4}
    text = "let dense = 1\nlet main = 3\n"
    kept = bind_stored(resolve([parse(text, "t.lay")], "hf.deepseek_v3"), shapes, sizes)
    assert kept.sizes["l"] == 4
    families = {f.name for e in kept.layout.equations for f in e.families.values()}
    assert families == set(kept.layout.families)
    dropped = parse(
        f"{text}layout mine of deepseek_v3 on none {{\n"
        "  model.layers.3.** = drop\n  use hf.deepseek_v3\n}\n",
        "t.lay",
    )
    assert bind_stored(resolve([dropped], "mine"), shapes, sizes).sizes["l"] == 3


def test_a_wrong_number_of_dense_layers_is_an_error() -> None:
    shapes = {n: tuple(s) for n, s in MODELS["deepseek_v3"]["shapes"].items()}
    program = parse("let dense = 2\nlet main = 3\n", "t.lay")
    with pytest.raises(MismatchError, match=r"no rule matches model\.layers\.1\.mlp"):
        bind_stored(resolve([program], "hf.deepseek_v3"), shapes, {"n": 4})


EXPERTS = {
    "mlp.experts.experts.linear_fc1.weight": (4, 24, 16),
    "mlp.experts.experts.linear_fc2.weight": (4, 16, 12),
}
LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": (16,),
    "self_attention.linear_qkv.weight": (32, 16),
    "self_attention.linear_proj.weight": (16, 16),
    "pre_mlp_layernorm.weight": (16,),
    "mlp.router.weight": (4, 16),
}
OTHERS = {"embedding.word_embeddings.weight": (128, 16), "output_layer.weight": (128, 16)}


@pytest.mark.parametrize("layers", ["", "layers"])
def test_a_torch_dist_of_megatron_with_experts_and_their_optimizer(layers: str) -> None:
    """Names and shapes as megatron-core 0.16.1 saves them; experts are optimized apart."""
    weights: dict[str, tuple[int, ...]] = {**OTHERS, "decoder.final_layernorm.weight": (16,)}
    for name, shape in {**LAYER, **EXPERTS}.items():
        if layers:
            weights |= {f"decoder.layers.{i}.{name}": shape for i in range(3)}
        else:
            weights[f"decoder.layers.{name}"] = (3, *shape)
    shapes = dict(weights)
    for name, shape in weights.items():
        chain = f"chained_{int('.experts.' in name)}.optimizer.state"
        shapes |= {f"{chain}.{s}.{name}": shape for s in ("param", "exp_avg", "exp_avg_sq")}
    layout = f"megatron.moe.dist.{layers}".rstrip(".")
    found = bind_stored(resolve([parse("let v = 100", "t.lay")], layout), shapes, {"kv": 2})
    assert found.sizes["half"] == 2
    assert set(StoredForm(found).by_name) == set(shapes)
