"""Make ``models.json``: what Hugging Face transformers saves of small models, and their config.

Run it with transformers installed: ``python tests/lay/models/make.py``. Names and shapes are
kept, values are not.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

BASE = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
GROUPS = {"num_key_value_heads": 2}
HEADS = {**GROUPS, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPS,
    "llama tied": {**GROUPS, "tie_word_embeddings": True},
    "mistral": HEADS,
    "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 3, "n_positions": 16},
    "mixtral": {**GROUPS, "num_local_experts": 4},
    "qwen2": GROUPS,
    "qwen3": HEADS,
    "qwen3_moe": {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "q_lora_rank": 6,
        "kv_lora_rank": 10,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
    },
    "gpt_neox": {},
    "gpt_oss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def saved(name: str) -> dict[str, Any]:
    """Return the config that a model saves, and the shapes of its tensors."""
    config = transformers.AutoConfig.for_model(name.split()[0], **{**BASE, **MODELS[name]})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        shapes: dict[str, list[int]] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, "pt") as found:
                shapes |= {k: found.get_slice(k).get_shape() for k in found.keys()}  # noqa: SIM118
        config = json.loads((Path(folder) / "config.json").read_text())
    return {"config": config, "shapes": dict(sorted(shapes.items()))}


def main() -> None:
    """Write the file."""
    torch.manual_seed(0)
    found = {"transformers": transformers.__version__, "models": {n: saved(n) for n in MODELS}}
    out = Path(__file__).with_name("models.json")
    out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
