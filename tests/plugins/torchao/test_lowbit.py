"""torchao's low-bit optimizers and quantized weights: saved as parts, back bit for bit."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import MismatchError
from ckptd.testing.ranks import run_ranks

pytestmark = [pytest.mark.plugins, pytest.mark.filterwarnings("ignore")]

OPTIMIZERS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


class Training:
    """A model of which each step is known, and torchao's optimizer, uncompiled."""

    def __init__(self, name: str, seed: int = 0, mesh: Any = None) -> None:
        warnings.simplefilter("ignore")
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its steps would be compiled: minutes of CPU
        import torchao.optim

        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 8))
        if mesh is not None:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=mesh)
        self.optimizer: Any = getattr(torchao.optim, name)(self.model.parameters(), lr=1e-2)
        self.state = {"model": self.model, "optim": self.optimizer}

    def step(self, number: int) -> None:
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        self.model(x).square().sum().backward()
        self.optimizer.step()

    def bits(self) -> list[bytes]:
        return bits(self.model.state_dict(), self.optimizer.state_dict()["state"])


def inner(value: Any) -> Iterator[torch.Tensor]:
    local = getattr(value, "_local_tensor", value)
    if hasattr(local, "__tensor_flatten__"):
        for name in local.__tensor_flatten__()[0]:
            yield from inner(getattr(local, name))
    elif isinstance(local, torch.Tensor):
        yield local.detach()
    elif isinstance(local, dict):
        for key in sorted(local, key=str):
            yield from inner(local[key])


def bits(*values: Any) -> list[bytes]:
    return [
        t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for v in values
        for t in inner(v)
    ]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_come_back_as_torch_brings_them_back(
    name: str, stepped: bool, tmp_path: Path
) -> None:
    first = Training(name)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        for step in (1, 2):
            first.step(step)
            handle = ck.save(step, first.state)
        oracle = io.BytesIO()
        torch.save((first.model.state_dict(), first.optimizer.state_dict()), oracle)
        first.step(3)
        handle.durable()
    ours, torchs = Training(name, 5), Training(name, 6)
    for one in (ours, torchs) if stepped else ():
        one.step(9)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        assert ck.load(ours.state) == 2
    oracle.seek(0)
    model, optim = torch.load(oracle, weights_only=False)
    torchs.model.load_state_dict(model)
    torchs.optimizer.load_state_dict(optim)
    assert ours.bits() == torchs.bits()
    for one in (ours, torchs):
        one.step(3)
    assert ours.bits() == torchs.bits() == first.bits()


def quantized(kind: str, seed: int) -> nn.Linear:
    warnings.simplefilter("ignore")
    from torchao import quantization as q

    torch.manual_seed(seed)
    model = nn.Linear(128, 64)
    if kind == "nf4":
        low = q.to_nf4(model.weight.detach(), 64, 8)
        model.weight = nn.Parameter(low, requires_grad=False)
        return model
    int4: Any = torch.int4  # type: ignore[attr-defined]
    configs = {
        "int8": q.Int8WeightOnlyConfig,
        "int8 with activations": q.Int8DynamicActivationInt8WeightConfig,
        "float8": q.Float8WeightOnlyConfig,
        "int4": lambda: q.IntxWeightOnlyConfig(weight_dtype=int4),
    }
    q.quantize_(model, configs[kind]())
    return model


@pytest.mark.parametrize("kind", ["int8", "int8 with activations", "float8", "int4", "nf4"])
def test_quantized_weights_come_back(kind: str, tmp_path: Path) -> None:
    saved, live, plain = quantized(kind, 1), quantized(kind, 2), nn.Linear(128, 64)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, {"model": saved}).durable()
        ck.load({"model": live})
        with pytest.raises(MismatchError) as caught:
            ck.load({"model": plain})
    assert bits(live.weight, live.bias) == bits(saved.weight, saved.bias)
    assert "has another class than in the checkpoint" in caught.value.message
    x = torch.randn(3, 128)
    assert torch.equal(live(x), saved(x))


def sharded(root: str, name: str) -> list[bool]:
    """Save under FSDP2, and go on in a training that has not stepped and in one that has."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    first = Training(name, 0, mesh)
    with ckptd.Checkpointer(root) as ck:
        for step in (1, 2):
            first.step(step)
            handle = ck.save(step, first.state)
        held = first.bits()
        first.step(3)
        handle.durable()
    found = []
    for steps in (0, 1):
        other = Training(name, 5, mesh)
        for _ in range(steps):
            other.step(9)
        with ckptd.Checkpointer(root) as ck:
            ck.load(other.state)
        found.append(other.bits() == held)
        other.step(3)
        found.append(other.bits() == first.bits())
    return found


@pytest.mark.dist
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_under_fsdp2(name: str, tmp_path: Path) -> None:
    found = run_ranks(2, sharded, str(tmp_path / "root"), name, deadline_s=200.0)
    assert found == [[True] * 4] * 2
