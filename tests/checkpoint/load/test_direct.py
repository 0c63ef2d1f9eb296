"""Boxes one by one: what numpy says, from blocks that are good, each read once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.base.digest import BLOCK_BYTES
from ckptd.base.grids.owners import ABSENT
from ckptd.checkpoint.load import direct
from ckptd.checkpoint.load.direct import DirectReader
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import CorruptError, UsageError
from ckptd.store.base import FaultSpec, Store, Wrapper
from ckptd.store.memory import MemoryStore, forget_memory
from ckptd.types import Box
from tests.checkpoint.load.builder import (
    Array,
    Saved,
    build,
    random_box,
    random_region,
    random_saved,
    seen_through,
    take,
)

_names = itertools.count()


class Counted(Wrapper):
    """Counts what is read of data files."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, FaultSpec())
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.reads.append((key, offset, buffer.nbytes))
        super().read_into(key, offset, buffer)


@pytest.fixture
def store() -> Iterator[Counted]:
    name = f"direct-{next(_names)}"
    yield Counted(MemoryStore(name))
    forget_memory(name)


def reader_of(store: Store, tensors: dict[str, Saved]) -> CkptdReader:
    return CkptdReader(Catalogue(store), build(store, tensors, witness=False).commit)


def whole(reader: DirectReader, number: int, like: Array) -> Array:
    out = np.zeros(like.nbytes, np.uint8)
    strides = tuple(s // like.itemsize for s in np.zeros_like(like).strides)
    reader.read_into(number, Box.whole(like.shape), out, strides)
    found: Array = out.view(like.dtype).reshape(like.shape)
    return found


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_boxes_into_any_strides(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 8) for _ in range(rng.randrange(4)))
    values = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    name = f"direct-{next(_names)}"
    reader = reader_of(MemoryStore(name), {"t": random_saved(rng, values, 3)})
    with pytest.MonkeyPatch.context() as patch, DirectReader(reader) as boxes:
        patch.setattr(direct, "_SPAN_BYTES", rng.choice([8, 40, 1 << 20]))
        for _ in range(4):
            region, end = random_region(rng, random_box(rng, shape), 0)
            out = np.full(end, -1, np.int32)
            boxes.read_into(0, region.box, out.view(np.uint8), region.strides)
            assert (seen_through(out, region) == take(values, region.box)).all()
            assert (out == -1).sum() == end - region.box.numel
    forget_memory(name)


def test_a_block_is_read_once_and_a_file_is_checked_once(store: Counted) -> None:
    tensors = {f"t{i}": Saved.whole(np.full(100, i, np.int64)) for i in range(50)}
    tensors["large"] = Saved.whole(np.arange(3 * BLOCK_BYTES // 8))
    with DirectReader(reader_of(store, tensors)) as boxes:
        store.reads.clear()
        for number, tensor in enumerate(list(tensors.values())[:50]):
            assert (whole(boxes, number, tensor.values) == tensor.values).all()
        assert [size for _, _, size in store.reads] == [BLOCK_BYTES]
        assert (whole(boxes, 50, tensors["large"].values) == tensors["large"].values).all()
        assert len(store.reads) == 2


def test_kept_blocks_are_bounded(store: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_KEPT_BLOCKS", 2)
    values = np.arange(4 * BLOCK_BYTES, dtype=np.uint8)
    with DirectReader(reader_of(store, {"t": Saved.whole(values)})) as boxes:
        store.reads.clear()
        out = np.empty(1, np.uint8)
        for block in (0, 1, 0, 2, 0, 1):
            boxes.read_into(0, Box((block * BLOCK_BYTES,), (1,)), out, (1,))
            assert out[0] == values[block * BLOCK_BYTES]
        assert len(store.reads) == 4  # 0, 1, 2, and 1 again, which was used longest ago


def test_absent_elements_are_left_as_they_are(store: Counted) -> None:
    saved = Saved.rows(np.arange(12, dtype=np.int16).reshape(6, 2), 3)
    saved = Saved(saved.values, saved.grid, [0, ABSENT, ABSENT])
    with DirectReader(reader_of(store, {"t": saved})) as boxes:
        out = np.full(12, -1, np.int16)
        boxes.read_into(0, Box.whole((6, 2)), out.view(np.uint8), (2, 1))
        assert out.tolist() == [0, 1, 2, 3, *[-1] * 8]
        assert boxes.is_absent(0, Box((2, 0), (4, 2)))
        assert not boxes.is_absent(0, Box((1, 0), (5, 2)))
        assert not boxes.is_absent(0, Box((3, 0), (0, 2)))


@pytest.mark.parametrize("size", [BLOCK_BYTES // 2, 3 * BLOCK_BYTES])
def test_a_bad_block_is_never_given(store: Counted, size: int) -> None:
    values = np.arange(size, dtype=np.uint8)
    reader = reader_of(store, {"t": Saved.whole(values)})
    file = reader.manifest.files[0]
    raw = bytearray(store.get(file.path))
    raw[-1] ^= 1
    store.put(file.path, bytes(raw))
    with DirectReader(reader) as boxes:
        for _ in range(2):
            with pytest.raises(CorruptError) as caught:
                whole(boxes, 0, values)
            assert caught.value.kind == "digest"
    with pytest.raises(UsageError) as closed:
        whole(boxes, 0, values)
    assert closed.value.kind == "closed"
