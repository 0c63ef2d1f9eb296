"""Every verb on checkpoints that refer to files of older ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptd.checkpoint.format.names import CommitName, commit_key
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.store import StoreSpec, open_store
from tests.checkpoint.save.referring import SHAPES, assert_holds
from tests.checkpoint.save.saving import Job, plan_of, values
from tests.cli.roots import flip
from tests.cli.running import Cli
from tests.keys import key_pair
from tests.processes import PATIENCE_S


@pytest.fixture
def states() -> list[dict[str, Any]]:
    first = values(1, SHAPES)
    return [first, first | values(2, {"hot": SHAPES["hot"]})]


@pytest.fixture
def root(tmp_path: Path, states: list[dict[str, Any]]) -> str:
    job = Job(StoreSpec(str(tmp_path / "root")), plan=plan_of(SHAPES))
    for step, arrays in enumerate(states, 1):
        job.save(step, arrays).durable(PATIENCE_S)
    job.close()
    return str(tmp_path / "root")


def test_verify_and_inspect(cli: Cli, root: str) -> None:
    cli.good("verify", root, "--all")
    document = cli.json("inspect", f"{root}@2")
    assert "frozen0" in str(document)
    cli.good("inspect", f"{root}@2")
    cli.good("ls", root)


def test_damage_to_an_old_file_is_found_in_all_that_refer_to_it(cli: Cli, root: str) -> None:
    (path,) = Path(root).glob("data/000000000001-*/r00000.safetensors")
    flip(path, path.stat().st_size // 2)
    for step in (1, 2):
        result = cli("verify", f"{root}@{step}")
        assert result.code == 3
        assert "frozen" in result.out + result.err


def test_diff(cli: Cli, root: str) -> None:
    result = cli("diff", f"{root}@1", f"{root}@2")
    assert "hot" in result.out
    assert "frozen" not in result.out


def test_cp_takes_along_what_is_referred_to(
    cli: Cli, root: str, tmp_path: Path, states: list[dict[str, Any]]
) -> None:
    target = str(tmp_path / "target")
    cli.good("cp", f"{root}@2", target)
    cli.good("verify", target, "--all")
    assert cli("diff", f"{root}@2", f"{target}@2").code == 0
    with open_store(target) as store:
        (name,) = Catalogue(store).line()
        assert_holds(store, name, states[1])


def test_export(cli: Cli, root: str, tmp_path: Path, states: list[dict[str, Any]]) -> None:
    target = tmp_path / "model"
    cli.good("export", f"{root}@2", str(target), "--section", ".")
    found = load_file(target / "model.safetensors")
    for name, array in states[1].items():
        assert np.array_equal(found[name], array)


def test_reshard(cli: Cli, root: str, tmp_path: Path, states: list[dict[str, Any]]) -> None:
    target = str(tmp_path / "target")
    cli.good("reshard", f"{root}@2", target, "--to", "fsdp", "-e", "mesh fsdp = dp:2")
    cli.good("verify", target, "--all")
    with open_store(target) as store:
        (name,) = Catalogue(store).line()
        assert_holds(store, name, states[1])


def test_gc_keeps_the_folder_of_a_deleted_checkpoint_while_it_is_needed(
    cli: Cli, root: str, states: list[dict[str, Any]]
) -> None:
    cli.good("gc", root, "--keep", "1", "--yes")
    assert [c["step"] for c in cli.json("ls", root)["checkpoints"]] == [2]
    assert not (Path(root) / commit_key(CommitName(1, 1))).exists()
    assert len(list(Path(root).glob("data/*"))) == 2
    cli.good("verify", root)
    with open_store(root) as store:
        assert_holds(store, CommitName(2, 1), states[1])


def test_a_signature_covers_what_is_referred_to(cli: Cli, root: str, tmp_path: Path) -> None:
    """It stays good as the older checkpoint goes, and names what is changed of its file."""
    pytest.importorskip("blake3")
    private, public = key_pair(tmp_path, "release")
    cli.good("sign", f"{root}@2", "--key", private)
    cli.good("gc", root, "--keep", "1", "--yes")
    assert [c["step"] for c in cli.json("ls", root)["checkpoints"]] == [2]
    cli.good("verify", root, "--key", public)
    (path,) = Path(root).glob("data/000000000001-*/r00000.safetensors")
    flip(path, path.stat().st_size // 2)
    assert "not what was signed" in cli("verify", root, "--key", public).out
