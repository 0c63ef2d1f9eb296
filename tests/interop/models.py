"""Tiny models of transformers: made, saved, loaded again, and what they say of some tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptd.checkpoint.load.reader import CkptdReader

__all__ = ["MODELS", "answer", "bits", "blank", "build", "check", "load", "save"]

_SIZES: Mapping[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False))


def _tied() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_SIZES, tie_word_embeddings=True)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2))


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=130, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    )


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **more))


MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama-tied": _tied,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "qwen3_moe": _qwen3_moe,
}


def build(name: str) -> Any:
    """Return a model whose every value is random, norms and biases too."""
    torch.manual_seed(len(name))
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def save(name: str, folder: Path) -> Path:
    """Save a model as its library does, in several files."""
    build(name).save_pretrained(folder, max_shard_size="60KB")
    return folder


def load(folder: Path) -> Any:
    """Load a folder as users do; the type is that of the file."""
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(said.values()), said
    return model.eval()


def blank(folder: Path) -> Any:
    """Return a model of the configuration in a folder, with other weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(config, dtype=config.dtype)


def answer(folder: Path, like: Path | None = None) -> bytes:
    """Return the bits of the logits of 16 tokens by the model in a folder.

    Parameters
    ----------
    folder
        Weights, and a configuration unless `like` has it.
    like
        The folder whose configuration is put beside the weights.
    """
    if like is not None:
        shutil.copy(like / "config.json", folder)
    with torch.no_grad():
        logits = load(folder)(torch.arange(1, 17).reshape(1, 16)).logits
    return bits(logits)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, row by row."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def check(reader: CkptdReader, wanted: Mapping[str, torch.Tensor]) -> None:
    """Compare every tensor that was read with what its library says."""
    found = reader.tensors(reader.names)
    assert set(reader.names) ^ set(wanted) == set()
    for name, tensor in wanted.items():
        assert tuple(found[name].shape) == tuple(tensor.shape), name
        assert found[name].tobytes() == bits(tensor), name
