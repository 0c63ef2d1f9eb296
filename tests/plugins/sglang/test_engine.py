"""SGLang's own engine on a CPU takes a trainer's weights by its own session of an update.

``sglang`` is in no extra, since it pins its torch, and wants CUDA's packages: ``pip install
sglang==0.5.23``. Without CUDA it looks for one function of vLLM, which it does not call.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd_sglang import LOADER, Wanted
from tests.plugins.vllm.test_engine import policy
from tests.trainers.packages import needs

pytestmark = [
    pytest.mark.plugins,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # SGLang misses devices
]

Probe = tuple[list[int], list[Any]]


def engine(folder: Path) -> Any:
    """Start SGLang with the weights of a folder."""
    return needs("sglang").Engine(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        max_total_tokens=512,
        mem_fraction_static=0.1,
        disable_overlap_schedule=True,
        disable_radix_cache=True,  # a prompt that is known is computed in another order
        custom_weight_loader=[LOADER],
    )


def probe(llm: Any) -> Probe:
    """Return what the engine generates, and the logarithms of its probabilities."""
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    found = llm.generate(input_ids=[1, 2, 3, 4, 5], sampling_params=sampling, return_logprob=True)
    return found["output_ids"], [each[0] for each in found["meta_info"]["output_token_logprobs"]]


def update(llm: Any, wanted: Wanted) -> tuple[bool, str]:
    """Lead SGLang through an update; return its answer to what the ranks have done."""
    assert llm.begin_weight_update()[0]
    answer = llm.update_weights_from_tensor(wanted.tensors(), load_format=LOADER)
    assert llm.end_weight_update()[0]
    return bool(answer[0]), str(answer[1])


def test_an_engine_generates_what_one_with_the_trainers_weights_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; a version that does not come, and a layout that does not fit, change nothing."""
    stand_in = tmp_path / "vllm"
    stand_in.mkdir()
    (stand_in / "__init__.py").touch()
    (stand_in / "_custom_ops.py").write_text("rotary_embedding = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # SGLang's processes have it too
    monkeypatch.setenv("CKPTD_SECRET", os.urandom(32).hex())
    needs("sglang", "sglang==0.5.23")
    policy(1).save_pretrained(tmp_path / "a")
    model = policy(2)
    at = str(tmp_path / "at")
    layout = "let kv = 2\nlayout mine on none { use hf.llama }\n"
    with ckptd.Publisher(layout, at) as publisher:
        llm = engine(tmp_path / "a")
        probes = [probe(llm)]
        wanted = Wanted("vllm.llama", at, 1, "nobody's", wait_s=2.0)
        assert "did not arrive" in update(llm, wanted)[1]
        assert not update(llm, Wanted("vllm.mixtral", at, 1, publisher.epoch))[0]
        assert probe(llm) == probes[0]
        for step in (1, 2):
            publication = publisher.publish(step, {"model": model})
            wanted = Wanted("vllm.llama", at, publication.number, publisher.epoch)
            assert update(llm, wanted) == (True, "Success")
            probes.append(probe(llm))
            if step == 1:
                with torch.no_grad():
                    model.lm_head.weight.mul_(2)
        llm.shutdown()
    model.save_pretrained(tmp_path / "b")
    llm = engine(tmp_path / "b")
    assert probe(llm) == probes[-1]
    llm.shutdown()
    assert len({str(each) for each in probes}) == 3
