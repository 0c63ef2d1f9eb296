"""MXFP8, MXFP4 and NVFP4 as torchao computes them, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ckptd.store import open_store
from tests.checkpoint.load.builder import Array
from tests.reshard.llama import everything, program, resharded, save
from tests.reshard.test_compose_scaled import MX

pytestmark = [pytest.mark.plugins, pytest.mark.filterwarnings("ignore")]


def made(tmp_path: Path, layout: str, w: Array) -> list[bytes]:
    """Return what a layout of ours has of a weight: values, scales, the scale of scales."""
    (tmp_path / "q.lay").write_text(MX)
    with open_store(tmp_path / "a") as store:
        save(store, {"w": w}, parts=3)
    to, plain = (program(f"{tmp_path}/q.lay:{n}") for n in (layout, "plain"))
    resharded(tmp_path / "a", tmp_path / "b", to, plain, allow_lossy=True)
    found = everything(tmp_path / "b")
    return [found[name].tobytes() for name in sorted(found)]


def weights(seed: int) -> Array:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((48, 256)) * 2.0 ** rng.integers(-2, 3, (48, 1))
    return w.astype(np.float32)


def bits(*tensors: torch.Tensor) -> list[bytes]:
    return [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("layout", ["fp8", "fp4"])
def test_microscaled(tmp_path: Path, layout: str) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    kind = {"fp8": torch.float8_e4m3fn, "fp4": torch.float4_e2m1fn_x2}[layout]
    w = weights(1)
    scales, values = to_mx(torch.from_numpy(w), kind, 32, ScaleCalculationMode.RCEIL)
    assert made(tmp_path, layout, w) == bits(values, scales)


@pytest.mark.parametrize("seed", range(3))
def test_two_levels(tmp_path: Path, seed: int) -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    w = weights(seed)
    x = torch.from_numpy(w)
    overall = per_tensor_amax_to_scale(x.abs().max())
    scales, values = nvfp4_quantize(x, 16, overall)
    assert made(tmp_path, "nv", w) == bits(values, scales, overall)
