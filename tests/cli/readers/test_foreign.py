"""Verbs on checkpoints that others wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from ckptd.checkpoint.cli.address import opened
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.reshard.source import open_own
from tests.cli.running import Cli


@pytest.fixture
def sample(foreign: Path) -> str:
    return str(foreign / "dcp" / "dcp-fsdp2-tp")


def test_verbs_that_read(cli: Cli, sample: str, tmp_path: Path) -> None:
    found = cli("inspect", sample, "--json")
    assert len(found.document["tensors"]) == 48
    assert found.document["metadata"]["ckptd.foreign"]["format"] == "dcp"
    shown = cli("ls", sample)
    assert "dcp" in shown.err
    assert "bytes are not" in shown.err
    assert cli("verify", sample).code == 0
    assert cli("verify", sample, "--quick").code == 0
    assert cli("diff", sample, sample).code == 0
    assert cli("export", sample, str(tmp_path / "hf")).code == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_what_is_noted_is_in_the_document_as_well(cli: Cli, tmp_path: Path) -> None:
    names = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    for number, name in enumerate(names):
        save_file({f"w{number}": np.ones(3, np.float32)}, tmp_path / name)
    for where, count in ((tmp_path, 1), (tmp_path / names[0], 2)):
        warnings = cli("inspect", str(where), "--json").document["warnings"]
        assert len(warnings) == count
        assert "no digests" in warnings[-1]
    assert warnings[0].startswith(f"{names[0]} alone was read, which is one of 2 files")
    exported = cli("export", str(tmp_path / names[0]), str(tmp_path / "out"))
    assert exported.code == 0
    assert "one of 2 files" in exported.err


def test_files_are_those_that_are_there(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": np.ones(3, np.float32)}, path)
    (row,) = cli("inspect", str(tmp_path), "--json").document["files"]
    assert row == {"path": path.name, "rank": 0, "bytes": path.stat().st_size, "header_bytes": 0}
    (tensor,) = cli("inspect", str(tmp_path), "--chunks", "--json").document["tensors"]
    (chunk,) = tensor["chunk_list"]
    assert chunk["file"] == path.name
    raw = path.read_bytes()[chunk["start"] : chunk["end"]]
    assert raw == np.ones(3, np.float32).tobytes()
    assert f"{path.name}     0  {path.stat().st_size} B" in cli("inspect", str(tmp_path)).out


@pytest.mark.parametrize("name", ["", "meta-llama/Llama-3-8B", "x.tar", "x.distcp"])
def test_where_nothing_is_other_formats_were_looked_for_as_well(
    cli: Cli, tmp_path: Path, name: str
) -> None:
    found = cli("inspect", str(tmp_path / name), "--json")
    assert (found.code, found.error["kind"]) == (4, "no-root")
    assert "ckptd.json, or a checkpoint of dcp, hf, " in found.error["wanted"]


def test_verbs_that_write_are_refused(cli: Cli, sample: str) -> None:
    for verb in (["pin", f"{sample}@0"], ["rollback", f"{sample}@0"]):
        found = cli(*verb, "--json")
        assert found.code
        assert "this view of a store is read-only" in found.error["message"], verb


def test_a_copy_is_a_checkpoint_with_digests(cli: Cli, sample: str, tmp_path: Path) -> None:
    target = str(tmp_path / "root")
    assert cli("cp", sample, target, "--json").document["checkpoints"][0]["state"] == "copied"
    assert cli("cp", sample, target, "--json").document["checkpoints"][0]["state"] == "present"
    verified = cli("verify", target)
    assert verified.code == 0
    assert not verified.err
    assert cli("diff", sample, target).code == 0
    data = sorted((tmp_path / "root" / "data").glob("*/*.safetensors"))
    raw = bytearray(data[0].read_bytes())
    raw[-1] ^= 1
    data[0].write_bytes(raw)
    assert cli("verify", target).code == 3


def test_a_copy_that_was_killed_goes_on(cli: Cli, sample: str, tmp_path: Path) -> None:
    target = tmp_path / "root"
    assert cli("cp", sample, str(target)).code == 0
    (commit,) = (target / "commits").glob("*.json")
    commit.unlink()
    assert cli("cp", sample, str(target), "--json").document["checkpoints"][0]["reused_files"] == 4
    assert cli("verify", str(target)).code == 0


def test_reshard(cli: Cli, sample: str, tmp_path: Path) -> None:
    target = str(tmp_path / "root")
    assert cli("reshard", sample, target, "--to", "fsdp", "-e", "mesh fsdp = dp:3").code == 0
    assert "48 bit-exact" in cli("diff", sample, target).out


@pytest.mark.parametrize("verb", [["cp"], ["reshard", "--to", "names.ckptd"]])
def test_a_root_is_not_begun_beside_a_foreign_checkpoint(
    cli: Cli, sample: str, tmp_path: Path, verb: list[str]
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    save_file({"w": np.ones(3, np.float32)}, target / "model.safetensors")
    found = cli(verb[0], sample, str(target), *verb[1:], "--json")
    assert (found.code, found.error["kind"]) == (5, "exists"), found.err
    assert "hf" in found.error["found"]
    assert [p.name for p in target.iterdir()] == ["model.safetensors"]
    # A root that is there already is written into, whatever lies beside it.
    (target / "model.safetensors").rename(tmp_path / "aside")
    assert cli("cp", sample, str(target)).code == 0
    (tmp_path / "aside").rename(target / "model.safetensors")
    assert cli("cp", sample, str(target), "--json").document["checkpoints"][0]["state"] == "present"


def test_two_checkpoints_in_folders(cli: Cli, sample: str, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "both" / "step-1")
    assert cli("ls", str(tmp_path / "both")).code == 0
    shutil.copytree(sample, tmp_path / "both" / "step-2")
    found = cli("ls", str(tmp_path / "both"), "--json")
    assert "several checkpoints in one folder" in found.error["message"]
    assert "step-1/ (dcp), step-2/ (dcp)" in found.error["found"]


def test_an_export_keeps_the_names_of_hugging_face(cli: Cli, tmp_path: Path) -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    save_file({n: np.ones((4, 2), np.float32) for n in names}, source / "model.safetensors")
    found = cli("export", str(source / "model.safetensors"), str(target), "--dtype", "bfloat16")
    assert found.code == 0, found.err
    with safe_open(target / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(names)


def hugging_face(folder: Path) -> str:
    """Write a model's folder with a configuration, and weights beside it that are not read."""
    folder.mkdir()
    weights = {f"model.{n}.weight": np.ones((6, 4), np.float32) for n in "ab"}
    save_file(weights, folder / "model.safetensors")
    save_file({"z": np.ones(3, np.float32)}, folder / "other.safetensors")
    weight_map = dict.fromkeys(weights, "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 2, "hidden_size": 8}))
    return str(folder)


def test_what_a_reshard_makes_has_nothing_of_its_source(cli: Cli, tmp_path: Path) -> None:
    source = hugging_face(tmp_path / "hf")
    first, second, weights = (str(tmp_path / name) for name in ("first", "second", "weights"))
    made = cli("reshard", source, first, "--to", "fsdp", "-e", "mesh fsdp = dp:2")
    assert (made.code, "other.safetensors" in made.err) == (0, True)
    assert cli.json("inspect", first)["metadata"] == {}
    # Its names are those of the source all the same: the kept program says so.
    made = cli("reshard", first, second, "--to", "ddp")
    assert (made.code, "other.safetensors" in made.err) == (0, False)
    assert cli("export", second, weights).code == 0
    with safe_open(f"{weights}/model.safetensors", "np") as file:
        assert sorted(file.keys()) == ["model.a.weight", "model.b.weight"]


def test_an_axis_of_a_program_is_not_one_of_a_configuration_that_was_read_before(
    cli: Cli, tmp_path: Path
) -> None:
    source, root = hugging_face(tmp_path / "hf"), str(tmp_path / "root")
    program = tmp_path / "p.lay"
    program.write_text(
        """space s { a[hd x]  b[hd x] }
        layout mine of s on none {
          model.a.weight = a[hd x]
          model.b.weight = b[hd x]
        }"""
    )
    assert cli("reshard", source, root, "--to", "ddp").code == 0
    target = str(tmp_path / "target")
    found = cli("reshard", root, target, "--from", str(program), "--to", "ddp", "--allow", "layout")
    assert found.code == 0, found.err


def test_a_copy_is_read_as_what_it_copies(cli: Cli, tmp_path: Path) -> None:
    root, weights = str(tmp_path / "root"), str(tmp_path / "weights")
    assert cli("cp", hugging_face(tmp_path / "hf"), root).code == 0
    assert cli("export", root, weights).code == 0
    with safe_open(f"{weights}/model.safetensors", "np") as file:
        assert sorted(file.keys()) == ["model.a.weight", "model.b.weight"]
    with opened(root) as catalogue:
        stock = open_own(CkptdReader(catalogue, catalogue.find(0)))
    assert (stock.sizes, stock.unread) == ({"kv": 2, "hd": 4}, ())
    assert "other.safetensors" not in cli("reshard", root, f"{root}2", "--to", "ddp").err
