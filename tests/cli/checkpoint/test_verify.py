"""``ckptd verify``: the verb; what is found how is tested with `ckptd.checkpoint.tools.verify`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.checkpoint.format.names import CommitName, commit_key
from tests.cli.roots import flip, rank_file
from tests.cli.running import Cli


def test_good(cli: Cli, root: str) -> None:
    assert cli.good("verify", root).out.startswith("step 20 of generation 1: good; 10 tensors in")
    document = cli.json("verify", root)
    (report,) = document["checkpoints"]
    assert (document["ok"], report["step"], report["deep"]) == (True, 20, True)
    assert report["read_bytes"] == report["data_bytes"] > 0


def test_a_flipped_bit_is_named(cli: Cli, root: str) -> None:
    # The last chunk of rank 3's file: rows 15 to 20 of the embedding come first, float32 all.
    flip(rank_file(root, 20, 3), -1)
    result = cli("verify", root)
    assert result.code == 3
    assert "BAD" in result.out
    (finding, *_) = cli.json("verify", root, code=3)["checkpoints"][0]["findings"]
    assert finding["kind"] == "digest"
    assert finding["rank"] == 3
    assert finding["file"] == "data/000000000020-g00000001-a/r00003.safetensors"
    assert finding["tensor"] == "optim.layers.0.mlp.weight.exp_avg"
    assert finding["chunk"] == "optim.layers.0.mlp.weight.exp_avg@6,0"
    for word in ("r00003.safetensors", "optim.layers.0.mlp.weight.exp_avg@6,0"):
        assert word in result.out
    assert cli("verify", f"{root}@10").code == 0


def test_quick_looks_at_sizes(cli: Cli, root: str) -> None:
    flip(rank_file(root, 20, 3), -1)
    assert "sizes and headers only" in cli.good("verify", root, "--quick").out
    rank_file(root, 20, 3).write_bytes(rank_file(root, 20, 3).read_bytes()[:-1])
    findings = cli.json("verify", root, "--quick", code=3)["checkpoints"][0]["findings"]
    assert {f["kind"] for f in findings} >= {"truncated"}


def test_all(cli: Cli, root: str) -> None:
    rank_file(root, 10, 2).unlink()
    result = cli("verify", root, "--all")
    assert result.code == 3
    assert "step 10 of generation 1: BAD" in result.out
    assert "step 20 of generation 1: good" in result.out
    document = cli.json("verify", root, "--all", code=3)
    assert [bool(r["findings"]) for r in document["checkpoints"]] == [True, False]
    assert "of the checkpoint is missing" in document["checkpoints"][0]["findings"][0]["message"]
    assert document["ok"] is False


@pytest.mark.parametrize("victim", ["commit", "manifest"])
def test_damaged_records(cli: Cli, root: str, victim: str) -> None:
    path = Path(root, commit_key(CommitName(20, 1)))
    if victim == "manifest":
        path = rank_file(root, 20, 0).with_name("manifest.json")
    path.write_bytes(path.read_bytes()[:-20])
    (report,) = cli.json("verify", root, code=3)["checkpoints"]
    assert len(report["findings"]) == 1
    assert cli("verify", f"{root}@10").code == 0


def test_what_is_not_there(cli: Cli, root: str) -> None:
    assert cli("verify", f"{root}@11").code == 4
    assert cli("verify", f"{root}@10", "--all").code == 2
