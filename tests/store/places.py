"""Places that are no plain local disk: mounts of all kinds, and processes without hard links."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["image_mounted", "mounted", "refuse_link", "skip_without_disk", "without_links"]

_REFUSING = """
import errno, os
def refuse(path, target, **_):
    raise OSError(errno.{code}, os.strerror(errno.{code}), path, None, target)
for number in range({most}):
    try:
        os.mkdir(f"{{os.path.dirname(__file__)}}/{{number}}")
    except FileExistsError:
        continue
    os.link = refuse
    break
"""


def refuse_link(path: str, target: str, **_: object) -> None:
    """Stand in for `os.link` as a file system without hard links has it."""
    raise OSError(errno.EPERM, os.strerror(errno.EPERM), path, None, target)


def without_links(folder: Path, code: str = "EPERM", most: int = 1000) -> dict[str, str]:
    """Return an environment whose first `most` Python processes have no hard links."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_REFUSING.format(code=code, most=most))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def skip_without_disk(folder: Path) -> None:
    """Skip where `folder` lies on no block device of this host, as in most containers."""
    if os.major(folder.stat().st_dev) == 0:
        pytest.skip("no disk of this host behind the temporary folder")


@contextmanager
def mounted(point: Path, command: Sequence[str]) -> Iterator[Path]:
    """Mount with `command`; skips where that is not to be had."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    point.mkdir(parents=True)
    before = os.stat(point).st_dev
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0 or os.stat(point).st_dev == before:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@contextmanager
def image_mounted(kind: str, folder: Path, driver: str) -> Iterator[Path]:
    """Mount a new file system of that kind, 64 MB; skips where the system has none."""
    make = f"mkfs.{kind}"
    if shutil.which(make) is None:
        pytest.skip(f"no {make} here")
    image = folder / f"{kind}.img"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run([make, str(image)], capture_output=True, check=True)
    found = subprocess.run(
        ["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        pytest.skip(f"no loop devices here: {found.stderr.strip()}")
    device = found.stdout.strip()
    try:
        with mounted(folder / kind, ["mount", "-t", driver, device, str(folder / kind)]) as point:
            yield point
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
