"""``ckptd diff``: the verb; how values are compared is tested with
`ckptd.checkpoint.tools.diff`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.store import open_store
from tests.checkpoint.load.builder import Saved
from tests.cli.roots import OBJECTS, by_columns, cut, flip, make_root, put, rank_file, values
from tests.cli.running import Cli


def test_equal_in_other_layouts(cli: Cli, tmp_path: Path) -> None:
    a = make_root(tmp_path / "a", (10,), tensors=cut(values(1), 4))
    b = make_root(tmp_path / "b", (10,), tensors=cut(values(1), 3))
    out = cli.good("diff", a, b).out
    assert out == (
        "equal: 10 tensors on both sides, 10 bit-exact, 0 differ,"
        f" {sum(v.ndim == 2 and len(v) > 0 for v in values(1).values())} cut another way\n"
    )
    document = cli.json("diff", a, b)
    assert document["equal"]
    assert document["left"] == {"root": a, "step": 10, "generation": 1}
    rows = {t["name"]: t for t in document["tensors"]}
    assert not rows["model.embed.weight"]["same_layout"]
    assert rows["model.embed.weight"]["left"]["layout"] == "rows / 4"
    assert rows["model.embed.weight"]["right"]["layout"] == "rows / 3 (7+7+6)"
    assert all(t["equal"] and t["bit_exact"] for t in document["tensors"])


def test_values(cli: Cli, tmp_path: Path) -> None:
    array = np.ones((4, 4), np.float32)
    other = array.copy()
    other[1, 2] = 1.5
    a = make_root(tmp_path / "a", (1,), tensors={"x": by_columns(array), "y": Saved.whole(array)})
    b = make_root(
        tmp_path / "b", (1,), tensors={"x": Saved.rows(other, 2), "y": Saved.whole(array)}
    )
    result = cli("diff", a, b)
    assert result.code == 1
    (line,) = (li for li in result.out.splitlines() if li.startswith("x "))
    assert "columns / 2 | rows / 2" in line
    assert line.split()[-5:] == ["1", "of", "16", "0.5", "0.333"]
    assert "\ny " not in result.out
    assert "\ny " in cli("diff", a, b, "--all").out
    document = cli.json("diff", a, b, code=1)
    x, y = document["tensors"]
    assert (x["differing"], x["max_abs"], x["equal"], x["bit_exact"]) == (1, 0.5, False, False)
    assert x["max_rel"] == pytest.approx(1 / 3)
    assert y["equal"]
    assert not document["equal"]
    assert cli("diff", a, b, "--tensor", "y").code == 0
    assert cli("diff", a, b, "--no-values").code == 0
    assert "values were not compared" in cli("diff", a, b, "--no-values").out


def test_steps_of_one_root(cli: Cli, root: str) -> None:
    result = cli("diff", f"{root}@10", f"{root}@20")
    assert result.code == 1
    assert "DIFFERENT: 10 tensors on both sides, 1 bit-exact, 9 differ" in result.out
    assert cli("diff", root, f"{root}@20").code == 0


def test_keys_shapes_and_objects(cli: Cli, tmp_path: Path) -> None:
    zeros = Saved.whole(np.zeros(2, np.float32))
    a = make_root(tmp_path / "a", (1,), tensors={"x": zeros, "only.left": zeros})
    tensors = {"x": Saved.whole(np.zeros(3, np.float32)), "only.right": zeros}
    with open_store(tmp_path / "b") as store:
        put(store, tensors, 1, objects=(*OBJECTS[1:], ObjectEntry("step", 8)))
    result = cli("diff", a, str(tmp_path / "b"))
    assert result.code == 1
    for words in ("1 only left", "1 only right", "different: 1 object", "float32 [3]"):
        assert words in result.out
    document = cli.json("diff", a, str(tmp_path / "b"), code=1)
    assert document["objects"] == [
        {
            "name": "step",
            "left": "7",
            "right": "8",
            "changes": [{"path": "", "left": "7", "right": "8"}],
        }
    ]
    rows = {t["name"]: t for t in document["tensors"]}
    assert rows["only.left"]["right"] is None
    assert rows["only.right"]["left"] is None
    assert not rows["x"]["compared"]


def test_where_objects_differ(cli: Cli, tmp_path: Path) -> None:
    roots = []
    for name, lr in (("a", 0.1), ("b", 0.2)):
        groups = [{"params": ["x"] * 50, "lr": lr}]
        objects = (ObjectEntry("optim.groups", groups, kind="groups"),)
        with open_store(tmp_path / name) as store:
            put(store, {"x": Saved.whole(np.zeros(2))}, 1, objects=objects, tied={})
        roots.append(str(tmp_path / name))
    lines = [" ".join(li.split()) for li in cli("diff", *roots).out.splitlines()]
    assert "optim.groups[0].lr 0.1 0.2" in lines


def test_patterns_may_name_objects(cli: Cli, root: str) -> None:
    assert cli("diff", f"{root}@10", f"{root}@20", "--tensor", "step").code == 0
    assert cli("diff", f"{root}@10", f"{root}@20", "--tensor", "nothing").code == 4


def test_a_damaged_side(cli: Cli, root: str) -> None:
    flip(rank_file(root, 20, 3), -1)
    result = cli("diff", f"{root}@10", root, "--json")
    assert (result.code, result.error["kind"]) == (3, "digest")
    assert cli("diff", f"{root}@10", f"{root}@99").code == 4


def test_a_section_against_another_and_against_names_without_one(cli: Cli, tmp_path: Path) -> None:
    w, v = np.arange(8, dtype=np.float32).reshape(4, 2), np.ones(3, np.float32)
    lr = ObjectEntry("app.lr", value=0.5)
    mine = {"app.w": Saved.rows(w, 2), "app.v": Saved.whole(v), "x.w": Saved.whole(v)}
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    with open_store(a) as store:
        put(store, mine, 1, objects=[lr])
    other = {"app.w": Saved.whole(w), "app.v": Saved.whole(v), "x.w": Saved.whole(v + 1)}
    with open_store(b) as store:
        put(store, other, 1, objects=[ObjectEntry("x.lr", value=1)])
    assert cli("diff", a, b).code == 1
    document = cli.json("diff", a, b, "--section", "app", code=1)
    assert {t["name"] for t in document["tensors"]} == {"w", "v"}
    assert all(t["equal"] for t in document["tensors"])
    assert [o["name"] for o in document["objects"]] == ["lr"]
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file({"w": w, "v": v}, hf / "model.safetensors")
    document = cli.json("diff", a, str(hf), "--section", "app", code=1)
    assert all(t["equal"] and t["compared"] for t in document["tensors"])
    save_file({"w": w, "v": v + 1}, hf / "model.safetensors")
    document = cli.json("diff", a, str(hf), "--section", "app", code=1)
    assert [t["name"] for t in document["tensors"] if not t["equal"]] == ["v"]
    missing = cli("diff", a, b, "--section", "optim")
    assert missing.code == 4
    assert "no section 'optim'" in missing.err
