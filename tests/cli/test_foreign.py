"""Verbs on checkpoints that others wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.cli.running import Cli
from tests.readers.conftest import foreign

__all__ = ["foreign"]


@pytest.fixture
def sample(foreign: Path) -> str:
    return str(foreign / "dcp" / "dcp-fsdp2-tp")


def test_verbs_that_read(cli: Cli, sample: str, tmp_path: Path) -> None:
    found = cli("inspect", sample, "--json")
    assert len(found.document["tensors"]) == 48
    assert found.document["metadata"]["ckptd.foreign"]["format"] == "dcp"
    shown = cli("ls", sample)
    assert "dcp" in shown.err
    assert "bytes are not" in shown.err
    assert cli("verify", sample).code == 0
    assert cli("verify", sample, "--quick").code == 0
    assert cli("diff", sample, sample).code == 0
    assert cli("export", sample, str(tmp_path / "hf")).code == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_verbs_that_write_are_refused(cli: Cli, sample: str) -> None:
    for verb in (["pin", f"{sample}@0"], ["rollback", f"{sample}@0"]):
        found = cli(*verb, "--json")
        assert found.code
        assert found.error["kind"] == "read-only", verb


def test_a_copy_is_a_checkpoint_with_digests(cli: Cli, sample: str, tmp_path: Path) -> None:
    target = str(tmp_path / "root")
    assert cli("cp", sample, target, "--json").document["checkpoints"][0]["state"] == "copied"
    assert cli("cp", sample, target, "--json").document["checkpoints"][0]["state"] == "present"
    verified = cli("verify", target)
    assert verified.code == 0
    assert not verified.err
    assert cli("diff", sample, target).code == 0
    data = sorted((tmp_path / "root" / "data").glob("*/*.safetensors"))
    raw = bytearray(data[0].read_bytes())
    raw[-1] ^= 1
    data[0].write_bytes(raw)
    assert cli("verify", target).code == 3


def test_a_copy_that_was_killed_goes_on(cli: Cli, sample: str, tmp_path: Path) -> None:
    target = tmp_path / "root"
    assert cli("cp", sample, str(target)).code == 0
    (commit,) = (target / "commits").glob("*.json")
    commit.unlink()
    assert cli("cp", sample, str(target), "--json").document["checkpoints"][0]["reused_files"] == 4
    assert cli("verify", str(target)).code == 0


def test_reshard(cli: Cli, sample: str, tmp_path: Path) -> None:
    target = str(tmp_path / "root")
    assert cli("reshard", sample, target, "--to", "fsdp", "-e", "mesh fsdp = dp:3").code == 0
    assert "48 bit-exact" in cli("diff", sample, target).out


def test_two_checkpoints_in_folders(cli: Cli, sample: str, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "both" / "step-1")
    assert cli("ls", str(tmp_path / "both")).code == 0
    shutil.copytree(sample, tmp_path / "both" / "step-2")
    found = cli("ls", str(tmp_path / "both"), "--json")
    assert found.error["kind"] == "ambiguous-format"
    assert "step-1/ (dcp), step-2/ (dcp)" in found.error["found"]


def test_an_export_keeps_the_names_of_hugging_face(cli: Cli, tmp_path: Path) -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    save_file({n: np.ones((4, 2), np.float32) for n in names}, source / "model.safetensors")
    found = cli("export", str(source / "model.safetensors"), str(target), "--dtype", "bfloat16")
    assert found.code == 0, found.err
    with safe_open(target / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(names)
