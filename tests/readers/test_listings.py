"""Folders that lack a file, or have a wrong one: an error, or the values that were there before."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.errors import CkptdError, CorruptError
from ckptd.readers import base
from ckptd.readers.base import SeenFiles
from ckptd.readers.find import find_foreign
from ckptd.store.generic import FsspecStore
from ckptd.store.local import LocalStore
from ckptd.types import ByteRange
from tests.readers.opening import open_reader

FOLDERS = {
    "dcp": "dcp/dcp-fsdp2-tp",
    "dcp, safetensors": "dcp/dcp-safetensors",
    "dcp, FSDP1": "dcp/fsdp1-sharded",
    "ranks": "dcp/torch-save-dtensor",
    "ranks, FSDP1": "fsdp1/sharded",
    "megatron": "megatron-tp2pp2-opt/optim-fully_reshardable",
    "zero 1, experts": "deepspeed/moe1-bf16/global_step2",
    "zero 1, pipeline": "deepspeed/pipe1-bf16/global_step2",
    "zero 3": "deepspeed/zero3-fp32/global_step2",
    "universal": "deepspeed/pipe1-universal",
}
KINDS = {
    *("corrupt", "truncated", "bad-zip", "mismatch", "not-found"),
}


def values_in(folder: Path) -> dict[str, bytes]:
    reader = open_reader(folder)
    return {name: value.tobytes() for name, value in reader.tensors(reader.names).items()}


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".npz")


def outcome(folder: Path, before: dict[str, bytes]) -> str:
    """Return the kind of error; else whether values are as before, some are gone, or are others."""
    try:
        found = values_in(folder)
    except CkptdError as error:
        return error.kind
    if any(before.get(name) != value for name, value in found.items()):
        return "wrong"
    return "same" if found.keys() == before.keys() else "gone"


@contextmanager
def removed(path: Path) -> Iterator[None]:
    kept = path.read_bytes()
    path.unlink()
    yield
    path.write_bytes(kept)


@contextmanager
def halved(path: Path) -> Iterator[None]:
    kept = path.read_bytes()
    path.write_bytes(kept[: len(kept) // 2])
    yield
    path.write_bytes(kept)


@contextmanager
def swapped(path: Path, other: Path) -> Iterator[None]:
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)
    yield
    path.write_bytes(one)
    other.write_bytes(two)


WITHOUT = {
    # Two layers of a pipeline that are one: what they share has a name of its own.
    ("zero 1, pipeline", "layer_00-model_states.pt"): "gone",
    ("zero 1, pipeline", "layer_04-model_states.pt"): "gone",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_is_missing_or_short(name: str, foreign: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(foreign / FOLDERS[name], tmp_path / "x"))
    before = values_in(folder)
    seen = 0
    for path in files_of(folder):
        with removed(path):
            found = outcome(folder, before)
            assert found in ("same", WITHOUT.get((name, path.name)), *KINDS), path.name
            seen += found not in ("same", "gone")
        with halved(path):
            assert outcome(folder, before) in KINDS, path.name
    assert seen >= len(files_of(folder)) // 3


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("ranks", "model_world_size_4_rank_{}.pt"),
        ("ranks, FSDP1", "model_world_size_4_rank_{}.pt"),
        ("zero 1, experts", "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
        ("zero 1, pipeline", "bf16_zero_pp_rank_{}_mp_rank_01_optim_states.pt"),
        ("zero 1, pipeline", "mp_rank_0{}_model_states.pt"),
        ("dcp, safetensors", "__{}_0.distcp"),
    ],
)
def test_files_that_were_renumbered(name: str, pattern: str, foreign: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(foreign / FOLDERS[name], tmp_path / "x"))
    before = values_in(folder)
    with swapped(folder / pattern.format(0), folder / pattern.format(1)):
        assert outcome(folder, before) in KINDS
    assert outcome(folder, before) == "same"


class Recording(LocalStore):
    """Keeps the keys of what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.keys: set[str] = set()

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self.keys.add(key)
        return super().get(key, byte_range)


@pytest.mark.parametrize("name", FOLDERS)
def test_each_file_that_was_read_is_looked_at_again(
    name: str, foreign: Path, tmp_path: Path
) -> None:
    """Written anew at the same time and of the same size, it is another file all the same."""
    folder, kept = Path(shutil.copytree(foreign / FOLDERS[name], tmp_path / "x")), tmp_path / "kept"
    with Recording(folder) as store:
        root = find_foreign(store)
        assert root is not None
        assert store.keys
        root.check_unchanged()
        for key in sorted(store.keys):
            (folder / key).rename(kept)
            shutil.copy2(kept, folder / key)
            with pytest.raises(CorruptError) as caught:
                root.check_unchanged()
            assert (caught.value.kind, caught.value.where) == ("replaced", key)
            kept.replace(folder / key)
        root.check_unchanged()


def test_an_inode_tells_nothing_where_a_file_system_makes_them_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"123")
    shutil.copy2(tmp_path / "a", tmp_path / "b")
    with LocalStore(tmp_path) as store:
        seen = SeenFiles(store)
        seen.get("a", 0, 3)
        (tmp_path / "b").replace(tmp_path / "a")
        with pytest.raises(CorruptError):
            seen.check_read()
        for kind in ("fuse.gcsfuse", "cifs"):
            monkeypatch.setattr(base, "filesystem_of", lambda device, kind=kind: kind)
            seen.check_read()


def test_an_object_that_only_was_moved_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's store moves what is read to another class, with another ETag and time."""
    (tmp_path / "a").write_bytes(b"123")
    with FsspecStore(f"file://{tmp_path}") as store:
        found = {"type": "file", "size": 3, "generation": "17", "etag": "x", "updated": 1.0}
        monkeypatch.setattr(store._fs, "info", lambda path: found)
        seen = SeenFiles(store)
        seen.get("a", 0, 3)
        found |= {"etag": "y", "updated": 2.0}
        seen.check_read()
        found["generation"] = "18"
        with pytest.raises(CorruptError, match="replaced while it was read"):
            seen.check_read()
