"""``ckptd gc``; what it asks on a terminal is in test_main."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ckptd.checkpoint.cli.address import opened
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.index import stamp
from ckptd.checkpoint.root.leases import hold
from ckptd.cli.options import duration_s
from ckptd.errors import UsageError
from ckptd.store import open_store
from tests.cli.roots import cut, put, rank_file, values
from tests.cli.running import Cli

DAY_S = 86_400.0


def steps(cli: Cli, root: str) -> list[int]:
    return [c["step"] for c in cli.json("ls", root)["checkpoints"]]


def test_without_a_rule_nothing_of_the_line_goes(cli: Cli, root: str) -> None:
    assert "nothing to delete" in cli.good("gc", root).out
    document = cli.json("gc", root)
    assert [(k["step"], k["generation"]) for k in document["kept"]] == [(10, 1), (20, 1)]
    assert (document["planned"], document["deleted"]) == ([], [])
    assert steps(cli, root) == [10, 20]


def test_dry_run(cli: Cli, root: str) -> None:
    document = cli.json("gc", root, "--keep", "1", "--dry-run")
    assert [(i["kind"], i["key"]) for i in document["planned"]] == [
        ("commit", "commits/000000000010-g00000001.json"),
        ("data", "data/000000000010-g00000001-a/"),
    ]
    folder = rank_file(root, 10, 0).parent
    assert document["planned_bytes"] == sum(p.stat().st_size for p in folder.iterdir())
    assert document["dry_run"]
    assert "data/000000000010" in cli.good("gc", root, "--keep", "1", "--dry-run").out
    assert steps(cli, root) == [10, 20]


def test_yes(cli: Cli, root: str) -> None:
    document = cli.json("gc", root, "--keep", "1", "--yes")
    assert [i["kind"] for i in document["deleted"]] == ["commit", "data"]
    assert steps(cli, root) == [20]
    assert not rank_file(root, 10, 0).parent.exists()
    assert cli("verify", root).code == 0


@pytest.mark.parametrize("json", [[], ["--json"]])
def test_nobody_to_ask(cli: Cli, root: str, json: list[str]) -> None:
    result = cli("gc", root, "--keep", "1", *json)
    assert result.code == 5
    assert "--yes" in result.err
    assert steps(cli, root) == [10, 20]


def test_leftovers(cli: Cli, root: str) -> None:
    dead = rank_file(root, 30, 0)
    dead.parent.mkdir()
    dead.write_bytes(b"half")
    assert "nothing to delete" in cli.good("gc", root).out, "it may be in flight"
    assert cli.json("gc", root, "--leftover", "0s", "--yes")["deleted"][0]["kind"] == "leftover"
    assert not dead.parent.exists()
    assert steps(cli, root) == [10, 20]


def test_abandoned_lines(cli: Cli, root: str) -> None:
    cli.good("rollback", f"{root}@10")
    assert "grace period" in cli.good("gc", root).out
    cli.good("gc", root, "--abandoned", "0s", "--yes")
    assert cli.json("ls", root, "--all")["abandoned"] == []
    assert steps(cli, root) == [10]


def test_rules(cli: Cli, tmp_path: Path) -> None:
    loss = {10: 3.0, 20: 1.0, 30: 2.0, 40: 4.0, 50: 5.0, 60: 6.0}
    with open_store(tmp_path) as store:
        for step, value in loss.items():
            created = stamp(time.time() // DAY_S * DAY_S - (60 - step) * DAY_S / 20)
            put(store, cut(values(1)), step, metadata={"loss": value}, created=created)
    root = str(tmp_path)

    def kept(*rules: str) -> list[int]:
        return [k["step"] for k in cli.json("gc", root, "--dry-run", *rules)["kept"]]

    assert kept("--keep", "2") == [50, 60]
    assert kept("--keep-every-steps", "40") == [40, 60]
    assert kept("--keep-best", "loss:min:2") == [20, 30, 60]
    assert kept("--keep-best", "loss:max:1", "--keep", "2") == [50, 60]
    assert kept("--keep-every", "1d") == [10, 20, 40, 60]
    cli.good("gc", root, "--keep-best", "loss:min:1", "--yes")
    assert steps(cli, root) == [20, 60]


def test_what_has_no_metric_waits_for_it(cli: Cli, tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for step, metadata in {10: {"loss": 1.0}, 20: {"loss": "low"}, 30: {}}.items():
            put(store, cut(values(1)), step, metadata=metadata)
    root = str(tmp_path)
    told = cli("gc", root, "--keep-best", "accuracy:max:1", "--yes")
    wanted = "note: no checkpoint has the metric accuracy, so each waits and stays; there: loss\n"
    assert (told.code, told.err) == (0, wanted)
    assert told.out.count("waits for its accuracy") == 3
    assert steps(cli, root) == [10, 20, 30]
    cli.good("annotate", f"{root}@30", "loss=0.5")
    cli.good("gc", root, "--keep-best", "loss:min:1", "--yes")
    assert steps(cli, root) == [30]


def test_what_is_read_stays(cli: Cli, root: str) -> None:
    with opened(root) as catalogue, hold(catalogue, CommitName(10, 1)):
        document = cli.json("gc", root, "--keep", "1", "--yes")
        assert document["deleted"] == []
    assert steps(cli, root) == [10, 20]


def test_a_newest_that_lost_files_is_told_and_not_counted(cli: Cli, root: str) -> None:
    rank_file(root, 20, 1).unlink()
    result = cli("gc", root, "--keep", "1", "--yes")
    assert result.code == 0
    assert "is not complete" in result.err
    assert steps(cli, root) == [10, 20]


@pytest.mark.parametrize(
    "args",
    [
        ("--keep-best", "loss"),
        ("--keep-best", "loss:mean:1"),
        ("--keep-best", "loss:min:x"),
        ("--keep-best", "loss:min:0"),
        ("--keep-every", "often"),
        ("--keep", "0"),
        ("--abandoned", "-1d"),
        ("--keep-every", "0s"),
    ],
)
def test_bad_rules(cli: Cli, root: str, args: tuple[str, ...]) -> None:
    result = cli("gc", root, "--yes", "--json", *args)
    assert (result.code, result.out) == (2, "")
    assert result.error["class"] == "UsageError"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("6h", 21600), ("7d", 604800), ("2w", 1209600), ("1.5h", 5400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text, "x") == seconds


@pytest.mark.parametrize(
    "text", ["", "7", "d", "-1d", "1 d", "1e3s", "1y", "1d\n", "9" * 15 + "w", "9" * 400 + "s"]
)
def test_no_durations(text: str) -> None:
    with pytest.raises(UsageError):
        duration_s(text, "--abandoned")
