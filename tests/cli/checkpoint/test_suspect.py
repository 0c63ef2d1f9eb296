"""Roots whose records are damaged or lost: every verb says so, and there is a way out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptd.checkpoint.format.names import CommitName, commit_key, generation_key
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import CorruptError
from ckptd.store import open_store
from tests.cli.running import Cli

FIXTURE = Path(__file__).parents[2] / "checkpoint/compat/root-539564c"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 3 of generation 1, gone back to 2, and step 4 of generation 3 after a load."""
    from ckptd.checkpoint.format.records import Generation, decode_record, encode_record

    root = tmp_path / "root"
    shutil.copytree(FIXTURE, root)
    for path in (root / "generations").iterdir():  # with digests, as they are written today
        path.write_bytes(encode_record(decode_record(path.read_bytes(), Generation, "")))
    return root


def lost(root: Path) -> None:
    (root / generation_key(3)).unlink()


def flipped(root: Path) -> None:
    path = root / generation_key(3)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b'"step": 2') + len('"step": ')] ^= 1  # 2 becomes 3: the rollback is undone
    path.write_bytes(raw)


def none_left(root: Path) -> None:
    shutil.rmtree(root / "generations")


@pytest.mark.parametrize("damage", [lost, flipped, none_left])
def test_every_verb_says_so(damage: object, root: Path, cli: Cli, tmp_path: Path) -> None:
    damage(root)  # type: ignore[operator]
    where = str(root)
    for verb in (
        ["verify", where],
        ["verify", where, "--all"],
        ["inspect", where],
        ["diff", where, where],
        ["pin", where],
        ["cp", where, str(tmp_path / "copy")],
        ["gc", where, "--keep", "1", "--yes"],
        ["export", where, str(tmp_path / "out")],
        ["rollback", f"{where}@2"],
    ):
        found = cli(*verb)
        assert found.code == CorruptError.exit_code, (verb, found)
        assert "generation" in found.err + found.out, verb
    found = cli("ls", where, "--json")
    assert found.document["checkpoints"] == []
    assert "generation" in found.err
    for verb in (["pin", where, "--list"], ["verify", f"{where}@2-g1"]):
        found = cli(*verb)
        assert "generation" in found.err + found.out, verb
    assert cli("verify", f"{where}@2-g1", "--json").document["ok"] is False
    with pytest.raises(CorruptError):
        Catalogue(open_store(where)).latest()


@pytest.mark.parametrize("damage", [lost, flipped])
def test_the_way_out(damage: object, root: Path, cli: Cli) -> None:
    damage(root)  # type: ignore[operator]
    found = cli("rollback", f"{root}@2-g1", "--json")
    assert found.code == 0, found.err
    catalogue = Catalogue(open_store(str(root)))
    assert catalogue.latest() == CommitName(2, 1)
    assert catalogue.newest_generation() == 4
    if damage is lost:
        assert cli("verify", str(root)).code == 0
    else:  # the damaged record is still there, and concerns nobody but him who asks
        assert cli("verify", str(root)).code == CorruptError.exit_code


def test_a_commit_of_a_generation_without_record_cannot_be_gone_back_to(
    root: Path, cli: Cli
) -> None:
    lost(root)
    found = cli("rollback", f"{root}@4-g3")
    assert found.code == CorruptError.exit_code
    assert Catalogue(open_store(str(root))).generations() == [1, 2]


def test_metadata_by_which_the_best_is_kept(tmp_path: Path, cli: Cli) -> None:
    from tests.checkpoint.root.checkpoints import save

    store = open_store(str(tmp_path))
    catalogue = Catalogue(store)
    catalogue.create_or_open()
    generation = catalogue.claim(None, 1).generation
    for step, loss in ((1, 1.5), (2, 3.5), (3, 5.5)):
        save(catalogue, step, generation, metadata={"loss": loss})
    path = tmp_path / commit_key(CommitName(1, generation))
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"1.5")] ^= 0x8  # 1.5 becomes 9.5: the best is the worst
    path.write_bytes(raw)
    found = cli("gc", str(tmp_path), "--keep", "1", "--keep-best", "loss:min:1", "--yes")
    assert found.code == CorruptError.exit_code
    assert len(catalogue.commits()) == 3
