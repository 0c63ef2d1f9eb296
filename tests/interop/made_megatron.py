"""Megatron-core on CPUs: a small GPT with its distributed optimizer, in torch_dist.

Megatron asks CUDA for a device in a few places; what answers "cpu" is put there. All else is
Megatron's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.interop.worlds import quiet

__all__ = ["load_both", "save_torch_dist"]

CUT = {"distrib_optim_sharding_type": "fully_reshardable"}


def without_cuda() -> None:
    """Let Megatron run on CPUs in this process."""
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    plain = tensor.type

    def on_cpu(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return make(*args, **options)

        return made

    def type_of(self: Any, *args: Any, **options: Any) -> Any:
        if args or options:
            return plain(self, *args, **options)
        return plain(self).replace("torch.", "torch.cuda.")

    for name in ("tensor", "zeros", "empty", "ones", "full", "zeros_like", "empty_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    cuda.synchronize = lambda *args: None
    cuda.current_device = lambda: torch.device("cpu")
    cuda.FloatTensor, cuda.IntTensor = torch.FloatTensor, torch.IntTensor
    tensor.cuda = lambda self, *args, **options: self
    tensor.type = type_of


def job(tp: int, pp: int) -> tuple[Any, Any]:
    """Return model and optimizer, after a step with drawn gradients."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    ps.initialize_model_parallel(tp, pp)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=128,
        max_sequence_length=16,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=1000),
        model,
    )
    settings = OptimizerConfig(lr=1e-2, use_distributed_optimizer=True, params_dtype=torch.float32)
    optimizer = get_megatron_optimizer(settings, [ddp])
    torch.manual_seed(ps.get_pipeline_model_parallel_rank())
    for buffer in ddp.buffers:
        buffer.grad_data.copy_(torch.randn(buffer.grad_data.shape))
    for parameter in model.parameters():
        parameter.main_grad_ready = True
    optimizer.step()
    return model, optimizer


def save_torch_dist(folder: str, tp: int, pp: int) -> None:
    """Save a job in torch_dist, with the optimizer of `fully_reshardable`."""
    from megatron.core import dist_checkpointing

    quiet()
    without_cuda()
    model, optimizer = job(tp, pp)
    state = model.sharded_state_dict()
    moments = optimizer.sharded_state_dict(state, metadata=CUT)
    whole = {"model": state, "optimizer": moments, "iteration": 8}
    dist_checkpointing.save(whole, folder, content_metadata=CUT)


def load_both(theirs: str, ours: str, tp: int, pp: int) -> int:
    """Load two folders into a job and compare every bit; return how many values there were."""
    from megatron.core import dist_checkpointing

    quiet()
    without_cuda()
    model, optimizer = job(tp, pp)
    found = []
    for folder in (theirs, ours):
        state = model.sharded_state_dict()
        moments = optimizer.sharded_state_dict(state, is_loading=True, metadata=CUT)
        loaded = dist_checkpointing.load({"model": state, "optimizer": moments}, folder)
        model.load_state_dict(loaded["model"])
        # Adam of torch keeps steps as tensors, which Megatron looks for in its own files as well,
        # and finds with Transformer Engine's alone: so its optimizer loads neither folder here.
        values = {f"model.{n}": p.detach().clone() for n, p in model.named_parameters()}
        values |= dict(leaves(loaded["optimizer"], "optimizer"))
        found.append((values, loaded["iteration"]))
    (first, iteration), (second, other) = found
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, second[name]), name
        else:
            assert value == second[name], name
    assert iteration == other
    return len(first)


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of a nested state."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from leaves(item, f"{name}.{number}")
    else:
        yield name, value
