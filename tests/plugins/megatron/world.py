"""A job of Megatron-core on CPUs: a small GPT model in any parallel sizes, trained over gloo.

Megatron takes an accelerator for granted in a few places, where it asks CUDA for the current
device and makes tensors there. `on_cpu` puts functions in their place that say "cpu"; all else is
Megatron's own: model, pipeline schedule, gradient buffers, distributed optimizer.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

__all__ = ["Job"]

VOCABULARY, LENGTH, BATCH = 128, 8, 2


@cache
def on_cpu() -> None:
    """Let Megatron run without an accelerator, in this process."""

    def elsewhere(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return make(*args, **options)

        return made

    for name in ("tensor", "zeros", "empty", "ones", "full", "zeros_like", "empty_like"):
        setattr(torch, name, elsewhere(getattr(torch, name)))
    numpy: Any = np
    numpy.product = np.prod  # Megatron-core 0.15 calls what numpy 2 has not
    cuda: Any = torch.cuda
    cuda.synchronize = lambda *args, **options: None
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("FloatTensor", "IntTensor", "BFloat16Tensor", "HalfTensor"):
        setattr(cuda, name, getattr(torch, name))
    tensor: Any = torch.Tensor
    plain = tensor.type
    tensor.cuda = lambda self, *args, **options: self
    tensor.type = lambda self, *args, **options: (
        plain(self, *args, **options)
        if args or options
        else plain(self).replace("torch.", "torch.cuda.")
    )


class Job:
    """Model, optimizer and how they are cut: tensor, pipeline and expert parallel sizes."""

    def __init__(self, tp: int = 1, pp: int = 1, ep: int = 1, sharding: str = "") -> None:
        warnings.simplefilter("ignore")
        on_cpu()
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.sharding = sharding
        parallel_state.destroy_model_parallel()  # of the job before, in the same processes
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        # Nothing is drawn in the model: there is no dropout.
        random.CudaRNGStatesTracker.fork = lambda self, *args: contextlib.nullcontext()
        experts: dict[str, Any] = {}
        if ep > 1:
            moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
            moe_utils.te_general_gemm = None  # it is looked for, and defined with what has it alone
            experts = {
                "num_moe_experts": 4,
                "moe_router_topk": 2,
                "moe_ffn_hidden_size": 12,
                "expert_model_parallel_size": ep,
                "moe_token_dispatcher_type": "allgather",
            }
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
            attention_dropout=0.0,
            hidden_dropout=0.0,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            **experts,
        )
        torch.manual_seed(11)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=4 if experts else None, normalization="RMSNorm"),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        for part in model.modules():
            if type(part).__name__ == "MoELayer":
                part.training = False  # it wants a norm of Transformer Engine beside it else
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, overlap_grad_reduce=False, bucket_size=1000
            ),
            model,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                use_distributed_optimizer=True,
                params_dtype=torch.float32,
                clip_grad=0.0,
            ),
            [self.model],
        )
        self.iteration = 0

    def train(self, steps: int) -> list[float]:
        """Train on data that the step names; return the losses where there are any."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        losses = []
        for _ in range(steps):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            found = get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=iter([0, 1]),
                model=[self.model],
                num_microbatches=2,
                seq_length=LENGTH,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            self.optimizer.step()
            self.iteration += 1
            losses += [float(each["loss"]) for each in found]
        return losses

    def _forward(self, batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        generator = torch.Generator().manual_seed(100 * self.iteration + next(batches))
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        positions = torch.arange(LENGTH).expand(BATCH, -1)
        mask = torch.ones(LENGTH, LENGTH).tril()[None, None] < 0.5
        output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            mean = output.float().mean()
            return mean, {"loss": mean.detach()}

        return output, loss

    def state(self, loading: bool = False) -> dict[str, Any]:
        """Return what Megatron's training saves: tensors that are cut, and what all ranks share."""
        if loading:
            self._fresh_moments()
        metadata = {"distrib_optim_sharding_type": self.sharding}
        model = self.model.module.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer, "iteration": self.iteration}

    def _fresh_moments(self) -> None:
        """Give torch's Adam what its first step would: Megatron asks it for the step before."""
        for p, state in self._states():
            state.update({name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")})
            state["step"] = torch.tensor(0.0)

    def _states(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for p in (p for group in each.optimizer.param_groups for p in group["params"]):
                yield p, each.optimizer.state[p]

    def wanted(self) -> dict[str, Any]:
        """Return what is loaded: the rest is common to all ranks."""
        return {k: v for k, v in self.state(loading=True).items() if k != "iteration"}

    def take(self, state: dict[str, Any]) -> None:
        """Go on from what was loaded.

        Adam of Apex or Transformer Engine, which need CUDA, has one step a group, torch's one a
        parameter: Megatron expects it among the moments then, where it does not save it, and
        gives all parameters one and the same tensor.
        """
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        plain = DistributedOptimizer._set_main_param_and_optimizer_states

        def fill(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
            held = self._get_main_param_and_optimizer_states(parameter)
            plain(self, parameter, {**tensors, "step": held["step"]})

        self.model.module.load_state_dict(state["model"])
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(DistributedOptimizer, "_set_main_param_and_optimizer_states", fill)
            self.optimizer.load_state_dict(state["optimizer"])
        for _, held in self._states():
            held["step"] = held["step"].clone()
        self.iteration = state["iteration"]
