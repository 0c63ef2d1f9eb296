"""The layout of vLLM's ranks, from the shipped one of a model and from what its config says."""

from __future__ import annotations

from typing import Any

from ckptd.errors import UsageError

__all__ = ["rollout_layout"]

_SIZES = {
    "v": "vocab_size",
    "kv": "num_key_value_heads",
    "n": "num_attention_heads",
    "dense": "first_k_dense_replace",
    "main": "num_hidden_layers",
}
"""Sizes that shapes leave open, by what configs call them."""
_LATENT = ("v", "n", "dense", "main")
_GROUPED = ("v", "kv")


def rollout_layout(name: str, config: Any, ranks: int, *, experts: bool = False) -> str:
    """Return the program of `ranks` tensor parallel ranks.

    Parameters
    ----------
    name
        A shipped layout, such as ``vllm.llama``.
    config
        The model's config, as transformers reads it.
    experts
        Whether ranks have experts of their own (vLLM's ``enable_expert_parallel``), in place of a
        part of each expert.

    Raises
    ------
    UsageError
        kind ``lay-use``: the config does not say a size; write the program out.
    """
    latent = name == "vllm.deepseek_v3"
    axes = _LATENT if latent else _GROUPED
    sizes: dict[str, int] = {}
    for axis in axes:
        size = getattr(config, _SIZES[axis], None)
        if isinstance(size, int):
            sizes[axis] = size
    missing = [_SIZES[axis] for axis in axes if axis not in sizes]
    if missing:
        raise UsageError(
            "the model's config lacks the sizes of the layout",
            kind="lay-use",
            where=name,
            wanted=", ".join(missing),
            hint="give the program of the rollout as layout",
        )
    lines = [f"let {axis} = {size}" for axis, size in sizes.items()]
    heads = min(ranks, sizes.get("kv", ranks))
    seen = "" if latent else f"=(tk:{heads} tr:{ranks // heads})"
    meshes = {"rollout": f"tp:{ranks}{seen}"}
    if name in ("vllm.deepseek_v3", "vllm.mixtral", "vllm.qwen3_moe"):
        meshes["experts"] = f"ep:{ranks} etp:1" if experts else f"ep:1 etp:{ranks}"
    lines += [f"mesh {mesh} = {cut}" for mesh, cut in meshes.items()]
    return "\n".join([*lines, f"layout ranks on {', '.join(meshes)} {{", f"  use {name}", "}", ""])
