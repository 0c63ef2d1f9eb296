"""Files of torch.save, written without torch: read by torch, by zipfile and by our reader."""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.errors import UsageError
from ckptd.readers.pickles import PickledTensor, read_pickle
from ckptd.readers.zips import extent_of, open_zip
from ckptd.reshard.writers.pickling import Global, Made, StorageTensor, as_plain, dump, is_plain
from ckptd.reshard.writers.torchzip import ALIGN, TorchFrame, TorchJoints
from ckptd.types import DTYPES

PLAIN: dict[str, Any] = {
    "numbers": (1, -5, 300, 1 << 70, -(1 << 40), -(1 << 1000), 1.5, float("inf")),
    "others": [None, True, False, "x" * 300, "\u00e9", {"k": (), 3: [()]}, (1, 2), b"\x00\xff"],
    "again": ["x" * 300] * 3,
    "many": {str(n): n for n in range(300)},
}


def test_torch_reads_all_types_and_plain_values() -> None:
    rng = np.random.default_rng(0)
    value: dict[str, Any] = {"plain": PLAIN}
    stored: list[tuple[StorageTensor, bytes]] = []
    for dtype in DTYPES.values():
        for shape in ((), (0,), (3, 5), (2, 0, 4)):
            bits = rng.integers(0, 2, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
            tensor = StorageTensor(str(len(stored)), dtype.name, shape)
            stored.append((tensor, bits.tobytes()))
            value[f"{dtype.name} {shape}"] = tensor
    # Two names share a storage in one file.
    value["tied"] = value["float32 (3, 5)"]
    frame = TorchFrame(value, [len(raw) for _, raw in stored])
    joints = TorchJoints(frame)
    out = joints.head
    for number, (_, raw) in enumerate(stored):
        assert len(out) % ALIGN == 0
        out += raw + joints.after(number, zlib.crc32(raw))
    assert len(out) == frame.nbytes
    assert len(out) == len(frame.head) + frame.ends[-1] + TorchJoints(frame).nbytes
    with zipfile.ZipFile(io.BytesIO(out)) as archive:
        assert archive.testzip() is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        found = torch.load(io.BytesIO(out), weights_only=True)
    assert found["plain"] == PLAIN
    assert found["tied"].data_ptr() == found["float32 (3, 5)"].data_ptr()
    ours = open_zip(lambda lo, hi: out[lo:hi], 0, len(out), "here")
    for tensor, raw in stored:
        name = f"{tensor.dtype} {tensor.shape}"
        theirs = found[name]
        assert (str(theirs.dtype), theirs.shape) == (f"torch.{tensor.dtype}", tensor.shape)
        assert theirs.is_contiguous()
        # Byte by byte: some types can do nothing else.
        assert bytes(theirs.untyped_storage()) == raw
        mine = ours.value[name]
        assert isinstance(mine, PickledTensor)
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape)
        start = extent_of(ours, mine, name).start
        assert out[start : start + len(raw)] == raw


def test_storages_beyond_4_gib(tmp_path: Path) -> None:
    sizes = [5 << 30, 8]
    value = {
        "far": StorageTensor("0", "uint8", (sizes[0],)),
        "last": StorageTensor("1", "float64", ()),
    }
    frame = TorchFrame(value, sizes)
    joints, path = TorchJoints(frame), tmp_path / "a.pt"
    with path.open("wb") as file:  # with holes: it takes no room
        file.write(joints.head)
        file.seek(sizes[0], os.SEEK_CUR)
        file.write(joints.after(0, 0) + np.float64(7).tobytes())
        file.write(joints.after(1, zlib.crc32(np.float64(7).tobytes())))
    assert path.stat().st_size == frame.nbytes
    assert torch.load(path, weights_only=True, mmap=True)["last"] == 7
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/1") == np.float64(7).tobytes()
    with path.open("rb") as opened:

        def read(start: int, end: int) -> bytes:
            opened.seek(start)
            return opened.read(end - start)

        ours = open_zip(read, 0, frame.nbytes, "here")
        start = extent_of(ours, ours.value["last"], "last").start
        assert read(start, start + 8) == np.float64(7).tobytes()


def test_what_a_pickle_names_is_not_imported() -> None:
    found = read_pickle(dump(Made(Global("no.such", "Thing"), (), {"a": (1,)})), "here")
    assert (found.cls, found.fields) == ("no.such.Thing", {"a": (1,)})
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    for bad in (deep, {1j: 2}, object(), 1 << 3000):
        with pytest.raises(UsageError) as caught:
            dump(bad)
        assert caught.value.kind == "unsavable"


def test_values_that_are_as_good_as_plain() -> None:
    given = {"a": {3, 1}, "b": np.float32(1.5), "c": np.arange(3), "d": (np.bool_(True), None)}
    assert as_plain(given) == {"a": [1, 3], "b": 1.5, "c": [0, 1, 2], "d": (True, None)}
    assert not is_plain(given)
    assert not any(is_plain([v]) for v in given.values())
    assert is_plain(as_plain(given))
    with pytest.raises(UsageError):
        as_plain([1j])
    refused: list[Any] = [{frozenset({1}): 2}, {"a": {(1, frozenset()): 2}}, [1 << 2100]]
    for bad in refused:
        with pytest.raises(UsageError) as caught:
            as_plain(bad)
        assert caught.value.kind == "unsavable"
