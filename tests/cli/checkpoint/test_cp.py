"""``ckptd cp``: the verb; copies that die are tested with `ckptd.checkpoint.tools.copy`."""

from __future__ import annotations

from pathlib import Path

from ckptd.checkpoint.cli.address import opened
from tests.cli.roots import cut, flip, make_root, put, rank_file, values
from tests.cli.running import Cli


def steps(cli: Cli, root: str) -> list[int]:
    return [c["step"] for c in cli.json("ls", root)["checkpoints"]]


def test_one(cli: Cli, root: str, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    out = cli.good("cp", f"{root}@10", target).out
    assert out.startswith("copied step 10: ")
    assert "exists already" in cli.good("cp", f"{root}@10", target).out
    document = cli.json("cp", root, target)
    assert (document["source"], document["target"]) == (root, target)
    (copied,) = document["checkpoints"]
    assert (copied["step"], copied["source_generation"], copied["state"]) == (20, 1, "copied")
    assert copied["bytes"] == cli.json("ls", root)["checkpoints"][1]["data_bytes"]
    assert steps(cli, target) == [10, 20]
    for step in (10, 20):
        assert cli("diff", f"{root}@{step}", f"{target}@{step}").code == 0
    assert cli("verify", target, "--all").code == 0
    assert cli.json("ls", target)["checkpoints"][0]["metadata"] == {"loss": 0.1}


def test_all(cli: Cli, root: str, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    document = cli.json("cp", root, target, "--all")
    assert [c["state"] for c in document["checkpoints"]] == ["copied", "copied"]
    with opened(root) as catalogue:
        put(catalogue.store, cut(values(30)), 30)
    document = cli.json("cp", root, target, "--all")
    assert [c["state"] for c in document["checkpoints"]] == ["present", "present", "copied"]
    assert steps(cli, target) == [10, 20, 30]
    assert cli.json("ls", target)["generation"] == 1


def test_a_step_of_an_abandoned_line(cli: Cli, root: str, tmp_path: Path) -> None:
    cli.good("rollback", f"{root}@10")
    assert cli("cp", f"{root}@20", str(tmp_path / "t")).code == 4
    cli.good("cp", f"{root}@20-g1", str(tmp_path / "t"))
    assert steps(cli, str(tmp_path / "t")) == [20]


def test_refusals(cli: Cli, root: str, tmp_path: Path) -> None:
    target = make_root(tmp_path / "target", (15,))
    result = cli("cp", f"{root}@10", target, "--json")
    assert (result.code, result.error["kind"]) == (5, "behind")
    assert cli("cp", root, root).code == 2
    assert cli("cp", f"{root}@10", target, "--all").code == 2
    assert cli("cp", f"{root}@11", target).code == 4
    assert cli("cp", root, "fsspec+memory://refusing").code == 5
    assert steps(cli, target) == [15]


def test_a_damaged_source(cli: Cli, root: str, tmp_path: Path) -> None:
    flip(rank_file(root, 20, 2), -1)
    result = cli("cp", root, str(tmp_path / "target"))
    assert result.code == 3
    assert "written by rank 2" in result.err
    assert steps(cli, str(tmp_path / "target")) == []


def test_nothing_to_copy(cli: Cli, root: str, tmp_path: Path) -> None:
    from ckptd.checkpoint.root.catalogue import Catalogue
    from ckptd.store import open_store

    with open_store(tmp_path / "empty") as store:
        Catalogue(store).create_or_open()
    assert "nothing to copy" in cli.good("cp", str(tmp_path / "empty"), root, "--all").out
    assert cli("cp", str(tmp_path / "empty"), root).code == 4
