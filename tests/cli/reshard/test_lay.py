"""``ckptd lay``: check, fmt, show."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptd.store import open_store
from tests.cli.running import Cli
from tests.reshard.llama import MEGATRON, SIZES, save, values

QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
MESH = "mesh megatron_gpt = pp:2 dp:2 tp:2"
WIDTHS = ("let rep = 2", "let hd = 8", "let half = 4", "let h = 16", "let f = 24", "let l = 4")


def e(*rules: str) -> tuple[str, ...]:
    return tuple(x for r in rules for x in ("-e", r))


def test_check_alone_and_against_a_checkpoint(cli: Cli, tmp_path: Path) -> None:
    assert cli.good("lay", "check", "hf.llama").out == "hf.llama: good\n"
    with open_store(tmp_path / "root") as store:
        save(store, values())
    good = ("lay", "check", "hf.llama", "--against", str(tmp_path / "root"))
    assert cli.json(*good, *e(*SIZES))["findings"] == []
    # How many groups of heads there are does not follow from the shapes.
    missing = cli.json(*good, code=1)["findings"]
    assert {f["severity"] for f in missing} == {"error"}
    assert any("let kv" in note for f in missing for note in f["notes"])


def test_findings_name_file_line_and_rule(cli: Cli, tmp_path: Path) -> None:
    lay = tmp_path / "bad.lay"
    lay.write_text("mesh M = tp:2\nspace s { w[o i] }\nlayout a of s on M {\n  w = w[o@tp]\n}\n")
    result = cli("lay", "check", str(lay))
    assert result.code == 1
    assert f"{lay}:4" in result.out
    assert result.out.endswith("a: 1 error, 0 warnings\n")
    document = cli.json("lay", "check", str(lay), code=1)
    assert document["layouts"] == ["a"]
    assert document["findings"][0]["line"] == 4


def test_all_layouts_of_a_file_or_one(cli: Cli, tmp_path: Path) -> None:
    lay = tmp_path / "two.lay"
    lay.write_text(
        "space s { w[o i] }\nlayout a of s on none { w = w[o i] }\n"
        "layout b of s on none { w = w[i o] }\n"
    )
    assert cli.json("lay", "check", str(lay))["layouts"] == ["a", "b"]
    assert cli.json("lay", "check", f"{lay}:b")["layouts"] == ["b"]
    assert cli("lay", "check", str(lay), *e("let o = 4")).code == 2


HEADS = """
mesh M = tp:2
space s { q[kv hd h] n[h] }
layout whole of s on none {
  q = q[(kv hd) h]
  n = n[h]
}
layout ranks of s on M {
  files "r{tp}.safetensors"
  q.weight = q[(kv@tp hd) h]
  n.weight = n[h]
}
"""


def test_check_against_files_of_ranks(cli: Cli, tmp_path: Path) -> None:
    """A line files makes them a checkpoint; a config.json says what shapes hide."""
    lay, folder = tmp_path / "a.lay", tmp_path / "ranks"
    lay.write_text(HEADS)
    folder.mkdir()
    for rank in range(2):
        held = {"q.weight": np.ones((4, 3), np.float32), "n.weight": np.ones(3, np.float32)}
        save_file(held, folder / f"r{rank}.safetensors")
    against = ("--against", str(folder))
    assert "let kv" in cli("lay", "check", f"{lay}:ranks", *against).out
    (folder / "config.json").write_text(
        '{"model_type": "llama", "num_attention_heads": 4, "hidden_size": 8}'
    )
    assert cli.good("lay", "check", f"{lay}:ranks", *against).out == "ranks: good\n"
    assert cli.good("lay", "check", str(lay), *against).out == "whole, ranks: good\n"
    assert "r0" in cli.good("lay", "show", f"{lay}:ranks", "q.weight", *against).out
    lay.write_text(HEADS.replace("  n.weight = n[h]\n", ""))
    found = cli("lay", "check", f"{lay}:ranks", *against)
    assert found.code == 1
    assert "no rule matches n.weight [3] on rank 0" in found.out


def test_fmt_changes_and_keeps_comments(cli: Cli, tmp_path: Path) -> None:
    lay = tmp_path / "a.lay"
    lay.write_text("# mine\nspace s {w[o i]}\nlayout a of s on none{w=w[o  i]}\n")
    assert cli("lay", "fmt", str(lay), "--check").code == 1
    before = lay.read_text()
    assert before.startswith("# mine\nspace s {w")
    assert cli.json("lay", "fmt", str(lay))["changed"] == [str(lay)]
    assert "  w = w[o i]\n" in lay.read_text()
    assert lay.read_text().startswith("# mine\n")
    assert cli.json("lay", "fmt", str(lay), "--check")["changed"] == []
    assert cli("lay", "fmt", str(tmp_path / "none.lay")).code == 4


def test_show_tells_who_holds_what(cli: Cli, tmp_path: Path) -> None:
    args = ("lay", "show", MEGATRON[0], QKV, *e(MESH, *SIZES, *WIDTHS))
    text = cli.good(*args).out
    assert "0..64    r0, 2" in text
    assert "64..128  r1, 3" in text
    assert "q[kv 2-3] k[kv 2-3] v[kv 2-3]" in text
    document = cli.json(*args)
    assert document["shape"] == [128, 16]
    assert [c["ranks"] for c in document["cells"]] == [[0, 2], [1, 3]]


def test_show_draws_cells_to_scale(cli: Cli, tmp_path: Path) -> None:
    svg = tmp_path / "x.svg"
    rules = e(MESH, *SIZES, *WIDTHS)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert cli("lay", "show", MEGATRON[0], name, *rules, "--svg", str(svg)).code == 0
    root = ElementTree.fromstring(svg.read_text())
    space = {"s": "http://www.w3.org/2000/svg"}
    boxes = root.findall(".//s:g/s:rect", space)
    assert len(boxes) == 4
    assert len({b.get("height") for b in boxes}) == 1
    assert len({b.get("fill") for b in boxes}) == 2
    titles = [t.text or "" for t in root.findall(".//s:title", space)]
    assert titles[0].startswith("r0, 2: g[f 0-11]")


def test_a_drawing_of_many_columns_can_be_read(cli: Cli, tmp_path: Path) -> None:
    """Heads stand upright where they would overlap; a legend names the ranks, but not hundreds."""
    lay, svg = tmp_path / "x.lay", tmp_path / "x.svg"
    lay.write_text(
        "mesh M = tp:40\nspace s { w[o i] }\nlet o = 3\nlet i = 4000\n"
        "layout x of s on M { w = w[o i@tp] }\n"
    )
    assert cli("lay", "show", str(lay), "w", "--svg", str(svg)).code == 0
    root = ElementTree.fromstring(svg.read_text())
    texts = root.findall(".//{http://www.w3.org/2000/svg}text")
    heads = [t for t in texts if t.get("class") == "column"]
    assert len(heads) == 40
    assert all("rotate(-90" in t.get("transform", "") for t in heads)
    places = [float(t.get("x", "0")) for t in heads]
    assert min(b - a for a, b in itertools.pairwise(places)) >= 12
    legend = [t.text for t in texts if t.get("class") == "legend"]
    assert legend[0] == "written by"
    assert legend[1:3] == ["r0", "r1"]
    assert legend[-1] == "and 16 more ranks"
    bottom = max(float(t.get("y", "0")) for t in texts)
    assert bottom < float(root.get("height", "0"))
    assert "prefers-color-scheme: dark" in svg.read_text()


def test_show_names_what_is_near(cli: Cli) -> None:
    wrong = QKV.replace("qkv", "qvk")
    result = cli("lay", "show", MEGATRON[0], wrong, *e(MESH, *SIZES, *WIDTHS), "--json")
    assert (result.code, result.error["message"]) == (4, "unknown tensor of the layout")
    assert QKV in result.error["hint"]


def test_flat_parts_are_shown(cli: Cli, tmp_path: Path) -> None:
    lay = tmp_path / "z.lay"
    lay.write_text(
        "mesh Z = dp:4\nspace s { w[o i]  follow m=exp_avg }\nlet o = 3\nlet i = 5\n"
        "layout z of s on Z { w = w[o i]; flat each @dp:ceil of m }\n"
    )
    document = cli.json("lay", "show", str(lay), "optim.w.exp_avg")
    assert document["cells"][0]["flat"] == [[0, 4, 0], [4, 8, 1], [8, 12, 2], [12, 15, 3]]
    assert "8..12 r2" in cli.good("lay", "show", str(lay), "optim.w.exp_avg").out


@pytest.mark.parametrize("verb", ["check", "show"])
def test_a_program_that_is_none(cli: Cli, tmp_path: Path, verb: str) -> None:
    lay = tmp_path / "bad.lay"
    lay.write_text("layout {")
    args = ("lay", verb, str(lay), *(("w",) if verb == "show" else ()), "--json")
    assert cli(*args).error["kind"] == "lay-syntax"


def test_a_section_of_a_checkpoint(cli: Cli, tmp_path: Path) -> None:
    with open_store(tmp_path / "root") as store:
        save(
            store,
            {f"app.{n}": v for n, v in values(states=False).items()} | {"other.w": np.ones(3)},
        )
    whole = ("lay", "check", "hf.llama", "--against", str(tmp_path / "root"), *e(*SIZES))
    assert cli.json(*whole, code=1)["findings"]
    assert cli.json(*whole, "--section", "app")["findings"] == []
    shown = ("lay", "show", "hf.llama", "lm_head.weight", "--against", str(tmp_path / "root"))
    assert cli(*shown, *e(*SIZES)).code
    assert cli.json(*shown, *e(*SIZES), "--section", "app")["shape"] == [250, 16]
