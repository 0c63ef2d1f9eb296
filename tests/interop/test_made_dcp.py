"""Checkpoints that torch's DCP writes here, of several parallelisms, are read bit by bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.testing.ranks import run_ranks
from tests.interop.models import bits, check
from tests.readers.opening import open_reader

pytestmark = pytest.mark.plugins

CASES: dict[str, tuple[int, str, dict[str, bool]]] = {
    "fsdp2 on 3": (3, "fsdp2", {"flatten": False, "half": False}),
    "fsdp2 on 3, bf16, flat names": (3, "fsdp2", {"flatten": True, "half": True}),
    "fsdp2 on 1": (1, "fsdp2", {"flatten": False, "half": True}),
    "hsdp": (4, "hsdp", {}),
    "fsdp x tp x pp": (8, "pipeline", {}),
    "fsdp1": (3, "fsdp1", {"original": False, "hybrid": False}),
    "fsdp1, original parameters": (3, "fsdp1", {"original": True, "hybrid": False}),
    "fsdp1, hybrid": (4, "fsdp1", {"original": True, "hybrid": True}),
}


def call(function: str, folder: str, options: dict[str, bool]) -> Any:
    # What it imports of torch takes a second, which a session without these tests shall not wait.
    return getattr(importlib.import_module("tests.interop.made_dcp"), function)(folder, **options)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_every_bit(case: str, tmp_path: Path) -> None:
    ranks, function, options = CASES[case]
    folder = tmp_path / "checkpoint"
    whole: dict[str, torch.Tensor] = {}
    for part in run_ranks(ranks, call, function, str(folder), options, deadline_s=240.0):
        for name, tensor in part.items():
            assert bits(whole.setdefault(name, tensor)) == bits(tensor), name
    assert len(whole) > 30
    reader = open_reader(folder)
    check(reader, whole)
    assert reader.objects()["step"] == 2
    if function == "fsdp1":
        model = {n: t for n, t in whole.items() if n.startswith("model.")}
        check(open_reader(tmp_path, "checkpoint.pt"), model)
