"""``ckptd rollback``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.checkpoint.cli.address import opened
from ckptd.errors import ConflictError
from tests.cli.roots import cut, make_root, put, values
from tests.cli.running import Cli


def steps(cli: Cli, root: str) -> list[int]:
    return [c["step"] for c in cli.json("ls", root)["checkpoints"]]


def test_there_and_back(cli: Cli, tmp_path: Path) -> None:
    root = make_root(tmp_path, (10, 20, 30))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    out = cli.good("rollback", f"{root}@10").out
    assert out.splitlines() == [
        "step 10 is now the newest (generation 2)",
        "no longer counted: 20, 30",
        f"to undo: ckptd rollback {root}@30-g1",
    ]
    assert steps(cli, root) == [10]
    document = cli.json("rollback", f"{root}@30-g1")
    assert (document["step"], document["generation"], document["claimed"]) == (30, 1, 3)
    assert document["abandoned"] == []
    assert steps(cli, root) == [10, 20, 30]
    assert all(p.read_bytes() == raw for p, raw in before.items()), "nothing moved"


def test_abandoned_steps_want_a_word(cli: Cli, tmp_path: Path) -> None:
    root = make_root(tmp_path, (10, 20))
    cli.good("rollback", f"{root}@10")
    result = cli("rollback", f"{root}@20")
    assert result.code == 4
    assert "abandoned line" in result.err
    assert cli.json("rollback", f"{root}@20", "--all")["step"] == 20
    assert steps(cli, root) == [10, 20]


def test_a_job_that_still_writes_is_told(cli: Cli, tmp_path: Path) -> None:
    root = make_root(tmp_path, (10, 20))
    with opened(root) as catalogue:
        cli.good("rollback", f"{root}@10")
        with pytest.raises(ConflictError, match="superseded"):
            put(catalogue.store, cut(values(3)), 30, generation=1)
    assert steps(cli, root) == [10]


def test_a_step_is_needed(cli: Cli, root: str) -> None:
    assert cli("rollback", root).code == 2
    assert cli("rollback", f"{root}@11").code == 4


def test_not_to_what_is_damaged(cli: Cli, root: str) -> None:
    manifest = next(Path(root).glob("data/*10-*/manifest.json"))
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert cli("rollback", f"{root}@10").code == 3
    assert steps(cli, root) == [10, 20]
