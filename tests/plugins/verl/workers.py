"""What verl's manager is given: actors that train with FSDP2, and what its rollout workers fill.

Imported where verl is: by `test_manager`, and by Ray's processes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout import BaseRollout

__all__ = ["Actor", "Filled", "Replica", "Rollout"]

Tensors = dict[str, torch.Tensor]


class Actor(Worker):
    """A rank of a trainer, with the methods of verl's actor that its manager calls."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=None, backend="cpu:gloo")
        import_external_libs(config.custom_backend_module)
        self.engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=dist.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs[config.backend],
        )
        torch.manual_seed(7)
        self.model = nn.Sequential(
            nn.Embedding(37, 16), *(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 37)
        )
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> None:
        """Make a step of training."""
        words = torch.arange(12) + step
        nn.functional.cross_entropy(self.model(words), words + 1).backward()
        self.optim.step()
        self.optim.zero_grad()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self) -> Tensors:
        """Return the weights, put together."""
        return dict(self._each())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept(self) -> float:
        """Return the share of the model that the engine keeps here between two versions."""
        kept = sum(t.numel() for t in self.engine._shares.values())
        return float(kept / sum(p.numel() for p in self.model.parameters()))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Send the weights, as verl's actor does."""
        assert mode == "ckptd"
        return await self.engine.send_weights(self._each(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the engine."""
        return getattr(self.engine, method)(*args, **kwargs)

    def _each(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Filled(BaseRollout):
    """In place of a server of vLLM or SGLang: keeps what verl's worker gives it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.held: Tensors = {}
        self.step: int | None = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing was given up."""

    async def release(self) -> None:
        """Nothing is given up."""

    async def update_weights(
        self,
        weights: AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Take each tensor."""
        assert wire_format == "named_tensors"
        self.held = {name: tensor.clone() async for name, tensor in weights}
        self.step = global_steps


class Rollout(CheckpointEngineWorker):
    """verl's worker, which can be asked what it was given."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def held(self) -> tuple[int | None, Tensors]:
        """Return the last step and its tensors."""
        return self.server_adapter.step, self.server_adapter.held


class Replica:
    """What the manager asks of a replica: its workers, and to pause around an update."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Note the call."""
        self.calls.append("abort")

    async def release_kv_cache(self) -> None:
        """Note the call."""
        self.calls.append("release")

    async def resume_kv_cache(self) -> None:
        """Note the call."""
        self.calls.append("resume")

    async def resume_generation(self) -> None:
        """Note the call."""
        self.calls.append("generate")
