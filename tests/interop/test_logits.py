"""The same logits, bit for bit, after a way through another format and back to Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptd.cli.main import run
from ckptd.testing.ranks import run_ranks
from tests.cli.running import Cli
from tests.interop import worlds
from tests.interop.models import answer

# The first test of a fixture pays for its worlds, each of which may take 280 s.
pytestmark = [pytest.mark.plugins, pytest.mark.timeout(900)]

PROGRAMS = Path(__file__).parent / "programs.lay"


@dataclass(frozen=True)
class Names:
    """Layouts of a model: in files, in memory and in Megatron; and a size that files do not say."""

    files: str
    memory: str
    megatron: str
    size: str = "let kv = 2"


def own(name: str) -> str:
    return f"{PROGRAMS}:{name}"


NAMES = {
    "llama": Names("hf.llama", "hf.llama", own("megatron.llama")),
    "llama-tied": Names("hf.llama", own("memory.tied"), own("megatron.llama")),
    "mixtral": Names("hf.mixtral", own("memory.mixtral"), own("megatron.mixtral")),
    "gpt2": Names("hf.gpt2", "hf.gpt2", own("megatron.gpt2"), "let n = 4"),
    "qwen3_moe": Names("hf.qwen3_moe", own("memory.qwen3_moe"), own("megatron.qwen3_moe")),
}


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


def reshard(cli: Cli, source: Path, target: Path, *options: str) -> None:
    found = cli("reshard", str(source), str(target), *options)
    assert not found.code, found.err


@pytest.fixture(scope="module")
def reloaded(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models in DCP, as they were written here, loaded by torch and saved ``again``."""
    folder = tmp_path_factory.mktemp("reloaded")
    for name, names in NAMES.items():
        command = ["reshard", str(models / name), str(folder / "first" / name)]
        to = ["--from", names.files, "--to", names.memory, "-e", names.size, "-e", "use names.dcp"]
        assert run([*command, *to, "--format", "dcp"]) == 0
    places = (str(models), str(folder / "first"), str(folder / "again"))
    run_ranks(2, worlds.reload_dcp, *places, deadline_s=280.0)
    return folder


@pytest.fixture(scope="module")
def zeroed(models: Path, zero3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of ZeRO-3 in its universal form, loaded by engines of three ranks and saved."""
    folder = tmp_path_factory.mktemp("zeroed")
    for name in NAMES:
        command = ["reshard", str(zero3 / name), str(folder / "first" / name)]
        assert run([*command, "--to", "ddp", "-e", "use names.plain", "--format", "universal"]) == 0
    places = (str(models), str(folder / "first"), str(folder / "again"), 3)
    run_ranks(3, worlds.reload_zero, *places, deadline_s=280.0, env={"DS_ACCELERATOR": "cpu"})
    return folder


def to_hf(cli: Cli, source: Path, name: str, target: Path, *options: str) -> None:
    """Convert what has the names of a model in memory to files of Hugging Face."""
    names = ["--from", NAMES[name].memory, "--to", NAMES[name].files, "-e", NAMES[name].size]
    reshard(cli, source, target, *names, *options, "--format", "hf")


@pytest.mark.parametrize("name", NAMES)
def test_a_root_of_fsdp(models: Path, name: str, tmp_path: Path, cli: Cli) -> None:
    root, out = tmp_path / "root", tmp_path / "hf"
    reshard(cli, models / name, root, "--to", "fsdp", "-e", "mesh fsdp = dp:3")
    assert not cli("export", str(root), str(out)).code
    assert answer(out, models / name) == answer(models / name)


@pytest.mark.parametrize("name", NAMES)
def test_a_root_of_megatron(models: Path, name: str, tmp_path: Path, cli: Cli) -> None:
    names, root, out = NAMES[name], tmp_path / "root", tmp_path / "hf"
    options = ["--from", names.files, "--to", names.megatron, "-e", names.size]
    reshard(cli, models / name, root, *options)
    reshard(cli, root, out, "--to", names.files, "--format", "hf")
    assert answer(out, models / name) == answer(models / name)


@pytest.mark.parametrize("name", NAMES)
def test_files_of_ranks_of_megatron(models: Path, name: str, tmp_path: Path, cli: Cli) -> None:
    names, ranks, out = NAMES[name], tmp_path / "ranks", tmp_path / "hf"
    there = ["--from", names.files, "--to", names.megatron]
    reshard(cli, models / name, ranks, *there, "-e", names.size, "--format", "ranks")
    assert len(list(ranks.glob("*/model.safetensors"))) == 2
    back = ["--from", names.megatron, "--to", names.files]
    reshard(cli, ranks, out, *back, "-e", names.size, "-e", "let v = 130", "--format", "hf")
    assert answer(out, models / name) == answer(models / name)


@pytest.mark.parametrize("name", NAMES)
def test_dcp(models: Path, dcp: Path, name: str, tmp_path: Path, cli: Cli) -> None:
    to_hf(cli, dcp / name, name, tmp_path / "hf", "-e", 'from: stored "model.{name}"')
    assert answer(tmp_path / "hf", models / name) == answer(models / name)


@pytest.mark.parametrize("name", NAMES)
def test_zero_3(models: Path, zero3: Path, name: str, tmp_path: Path, cli: Cli) -> None:
    to_hf(cli, zero3 / name, name, tmp_path / "hf")
    assert answer(tmp_path / "hf", models / name) == answer(models / name)


@pytest.mark.parametrize("name", NAMES)
def test_dcp_that_torch_loads(models: Path, reloaded: Path, name: str, cli: Cli) -> None:
    """Written here, loaded by `dcp.load` into FSDP2 on two ranks, saved again, and read here."""
    out = reloaded / "hf" / name
    to_hf(cli, reloaded / "again" / name, name, out, "-e", 'from: stored "model.{name}"')
    assert answer(out, models / name) == answer(models / name)


@pytest.mark.parametrize("name", NAMES)
def test_zero_3_that_deepspeed_loads(models: Path, zeroed: Path, name: str, cli: Cli) -> None:
    """Of two ranks, then of three by the universal form that is written here."""
    to_hf(cli, zeroed / "again" / name, name, zeroed / "hf" / name)
    assert answer(zeroed / "hf" / name, models / name) == answer(models / name)
