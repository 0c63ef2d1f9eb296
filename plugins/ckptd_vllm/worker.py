"""The side of vLLM's workers: each pulls what its rank holds, and gives it to its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tp_group, get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    make_online_process_loader,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

import ckptd
from ckptd.errors import UsageError, first_few
from ckptd_vllm.layouts import rollout_layout
from ckptd_vllm.versions import have

__all__ = ["CkptdInitInfo", "CkptdUpdateInfo", "CkptdWeightTransferEngine"]

DERIVED = ("W_UK_T", "W_UV", "W_K", "W_V", "W_K_scale", "W_V_scale")
"""Tensors that multi-head latent attention computes of weights after they are loaded."""


@dataclass
class CkptdInitInfo(WeightTransferInitInfo):
    """Arguments of the phase *init*: plain values, since they come over HTTP as well.

    The job's secret does not travel: it is ``CKPTD_SECRET``, or that of the folder `at`.

    Attributes
    ----------
    layout
        How the ranks of this vLLM hold the model: the name of a shipped layout, such as
        ``vllm.llama``, or a program.
    at, root, root_layout, budget_bytes, pass_on
        See `ckptd.Subscriber`.
    in_place
        Write the model's parameters themselves. Only where vLLM keeps them as it has loaded them:
        dense models that are not quantized, on CUDA. Else each layer is processed again from a copy
        on the host.
    wait_s
        Longest wait for the version that an update names, in seconds.
    """

    layout: str
    at: str
    root: str | None = None
    root_layout: str | None = None
    budget_bytes: int | None = None
    in_place: bool = False
    pass_on: bool = False
    wait_s: float = 300.0


@dataclass
class CkptdUpdateInfo(WeightTransferUpdateInfo):
    """Which version the phase *update* is about: `number` and `epoch` of a `WeightVersion`."""

    number: int
    epoch: str


class CkptdWeightTransferEngine(WeightTransferEngine):
    """Fills a worker's model from a `ckptd.Publisher`.

    *update* pulls a version whole, and the model is as before where that fails; *finish* lets
    vLLM process it, layer by layer, as after a load.
    """

    init_info_cls = CkptdInitInfo
    update_info_cls = CkptdUpdateInfo
    supports_draft_weight_update = False

    _subscriber: ckptd.Subscriber | None = None
    _into: Mapping[str, torch.Tensor]
    _loaded: Any = None
    """The version that the model has; one that was pulled may wait for its *finish*."""

    def init_transfer_engine(self, init_info: CkptdInitInfo) -> None:
        """Bind the layout to the parameters that this worker has."""
        self.shutdown()
        self._info = init_info
        recorded = _recorded(self.model)
        if init_info.in_place:
            self._into = _unprocessed(self.model, recorded)
        else:
            # Zeros: a padded row that no rule fills must not be noise.
            self._into = {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in recorded.items()}
        layout = init_info.layout
        if layout.startswith("vllm.") and "\n" not in layout:
            config = self.parallel_config
            layout = rollout_layout(
                layout,
                self.model_config.hf_text_config,
                config.world_size,
                experts=config.enable_expert_parallel,
            )
        self._subscriber = ckptd.Subscriber(
            layout,
            {"model": self._into},
            init_info.at,
            group=self._group(),
            budget_bytes=init_info.budget_bytes,
            root=init_info.root,
            root_layout=init_info.root_layout,
            pass_on=init_info.pass_on,
        )

    def _group(self) -> Any:
        """Return the process group of one model: tensor and pipeline parallel ranks."""
        config = self.parallel_config
        if config.enable_expert_parallel and config.data_parallel_size > 1:
            raise UsageError(
                "experts lie on ranks of several data parallel engines",
                wanted="expert parallelism inside of one engine",
                found=f"data_parallel_size {config.data_parallel_size}",
            )
        if config.world_size == 1:
            return None
        found = get_tp_group() if config.pipeline_parallel_size == 1 else get_world_group()
        return found.cpu_group

    def start_weight_update(self) -> None:
        """Nothing is touched before a version is there."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Pull the version; in place, parameters change here."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: CkptdUpdateInfo) -> None:
        """Have the version that is named, or a newer one of the same trainer.

        Raises
        ------
        DeadlineError
            It is not there in time.
        """
        subscriber = self._subscriber
        if subscriber is None:
            raise UsageError(
                "weights are not available before init_weight_transfer_engine", kind="closed"
            )
        have(subscriber, update_info.number, update_info.epoch, self._info.wait_s)

    def finish_weight_update(self) -> None:
        """Load the new weights through vLLM, where they were not written in place."""
        held = None if self._subscriber is None else self._subscriber.version
        if held != self._loaded and not self._info.in_place:
            self._process()
        self._loaded = held

    def _process(self) -> None:
        initialize_layerwise_reload(self.model)
        for layer in self.model.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                # What comes is this rank's part already: the layer's own loader would cut it.
                parameter.weight_loader = default_weight_loader
                parameter.weight_loader = make_online_process_loader(layer, name)
        for name, parameter in list(self.model.named_parameters()):
            parameter.weight_loader(parameter, self._into[name])
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """End the connections; the model stays as it is."""
        if self._subscriber is not None:
            self._subscriber.close()
        self._subscriber = self._loaded = None


def _recorded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters as vLLM's loaders fill them, without data, by their names."""
    found = {}
    for prefix, layer in model.named_modules(remove_duplicate=True):
        for name, tensor in get_layerwise_info(layer).restore_metadata[0].items():
            found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _unprocessed(
    model: torch.nn.Module, recorded: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the model's parameters, which have to be as they were loaded.

    Raises
    ------
    UsageError
        VLLM has processed some of them, or has computed others of them, which would be stale.
    """
    derived = [
        f"{at}.{name}"
        for at, layer in model.named_modules()
        for part in (layer, getattr(layer, "impl", None))
        for name in DERIVED
        if isinstance(getattr(part, name, None), torch.Tensor)
    ]
    if derived:
        raise UsageError(
            "parameters cannot be written in place: vLLM has computed others of them",
            where=first_few(derived, 4),
            hint="in_place=False",
        )
    live = {n: p.data for n, p in model.named_parameters()}
    other = [
        n
        for n, p in recorded.items()
        if n not in live or (live[n].shape, live[n].dtype) != (p.shape, p.dtype) or p.ndim > 2
    ]
    if other:
        raise UsageError(
            "parameters cannot be written in place: vLLM does not keep them as it loads them",
            where=first_few(other, 4),
            hint="in_place=False",
        )
    return live
