"""A power cut at any moment of a save: the step is whole or absent, and the one before it is whole.

The disk is simulated: what a cut leaves of a file is what was flushed of it, and of a folder the
names of its last flush; or all names, with nothing in the files that were not flushed.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import plan_gc, run_gc
from ckptd.checkpoint.root.leases import hold
from ckptd.checkpoint.save.structure import INLINE_BYTES
from ckptd.checkpoint.tools.verify import verify
from ckptd.store import StoreSpec
from ckptd.store.local import LocalStore
from ckptd.store.osio import Os
from tests.checkpoint.save.referring import assert_holds
from tests.checkpoint.save.saving import Job, plan_of, values
from tests.processes import PATIENCE_S

LITTLE: dict[str, tuple[int, ...]] = {"a": (64, 64), "b": (3,), "step": ()}
MUCH: dict[str, tuple[int, ...]] = {"a": (INLINE_BYTES // 4 + 1,), "b": (3,)}
Tree = dict[str, bytes | None]
"""Files by path, below the top; None is a folder."""


class Disk(Os):
    """Does what it is asked, and notes before each step what a cut would leave."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.cuts: list[tuple[Tree, Tree]] = []
        self._lock = threading.Lock()
        self._flushed: dict[int, bytes] = {}
        self._names: dict[str, dict[str, int | None]] = {}
        self._folders: dict[str, str] = {}

    def note(self) -> None:
        with self._lock:
            kept: Tree = {}
            self._kept(str(self.top), "", kept)
            named: Tree = {}
            for folder, folders, files in os.walk(self.top):
                at = os.path.relpath(folder, self.top)
                named.update({os.path.normpath(f"{at}/{name}"): None for name in folders})
                for name in files:
                    inode = os.stat(f"{folder}/{name}").st_ino
                    named[os.path.normpath(f"{at}/{name}")] = self._flushed.get(inode, b"")
            if not self.cuts or self.cuts[-1] != (kept, named):
                self.cuts.append((kept, named))

    def _kept(self, folder: str, at: str, out: Tree) -> None:
        for name, inode in self._names.get(folder, {}).items():
            out[at + name] = None if inode is None else self._flushed.get(inode, b"")
            if inode is None:
                self._kept(f"{folder}/{name}", f"{at}{name}/", out)

    def open(self, path: str, flags: int) -> int:
        self.note()
        fd = super().open(path, flags)
        self._flushed.pop(os.fstat(fd).st_ino, None)  # the number of one that is gone
        return fd

    def _flush(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            self._flushed[os.fstat(fd).st_ino] = file.read(size)

    def fsync(self, fd: int, path: str) -> None:
        self.note()
        super().fsync(fd, path)
        self._flush(fd)

    def fdatasync(self, fd: int, path: str) -> None:
        self.note()
        super().fdatasync(fd, path)
        self._flush(fd)

    def fsync_folder(self, path: str) -> None:
        self.note()
        found = {e.name: None if e.is_dir() else e.stat().st_ino for e in os.scandir(path)}
        self._names[path] = found

    def mkdir(self, path: str) -> None:
        self.note()
        self._names.pop(path, None)
        super().mkdir(path)

    def link(self, path: str, target: str) -> None:
        self.note()
        super().link(path, target)

    def replace(self, path: str, target: str) -> None:
        self.note()
        super().replace(path, target)

    def unlink(self, path: str) -> None:
        self.note()
        super().unlink(path)

    def rmdir(self, path: str) -> None:
        self.note()
        super().rmdir(path)


def made(tree: Tree, at: Path) -> LocalStore:
    at.mkdir()
    for path, raw in tree.items():
        if raw is None:
            (at / path).mkdir(parents=True, exist_ok=True)
        else:
            (at / path).parent.mkdir(parents=True, exist_ok=True)
            (at / path).write_bytes(raw)
    return LocalStore(at)


@pytest.mark.parametrize("shapes", [LITTLE, MUCH], ids=["little", "much"])
def test_a_cut_at_any_step_of_a_save_leaves_the_step_whole_or_absent(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    top = tmp_path / "root"
    top.mkdir()
    disk = Disk(top)
    store = LocalStore(top, system=disk)
    job = Job(StoreSpec("memory://unused"), store=store, plan=plan_of(shapes))
    job.save(1, values(1, shapes)).durable(PATIENCE_S)
    del disk.cuts[:]
    with hold(job.catalogue, CommitName(1, 1)):
        disk.note()
        job.save(2, values(2, shapes)).durable(PATIENCE_S)
        at_once = len(disk.cuts)
        disk.note()
    job.close()
    whole = 0
    for number, cut in enumerate(disk.cuts):
        for kind, tree in zip(("kept", "named"), cut, strict=True):
            left = made(tree, tmp_path / f"{kind}-{number}")
            catalogue = Catalogue(left)
            catalogue.create_or_open()
            assert catalogue.latest() in (CommitName(1, 1), CommitName(2, 1)), (number, kind)
            for name in catalogue.commits():
                assert_holds(left, name, values(name.step, shapes))
                assert verify(catalogue, name).findings == ()
            whole += catalogue.latest() == CommitName(2, 1)
            # What was called durable is there.
            assert number < at_once or catalogue.latest() == CommitName(2, 1), (number, kind)
            run_gc(left, plan_gc(catalogue, 1))  # no lease that the cut left stops it
            assert catalogue.commits() == [catalogue.latest()]
    assert 0 < whole < 2 * len(disk.cuts)
