"""``ckptd annotate``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ckptd.checkpoint.cli.address import opened
from tests.cli.roots import make_root
from tests.cli.running import COMMAND, Cli
from tests.processes import PATIENCE_S


def test_what_is_added_is_seen(cli: Cli, root: str) -> None:
    assert cli.good("annotate", f"{root}@10", "loss=1.25", "by=eval 3", "ok=true").out == (
        "step 10 of generation 1: loss=1.25 by=eval 3 ok=true\n"
    )
    document = cli.json("annotate", f"{root}@10", 'more={"a": [1]}', "loss=nan")
    metadata = {"loss": "nan", "by": "eval 3", "ok": True, "more": {"a": [1]}}
    assert document["metadata"] == metadata
    assert (document["step"], document["generation"]) == (10, 1)
    rows = cli.json("ls", root)["checkpoints"]
    assert [row["metadata"] for row in rows] == [metadata, {"loss": 0.05}]
    assert "by=eval 3" in cli.good("ls", root).out
    assert cli.json("inspect", f"{root}@10")["metadata"] == metadata
    assert cli("verify", root, "--all").code == 0


@pytest.mark.parametrize("pair", ["loss", "=1", ""])
def test_what_is_no_pair_is_refused(cli: Cli, root: str, pair: str) -> None:
    result = cli("annotate", f"{root}@10", pair)
    assert result.code == 2
    assert "KEY=VALUE" in result.err


def test_the_step_must_be_said_and_exist(cli: Cli, root: str) -> None:
    assert cli("annotate", root, "loss=1").code == 2
    assert cli("annotate", f"{root}@15", "loss=1").code == 4


def test_three_processes_at_once(cli: Cli, root: str) -> None:
    args = [[*COMMAND, "annotate", f"{root}@10", f"k{n}={n}", "last=1"] for n in range(3)]
    processes = [subprocess.Popen(a, stdout=subprocess.DEVNULL) for a in args]
    assert [p.wait(PATIENCE_S) for p in processes] == [0, 0, 0]
    found = cli.json("ls", root)["checkpoints"][0]["metadata"]
    assert found == {"loss": 0.1, "k0": 0, "k1": 1, "k2": 2, "last": 1}


def test_a_damaged_one_hides_no_row(cli: Cli, root: str) -> None:
    cli.good("annotate", f"{root}@10", "loss=1")
    [path] = Path(root).glob("annotations/*")
    path.write_bytes(path.read_bytes()[:-20])
    result = cli("ls", root, "--json")
    assert [row["step"] for row in result.document["checkpoints"]] == [10, 20]
    assert path.name in result.err
    assert cli("gc", root, "--keep-best", "loss:min:1", "--yes").code == 3
    assert [row["step"] for row in cli("ls", root, "--json").document["checkpoints"]] == [10, 20]


def test_a_copy_has_what_was_added(cli: Cli, tmp_path: Path) -> None:
    root, target = make_root(tmp_path / "root"), str(tmp_path / "copy")
    cli.good("annotate", f"{root}@20", "loss=1.5")
    cli.good("cp", root, target)

    def found() -> dict[str, object]:
        return dict(cli.json("ls", target)["checkpoints"][0]["metadata"])

    assert found() == {"loss": 1.5}
    cli.good("annotate", f"{target}@20", "loss=2", "own=1")
    cli.good("annotate", f"{root}@20", "later=1")
    assert cli.json("cp", root, target)["checkpoints"][0]["state"] == "present"
    assert found() == {"loss": 2, "own": 1, "later": 1}
    with opened(target) as catalogue:
        assert sum(map(len, catalogue.annotations().values())) == 3
