"""Opening foreign checkpoints in tests."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.index import Index
from ckptd.errors import CkptdError, NotFoundError
from ckptd.readers.find import find_foreign
from ckptd.reshard.source import SourceTensors, open_own
from ckptd.store import Store, open_store

SAMPLES = Path(__file__).parent / "samples"
MODELS = Path(__file__).parents[1] / "lay" / "models" / "models.json"
"""Names, shapes and configurations that Hugging Face transformers saved."""


def unpack(name: str, out: Path) -> None:
    """Unpack one of the samples, ``NAME.tar.xz``; samples/README.md says what they are."""
    with tarfile.open(SAMPLES / f"{name}.tar.xz") as packed:
        packed.extractall(out, filter="data")


def open_reader(folder: Path, only: str = "") -> CkptdReader:
    return reader_in(open_store(folder), only)


def reader_in(store: Store, only: str = "", step: int = 0) -> CkptdReader:
    root = find_foreign(store, only, step)
    if root is None:
        raise NotFoundError("nothing is recognised here")
    index = Index(root)
    index.open()
    latest = index.latest()
    assert latest == root.name
    return CkptdReader(index, latest)


def foreign_stock(store: Store, step: int = 0) -> SourceTensors:
    return open_own(reader_in(store, step=step))


def fails(folder: Path) -> CkptdError:
    """Read everything, which must fail."""
    with pytest.raises(CkptdError) as caught:
        reader = open_reader(folder)
        reader.tensors(reader.names)
    return caught.value


def write_model(folder: Path, name: str = "llama") -> dict[str, np.ndarray[Any, Any]]:
    """Write a model as transformers saves it, with random values; return these."""
    model = json.loads(MODELS.read_text())["models"][name]
    draw = np.random.default_rng(5)
    values = {n: draw.standard_normal(s, np.float32) for n, s in model["shapes"].items()}
    folder.mkdir()
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model["config"]))
    return values
