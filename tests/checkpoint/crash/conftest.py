from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.crash.zygote import Zygote
from tests.servers import s3_moto, s3_radosgw

__all__ = ["s3_moto", "s3_radosgw"]


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a killed process loses nothing to an fsync."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="ckptd-crash-", dir=shm if shm.is_dir() else tmp_path
    ) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process
