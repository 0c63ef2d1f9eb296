from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.models import MODELS, save


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each of the models, written by transformers."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save(name, folder / name)
    return folder
