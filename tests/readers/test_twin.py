"""A table of pieces as a root: whatever the cut, the bytes are those of the foreign files."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.index import Index
from ckptd.errors import CkptdError, UsageError
from ckptd.readers.base import Foreign, ForeignPiece
from ckptd.readers.twin import ForeignRoot
from ckptd.readers.zips import Extent
from ckptd.store.memory import MemoryStore, forget_memory
from ckptd.types import Box, ByteRange

Array = np.ndarray
_names = itertools.count()
TYPES = ["float32", "uint8", "int64", "float16", "complex128"]


@st.composite
def cuts(draw: st.DrawFn, n: int) -> list[int]:
    inner = draw(st.lists(st.integers(1, n - 1), max_size=3, unique=True)) if n > 1 else []
    return [0, *sorted(inner), n]


class Files:
    """Foreign files under construction: pieces are put anywhere, with rubbish between them."""

    def __init__(self, draw: Any, count: int) -> None:
        self.draw = draw
        self.files = [bytearray() for _ in range(count)]

    def put(self, values: Array, *, strided: bool = True) -> tuple[str, Extent]:
        """Write a piece, perhaps with strides; return its file and place."""
        number = self.draw(st.integers(0, len(self.files) - 1))
        file = self.files[number]
        file += b"\xee" * self.draw(st.integers(0, 9))
        strides = None
        if strided and values.ndim and values.size and self.draw(st.booleans()):
            order = self.draw(st.permutations(range(values.ndim)))
            wide = np.zeros(
                [values.shape[d] + self.draw(st.integers(0, 2)) for d in order], values.dtype
            )
            view = wide.transpose(np.argsort(order))[tuple(slice(n) for n in values.shape)]
            view[...] = values
            strides = tuple(s // values.itemsize for s in view.strides)
            values = wide
        start = len(file)
        file += values.tobytes()
        return f"f{number}", Extent(start, strides)


def pieces_of(draw: Any, files: Files, name: str, whole: Array) -> list[ForeignPiece]:
    axes = [draw(cuts(n)) for n in whole.shape]
    out = []
    dtype = whole.dtype.name
    for cell in itertools.product(*(itertools.pairwise(a) for a in axes)):
        box = Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        part = whole[tuple(slice(a, b) for a, b in cell)]
        if draw(st.integers(0, 3)):
            file, at = files.put(part)
            late = draw(st.booleans())
            place = (lambda at=at: at) if late else at
            out.append(ForeignPiece(name, dtype, whole.shape, box, file, place))
            continue
        for low, high in itertools.pairwise(draw(cuts(max(1, part.size)))):
            file, at = files.put(part.ravel()[low:high], strided=False)
            out.append(ForeignPiece(name, dtype, whole.shape, box, file, at, (low, high)))
    return out


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_cut_gives_back_the_whole(data: st.DataObject) -> None:
    store = MemoryStore(f"twin-{next(_names)}")
    files = Files(data.draw, data.draw(st.integers(1, 3)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    wanted: dict[str, Array] = {}
    pieces: list[ForeignPiece] = []
    for number in range(data.draw(st.integers(1, 4))):
        shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
        dtype = np.dtype(data.draw(st.sampled_from(TYPES)))
        size = max(1, math.prod(shape)) * dtype.itemsize
        whole = np.frombuffer(rng.bytes(size), dtype).reshape(shape)
        wanted[f"t{number}"] = whole
        pieces += pieces_of(data.draw, files, f"t{number}", whole)
    for number, written in enumerate(files.files):
        store.put(f"f{number}", bytes(written))
    root = ForeignRoot(store, Foreign(data.draw(st.permutations(pieces)), {"a": 1}), "test", 5)
    reader = reader_of(root)
    assert reader.commit.step == 5
    assert reader.objects() == {"a": 1}
    found = reader.tensors(list(wanted))
    assert all(found[n].tobytes() == v.tobytes() for n, v in wanted.items())
    for name, whole in wanted.items():
        for box, part in reader.slabs(name, 3 * whole.itemsize):
            cut = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            assert part.tobytes() == whole[cut].tobytes()
    for file in reader.manifest.files:
        size = root.stat(file.path).size
        raw = root.get(file.path)
        low = data.draw(st.integers(0, size))
        high = data.draw(st.integers(low, size))
        assert root.get(file.path, ByteRange(low, high)) == raw[low:high]
    forget_memory(store.url.partition("://")[2])


def reader_of(root: ForeignRoot) -> CkptdReader:
    index = Index(root)
    index.open()
    return CkptdReader(index, index.commit(root.name))


def table(*pieces: tuple[Box, tuple[int, int] | None], shape: tuple[int, ...] = (4, 4)) -> Foreign:
    return Foreign(
        [ForeignPiece("w", "uint8", shape, b, "f", Extent(0), flat) for b, flat in pieces]
    )


BAD: dict[str, Any] = {
    "nothing": [],
    "a hole": [(Box((0, 0), (2, 4)), None)],
    "a hole at the beginning": [(Box((2, 0), (2, 4)), None)],
    "an overlap": [(Box((0, 0), (3, 4)), None), (Box((2, 0), (2, 4)), None)],
    "two of one place": [(Box((0, 0), (4, 4)), None), (Box((0, 0), (4, 2)), None)],
    "do not form a grid": [
        (Box((0, 0), (2, 4)), None),
        (Box((2, 0), (2, 2)), None),
        (Box((2, 2), (2, 2)), None),
    ],
    "outside": [(Box((0, 0), (4, 5)), None)],
    "before": [(Box((-1, 0), (5, 4)), None)],
    "a flat hole": [(Box((0, 0), (4, 4)), (0, 7)), (Box((0, 0), (4, 4)), (8, 16))],
    "a flat overlap": [(Box((0, 0), (4, 4)), (0, 9)), (Box((0, 0), (4, 4)), (8, 16))],
    "a flat end": [(Box((0, 0), (4, 4)), (0, 15))],
    "a flat range outside": [(Box((0, 0), (4, 4)), (0, 17))],
}


@pytest.mark.parametrize("name", BAD)
def test_tables_that_make_no_tensor(name: str) -> None:
    store = MemoryStore(f"twin-{next(_names)}")
    store.put("f", bytes(64))
    with pytest.raises(CkptdError) as caught:
        ForeignRoot(store, table(*BAD[name]), "test")
    words = (
        "hold no tensor"
        if name == "nothing"
        else "do not form a grid|begins with a hole|overlap|outside of it"
    )
    assert re.search(words, caught.value.message)


@pytest.mark.parametrize(
    ("extent", "kind"),
    [(Extent(49), "truncated"), (Extent(-1), "truncated"), (Extent(0, (30, 1)), "truncated")],
)
def test_pieces_beyond_their_file(extent: Extent, kind: str) -> None:
    store = MemoryStore(f"twin-{next(_names)}")
    store.put("f", bytes(64))
    piece = ForeignPiece("w", "uint8", (4, 4), Box.whole((4, 4)), "f", extent)
    with pytest.raises(CkptdError) as caught:
        ForeignRoot(store, Foreign([piece]), "test")
    assert caught.value.kind == kind
    late = ForeignPiece("w", "uint8", (4, 4), Box.whole((4, 4)), "f", lambda: extent)
    reader = reader_of(ForeignRoot(store, Foreign([late]), "test"))
    with pytest.raises(CkptdError) as caught:
        reader.tensor("w")
    assert caught.value.kind == kind


def test_it_is_only_read() -> None:
    store = MemoryStore(f"twin-{next(_names)}")
    store.put("f", bytes(64))
    root = ForeignRoot(store, table((Box((0, 0), (4, 4)), None)), "test")
    for act in (
        lambda: root.put("x", b""),
        lambda: root.delete(["ckptd.json"]),
        lambda: root.sync(""),
        lambda: root.writer("x", 1),
    ):
        with pytest.raises(UsageError) as caught:
            act()
        assert "this view of a store is read-only" in caught.value.message
    assert root.children() == ["ckptd.json", "commits/", "data/", "generations/"]
    assert not root.exists("data/x")
