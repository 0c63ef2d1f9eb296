from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of real foreign checkpoints; samples/README.md says what they are."""
    folder = tmp_path_factory.mktemp("foreign")
    for path in sorted(SAMPLES.glob("*.tar.xz")):
        with tarfile.open(path) as packed:
            packed.extractall(folder, filter="data")
    return folder
