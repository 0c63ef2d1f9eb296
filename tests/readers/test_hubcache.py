"""Models in the cache of the Hugging Face hub: folders of links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.errors import RefusedError, UsageError
from ckptd.readers.hubcache import follow_cache
from ckptd.store import open_store
from tests.cli.running import Cli
from tests.readers.opening import open_reader, write_model


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A model as the hub's library keeps it."""
    write_model(tmp_path / "model")
    cache = tmp_path / "models--meta--llama"
    (cache / "blobs").mkdir(parents=True)
    revision = cache / "snapshots" / "abc"
    revision.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "model").iterdir())):
        path.rename(cache / "blobs" / f"{number:064x}")
        (revision / path.name).symlink_to(f"../../blobs/{number:064x}")
    return revision


def test_a_snapshot_is_read_by_its_links(snapshot: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("verify", str(snapshot)).code == 0
    assert cli("verify", str(snapshot / "model.safetensors")).code == 0
    assert cli("export", str(snapshot), str(tmp_path / "out")).code == 0
    assert cli("diff", str(snapshot), str(tmp_path / "out")).code == 0
    assert "hf.llama" in cli("inspect", str(snapshot)).out
    found = cli("cp", str(tmp_path / "out"), str(snapshot), "--json")
    assert found.error["kind"] == "exists"


def test_links_elsewhere_are_refused(snapshot: Path, tmp_path: Path) -> None:
    model = snapshot / "model.safetensors"
    blob = model.resolve()
    for to in (tmp_path / "secret", snapshot.parents[1] / "refs"):
        to.write_bytes(blob.read_bytes())
        model.unlink()
        model.symlink_to(to)
        with pytest.raises(RefusedError) as caught:
            open_reader(snapshot)
        assert "a symbolic link leads out of the store" in caught.value.message
    model.unlink()
    model.symlink_to(os.path.relpath(blob, snapshot))
    open_reader(snapshot)
    with pytest.raises(UsageError):
        follow_cache(open_store(snapshot)).put("a", b"")


def test_other_folders_are_read_as_before(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "snapshots" / "abc"):
        store = open_store(folder)
        assert follow_cache(store) is store
