"""Damaged metadata of every format: an error that names the file, or values; never a crash."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ckptd.errors import CkptdError
from tests.readers.opening import open_reader

ZERO = "deepspeed/zero3-fp32/global_step2/zero_pp_rank_{}_mp_rank_00_{}_states.pt"
FILES = {
    "dcp": "dcp/dcp-fsdp2-tp/.metadata",
    "safetensors of dcp": "dcp/dcp-safetensors/__0_0.distcp",
    "ranks": "dcp/torch-save-dtensor/model_world_size_4_rank_1.pt",
    "megatron": "megatron-tp2pp2/model-stacked/common.pt",
    "weights of zero": ZERO.format(0, "model"),
    "states of zero": ZERO.format(1, "optim"),
    "torch": "misc/torch-zip.pt",
}
ROUNDS = 40


@pytest.mark.parametrize("name", FILES)
def test_damage(name: str, foreign: Path, tmp_path: Path) -> None:
    source = foreign / FILES[name]
    folder = tmp_path / "x"
    shutil.copytree(source.parent, folder)
    raw = source.read_bytes()
    rng = np.random.default_rng(0)
    failed = 0
    for number in range(ROUNDS):
        bad = bytearray(raw)
        if number % 4 == 0:
            bad = bad[: int(rng.integers(0, len(raw)))]
        for at in rng.integers(0, max(1, len(bad)), 1 + number % 5):
            bad[at : at + 1] = bytes([int(rng.integers(0, 256))])
        (folder / source.name).write_bytes(bytes(bad))
        try:
            reader = open_reader(folder)
            reader.tensors(reader.names)
        except CkptdError:
            failed += 1
    assert failed
