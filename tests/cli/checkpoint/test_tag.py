"""``ckptd tag``, and checkpoints that are named by a tag."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.checkpoint.format.names import tag_key
from tests.cli.roots import make_root
from tests.cli.running import Cli


def test_a_tag_stands_where_a_step_does(cli: Cli, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", (10, 20, 30))
    assert "prod" in cli.good("tag", f"{root}@10", "prod").out
    newest, prod = cli.json("tag", root, "newest")["tags"]
    assert (prod["tag"], prod["step"]) == ("prod", 10)
    assert newest.pop("created")
    assert newest == {
        "tag": "newest",
        "step": 30,
        "generation": 1,
        "reason": "",
        "exists": True,
    }
    cli.good("gc", root, "--keep", "1", "--yes")
    assert [c["tags"] for c in cli.json("ls", root)["checkpoints"]] == [["prod"], ["newest"]]
    assert "tagged prod" in cli.good("ls", root).out
    at = f"{root}@prod"
    assert cli.json("inspect", at)["step"] == 10
    assert cli("verify", at).code == 0
    assert cli("diff", at, f"{root}@newest").code == 1
    assert cli.json("annotate", at, "by=tag")["metadata"]["by"] == "tag"
    assert cli.json("cp", at, str(tmp_path / "copy"))["checkpoints"][0]["step"] == 10
    cli.good("export", at, str(tmp_path / "hf"))
    cli.good("pin", at)
    cli.good("pin", at, "--remove")
    assert cli.json("rollback", at)["step"] == 10


def test_a_tag_moves_and_is_removed(cli: Cli, root: str) -> None:
    assert cli.good("tag", root, "--list").out == "nothing is tagged\n"
    cli.good("tag", f"{root}@10", "prod")
    cli.good("tag", f"{root}@20", "prod")
    assert [t["step"] for t in cli.json("tag", root, "--list")["tags"]] == [20]
    assert "prod" in cli.good("tag", root, "--list").out
    result = cli("tag", f"{root}@rod", "--remove", "--json")
    assert (result.code, result.error["found"]) == (4, "prod")
    assert cli.json("tag", f"{root}@prod", "--remove")["tags"] == []
    result = cli("inspect", f"{root}@prod")
    assert result.code == 4
    assert "no checkpoint is tagged prod" in result.err


@pytest.mark.parametrize(
    "args",
    [("{}@10",), ("{}@10", "prod", "--list"), ("{}@10", "--remove"), ("{}@10", "7"), ("{}", "a/b")],
)
def test_what_is_no_tag(cli: Cli, root: str, args: tuple[str, ...]) -> None:
    assert cli("tag", *(a.format(root) for a in args)).code == 2


def test_a_path_that_looks_like_a_tag_is_a_path(cli: Cli, tmp_path: Path) -> None:
    root = make_root(tmp_path / "run@home")
    assert cli.json("inspect", root)["step"] == 20
    assert cli.json("inspect", f"{root}@10")["step"] == 10
    assert cli.json("inspect", f"{root}@latest")["step"] == 20


def test_a_damaged_tag_hides_no_row(cli: Cli, root: str) -> None:
    cli.good("tag", f"{root}@10", "prod")
    os.truncate(Path(root) / tag_key("prod"), 20)
    result = cli("ls", root, "--json")
    assert [c["step"] for c in result.document["checkpoints"]] == [10, 20]
    assert "prod" in result.err
    assert cli("gc", root, "--keep", "1", "--yes").code == 3
