"""``ckptd ls``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.checkpoint.cli.address import opened
from ckptd.checkpoint.cli.ls import metadata_text
from ckptd.checkpoint.format.names import CommitName, commit_key
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.leases import hold
from ckptd.store.local import LocalStore
from tests.cli.roots import cut, make_root, put, rank_file, values
from tests.cli.running import Cli


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_newest_is_last(cli: Cli, root: str) -> None:
    head, *rows = lines(cli.good("ls", root).out)
    assert head == ["STEP", "GEN", "CREATED", "SIZE", "RANKS", "MARKS", "METADATA"]
    assert [row[:2] for row in rows] == [["10", "1"], ["20", "1"]]
    assert [row[-1] for row in rows] == ["loss=0.1", "loss=0.05"]


def test_document(cli: Cli, root: str) -> None:
    document = cli.json("ls", root)
    assert (document["verb"], document["schema"], document["root"]) == ("ls", 1, root)
    assert (document["newest"], document["generation"]) == (20, 1)
    first, second = document["checkpoints"]
    assert (first["step"], second["step"]) == (10, 20)
    assert second["metadata"] == {"loss": 0.05}
    assert (second["world_size"], second["attempt"], second["damaged"]) == (4, "a", None)
    files = Path(root, second["folder"]).glob("*.safetensors")
    assert second["data_bytes"] == sum(f.stat().st_size - 4096 for f in files)
    assert (document["abandoned"], document["attempts"]) == (None, None)


def test_marks(cli: Cli, root: str) -> None:
    with opened(root) as catalogue:
        catalogue.pin(CommitName(10, 1))
        with hold(catalogue, CommitName(20, 1), holder="somebody"):
            rows = lines(cli.good("ls", root).out)[1:]
            document = cli.json("ls", root)
    assert "pinned" in rows[0]
    assert rows[1][7:10] == ["leased", "by", "somebody"]
    assert [c["pinned"] for c in document["checkpoints"]] == [True, False]
    assert document["checkpoints"][1]["leases"][0].startswith("somebody ")
    assert cli.json("ls", root)["checkpoints"][1]["leases"] == []


def test_everything(cli: Cli, tmp_path: Path) -> None:
    root = make_root(tmp_path, (10, 20, 30))
    with opened(root) as catalogue:
        catalogue.rollback(10)
        put(catalogue.store, cut(values(1)), 15)
        # A zombie of generation 1 and an attempt that is in flight.
        commit = put(catalogue.store, cut(values(2)), 17).commit
        catalogue.store.delete([commit_key(commit.name)])
    rank_file(root, 40, 0).parent.mkdir()
    rank_file(root, 40, 0).write_bytes(b"12345")

    assert [c["step"] for c in cli.json("ls", root)["checkpoints"]] == [10, 15]
    document = cli.json("ls", root, "--all")
    assert [(c["step"], c["abandoned_by"]) for c in document["abandoned"]] == [(20, 2), (30, 2)]
    assert [c["step"] for c in document["checkpoints"]] == [10, 15]
    assert [g["reason"] for g in document["generations"]] == ["start", "rollback"]
    assert document["generations"][1]["parent"] == {"step": 10, "generation": 1}
    found = [(a["step"], a["generation"], a["over"]) for a in document["attempts"]]
    assert found == [(17, 2, False), (40, 1, True)]
    assert (document["attempts"][1]["bytes"], document["attempts"][1]["objects"]) == (5, 1)

    out = cli.good("ls", root, "--all").out
    assert "abandoned by generation 2" in out
    assert "given up: ckptd gc removes it" in out
    assert "in flight, or died" in out


@pytest.mark.parametrize("damage", [b"{", b'{"step": 20}', b"\xff" * 100])
def test_one_damaged_record_does_not_hide_the_others(cli: Cli, root: str, damage: bytes) -> None:
    path = Path(root, commit_key(CommitName(20, 1)))
    path.write_bytes(damage)
    result = cli("ls", root)
    assert result.code == 3
    assert [row[0] for row in lines(result.out)[1:]] == ["10", "20"]
    assert "DAMAGED" in result.out
    assert str(path) in result.out
    rows = cli.json("ls", root, code=3)["checkpoints"]
    assert [bool(r["damaged"]) for r in rows] == [False, True]


def test_an_empty_root(cli: Cli, tmp_path: Path) -> None:
    with LocalStore(tmp_path) as store:
        Catalogue(store).create_or_open()
    assert cli.good("ls", str(tmp_path)).out == "no checkpoint counts here\n"
    document = cli.json("ls", str(tmp_path))
    assert (document["checkpoints"], document["newest"]) == ([], None)


def test_not_a_root(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("x")
    result = cli("ls", str(tmp_path), "--json")
    assert (result.code, result.error["kind"]) == (4, "no-root")


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({}, ""),
        ({"loss": 2.123456789, "n": 3}, "loss=2.12346 n=3"),
        ({"tags": ["a", "b"], "note": "x y"}, "tags=a,b note=x y"),
        ({"deep": {"a": [1]}}, 'deep={"a":[1]}'),
        ({"long": "x" * 100}, f"long={'x' * 22}..."),
        ({"escape": "\x1b[31m"}, "escape=\N{REPLACEMENT CHARACTER}[31m"),
    ],
)
def test_metadata(metadata: dict[str, object], text: str) -> None:
    assert metadata_text(metadata, 30) == text
