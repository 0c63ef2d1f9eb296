"""Layout hints: which shipped layout a model's ``config.json`` or Megatron's arguments mean, sizes.

In it: table of model types.

A hint is a program as a checkpoint keeps it: the line ``# layout NAME``, and statements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptd.checkpoint.format.codec import parse_json
from ckptd.errors import CorruptError
from ckptd.readers.base import Listing
from ckptd.readers.pickles import PickledObject

LAYOUTS: Mapping[str, str] = {
    "deepseek_v3": "hf.deepseek_v3",
    "glm4_moe": "hf.glm4_moe",
    "gpt2": "hf.gpt2",
    "gpt_neox": "hf.neox",
    "gpt_oss": "hf.gpt_oss",
    "llama": "hf.llama",
    "mistral": "hf.llama",
    "mixtral": "hf.mixtral",
    "qwen2": "hf.qwen2",
    "qwen3": "hf.qwen3",
    "qwen3_moe": "hf.qwen3_moe",
}
"""Shipped layouts by the ``model_type`` of a configuration."""

_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 1 << 22
_DENSE_FIRST = ("deepseek_v3", "glm4_moe")
_HEADS_ARE_N = ("deepseek_v3", "gpt2", "gpt_neox")
_WITH_BIASES = ("glm4_moe", "gpt_oss", "gpt2", "gpt_neox", "qwen2")

Hints = tuple[str, dict[str, int]]
"""A program, or "" for none, and sizes."""


def config_hints(names: Listing) -> Hints:
    """Return what the ``config.json`` of a model of Hugging Face says.

    There is no program for what no shipped layout has: quantized weights, biases that a model of
    this type has not by default, other mixes of dense layers and experts.
    """
    if _CONFIG not in names.names:
        return "", {}
    try:
        config = parse_json(names.read(_CONFIG, _MAX_CONFIG_BYTES))
        kind = config.get("model_type")
        heads = config.get("num_attention_heads", config.get("n_head"))
        groups = config.get("num_key_value_heads") or heads
        hidden = config.get("hidden_size", config.get("n_embd"))
        width = config.get("head_dim") or (hidden // heads if hidden and heads else None)
        program = _program(config, LAYOUTS.get(kind, "")) if isinstance(kind, str) else ""
    except (CorruptError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        return "", {}
    sizes = {"kv": groups, "hd": width, **({"n": heads} if kind in _HEADS_ARE_N else {})}
    return program, _counts(sizes)


def _program(config: Mapping[str, Any], layout: str) -> str:
    kind = config["model_type"]
    biases = config.get("attention_bias") and kind not in _WITH_BIASES
    if not layout or biases or config.get("mlp_bias") or config.get("quantization_config"):
        return ""
    if kind == "qwen3_moe" and (config.get("mlp_only_layers") or _steps(config) != 1):
        return ""
    if kind not in _DENSE_FIRST:
        return _text(layout)
    dense, main = config.get("first_k_dense_replace"), config.get("num_hidden_layers")
    found = _counts({"main": main})
    whole = kind != "deepseek_v3" or config.get("q_lora_rank")
    if not found or type(dense) is not int or dense < 0 or not whole:
        return ""
    return _text(layout, dense=dense, **found)


def _steps(config: Mapping[str, Any]) -> object:
    return config.get("decoder_sparse_step", 1)


_DIST = {
    "": "megatron.dist",
    "experts": "megatron.moe.dist",
    "biases": "megatron.qwen2.dist",
    "norms": "megatron.qwen3.dist",
    "experts norms": "megatron.qwen3_moe.dist",
}
"""Shipped layouts of torch_dist by what a model has besides Llama's tensors."""
_PARTS = {
    "experts": (".experts.",),
    "biases": (".linear_qkv.bias",),
    "norms": (".q_layernorm.weight", ".k_layernorm.weight"),
}
"""Parts of names by which it is recognized."""
_NUMBERED = re.compile(r"decoder\.layers\.[0-9]+\.")
_EMBEDDING = "embedding.word_embeddings.weight"
_ARGS = "args"
_FORMS = tuple(f"{_DIST[k]}.{form}" for k in ("", "experts") for form in ("layers", "single"))
_STRANGE = ("bias", "linear_q_", "linear_kv_", "shared_experts", "optimizer.distributed.")
"""Parts of names that no shipped layout has: latent attention, buckets without names."""
_DENSE_NORM = "linear_fc1.layer_norm_weight"
"""Where Megatron's own layers keep the norm before experts."""


def megatron_hints(shapes: Mapping[str, tuple[int, ...]], common: object) -> Hints:
    """Return what names, and the arguments of the job that wrote, say of a torch_dist.

    Words that the vocabulary was filled up with are known where the arguments say them; else all
    rows count.

    Parameters
    ----------
    shapes
        Of all tensors.
    common
        The common state.
    """
    has = [k for k, parts in _PARTS.items() if any(p in n for n in shapes for p in parts)]
    layout = _DIST.get(" ".join(has), "")
    if any(n.endswith((".weight_w", ".weight_v")) for n in shapes):
        layout += ".single"
    elif any(map(_NUMBERED.match, shapes)):
        layout += ".layers"
    rows = shapes.get(_EMBEDDING, ())[:1]
    strange = (*_STRANGE, _DENSE_NORM) if "experts" in has else _STRANGE
    names = [n for n in shapes if not n.endswith(_PARTS["biases"])]
    odd = any(part in name for name in names for part in strange)
    if not rows or odd or layout not in (*_DIST.values(), *_FORMS):
        return "", {}
    return _text(layout, vpad=rows[0]), megatron_sizes(rows, common)


def megatron_sizes(embedding: tuple[int, ...], common: object) -> dict[str, int]:
    """Return the sizes of axes that the arguments of the job that wrote say, by name.

    Parameters
    ----------
    embedding
        Shape of the table of words, or its beginning.
    common
        The common state.
    """
    found = megatron_said(common)
    words = found.pop("v", None)
    if embedding:
        rows = embedding[0]
        found |= _counts({"v": rows if words is None else min(words, rows)})
    return found


def megatron_said(common: object) -> dict[str, int]:
    """Return the sizes of axes that the arguments alone say: ``kv``, ``hd`` and ``v``."""
    said = megatron_args(common)
    grouped = "num_query_groups" if said.get("group_query_attention") else "num_attention_heads"
    sizes = {"kv": grouped, "hd": "kv_channels", "v": "vocab_size"}
    return _counts({axis: said.get(name) for axis, name in sizes.items()})


def megatron_args(common: object) -> Mapping[str, Any]:
    """Return the arguments of the job that wrote, by name; none where there are none."""
    args = common.get(_ARGS) if isinstance(common, dict) else None
    return args.fields if isinstance(args, PickledObject) else {}


def _text(layout: str, **lets: int) -> str:
    return "".join([f"# layout {layout}\n", *(f"let {k} = {v}\n" for k, v in lets.items())])


def _counts(found: Mapping[str, object]) -> dict[str, int]:
    return {k: v for k, v in found.items() if type(v) is int and 0 < v < 1 << 31}
