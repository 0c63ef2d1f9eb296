"""``ckptd pin``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.checkpoint.cli.address import opened
from tests.cli.roots import cut, make_root, put, values
from tests.cli.running import Cli


def test_a_pin_keeps(cli: Cli, tmp_path: Path) -> None:
    root = make_root(tmp_path, (10, 20, 30))
    document = cli.json("pin", f"{root}@10", "--reason", "the good one")
    assert document["pin"]["reason"] == "the good one"
    assert document["pin"]["exists"]
    cli.good("gc", root, "--keep", "1", "--yes")
    assert [c["step"] for c in cli.json("ls", root)["checkpoints"]] == [10, 30]
    assert "the good one" in cli.good("pin", root, "--list").out
    assert cli.json("pin", f"{root}@10", "--remove") == {
        "verb": "pin --remove",
        "schema": 1,
        "root": root,
        "step": 10,
        "generation": 1,
    }
    assert cli.good("pin", root, "--list").out == "nothing is pinned\n"
    cli.good("gc", root, "--keep", "1", "--yes")
    assert [c["step"] for c in cli.json("ls", root)["checkpoints"]] == [30]


def test_the_newest_without_a_step(cli: Cli, root: str) -> None:
    assert cli.good("pin", root).out == "pinned step 20 of generation 1\n"
    assert [p["step"] for p in cli.json("pin", root, "--list")["pins"]] == [20]


def test_pinning_twice_keeps_the_first_reason(cli: Cli, root: str) -> None:
    cli.good("pin", root, "--reason", "first")
    assert cli.json("pin", root, "--reason", "second")["pin"]["reason"] == "first"


def test_a_pin_of_what_is_gone_can_be_removed(cli: Cli, root: str) -> None:
    cli.good("pin", f"{root}@10")
    next(Path(root, "commits").glob("*10-*")).unlink()
    assert "the checkpoint is gone" in cli.good("pin", root, "--list").out
    assert cli.json("pin", root, "--list")["pins"][0]["exists"] is False
    cli.good("pin", f"{root}@10", "--remove")
    assert cli.json("pin", root, "--list")["pins"] == []


@pytest.mark.parametrize("counting", [1, 2])
def test_of_two_pins_of_a_step_the_one_that_counts(cli: Cli, tmp_path: Path, counting: int) -> None:
    root = make_root(tmp_path, (10, 20))
    cli.good("rollback", f"{root}@10")
    with opened(root) as catalogue:
        put(catalogue.store, cut(values(1)), 20)
    for generation in (1, 2):
        cli.good("pin", f"{root}@20-g{generation}")
    cli.good("rollback", f"{root}@20-g{counting}")
    assert cli.json("pin", f"{root}@20", "--remove")["generation"] == counting
    assert cli.json("pin", f"{root}@20", "--remove")["generation"] == 3 - counting


def test_what_is_not_there(cli: Cli, root: str) -> None:
    assert cli("pin", f"{root}@11").code == 4
    result = cli("pin", f"{root}@10", "--remove", "--json")
    assert (result.code, result.error["message"]) == (4, "step 10 is not pinned")
    assert cli("pin", root, "--remove").code == 2
    assert cli("pin", root, "--remove", "--list").code == 2
