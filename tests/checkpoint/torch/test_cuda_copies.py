"""Lazy copies of CUDA tensors, on a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.torch.cuda_checks import CHECKS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="NO CUDA DEVICE: lazy copies of CUDA tensors are NOT tested here",
    ),
]


@pytest.mark.parametrize("check", CHECKS)
def test_on_a_device(check: str, tmp_path: Path) -> None:
    CHECKS[check](str(tmp_path / "root"))
    torch.cuda.synchronize()
