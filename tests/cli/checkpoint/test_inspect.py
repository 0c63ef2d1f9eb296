"""``ckptd inspect``, and the tree that it draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import ABSENT
from ckptd.checkpoint.cli.inspect import TensorRow, tree_rows
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.format.witness import SAMPLE
from ckptd.checkpoint.format.words import TensorLayout
from ckptd.store import open_store
from tests.checkpoint.load.builder import Saved
from tests.cli.roots import LAYERS, absent_rows, by_columns, cut, make_root, put, values
from tests.cli.running import Cli


def by_name(document: Any) -> dict[str, Any]:
    return {t["name"]: t for t in document["tensors"]}


def test_document(cli: Cli, root: str) -> None:
    document = cli.json("inspect", root)
    wanted = values(20)
    tensors = by_name(document)
    assert list(tensors) == list(wanted)
    for name, array in wanted.items():
        assert tensors[name]["shape"] == list(array.shape)
        assert tensors[name]["dtype"] == array.dtype.name
        assert tensors[name]["bytes"] == array.nbytes
    embed = tensors["model.embed.weight"]
    assert embed["aliases"] == ["model.head.weight"]
    assert embed["layout"] == {
        "words": "rows / 4",
        "cells": [4, 1],
        "flat": False,
        "chunks": 4,
        "absent": 0,
        "ranks": "0-3",
    }
    assert tensors["model.scale"]["layout"]["words"] == "whole"
    assert (document["step"], document["world_size"]) == (20, 4)
    assert document["metadata"] == {"loss": 0.05}
    assert document["meshes"] == [{"names": ["dp", "tp"], "shape": [2, 2], "ranks": "0-3"}]
    assert document["witness"] == SAMPLE
    assert [f["rank"] for f in document["files"]] == [0, 1, 2, 3]
    assert sum(f["bytes"] for f in document["files"]) == document["data_bytes"]


def test_objects(cli: Cli, root: str) -> None:
    objects = {o["name"]: o for o in cli.json("inspect", root)["objects"]}
    assert objects["step"]["value"] == 7
    assert objects["optim.groups"]["text"] == "2 tensors lr=0.001"
    assert objects["scheduler"]["text"] == "{last: 3, betas: (0.9, 0.95)}"
    assert "optim.groups" in cli.good("inspect", root).out


LAYOUTS: dict[str, tuple[Saved, str, str]] = {
    "whole": (Saved.whole(np.zeros((4, 4)), 2), "whole", "2"),
    "rows": (Saved.rows(np.zeros((8, 4)), 4), "rows / 4", "0-3"),
    "uneven": (Saved.rows(np.zeros((7, 2)), 3), "rows / 3 (3+2+2)", "0-2"),
    "columns": (by_columns(np.zeros((3, 8))), "columns / 2", "0-1"),
    "inner": (
        Saved(
            np.zeros((2, 4, 3)), Grid((Axis(((2, 1),)), Axis(((2, 2),)), Axis(((3, 1),)))), [0, 3]
        ),
        "dim 1 / 2",
        "0, 3",
    ),
    "grid": (
        Saved(np.zeros((4, 6)), Grid((Axis(((2, 2),)), Axis(((3, 2),)))), [0, 2, 4, 6]),
        "grid 2 x 2",
        "0-6 step 2",
    ),
    "flat": (
        Saved(
            np.zeros((4, 6)),
            Grid((Axis(((4, 1),)), Axis(((6, 1),))), (Axis(((8, 3),)),)),
            [0, 1, 2],
        ),
        "flat ranges / 3",
        "0-2",
    ),
    "both": (
        Saved(
            np.zeros((4, 6)),
            Grid((Axis(((4, 1),)), Axis(((3, 2),))), (Axis(((4, 3),)),)),
            [0, 1, 2] * 2,
        ),
        "columns / 2, then flat ranges / 6",
        "0-2",
    ),
    "many": (Saved.rows(np.zeros((15, 1)), 7), "rows / 7, uneven", "0-6"),
    "partly": (absent_rows(np.zeros((4, 4))), "rows / 2, 1 of 2 absent", "0"),
    "absent": (Saved(np.zeros(3), Grid((Axis(((3, 1),)),)), [ABSENT]), "absent", ""),
}


def test_layouts_in_words(cli: Cli, tmp_path: Path) -> None:
    tensors = {name: saved for name, (saved, _, _) in LAYOUTS.items()}
    root = make_root(tmp_path, (1,), tensors=tensors)
    found = {n: t["layout"] for n, t in by_name(cli.json("inspect", root)).items()}
    assert {n: (w["words"], w["ranks"]) for n, w in found.items()} == {
        n: (words, ranks) for n, (_, words, ranks) in LAYOUTS.items()
    }


def test_tree(cli: Cli, root: str) -> None:
    lines = cli.good("inspect", root).out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("tensors: "))
    assert lines[start].startswith(f"tensors: {len(values(0))}, ")
    shown = [" ".join(line.split()) for line in lines[start + 1 : start + 10]]
    assert shown[0] == "NAME DTYPE SHAPE LAYOUT RANKS SIZE"
    assert shown[1].startswith("model 9 tensors")
    assert shown[2].startswith("├─ embed.weight = model.head.weight float32 [20, 6] rows / 4 0-3")
    assert shown[3].startswith(f"├─ layers {2 * LAYERS} tensors")
    assert shown[4].startswith(f"│ └─ 0-{LAYERS - 1} ({LAYERS} alike) 2 tensors {LAYERS} x")
    assert shown[5].startswith("│ ├─ mlp.weight float32 [8, 6] rows / 4")
    assert shown[6].startswith("│ └─ norm.bias bfloat16 [6] whole")
    assert shown[8].startswith("└─ empty float32 [0, 4] whole")
    assert "optim.layers.0.mlp.weight.exp_avg" in lines[start + 10]


def test_full_and_depth(cli: Cli, root: str) -> None:
    full = cli.good("inspect", root, "--full").out
    assert "alike" not in full
    assert full.count("mlp.weight ") == LAYERS
    shallow = cli.good("inspect", root, "--depth", "2").out
    assert "layers" in shallow
    assert "norm.bias" not in shallow


def row(name: str, words: str = "whole", shape: tuple[int, ...] = (2,)) -> TensorRow:
    layout = TensorLayout(words, (1,), False, 1, 0, "0")
    return TensorRow(name=name, dtype="float32", shape=shape, bytes=8, layout=layout)


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        ([row("a"), row("b")], ["a", "b"]),
        ([row("a.b.c")], ["a.b.c"]),
        ([row("a.0.w"), row("a.1.w")], ["a", "└─ 0-1  (2 alike)", "   └─ w"]),
        ([row("a.0.w"), row("a.2.w")], ["a", "├─ 0.w", "└─ 2.w"]),
        ([row("a.0.w"), row("a.1.w", "rows / 2")], ["a", "├─ 0.w", "└─ 1.w"]),
        ([row("a.0.w"), row("a.1.w", shape=(3,))], ["a", "├─ 0.w", "└─ 1.w"]),
        ([row("a.0.w"), row("a.1.v")], ["a", "├─ 0.w", "└─ 1.v"]),
        ([row("a"), row("a.b")], ["a", "└─ b"]),
    ],
)
def test_labels(rows: list[TensorRow], labels: list[str]) -> None:
    assert [cells[0] for cells in tree_rows(rows, None, full=False)] == labels


def test_a_name_of_a_thousand_segments(cli: Cli, tmp_path: Path) -> None:
    name = "a" + ".a" * 2000
    root = make_root(
        tmp_path, (1,), tensors={name: Saved.whole(np.zeros(1)), "b": Saved.whole(np.zeros(1))}
    )
    assert name in cli.good("inspect", root).out.replace(" ", "")


def test_patterns(cli: Cli, root: str) -> None:
    def found(pattern: str) -> list[str]:
        return list(by_name(cli.json("inspect", root, "--tensor", pattern)))

    assert found("*.norm.bias") == [f"model.layers.{i}.norm.bias" for i in range(LAYERS)]
    assert found("model.layers.1") == ["model.layers.1.mlp.weight", "model.layers.1.norm.bias"]
    assert found("model.head.weight") == ["model.embed.weight"]
    result = cli("inspect", root, "--tensor", "model.layrs", "--json")
    assert (result.code, result.error["message"]) == (4, "no tensor matches")
    assert "model.layers" in result.error["found"]


def test_chunks_lie_where_it_says(cli: Cli, root: str) -> None:
    arrays = values(10)
    document = cli.json("inspect", f"{root}@10", "--chunks")
    heads = {f["path"]: f["header_bytes"] for f in document["files"]}
    checked = 0
    for name, tensor in by_name(document).items():
        for chunk in tensor["chunk_list"]:
            raw = Path(root, chunk["file"]).read_bytes()
            data = raw[heads[chunk["file"]] :][chunk["start"] : chunk["end"]]
            cell = arrays[name][
                tuple(slice(o, o + n) for o, n in zip(chunk["offset"], chunk["shape"], strict=True))
            ]
            assert data == np.ascontiguousarray(cell).tobytes(), name
            checked += 1
    assert checked == sum(t["layout"]["chunks"] for t in document["tensors"])
    out = cli.good("inspect", root, "--tensor", "model.scale", "--chunks").out
    assert "chunks of model.scale" in out
    assert "objects" not in out


def test_chunks_of_flat_ranges_and_absent_ones(cli: Cli, tmp_path: Path) -> None:
    tensors = {"flat": LAYOUTS["flat"][0], "partly": LAYOUTS["partly"][0]}
    root = make_root(tmp_path, (1,), tensors=tensors)
    found = by_name(cli.json("inspect", root, "--chunks"))
    assert [c["flat"] for c in found["flat"]["chunk_list"]] == [[0, 8], [8, 16], [16, 24]]
    assert found["partly"]["chunk_list"][1]["file"] is None
    assert "absent" in cli.good("inspect", root, "--chunks", "--tensor", "partly").out


def test_objects_in_files(cli: Cli, tmp_path: Path) -> None:
    from ckptd.checkpoint.format.manifest import ObjectEntry

    body = np.frombuffer(b'{"a":1}', np.uint8)
    grid = Grid((Axis(((7, 1),)),))
    tensors = {"w": Saved.whole(np.zeros(2)), "rng": Saved(body, grid, [1])}
    objects = (ObjectEntry("rng", tensor="rng", per_rank="reseed"),)
    with open_store(tmp_path) as store:
        put(store, tensors, 1, objects=objects, tied={})
    document = cli.json("inspect", str(tmp_path))
    assert list(by_name(document)) == ["w"]
    (found,) = document["objects"]
    assert (found["per_rank"], found["bytes"], found["value"]) == ("reseed", 7, None)
    assert found["text"] == "per rank, 7 B of rank 1; when the world changes: reseed"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "complex64", "bool"])
def test_every_kind_of_type(cli: Cli, tmp_path: Path, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    root = make_root(tmp_path, (1,), tensors={"x": Saved.whole(np.zeros(3, dtype=kind))})
    assert by_name(cli.json("inspect", root))["x"]["dtype"] == dtype


def test_a_damaged_manifest(cli: Cli, root: str) -> None:
    path = next(Path(root).glob("data/*20-*/manifest.json"))
    path.write_bytes(path.read_bytes().replace(b"float32", b"float33"))
    result = cli("inspect", root, "--json")
    assert (result.code, result.error["kind"]) == (3, "digest")
    assert cli("inspect", f"{root}@10").code == 0


def test_all_columns_of_cut_tensors_fit(cli: Cli, tmp_path: Path) -> None:
    root = make_root(tmp_path, (1,), tensors=cut(values(1), parts=2))
    head, *_ = (li for li in cli.good("inspect", root).out.splitlines() if li.startswith("NAME"))
    assert head.split() == ["NAME", "DTYPE", "SHAPE", "LAYOUT", "RANKS", "SIZE"]


def test_a_section(cli: Cli, tmp_path: Path) -> None:
    found = np.arange(12, dtype=np.float32).reshape(4, 3)
    tensors = {
        "app.w": Saved.rows(found, 2),
        "app.x.w": Saved.whole(found),
        "z.w": Saved.whole(found),
    }
    objects = [ObjectEntry("app.lr", value=1), ObjectEntry("z.lr", value=2)]
    root = str(tmp_path / "r")
    with open_store(root) as store:
        put(store, tensors, 1, objects=objects)
    document = cli.json("inspect", root, "--section", "app", "--chunks")
    assert [t["name"] for t in document["tensors"]] == ["w", "x.w"]
    assert len(document["tensors"][0]["chunk_list"]) == 2
    assert [o["name"] for o in document["objects"]] == ["lr"]
    chosen = cli.json("inspect", root, "--section", "app", "--tensor", "x")
    assert [t["name"] for t in chosen["tensors"]] == ["x.w"]
    assert "no section 'y'" in cli("inspect", root, "--section", "y").err
