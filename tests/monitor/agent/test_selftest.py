"""A node's test of itself."""

from __future__ import annotations

import fcntl
from pathlib import Path

import numpy as np
import pytest

from ckptd.monitor.agent import selftest
from ckptd.monitor.agent.selftest import parse_gpu, self_test
from ckptd.monitor.preflight import Gpu


def test_this_machine(tmp_path: Path) -> None:
    found = self_test(tmp_path, 60.0)
    assert (found.wrong, found.disk_error, found.alone) == ("", "", True)
    assert found.compute_s > 0
    assert found.copy_bytes_per_s > 0
    assert found.disk_s > 0
    assert [path.name for path in tmp_path.iterdir()] == ["selftest.lock"], "nothing is left over"


def test_arithmetic_that_is_wrong_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One bit of one element of one product.
    monkeypatch.setattr(selftest, "_PRODUCT", "0" * 16)
    assert self_test(tmp_path, 60.0).wrong == "a matrix product"


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    found = self_test(tmp_path / "missing", 60.0)
    assert found.disk_error == "No such file or directory"
    assert np.isnan(found.disk_s)


def test_nodes_of_one_machine_take_turns_and_wait_for_ever_for_none(tmp_path: Path) -> None:
    with open(tmp_path / "selftest.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not self_test(tmp_path, 0.05).alone
    assert self_test(tmp_path, 60.0).alone


def test_what_the_driver_says() -> None:
    assert parse_gpu("NVIDIA H200, 143771, 0, 31") == Gpu(
        name="NVIDIA H200", memory_bytes=143771 << 20, uncorrected=0, celsius=31.0
    )
    assert parse_gpu("NVIDIA RTX, 8192, [N/A], 40").uncorrected == 0
    for text in ("No devices were found", "a, b, c, d", ""):
        with pytest.raises(ValueError):
            parse_gpu(text)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo 'NVIDIA H200, 143771, 0, 31'", ""),
        ("echo 'Unable to determine the handle'; exit 15", "nvidia-smi: Unable to determine"),
        ("echo gibberish", "nvidia-smi: not a GPU"),
    ],
)
def test_the_driver_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = self_test(tmp_path, 60.0)
    assert found.gpu_error.startswith(error)
    assert len(found.gpus) == (not error)
