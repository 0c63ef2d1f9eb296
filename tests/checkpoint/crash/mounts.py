"""A small file system of its own, so that a disk can really be full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Mounted", "tmpfs"]


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mounted tmpfs of `nbytes` bytes at `path`."""

    path: Path
    nbytes: int

    def free(self) -> int:
        """Return the bytes that are left."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def fill(self, leave: int) -> Path:
        """Write a file that leaves `leave` bytes."""
        ballast = self.path / "ballast"
        ballast.unlink(missing_ok=True)
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self.free() - leave))
        return ballast

    def remount(self, options: str) -> None:
        """Change options, such as ``ro``."""
        _mount("-o", f"remount,{options}", str(self.path))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Mounted]:
    """Mount 16 MB; skips where this user may not."""
    path = tmp_path / "small"
    path.mkdir()
    size = 16 << 20
    try:
        _mount("-t", "tmpfs", "-o", f"size={size}", "ckptd-test", str(path))
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield Mounted(path, size)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=20)
