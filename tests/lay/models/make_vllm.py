"""Make ``vllm.json``: what vLLM's own loaders make of small models, rank by rank.

Run it with vLLM for CPUs installed: ``python tests/lay/models/make_vllm.py``. Each element
of a checkpoint has its number as value, in the order of the names; kept are names and shapes of
what each rank holds, and digests of the values.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import multiprocessing

BASE = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
HEADS = {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
CASES: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "llama": ("llama", HEADS, 2, False),
    "llama, few heads": ("llama", HEADS, 4, False),
    "llama tied": ("llama", {**HEADS, "tie_word_embeddings": True}, 2, False),
    "qwen2": ("qwen2", {}, 2, False),
    "qwen3": ("qwen3", HEADS, 2, False),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 2, False),
    "qwen3_moe": ("qwen3_moe", {**HEADS, **EXPERTS, "num_experts": 4}, 2, False),
    "qwen3_moe, ep": ("qwen3_moe", {**HEADS, **EXPERTS, "num_experts": 5}, 2, True),
    "deepseek_v3": ("deepseek_v3", {**EXPERTS, **LATENT}, 2, False),
}
"""Model type, what its config has besides, ranks, and whether these have experts of their own."""


def make(case: str, folder: Path) -> None:
    """Write the checkpoint of a case."""
    import transformers

    kind, more, _, _ = CASES[case]
    config = transformers.AutoConfig.for_model(kind, **{**BASE, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors, at = load_file(path), 0
    for name, tensor in sorted(tensors.items()):
        tensors[name] = torch.arange(at, at + tensor.numel()).float().reshape(tensor.shape)
        at += tensor.numel()
    assert at < 1 << 24, "float32 cannot tell so many elements apart"
    from safetensors.torch import save_file

    save_file(tensors, path, {"format": "pt"})


def load(rank: int, case: str, folder: Path) -> None:
    """Load the checkpoint as rank `rank` does, and write what it holds then."""
    _, _, world, experts = CASES[case]
    # As on a machine without bfloat16 instructions: those of the wheel are not everywhere.
    torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = bool
    os.environ["VLLM_DIST_IDENT"] = folder.name
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=32,
        tensor_parallel_size=world,
        enable_expert_parallel=experts,
        distributed_executor_backend="external_launcher",
    ).create_engine_config()
    with set_current_vllm_config(config):
        meeting = f"file://{folder}/meeting"
        init_distributed_environment(world, rank, meeting, rank, "gloo")
        ensure_model_parallel_initialized(world, 1)
        torch.set_default_dtype(torch.float32)
        model = initialize_model(config)
        model.load_weights(sorted(load_file(folder / "model.safetensors").items()))
    held = {
        name: [list(p.shape), hashlib.sha256(p.detach().numpy().tobytes()).hexdigest()[:16]]
        for name, p in model.named_parameters()
    }
    (folder / f"rank.{rank}.json").write_text(json.dumps(held))


def loaded(case: str) -> dict[str, Any]:
    """Return what is recorded of a case."""
    print(case, file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(case, folder)
        world = CASES[case][2]
        multiprocessing.spawn(load, (case, folder), world)
        return {
            "config": json.loads((folder / "config.json").read_text()),
            "shapes": {
                n: list(t.shape) for n, t in sorted(load_file(folder / "model.safetensors").items())
            },
            "experts": CASES[case][3],
            "ranks": [json.loads((folder / f"rank.{r}.json").read_text()) for r in range(world)],
        }


def main() -> None:
    """Write the file; with names of cases, renew these alone."""
    import vllm

    out = Path(__file__).with_name("vllm.json")
    found = json.loads(out.read_text())["models"] if out.exists() else {}
    for case in sys.argv[1:] or CASES:
        found[case] = loaded(case)
        record = {"vllm": vllm.__version__, "models": found}
        out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
