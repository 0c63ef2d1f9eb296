"""Trainers of one model on the same batches, in frameworks that cut and save it differently.

Each is called in its ranks with `Run`, and returns the loss of each step over the whole batch.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.interop.worlds import deepspeed_engine, quiet
from tests.trainers.gpt import GPT

__all__ = ["Run", "deepspeed", "fsdp2", "fsdp2_tp", "llama", "megatron"]

BATCH, WORDS, LENGTH = 12, 33, 7


@dataclass(frozen=True)
class Run:
    """What to do.

    Attributes
    ----------
    folder
        Where checkpoints go, each in a folder of its own.
    steps
        The last step.
    every
        Save after each so many; 0 is never.
    kill_at
        The step after which all ranks are killed.
    source
        The checkpoint from which the run goes on, and after which step it was saved.
    options
        Of the trainer.
    """

    folder: str
    steps: int = 8
    every: int = 0
    kill_at: int = 0
    source: str = ""
    begun: int = 0
    options: Mapping[str, Any] | None = None

    def path(self, step: int) -> Path:
        return Path(self.folder) / f"global_step{step}"


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=3, dropout=0.0)


def _groups(model: nn.Module, *, lr: float = 3e-3) -> list[dict[str, Any]]:
    """Return two groups; a run that goes on has a wrong rate until it has loaded the right one."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": decay, "weight_decay": 0.1, "lr": lr},
        {"params": rest, "weight_decay": 0.0, "lr": lr / 2},
    ]


def _batch(step: int, share: int, shares: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this share of the batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    mine = tokens[share * BATCH // shares : (share + 1) * BATCH // shares]
    return mine[:, :-1], mine[:, 1:]


def _mean(loss: torch.Tensor) -> float:
    """Return the loss of the whole batch; shares are equal."""
    whole = loss.detach().double()
    dist.all_reduce(whole)
    return float(whole) / dist.get_world_size()


def _steps(run: Run) -> Iterator[int]:
    for step in range(run.begun + 1, run.steps + 1):
        yield step
        if step == run.kill_at:
            dist.barrier()
            os.killpg(0, signal.SIGKILL)  # with what a framework has started


def deepspeed(run: Run) -> list[float]:
    """Train by DeepSpeed's engine, of the stage that the options say."""
    quiet()
    options = dict(run.options or {})
    stage = options.pop("stage")
    model = _model()
    lr = 0.3 if run.source else 3e-3
    engine = deepspeed_engine(
        model, stage, groups=_groups(model, lr=lr), gradient_clipping=0.0, **options
    )
    if run.source:
        found, _ = engine.load_checkpoint(run.source)
        assert found is not None
    losses = []
    for step in _steps(run):
        x, y = _batch(step, dist.get_rank(), dist.get_world_size())
        _, loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(_mean(loss))
        if run.every and step % run.every == 0:
            engine.save_checkpoint(run.folder, tag=run.path(step).name)
    return losses


def fsdp2(run: Run) -> list[float]:
    """Train by FSDP2 over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return _fsdp2(run, _model(), mesh, dist.get_rank(), dist.get_world_size())


def fsdp2_tp(run: Run) -> list[float]:
    """Train by FSDP2 over two halves of the ranks, in each of which TP cuts the layers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = _model()
    for block in model.blocks:
        parallelize(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _fsdp2(run, model, mesh["dp"], mesh["dp"].get_local_rank(), 2)


def _fsdp2(run: Run, model: GPT, mesh: Any, share: int, shares: int) -> list[float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    quiet()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(_groups(model, lr=0.3 if run.source else 3e-3))
    if (run.options or {}).get("checkpointer"):
        import ckptd

        with ckptd.Checkpointer(run.source) as ck:
            # DeepSpeed's own values are in the checkpoint too, and nothing here takes them.
            state = {"model": model, "optim": optimizer}
            assert ck.load(state, strict=False) == run.begun
    elif run.source:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": states}, checkpoint_id=run.source)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    losses = []
    for step in _steps(run):
        _, loss = model(*_batch(step, share, shares))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(loss))
        if run.every and step % run.every == 0:
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optim": states}, checkpoint_id=run.path(step))
    return losses


def megatron(run: Run) -> list[float]:
    """Train a GPT model by Megatron-core with two stages, each over two tensor-parallel ranks."""
    from tests.plugins.megatron.world import Job

    quiet()
    job = Job(2, 2, sharding="fully_reshardable")
    losses = []
    for step in _steps(run):
        # Halves of the losses of two small batches, on the two ranks of the last stage alone.
        found = torch.tensor(job.train(1) or [0.0, 0.0]).double()
        dist.all_reduce(found)
        losses.append(float(found.sum()) / 2)
        if run.every and step % run.every == 0:
            from megatron.core import dist_checkpointing

            if dist.get_rank() == 0:
                run.path(step).mkdir(parents=True)
            dist.barrier()
            dist_checkpointing.save(job.state(), str(run.path(step)))
    return losses


def llama(run: Run) -> list[float]:
    """Go on with Megatron's job as transformers' Llama under FSDP2, a small batch on each rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    import ckptd
    from tests.plugins.megatron.world import BATCH, LENGTH, VOCABULARY

    quiet()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    with ckptd.Checkpointer(run.source) as ck:
        # Megatron saves no counters of torch's Adam, and its groups do not name parameters.
        assert ck.load({"model": model, "optim": optimizer}, strict=False) == run.begun
    for state in optimizer.state.values():
        state["step"] = torch.tensor(float(run.begun))
    losses = []
    for step in _steps(run):
        seed = 100 * (step - 1) + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        logits = model(tokens[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(loss))
    return losses
