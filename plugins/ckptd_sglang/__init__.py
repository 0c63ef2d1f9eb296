"""SGLang takes the weights that a trainer publishes: ``--custom-weight-loader ckptd_sglang.pull``.

The program that leads SGLang names a version, in place of tensors: `Wanted.tensors`. Each rank then
pulls what it holds of it. Nothing is gathered, and SGLang's own messages carry no weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

import ckptd
from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, UsageError, first_few
from ckptd_vllm.layouts import rollout_layout
from ckptd_vllm.versions import have

__all__ = ["LOADER", "Wanted", "pull", "register"]

LOADER = "ckptd_sglang.pull"
"""The value of SGLang's ``--custom-weight-loader`` and of ``load_format``."""

_MOST_BYTES = 1 << 16
_UPDATES = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version that SGLang is to have, and where its ranks find it.

    The job's secret does not travel: it is ``CKPTD_SECRET``, or that of the folder `at`.

    Attributes
    ----------
    layout
        How the ranks of this SGLang hold the model: a program, or the name of a shipped layout.
        SGLang joins tensors as vLLM does: ``vllm.llama`` is right for both.
    at, root, root_layout, budget_bytes, pass_on
        See `ckptd.Subscriber`.
    number, epoch
        Of a `ckptd.Publication`'s version, and of its publisher.
    wait_s
        Longest wait for that version, in seconds.
    """

    layout: str
    at: str
    number: int
    epoch: str
    root: str | None = None
    root_layout: str | None = None
    budget_bytes: int | None = None
    pass_on: bool = False
    wait_s: float = 300.0

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return what SGLang's ``update_weights_from_tensor`` is given, with ``load_format``."""
        raw = bytearray(msgspec.json.encode(self))
        return [("ckptd", torch.frombuffer(raw, dtype=torch.uint8))]


_wanted = json_decoder(Wanted)
_Followed = tuple[Wanted, ckptd.Subscriber, Callable[[], object]]
"""With what ends the subscriber: now, with the model, or with the process."""
_followed: weakref.WeakKeyDictionary[torch.nn.Module, _Followed] = weakref.WeakKeyDictionary()


def pull(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Fill the parameters of a rank's model with a version; SGLang calls it on every rank.

    The parameters themselves are written, when every rank has the version whole. Then SGLang
    computes again what it derives of them, as multi-head latent attention does.

    Raises
    ------
    UsageError
        The tensors are not those of `Wanted.tensors`; or SGLang may keep parameters in another
        order than it loads them in: experts, and what is quantized.
    MismatchError
        The layout does not fit the model.
    DeadlineError
        The version is not there in time: the model is as it was.
    """
    from sglang.srt.model_loader.loader import post_load_weights

    wanted = _read(named_tensors)
    have(_subscriber(model, wanted), wanted.number, wanted.epoch, wanted.wait_s)
    post_load_weights(model)


def register() -> None:
    """Have SGLang answer an update that fails, where its ranks would end by the error.

    An entry point: SGLang calls it in each of its processes.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_UPDATES}.update_weights_from_tensor", _answered, HookType.AROUND)


def _answered(update: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return update(*args, **options)
    except CkptdError as error:
        return False, str(error)


def _read(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> Wanted:
    names = [name for name, _ in named_tensors]
    raw = named_tensors[0][1] if names == ["ckptd"] else torch.empty(0)
    if raw.dtype == torch.uint8 and raw.numel() <= _MOST_BYTES:
        try:
            return _wanted.decode(raw.cpu().numpy().tobytes())
        except msgspec.DecodeError as error:
            names = [f"ckptd: {error}"]
    raise UsageError(
        "an update of SGLang by ckptd names a version, and brings no tensors",
        wanted="ckptd_sglang.Wanted(...).tensors()",
        found=first_few(names, 4) or "no tensor",
    )


def _subscriber(model: torch.nn.Module, wanted: Wanted) -> ckptd.Subscriber:
    """Return what follows the publisher for a model; another place or layout makes another one."""
    about = msgspec.structs.replace(wanted, number=0, epoch="", wait_s=0.0)
    if (followed := _followed.get(model)) is not None:
        if followed[0] == about:
            return followed[1]
        del _followed[model]
        followed[2]()
    from sglang.srt.distributed.parallel_state import get_tp_group, get_world_group

    tp, world = get_tp_group(), get_world_group()
    group = tp if world.world_size in (1, tp.world_size) else world
    layout = wanted.layout
    if layout.startswith("vllm.") and "\n" not in layout:
        layout = rollout_layout(layout, model.config, group.world_size)
    found = ckptd.Subscriber(
        layout,
        {"model": _parameters(model)},
        wanted.at,
        group=None if group.world_size == 1 else group.cpu_group,
        budget_bytes=wanted.budget_bytes,
        root=wanted.root,
        root_layout=wanted.root_layout,
        pass_on=wanted.pass_on,
    )
    _followed[model] = (about, found, weakref.finalize(model, found.close))
    return found


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    live = {name: parameter.data for name, parameter in model.named_parameters()}
    # A block of experts may be shuffled for its kernel, in the same shape.
    other = [n for n, p in live.items() if p.ndim > 2 or p.element_size() < 2]
    if other:
        raise UsageError(
            "parameters cannot be written in place: SGLang may keep them in another order",
            where=first_few(other, 4),
            wanted="a dense model that is not quantized",
            hint="load_format=None sends SGLang whole tensors",
        )
    return live
