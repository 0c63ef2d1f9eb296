"""``ckptd reshard`` as a user meets it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptd.store import open_store
from tests.checkpoint.load.builder import Array
from tests.cli.running import Cli
from tests.reshard.llama import HF, MEGATRON, SIZES, save, values
from tests.reshard.test_ranks import SPACE, logical, write

TO_MEGATRON = ("--to", MEGATRON[0], *(x for r in MEGATRON[1:] for x in ("-e", r)))
KNOWN = tuple(x for r in SIZES for x in ("-e", r))
FSDP = ("--to", "fsdp", "-e", "mesh fsdp = dp:2")


@pytest.fixture
def data() -> dict[str, Array]:
    return values()


@pytest.fixture
def source(tmp_path: Path, data: dict[str, Array]) -> str:
    with open_store(tmp_path / "source") as store:
        save(store, data)
    return str(tmp_path / "source")


def test_there_and_back_is_identical(cli: Cli, source: str, tmp_path: Path) -> None:
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    said = cli.good("reshard", source, there, "--from", HF[0], *TO_MEGATRON).out
    assert "hf.llama -> megatron.gpt" in said
    assert "now step 5 of generation 1" in said
    assert "at their positions" in said
    cli.good("reshard", f"{there}@5", back, "--to", HF[0])
    assert cli("diff", source, back).code == 0
    assert "exists already" in cli.good("reshard", there, back, "--to", HF[0]).out


def test_what_an_evaluation_added_stays(cli: Cli, source: str, tmp_path: Path) -> None:
    cli.good("annotate", f"{source}@5", "loss=1.5")
    target = str(tmp_path / "cut")
    cli.good("reshard", source, target, *FSDP)
    (found,) = cli.json("ls", target)["checkpoints"]
    assert found["metadata"]["loss"] == 1.5


def test_a_program_that_contradicts_the_kept_one_is_refused_before_a_byte_moves(
    cli: Cli, source: str, tmp_path: Path
) -> None:
    there, back = str(tmp_path / "there"), tmp_path / "back"
    cli.good("reshard", source, there, "--from", HF[0], *TO_MEGATRON)
    mesh = ("-e", f"from: {MEGATRON[1]}", *KNOWN)
    args = ("reshard", there, str(back), "--to", HF[0], "--from", MEGATRON[0], *mesh)
    name = "decoder.layers.{#l@pp}.self_attention.linear_qkv.weight"
    swapped = ("-e", f"from: {name} = L{{l}}[(kv@tp (k:1|q:rep|v:1) hd) h]")
    refused = cli(*args, *swapped, "--json")
    assert (refused.code, refused.error["kind"]) == (1, "lay-fit")
    assert not back.exists()
    insisted = cli(*args, *swapped, "--allow", "layout", "--allow", "lossy")
    assert insisted.code == 0
    assert "contradicts the kept program: decoder.layers.0" in insisted.err
    assert "agrees with the kept program on all" in cli.good(*args, "--explain").out
    document = cli.json(*args, "--dry-run")
    assert document["source_program"]["kept"] == "agrees"
    plain = ("reshard", there, str(tmp_path / "other"), "--to", HF[0])
    assert "its stored program" in cli.good(*plain, "--explain").out
    given = cli(*plain, "-e", "let v = 251", "--dry-run")
    assert "let v = 251 in place of the kept let v = 250" in given.err


def test_a_folder_of_hugging_face_both_ways(
    cli: Cli, source: str, tmp_path: Path, data: dict[str, Array]
) -> None:
    mg, hf, back = (str(tmp_path / n) for n in ("mg", "hf", "back"))
    cli.good("reshard", source, mg, "--from", HF[0], *TO_MEGATRON)
    to_hf = ("reshard", mg, hf, "--to", HF[0], "--format", "hf")
    result = cli(*to_hf, "--max-shard-size", "20KB")
    assert result.code == 0
    assert "left out: optim." in result.err
    index = cli.json("lay", "check", HF[0], "--against", hf, *KNOWN)
    assert index["findings"] == []
    found: dict[str, Array] = {}
    files = sorted(Path(hf).glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        found |= load_file(file)
    params = {n: v for n, v in data.items() if not n.startswith("optim.")}
    assert found.keys() == params.keys()
    assert all(np.array_equal(found[n], v) for n, v in params.items())
    assert not [p for p in Path(hf).rglob("*") if "ckptd" in p.name or p.suffix == ".partial"]
    refused = cli(*to_hf)
    assert (refused.code, "already holds a" in refused.err) == (5, True)
    assert cli(*to_hf, "--force").code == 0
    result = cli("reshard", hf, back, "--from", HF[0], *KNOWN, *FSDP, "--step", "9")
    assert result.code == 0
    assert "positions of values were not checked" in result.err
    assert cli.json("ls", back)["checkpoints"][0]["step"] == 9


def test_explain_and_prove_write_nothing(cli: Cli, source: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    args = ("reshard", source, str(target), "--from", HF[0], *TO_MEGATRON)
    text = cli.good(*args, "--explain", "--prove").out
    assert "exact up to fill" in text
    assert "1.000 bytes for each needed" in text
    assert "is written exactly once" in text
    assert "nothing was written" in cli.good(*args, "--dry-run").out
    assert not target.exists()
    document = cli.json(*args, "--explain", "--prove")
    assert document["done"] is None
    assert document["costs"]["files"] == 4
    assert document["costs"]["peak_bytes"] < 2 << 30
    assert document["proved"]["elements"] > 70_000
    assert {r["promise"] for r in document["rules"]} == {"exact", "exact up to fill"}


@pytest.mark.parametrize(("left", "said"), [(None, "is missing"), (100, "has the wrong size")])
def test_explain_plans_no_more_than_the_files_that_are_there(
    cli: Cli, source: str, tmp_path: Path, left: int | None, said: str
) -> None:
    file = max(Path(source).glob("data/*/r*.safetensors"))
    if left is None:
        file.unlink()
    else:
        os.truncate(file, left)
    args = ("reshard", source, str(tmp_path / "t"), "--from", HF[0], *TO_MEGATRON, "--explain")
    refused = cli(*args)
    assert refused.code == 3
    assert file.name in refused.err
    assert said in refused.err


def test_costs_are_what_it_then_costs(cli: Cli, source: str, tmp_path: Path) -> None:
    args = ("reshard", source, str(tmp_path / "t"), "--from", HF[0], *TO_MEGATRON)
    costs = cli.json(*args, "--explain")["costs"]
    done = cli.json(*args)["done"]
    for name in ("bytes_needed", "bytes_read", "bytes_written", "rounds", "files"):
        assert costs[name] == done[name], name
    assert done["peak_staged"] <= costs["peak_bytes"]


def test_shards_share_the_work(cli: Cli, source: str, tmp_path: Path) -> None:
    args = ("reshard", source, str(tmp_path / "t"), "--from", HF[0], *TO_MEGATRON)
    first = cli.json(*args, "--shard", "2/2")["done"]
    assert (first["state"], first["files"], first["missing_files"]) == ("waiting", 2, 2)
    assert cli("ls", str(tmp_path / "t"), "--json").document["checkpoints"] == []
    whole = cli.json(*args)["done"]
    assert (whole["state"], whole["files"], whole["reused_files"]) == ("committed", 4, 2)


def test_lossy_needs_leave(cli: Cli, source: str, tmp_path: Path) -> None:
    args = ("reshard", source, str(tmp_path / "t"), "--to", "ddp")
    cast = ("-e", "default [...] cast(bfloat16)")
    refused = cli(*args, *cast, "--json")
    assert (refused.code, refused.error["message"]) == (5, "values would change or be dropped")
    assert cli.json(*args, *cast, "--allow", "lossy")["promise"] == "lossy"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--to", "nothing.lay"), "not-found"),
        (("--to", "no.such.layout"), "lay-rule"),
        (("--to", "fsdp", "-e", "w = ["), "lay-syntax"),
        (("--to", "fsdp", "--shard", "3/2"), "invalid --shard"),
        (("--to", "fsdp", "--budget", "1MB"), "the budget is too small"),
        (("--to", "megatron.gpt", "--from", "hf.mixtral"), "lay-fit"),
    ],
)
def test_what_cannot_be_understood_is_said(
    cli: Cli, source: str, tmp_path: Path, args: tuple[str, ...], says: str
) -> None:
    result = cli("reshard", source, str(tmp_path / "t"), *args, "--json")
    assert result.code in (1, 2, 4)
    assert says in (result.error["kind"], result.error["message"])
    assert not (tmp_path / "t").exists()


def test_a_program_in_a_file(cli: Cli, source: str, tmp_path: Path) -> None:
    lay = tmp_path / "two.lay"
    lay.write_text(
        "use hf.llama\nmesh F = dp:3\nlet kv = 4\n"
        "layout rows on F { use hf.llama; default [_@dp:ceil ...] }\n"
        "layout whole on none { use hf.llama }\n"
    )
    ambiguous = cli("reshard", source, str(tmp_path / "t"), "--to", str(lay), "--json")
    assert ambiguous.error["kind"] == "lay-rule"
    args = ("--from", f"{lay}:whole", "--to", f"{lay}:rows")
    document = cli.json("reshard", source, str(tmp_path / "t"), *args)
    assert (document["source_layout"], document["target_layout"]) == ("whole", "rows")
    assert document["done"]["files"] == 3


def test_files_of_ranks(cli: Cli, tmp_path: Path) -> None:
    whole = logical()
    write(tmp_path / "ranks", whole, lambda tp: 0.0)
    lay = tmp_path / "p.lay"
    lay.write_text(SPACE.replace("NORM", ""))
    args = ("--from", f"{lay}:mg", "--to", f"{lay}:whole", "--format", "hf")
    result = cli("reshard", str(tmp_path / "ranks"), str(tmp_path / "out"), *args)
    assert result.code == 0, result
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[n], v) for n, v in whole.items())
