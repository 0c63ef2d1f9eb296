"""Every module class with state of torch.nn and of libraries: one save and one load, against torch.

``python -m tests.checkpoint.torch.state.modulecorpus [LIBRARY...]`` prints the table of
`docs/reference/campaigns.md`, by default of all libraries that are installed. They are best put
beside the environment and not into it; this is the one command, torch itself stays as it is::

    D=$(mktemp -d); .venv/bin/pip install --no-deps --target $D torchmetrics lightning-utilities \
        torchvision==0.28.0 timm transformers tokenizers huggingface_hub hf-xet httpx2 httpcore2 \
        h11 truststore anyio sniffio tqdm regex peft accelerate diffusers importlib_metadata zipp \
        e3nn opt_einsum opt_einsum_fx scipy sympy mpmath && \
        PYTHONPATH=$D .venv/bin/python -m tests.checkpoint.torch.state.modulecorpus

torchrec needs a folder of its own, with a build of fbgemm for this torch: ``torchrec==1.8.0
fbgemm-gpu-cpu==1.8.0 tensordict pyvers pyre-extensions iopath portalocker orjson cloudpickle
typing-inspect torchmetrics lightning-utilities tqdm``.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import itertools
import logging
import os
import pkgutil
import random
import sys
import time
import traceback
import urllib.request
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import ckptd
from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.errors import CkptdError
from ckptd.store.memory import forget_memory
from tests.checkpoint.torch.state.oracle import differences, reloaded

Make = Callable[[], nn.Module]
MAX_ELEMENTS = 12_000_000
BATCH = 8


@dataclass
class Found:
    """What became of the classes of one library.

    `stateless` have nothing to save, `unbuilt` were not constructed by what this file knows, and of
    `torchs` torch itself does not bring back what it saved, or does not save it.
    """

    version: str = ""
    exact: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    stateless: list[str] = field(default_factory=list)
    unbuilt: dict[str, str] = field(default_factory=dict)
    torchs: dict[str, str] = field(default_factory=dict)
    spoke: int = 0


# --- values ---------------------------------------------------------------------------------------


def randomise(module: nn.Module, seed: int) -> None:
    """Give parameters, buffers and a metric's states values of their own."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.copy_(torch.rand(tensor.shape, generator=made).to(tensor.dtype))
            elif tensor.dtype == torch.bool:
                tensor.logical_not_()
            elif tensor.numel() and not tensor.is_quantized:
                tensor.add_(1)
    for inner in module.modules():
        defaults = getattr(inner, "_defaults", None)
        if not isinstance(defaults, dict) or not hasattr(inner, "persistent"):
            continue
        persistent: Any = inner.persistent
        persistent(True)
        for name, default in defaults.items():
            if isinstance(default, torch.Tensor):
                value = torch.rand(default.shape, generator=made)
                setattr(inner, name, (value * 9).to(default.dtype))
            else:
                setattr(inner, name, [torch.rand(3, generator=made) for _ in range(2)])


def alike(make: Make) -> nn.Module:
    """Construct with the same draws each time."""
    torch.manual_seed(5)
    random.seed(5)
    module = make()
    for inner in module.modules():
        if hasattr(inner, "_defaults") and hasattr(inner, "persistent"):
            persistent: Any = inner.persistent
            persistent(True)
    return module


# --- one library ----------------------------------------------------------------------------------


def run(modules: Iterable[tuple[str, Make]], found: Found, seed: int = 3) -> Found:
    """Save and load all of `modules` in batches, and compare each with what torch brings back."""
    some = iter(modules)
    while batch := list(itertools.islice(some, BATCH)):
        ready: dict[str, tuple[Make, nn.Module, nn.Module]] = {}
        for name, make in batch:
            try:
                saved, wanted = alike(make), alike(make)
            except Exception as error:  # noqa: BLE001 - counted
                found.unbuilt[name] = _brief(error)
                continue
            try:
                randomise(saved, seed)
                if not saved.state_dict():
                    found.stateless.append(name)
                    continue
                reloaded(saved, wanted)
            except Exception as error:  # noqa: BLE001 - counted
                try:
                    flatten({"m": saved})
                except CkptdError as refusal:
                    found.refused[name] = f"{refusal.kind}: {refusal.where}"
                else:
                    found.torchs[name] = _brief(error)
                continue
            try:
                leaves = flatten({"m": saved})
            except CkptdError as error:
                found.refused[name] = f"{error.kind}: {error.where}"
                continue
            found.spoke += any(n.endswith("_own_state") for n in leaves.objects)
            ready[name] = make, saved, wanted
        for name, why in _together(ready).items():
            if why:
                found.wrong[name] = why
            else:
                found.exact.append(name)
    return found


def _together(ready: dict[str, tuple[Make, nn.Module, nn.Module]]) -> dict[str, str]:
    """Save and load all at once; one by one where that fails."""
    if not ready:
        return {}
    fresh = {name: alike(make) for name, (make, _, _) in ready.items()}
    root = f"memory://corpus-{uuid.uuid4().hex}"  # construction seeds the other draws
    try:
        with ckptd.Checkpointer(root) as ck:
            handle = ck.save(1, {f"m{i}": ready[n][1] for i, n in enumerate(ready)})
            assert handle is not None
            handle.durable(600)
            ck.load({f"m{i}": fresh[n] for i, n in enumerate(ready)})
        forget_memory(root.removeprefix("memory://"))
    except Exception as error:  # noqa: BLE001 - counted
        if len(ready) == 1:
            return dict.fromkeys(ready, f"{type(error).__name__}: {error}"[:300])
        return {n: w for name in ready for n, w in _together({name: ready[name]}).items()}
    return {
        name: ", ".join(differences(wanted, fresh[name])[:4])
        for name, (_, _, wanted) in ready.items()
    }


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:160]


def small(make: Make) -> bool:
    """Tell whether a module is small, without memory for it; where that works."""
    try:
        with torch.device("meta"):
            module = make()
    except Exception:  # noqa: BLE001 - then it is tried as it is
        return True
    return sum(t.numel() for t in (*module.parameters(), *module.buffers())) <= MAX_ELEMENTS


def built(kind: Any, ways: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> Make | None:
    """Return the first of some ways to construct a class that works."""
    for args, kwargs in ways:
        make: Make = partial(kind, *args, **kwargs)
        with contextlib.suppress(Exception):
            if isinstance(make(), nn.Module):
                return make
    return None


def classes(*names: str, of: type = nn.Module) -> list[Any]:
    """Return the public classes of modules (of Python), each once, by name."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception:  # noqa: BLE001 - it needs something that is not here
            continue
        for key, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, of) and not key.startswith("_"):
                found.setdefault(f"{value.__module__}.{value.__qualname__}", value)
    return [found[n] for n in sorted(found)]


def below(package: str) -> list[str]:
    found = importlib.import_module(package)
    return [package] + [
        m.name for m in pkgutil.walk_packages(found.__path__, f"{package}.", onerror=lambda _: None)
    ]


# --- libraries ------------------------------------------------------------------------------------

_PLAIN_WAYS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((4,), {}),
    ((4, 4), {}),
    ((4, 4, 3), {}),
    ((4, 4, 4), {}),
    ((2, 4), {}),
    ((4, 2), {}),
    ((4, 6, [2, 4]), {}),
    ((4, 4, 3, 2), {}),
    (([nn.Linear(2, 2), nn.BatchNorm1d(2)],), {}),
    ((nn.Linear(4, 4),), {}),
    ((nn.TransformerEncoderLayer(4, 2, 8), 2), {}),
    ((nn.TransformerDecoderLayer(4, 2, 8), 2), {}),
    (({"a": nn.Parameter(torch.ones(2))},), {}),
]


def torch_nn() -> Iterator[tuple[str, Make]]:
    """Yield all classes of torch.nn, parametrizations, and wrappers."""
    names = [n for n in below("torch.nn.modules") if "lazy" not in n]
    quantized = [n for n in (*below("torch.ao.nn"), "torch.ao.quantization") if "test" not in n]
    for kind in classes("torch.nn", *names, "torch.optim.swa_utils", *quantized):
        if "Lazy" in kind.__name__:
            lazy = kind
            ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
                ((), {}),
                ((4,), {}),
                ((4, 3), {}),
            ]
            make = built(lazy, ways)
            if make is not None:
                yield f"{kind.__module__}.{kind.__name__} (not run)", make
                yield f"{kind.__module__}.{kind.__name__} (run)", partial(_materialised, make)
                continue
        qat_config = {"qconfig": torch.ao.quantization.get_default_qat_qconfig("x86")}
        ways = [*_PLAIN_WAYS, ((4, 4), qat_config), ((4, 4, 3), qat_config)]
        ways += [(("LSTM", 4, 4), {}), ((1, (2, 2)), {})]
        if kind is nn.Transformer:
            ways = [((8, 2, 1, 1, 8), {})]
        if kind is nn.Bilinear:
            ways = [((3, 3, 2), {})]
        make = built(kind, ways)
        yield f"{kind.__module__}.{kind.__name__}", make or kind
    from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

    def first(wrap: Callable[[nn.Module], Any]) -> Make:
        def make() -> nn.Module:
            module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            wrap(module[0])
            return module

        return make

    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).t()

    yield "parametrizations.weight_norm", first(parametrizations.weight_norm)
    yield "parametrizations.spectral_norm", first(parametrizations.spectral_norm)
    yield "parametrizations.orthogonal", first(parametrizations.orthogonal)
    register = parametrize.register_parametrization
    yield "parametrize", first(lambda m: register(m, "weight", Symmetric()))
    yield "nn.utils.weight_norm", first(weight_norm)
    yield "nn.utils.spectral_norm", first(spectral_norm)
    yield "prune.l1_unstructured", first(lambda m: prune.l1_unstructured(m, "weight", 0.5))
    compiled: Any = torch.compile
    yield "torch.compile", lambda: compiled(nn.Linear(4, 4), backend="eager")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    yield "checkpoint_wrapper", lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)))
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    def qat() -> nn.Module:
        net: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
        net.qconfig = get_default_qat_qconfig("x86")
        prepared: nn.Module = prepare_qat(net)
        return prepared

    def seen() -> nn.Module:
        net = qat()
        net(torch.rand(3, 4))
        return net

    yield "prepare_qat", qat
    yield "prepare_qat (run)", seen

    def dynamic() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4))
        quantized: nn.Module = torch.ao.quantization.quantize_dynamic(net, {nn.Linear})
        return quantized

    yield "quantize_dynamic", dynamic


def _materialised(make: Make) -> nn.Module:
    module = make()
    for shape in ((2, 3), (2, 3, 8), (2, 3, 8, 8), (2, 3, 8, 8, 8)):
        with contextlib.suppress(Exception):
            module(torch.rand(shape))
            return module
    raise ValueError("no input fits")


def metrics() -> Iterator[tuple[str, Make]]:
    """Yield the metrics of torchmetrics, with persistent states."""
    torchmetrics: Any = importlib.import_module("torchmetrics")

    names = [n for n in below("torchmetrics") if "functional" not in n and "utilities" not in n]
    tasks: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {"task": "multiclass", "num_classes": 3}),
        ((), {"num_classes": 3}),
        ((), {"num_labels": 3}),
        ((), {"num_outputs": 2}),
        ((), {"num_groups": 2}),
        ((), {"fs": 8000}),
        ((), {"min_precision": 0.5}),
        ((), {"min_recall": 0.5}),
        ((), {"num_classes": 3, "min_precision": 0.5}),
        ((), {"num_classes": 3, "min_recall": 0.5}),
        ((), {"num_classes": 3, "min_sensitivity": 0.5}),
        ((), {"num_classes": 3, "min_specificity": 0.5}),
        ((), {"num_labels": 3, "min_precision": 0.5}),
        ((), {"num_labels": 3, "min_recall": 0.5}),
        ((), {"num_labels": 3, "min_sensitivity": 0.5}),
        ((), {"num_labels": 3, "min_specificity": 0.5}),
        ((), {"min_sensitivity": 0.5}),
        ((), {"min_specificity": 0.5}),
        ((), {"p": 2.0}),
        ((torchmetrics.MeanMetric(),), {}),
        ((torchmetrics.MeanMetric(), 3), {}),
        (([torchmetrics.MeanMetric(), torchmetrics.SumMetric()],), {}),
        ((torchmetrics.MeanMetric(), torchmetrics.SumMetric()), {}),
        (({0, 1}, {2}), {}),
    ]
    for kind in classes(*names):
        make = built(kind, [*_PLAIN_WAYS[:3], *tasks])
        yield f"{kind.__module__}.{kind.__name__}", make or kind


def vision() -> Iterator[tuple[str, Make]]:
    """Yield the models of torchvision that are small enough, and its modules with state."""
    torchvision: Any = importlib.import_module("torchvision")

    for name in torchvision.models.list_models():
        # Some draw as they are built, which the meta device does not do.
        weights = list(torchvision.models.get_model_weights(name))
        if any(w.meta["num_params"] > MAX_ELEMENTS for w in weights):
            continue
        make = partial(torchvision.models.get_model, name, weights=None, **(
            {"weights_backbone": None} if "rcnn" in name or "seg" in name or "ssd" in name
            or "retina" in name or "lraspp" in name or "fcos" in name or "deeplab" in name
            or "fcn" in name else {}
        ))  # fmt: skip
        if small(make):
            yield name, make
    of = torchvision.models
    few = of.mobilenet_v3_small(weights=None).features
    few.out_channels = 576
    swin = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": [2, 2]}
    blocks = [of.convnext.CNBlockConfig(8, 16, 1), of.convnext.CNBlockConfig(16, None, 1)]
    yield "VisionTransformer", partial(of.VisionTransformer, 32, 8, 2, 2, 16, 32)
    yield "SwinTransformer", partial(of.SwinTransformer, [4, 4], **swin)
    yield (
        "SwinTransformer, version 2",
        partial(
            of.SwinTransformer,
            [4, 4],
            **swin,
            block=of.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=of.swin_transformer.PatchMergingV2,
        ),
    )
    yield "ConvNeXt", partial(of.ConvNeXt, blocks)
    yield "MaxVit", partial(of.MaxVit, (32, 32), 8, 4, [8, 16], [1, 1], 4, 0.1)
    for name in ("FasterRCNN", "MaskRCNN", "KeypointRCNN", "RetinaNet", "FCOS"):
        yield name, partial(_detector, getattr(of.detection, name), few)
    for kind in classes("torchvision.ops", *below("torchvision.ops")):
        yield f"{kind.__module__}.{kind.__name__}", built(kind, _PLAIN_WAYS) or kind


def _detector(kind: Any, features: nn.Module) -> nn.Module:
    made: nn.Module = kind(copy.deepcopy(features), num_classes=3)
    return made


def timm_models() -> Iterator[tuple[str, Make]]:
    """Yield the smallest model of each family of timm that is small enough."""
    timm: Any = importlib.import_module("timm")

    for family in sorted(timm.models.list_modules()):
        least: tuple[int, str] | None = None
        for name in timm.list_models(module=family)[:40]:
            try:
                with torch.device("meta"):
                    model = timm.create_model(name, pretrained=False)
            except Exception:  # noqa: BLE001 - another of the family will do
                continue
            size = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
            least = min(least or (size, name), (size, name))
        if least is not None and least[0] <= MAX_ELEMENTS:
            yield f"{family}: {least[1]}", partial(timm.create_model, least[1], pretrained=False)


_TINY = {
    "hidden_size": 16, "d_model": 16, "dim": 16, "embed_dim": 16, "n_embd": 16, "emb_dim": 16,
    "embedding_size": 16, "projection_dim": 16, "intermediate_size": 32, "ffn_dim": 32,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_ff": 32, "d_kv": 4, "head_dim": 4,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2, "num_heads": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 40, "depth": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 32, "image_size": 32, "patch_size": 8, "n_positions": 32,
    "moe_intermediate_size": 16, "mlp_dim": 32, "feed_forward_hidden_size": 32,
}  # fmt: skip


def _shrunk(config: Any) -> Any:
    for key, value in _TINY.items():
        if isinstance(getattr(config, key, None), int):
            with contextlib.suppress(Exception):
                setattr(config, key, value)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, 1)
    types = getattr(config, "layer_types", None)
    if isinstance(types, list):
        with contextlib.suppress(Exception):
            config.layer_types = types[:2]
    for key in getattr(config, "sub_configs", {}):
        inner = getattr(config, key, None)
        if inner is not None:
            _shrunk(inner)
    return config


def transformers_models() -> Iterator[tuple[str, Make]]:
    """Yield each model type of transformers that its config, made tiny, gives."""
    from transformers import CONFIG_MAPPING, AutoModel

    for name in sorted(CONFIG_MAPPING):
        try:
            config = _shrunk(CONFIG_MAPPING[name]())
        except Exception as error:  # noqa: BLE001 - counted
            yield name, partial(_raise, error)
            continue
        make = partial(AutoModel.from_config, config)
        if small(make):
            yield name, make
        else:
            yield name, partial(_raise, ValueError("too large for a try"))


def _raise(error: Exception) -> nn.Module:
    raise error


class Net(nn.Module):
    """What adapters are put on."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 16)
        self.conv = nn.Conv2d(4, 4, 3)
        self.lin0 = nn.Linear(16, 16)
        self.lin1 = nn.Linear(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lin1(self.lin0(x)))
        return out


def adapters() -> Iterator[tuple[str, Make]]:
    """Yield a small network with each kind of adapter of PEFT."""
    peft: Any = importlib.import_module("peft")

    def with_adapter(config: Any, **more: Any) -> Make:
        def make() -> nn.Module:
            model: nn.Module = peft.get_peft_model(
                Net(), config(target_modules=["lin0", "lin1"], **more)
            )
            return model

        return make

    for name in sorted(vars(peft)):
        kind = getattr(peft, name)
        if not (name.endswith("Config") and inspect.isclass(kind)):
            continue
        least: dict[str, Any] = {}
        fields = inspect.signature(kind).parameters
        least |= {"r": 2} if "r" in fields else {}
        least |= {"total_step": 9} if "total_step" in fields else {}
        least |= {"feedforward_modules": ["lin1"]} if "feedforward_modules" in fields else {}
        least |= {"n_frequency": 4} if "n_frequency" in fields else {}
        yield name, with_adapter(kind, **least)
        yield f"{name}, a head to save", with_adapter(kind, modules_to_save=["head"], **least)


def diffusers_models() -> Iterator[tuple[str, Make]]:
    """Yield the models of diffusers, small where that is known, and their building blocks."""
    diffusers: Any = importlib.import_module("diffusers")

    tiny: dict[str, Any] = {
        "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1,
        "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8,
        "cross_attention_dim": 16, "norm_num_groups": 8, "num_single_layers": 1,
        "joint_attention_dim": 16, "pooled_projection_dim": 16, "caption_channels": 16,
        "caption_projection_dim": 16, "in_channels": 4, "out_channels": 4,
        "axes_dims_rope": (2, 2, 4),
        "hidden_size": 16, "text_dim": 16, "dim": 16, "ffn_dim": 32, "depth": 1,
        "down_block_types": None, "up_block_types": None,
    }  # fmt: skip
    for name in sorted(n for n in dir(diffusers) if "Model" in n or n.startswith("Autoencoder")):
        try:
            kind: Any = getattr(diffusers, name)
            fields = inspect.signature(kind).parameters if inspect.isclass(kind) else {}
        except Exception:  # noqa: BLE001 - it needs something that is not here
            continue
        if not (inspect.isclass(kind) and issubclass(kind, nn.Module)) or "Mixin" in name:
            continue
        given = {k: v for k, v in tiny.items() if k in fields and v is not None}
        if "down_block_types" in fields:
            down, up = ("DownBlock2D",) * 2, ("UpBlock2D",) * 2
            if "AutoencoderKL" in name or "VQ" in name or "Asymmetric" in name:
                down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
            given |= {"down_block_types": down}
            given |= {"up_block_types": up} if "up_block_types" in fields else {}
        ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), given), ((), {})]
        for _, kwargs in ways:
            make: Make = partial(kind, **kwargs)
            try:
                with torch.device("meta"):
                    size = sum(t.numel() for t in make().parameters())
            except Exception:  # noqa: BLE001 - the next way
                continue
            if size <= MAX_ELEMENTS:
                yield name, make
                break
        else:
            yield (
                name,
                partial(_raise, ValueError("too large, or no way to make it small is known")),
            )


def e3nn_modules() -> Iterator[tuple[str, Make]]:
    """Yield modules of e3nn, whose code is generated as they are made."""
    layers: Any = importlib.import_module("e3nn.nn")
    o3: Any = importlib.import_module("e3nn.o3")

    yield "o3.Linear", lambda: o3.Linear("2x0e+1x1o", "3x0e+2x1o")
    yield (
        "o3.FullyConnectedTensorProduct",
        lambda: o3.FullyConnectedTensorProduct("1x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o"),
    )
    yield "o3.FullTensorProduct", lambda: o3.FullTensorProduct("1x0e+1x1o", "1x1o")
    yield "o3.ElementwiseTensorProduct", lambda: o3.ElementwiseTensorProduct("2x1o", "2x1o")
    yield "o3.TensorSquare", lambda: o3.TensorSquare("1x0e+1x1o", "2x0e")
    yield "o3.Norm", lambda: o3.Norm("2x1o")
    yield "o3.SphericalHarmonics", lambda: o3.SphericalHarmonics([0, 1, 2], True)
    yield "nn.BatchNorm", lambda: layers.BatchNorm("2x0e+1x1o")
    yield "nn.Gate", lambda: layers.Gate("2x0e", [torch.relu], "1x0e", [torch.sigmoid], "1x1o")
    yield "nn.FullyConnectedNet", lambda: layers.FullyConnectedNet([2, 4, 1], torch.relu)
    yield "nn.NormActivation", lambda: layers.NormActivation("2x1o", torch.sigmoid)
    yield "nn.Dropout", lambda: layers.Dropout("2x0e", 0.5)


def sharded_embeddings() -> Iterator[tuple[str, Make]]:
    """Yield the modules of torchrec, unsharded, and fbgemm's tables on the host."""
    torchrec: Any = importlib.import_module("torchrec")
    tables: Any = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common: Any = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")

    kinds: Any = torchrec.modules.embedding_configs

    def bags() -> Any:
        config = kinds.EmbeddingBagConfig(
            name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"]
        )
        return torchrec.EmbeddingBagCollection(tables=[config])

    def rows() -> Any:
        config = kinds.EmbeddingConfig(
            name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"]
        )
        return torchrec.EmbeddingCollection(tables=[config])

    yield "EmbeddingBagCollection", bags
    yield "EmbeddingCollection", rows
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        *(((b(),), {}) for b in (bags, rows)),
        ((4, [8, 4]), {}),
        ((4, [8, 4], 3), {}),
        ((3, 2), {"in_features": 4}),
        ((), {"in_features": 4, "num_layers": 2}),
        ((), {"in_features": 4, "num_layers": 2, "low_rank": 2}),
        ((), {"num_tables": 2, "embedding_dim": 4}),
        ((), {"dense_in_features": 4, "embedding_bag_collection": bags(),
              "dense_arch_layer_sizes": [4, 4], "over_arch_layer_sizes": [4, 1]}),
        ((4, bags(), 4, 4), {}),
        (({"f": 3},), {}),
        ((8, 4, torch.float32), {}),
        ((8, {"f": 4}), {}),
        ((8, 4, torch.float32, torch.device("cpu")), {}),
        ((), {"zch_size": 8, "device": torch.device("cpu"), "total_num_buckets": 1}),
        ((), {"zch_size": 8, "device": torch.device("cpu"), "eviction_interval": 2,
              "eviction_policy": torchrec.modules.mc_modules.DistanceLFU_EvictionPolicy()}),
        ((), {"tables": bags().embedding_bag_configs(), "optimizer_type": torch.optim.SGD,
              "optimizer_kwargs": {"lr": 0.1}}),
        ((), {"tables": rows().embedding_configs(), "optimizer_type": torch.optim.SGD,
              "optimizer_kwargs": {"lr": 0.1}}),
        *_PLAIN_WAYS,
    ]  # fmt: skip
    names = [n for n in below("torchrec.modules") if "test" not in n and "benchmark" not in n]
    for kind in classes(*names, "torchrec.models.deepfm", "torchrec.models.dlrm"):
        if kind.__module__.startswith("torchrec."):
            yield f"{kind.__module__}.{kind.__name__}", built(kind, ways) or kind

    def table(kind: Any, *args: Any, **kwargs: Any) -> nn.Module:
        made: Any = kind(*args, **kwargs)
        made.uuid = ""  # drawn for each object
        return made  # type: ignore[no-any-return]

    host = [(8, 4, common.EmbeddingLocation.HOST, tables.ComputeDevice.CPU)]
    for optimizer in ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "ADAM"):
        chosen = getattr(tables.OptimType, optimizer)
        yield (
            f"SplitTableBatchedEmbeddingBagsCodegen, {optimizer}",
            partial(table, tables.SplitTableBatchedEmbeddingBagsCodegen, host, optimizer=chosen),
        )
    yield (
        "DenseTableBatchedEmbeddingBagsCodegen",
        partial(table, tables.DenseTableBatchedEmbeddingBagsCodegen, [(8, 4)], use_cpu=True),
    )


LIBRARIES: dict[str, tuple[str, Callable[[], Iterator[tuple[str, Make]]]]] = {
    "torch.nn": ("torch", torch_nn),
    "torchmetrics": ("torchmetrics", metrics),
    "transformers": ("transformers", transformers_models),
    "torchvision": ("torchvision", vision),
    "timm": ("timm", timm_models),
    "PEFT": ("peft", adapters),
    "diffusers": ("diffusers", diffusers_models),
    "e3nn": ("e3nn", e3nn_modules),
    "torchrec": ("torchrec", sharded_embeddings),
}


_operators: list[Any] = []


def version(package: str) -> str:
    """Import a library and return its version; raise where it cannot be used here."""
    if package == "torchvision" or not hasattr(torch.ops.torchvision, "nms"):
        # A build of it for another device than this torch's brings no operators.
        with contextlib.suppress(Exception):
            library: Any = torch.library.Library("torchvision", "FRAGMENT")
            _operators.append(library)
            define = library.define
            define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return str(getattr(importlib.import_module(package), "__version__", "?"))


def _offline(*args: Any, **kwargs: Any) -> Any:
    """Refuse the weights that some constructors ask for: values are drawn here."""
    raise OSError("nothing is fetched")


def campaign(names: Iterable[str] = ()) -> dict[str, Found | str]:
    """Run all libraries, or those named; of one that cannot be imported return why."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    urllib.request.urlopen = _offline
    results: dict[str, Found | str] = {}
    for name in names or LIBRARIES:
        package, modules = LIBRARIES[name]
        begun = time.monotonic()
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            try:
                found = Found(version(package))
            except Exception as error:  # noqa: BLE001 - said in the table
                results[name] = _brief(error)
                continue
            finally:
                logging.disable(logging.NOTSET)
            logging.disable(logging.WARNING)
            try:
                results[name] = run(modules(), found)
            finally:
                logging.disable(logging.NOTSET)
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return results


def table(results: dict[str, Found | str]) -> str:
    """Return the results as rows of a table, then what was refused and why."""
    columns: tuple[str, ...] = (
        "library",
        "with state",
        "exact",
        "of these by own words",
        "refused by name",
    )
    columns += ("wrong", "torch fails", "no state", "not built")
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    notes = []
    for name, found in results.items():
        if isinstance(found, str):
            rows.append(f"| {name} | not run: {found} | | | | | | | |")
            continue
        total = len(found.exact) + len(found.refused) + len(found.wrong) + len(found.torchs)
        numbers = (
            total, len(found.exact), found.spoke, len(found.refused), len(found.wrong),
            len(found.torchs), len(found.stateless), len(found.unbuilt),
        )  # fmt: skip
        rows.append(f"| {name} {found.version} | " + " | ".join(map(str, numbers)) + " |")
        kinds = Counter(why.partition(":")[0] for why in found.refused.values())
        notes += [f"{name}, refused: {dict(kinds)}"] if kinds else []
        notes += [f"{name}, WRONG {n}: {why}" for n, why in found.wrong.items()]
        notes += [f"{name}, torch fails {n}: {why}" for n, why in found.torchs.items()]
        notes += [f"{name}, refused {n}: {why}" for n, why in found.refused.items()]
        notes += [f"{name}, not built {n}: {why}" for n, why in found.unbuilt.items()]
        notes += [f"{name}, no state: {', '.join(found.stateless)}"] if found.stateless else []
    return "\n".join([*rows, "", *notes])


if __name__ == "__main__":
    try:
        print(table(campaign(sys.argv[1:])))
    except Exception:  # noqa: BLE001 - a program
        traceback.print_exc()
        sys.exit(2)
