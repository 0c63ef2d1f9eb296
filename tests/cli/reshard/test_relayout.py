"""``ckptd relayout``: the policy explained, and bytes counted on real checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.store import open_store
from tests.cli.running import Cli
from tests.reshard.llama import HF, SIZES, groups, program, resharded, save, values

MESH = "mesh megatron_gpt = pp:2 dp:2 tp:2"
SMALL = ("relayout", "--microbatches", "8", "--slots-per-node", "2")
BIG = ("relayout", "--layout", "pp=2,dp=4,tp=2", "--microbatches", "64")
GROUPS = ObjectEntry("optim.groups", groups(), kind="groups")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    with open_store(tmp_path / "hf") as store:
        save(store, values(), objects=[GROUPS])
    return tmp_path / "hf"


@pytest.fixture
def megatron(llama: Path, tmp_path: Path) -> Path:
    to = program("megatron.gpt", MESH, *SIZES)
    assert resharded(llama, tmp_path / "megatron", to, program(*HF)).state == "committed"
    return tmp_path / "megatron"


def test_it_explains_itself(cli: Cli) -> None:
    out = cli.good(*BIG, "--survivors", "13").out
    assert out.startswith("pp=2 dp=4 tp=2 -> pp=2 dp=3 tp=2, on 13 slots\n")
    assert "fewer replicas, 4 to 3" in out
    assert "throughput: 73.9 % of before" in out
    assert "with one more node: pp=2 dp=4 tp=2" in out
    assert "  10  n0/6  1.2.0     43..63         from 0.3.0\n" in out
    assert "parked: n1/4\n" in out
    document = cli.json(*BIG, "--survivors", "13")
    assert document["choice"]["shape"] == {"pp": 2, "dp": 3, "tp": 2}
    assert document["choice"]["seats"][10]["before"] == [0, 3, 0]
    assert (document["rows"], document["moved"], document["memory"]) == ([], None, None)


def test_a_range_is_a_table_and_a_picture(cli: Cli, tmp_path: Path) -> None:
    picture = tmp_path / "curve.svg"
    result = cli(*BIG, "--survivors", "1:16", "--plot", str(picture))
    assert result.code == 0
    lines = result.out.splitlines()
    assert len(lines) == 17
    assert "needs 4 slots" in lines[1]
    assert "100.0 %" in lines[16]
    assert picture.read_text().startswith("<?xml")
    rows = cli.json(*BIG, "--survivors", "1:16")["rows"]
    assert [r["survivors"] for r in rows] == list(range(1, 17))
    assert rows[0]["shape"] is None
    assert rows[15]["throughput"] == 1.0


def test_what_fits_nothing_is_refused_with_the_reason(cli: Cli) -> None:
    result = cli(*BIG, "--survivors", "3", "--json")
    assert result.code == 5
    assert result.error["kind"] == "no-layout"
    assert "one more node of 8 slots would do" in result.error["hint"]
    assert "needs 4 slots" in result.error["found"]


def test_without_a_replica_nothing_moves_and_with_a_spare_its_share_does(
    cli: Cli, megatron: Path
) -> None:
    args = (*SMALL, "--layout", "pp=2,dp=2,tp=2", "--nodes-lost", "n1")
    with_checkpoint = (*args, "--checkpoint", str(megatron))
    dropped = cli.json(*with_checkpoint)["moved"]["sources"]
    assert dropped["own"] > 0
    assert (dropped["node"], dropped["peer"], dropped["root"]) == (0, 0, 0)
    spare = cli.json(*with_checkpoint, "--spare-nodes", "1")["moved"]
    # Half of the model is lost with the node, and the other replica's node of that stage gives it.
    assert spare["sources"]["root"] == 0
    assert list(spare["sent"].values()) == [spare["sources"]["peer"]]
    assert spare["received"]["n4"]["peer"] == spare["sources"]["peer"]
    assert sum(spare["sources"].values()) == 2 * sum(dropped.values())


def test_a_stage_that_nobody_holds_comes_from_the_root(cli: Cli, megatron: Path) -> None:
    args = (*SMALL, "--layout", "pp=2,dp=2,tp=2", "--checkpoint", str(megatron), "--pp", "1")
    found = cli.json(*args, "--nodes-lost", "n0,n1")
    assert found["choice"]["shape"] == {"pp": 1, "dp": 2, "tp": 2}
    sources = found["moved"]["sources"]
    # Who is left holds the last stage: the first one is nowhere.
    assert sources["own"] > 0
    assert sources["root"] > 0
    out = cli.good(*args, "--nodes-lost", "n0,n1").out
    assert "NODE" in out
    assert "ROOT" in out


def test_data_parallel_layouts_need_no_program(cli: Cli, llama: Path) -> None:
    args = (*SMALL, "--layout", "dp=4", "--nodes-lost", "n1", "--checkpoint", str(llama))
    cut = cli.json(*args)["moved"]["sources"]
    whole = sum(v.nbytes for v in values().values())
    # Rows cut over four ranks, of which two are gone: half of what is cut is lost with them.
    assert 0.4 * whole < cut["root"] < 0.6 * whole
    same = cli.json(*args, "--program", "ddp")["moved"]["sources"]
    assert same == {"own": 2 * whole, "node": 0, "peer": 0, "root": 0}
    refused = cli(*SMALL, "--layout", "dp=2,tp=2", "--checkpoint", str(llama), "--json")
    assert (refused.code, refused.error["kind"]) == (2, "bad-argument")
    assert "--program" in refused.error["hint"]


def test_sizes_of_the_model_come_from_the_checkpoint(cli: Cli, llama: Path) -> None:
    args = (*SMALL, "--layout", "dp=4", "--checkpoint", str(llama))
    parameters = sum(v.nbytes for n, v in values().items() if not n.startswith("optim."))
    states = sum(v.nbytes for n, v in values().items() if n.startswith("optim."))
    found = cli.json(*args, "--memory", "limit=1GB")["memory"]
    assert found == {
        "replicated": 0,
        "sharded": 2 * parameters + states,
        "activations": 0,
        "limit": 10**9,
    }
    given = cli.json(*args, "--memory", "replicated=3KB,sharded=0,limit=1GB")["memory"]
    assert (given["replicated"], given["sharded"]) == (3000, 0)
    assert cli(*args, "--memory", "limit=1KB").code == 5


@pytest.mark.parametrize(
    "wrong",
    [
        ("--layout", "pp=2,qq=1"),
        ("--layout", "pp=two"),
        ("--layout", "dp=2", "--survivors", "9"),
        ("--layout", "dp=2", "--survivors", "4:1"),
        ("--layout", "dp=2", "--nodes-lost", "m1"),
        ("--layout", "dp=2", "--memory", "replicated=1GB"),
        ("--layout", "dp=2", "--memory", "limit=much"),
        ("--layout", "dp=20"),
    ],
)
def test_what_cannot_be_meant_is_said(cli: Cli, wrong: tuple[str, ...]) -> None:
    result = cli(*SMALL, *wrong, "--json")
    assert (result.code, result.error["kind"]) == (2, "bad-argument")
