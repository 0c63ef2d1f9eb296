"""The same logits, bit for bit, after a way through another format and back to Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.testing.ranks import run_ranks
from tests.cli.running import Cli
from tests.interop import worlds
from tests.interop.models import MODELS, answer

pytestmark = pytest.mark.plugins

PROGRAMS = Path(__file__).parent / "programs.lay"
FILES = {"llama": "hf.llama", "llama-tied": "hf.llama", "mixtral": "hf.mixtral", "gpt2": "hf.gpt2"}
MEMORY = FILES | {"mixtral": f"{PROGRAMS}:memory.mixtral"}
SIZES = {name: "let n = 4" if name == "gpt2" else "let kv = 2" for name in MODELS}


@pytest.fixture(scope="module")
def dcp(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, each saved by DCP from FSDP2 on three ranks."""
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(3, worlds.save_dcp, str(models), str(folder), deadline_s=280.0)
    return folder


@pytest.fixture(scope="module")
def zero3(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, each saved by DeepSpeed of two ranks, stage 3."""
    folder = tmp_path_factory.mktemp("zero3")
    world = {"DS_ACCELERATOR": "cpu"}
    run_ranks(2, worlds.save_zero, str(models), str(folder), 3, deadline_s=280.0, env=world)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_root_of_fsdp(models: Path, name: str, tmp_path: Path, cli: Cli) -> None:
    root, out = str(tmp_path / "root"), tmp_path / "hf"
    assert not cli(
        "reshard", str(models / name), root, "--to", "fsdp", "-e", "mesh fsdp = dp:3"
    ).code
    assert not cli("export", root, str(out)).code
    assert answer(out, models / name) == answer(models / name)


def to_hf(cli: Cli, source: Path, name: str, target: Path, *options: str) -> None:
    """Convert what has the names of a model in memory to files of Hugging Face."""
    names = ["--from", MEMORY[name], "--to", FILES[name], "-e", SIZES[name], *options]
    found = cli("reshard", str(source), str(target), *names, "--format", "hf")
    assert not found.code, found.err


@pytest.mark.parametrize("name", FILES)
def test_dcp(models: Path, dcp: Path, name: str, tmp_path: Path, cli: Cli) -> None:
    to_hf(cli, dcp / name, name, tmp_path / "hf", "-e", 'from: stored "model.{name}"')
    assert answer(tmp_path / "hf", models / name) == answer(models / name)


@pytest.mark.parametrize("name", FILES)
def test_zero_3(models: Path, zero3: Path, name: str, tmp_path: Path, cli: Cli) -> None:
    to_hf(cli, zero3 / name, name, tmp_path / "hf")
    assert answer(tmp_path / "hf", models / name) == answer(models / name)
