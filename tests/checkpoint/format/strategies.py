"""Random names, values and whole manifests, and what their files must hold by a plain walk."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from ckptd.base.grids.owners import ABSENT, Owners
from ckptd.checkpoint.format.codec import register
from ckptd.checkpoint.format.manifest import FileEntry, GridEntry, Manifest, TensorEntry
from ckptd.checkpoint.format.names import CommitName, data_folder, file_key
from ckptd.types import DTYPES
from tests.base.grids.strategies import Cut, cuts, shapes

DTYPE_NAMES = sorted(DTYPES)

fqns = st.lists(
    st.one_of(
        st.sampled_from(
            ["model", "layers", "0", "17", "weight", "_orig_mod", "a b", "@", "%", "%2E"]
        ),
        st.text(max_size=6),
    ),
    min_size=1,
    max_size=5,
).map(".".join)
"""Keys of state dicts: ordinary ones, and any text."""


@register
class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


@register
@dataclass(frozen=True)
class Point:
    x: Any
    y: Any = 0
    late: Any = field(default=7, init=False)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None, categories=None), max_size=12),
    st.binary(max_size=12),
    st.sampled_from(Colour),
    st.sampled_from(["$", "%", "", "\ud800"]),
)


def arrays() -> st.SearchStrategy[Any]:
    """Numpy arrays and scalars of each kind that the codec takes, in either byte order."""
    plain = [
        "bool",
        "int8",
        "uint16",
        "int32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
    ]
    kinds = st.sampled_from([*plain, "complex128", ">f4", ">i8"])

    def make(kind: str, shape: tuple[int, ...], seed: int) -> Any:
        raw = np.random.default_rng(seed).integers(0, 2, math.prod(shape) * 16, dtype=np.uint8)
        dtype = np.dtype(kind)
        return np.frombuffer(raw.tobytes(), dtype)[: math.prod(shape)].reshape(shape)

    made = st.builds(make, kinds, shapes(max_dims=3, max_size=3), st.integers(0, 2**32))
    return st.one_of(made, made.filter(lambda a: a.ndim == 0).map(lambda a: a[()]))


hashable = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.binary(max_size=5)),
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=5,
)

values = st.recursive(
    st.one_of(scalars, arrays()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), hashable), inner, max_size=4),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
        st.builds(Point, inner, inner),
    ),
    max_leaves=12,
)
"""Everything that can be an object of a checkpoint."""


@dataclass
class Model:
    """Contents of a manifest's files, found by a walk over every piece.

    Attributes
    ----------
    chunks
        Per file: ``(tensor, piece, first byte, end)`` in file order.
    places
        ``(tensor, piece)`` to ``(file, first byte, end)``.
    absent
        Per tensor number: its absent pieces.
    """

    chunks: list[list[tuple[int, int, int, int]]]
    places: dict[tuple[int, int], tuple[int, int, int]]
    absent: dict[int, list[int]]


def walk(manifest: Manifest, cut_of: list[Cut], owners_of: list[list[int]]) -> Model:
    """Lay the chunks of `manifest` into its files, one at a time."""
    model = Model([[] for _ in manifest.files], {}, {})
    ends = [0] * len(manifest.files)
    itemsize = [DTYPES[t.dtype].itemsize for t in manifest.tensors]
    for size in (16, 8, 4, 2, 1):
        for number in [i for i, n in enumerate(itemsize) if n == size]:
            for piece, elements in enumerate(cut_of[number].pieces):
                file = owners_of[number][piece]
                if file == ABSENT:
                    model.absent.setdefault(number, []).append(piece)
                    continue
                start = ends[file]
                ends[file] = start + len(elements) * size
                model.chunks[file].append((number, piece, start, ends[file]))
                model.places[number, piece] = (file, start, ends[file])
    return model


@dataclass
class Sample:
    """A manifest, and what is known of it by other means."""

    manifest: Manifest
    cuts: list[Cut]
    owners: list[list[int]]
    model: Model


@st.composite
def manifests(draw: st.DrawFn, max_tensors: int = 6, absent: bool = True) -> Sample:
    """Manifests that keep every rule: shared tables, flat cuts, empty tensors, absent pieces."""
    nfiles = draw(st.integers(1, 5))
    lowest = ABSENT if absent else 0
    kinds = []
    for _ in range(draw(st.integers(1, 4))):
        cut = draw(shapes(max_dims=3, max_size=5).flatmap(cuts))
        n = cut.grid.npieces
        files = draw(st.lists(st.integers(lowest, nfiles - 1), min_size=n, max_size=n))
        if draw(st.booleans()):
            files = [(i * draw(st.integers(0, 2))) % nfiles for i in range(n)]
        kinds.append((cut, files))
    grids: dict[GridEntry, int] = {}
    maps: dict[Any, int] = {}
    tensors, cut_of, owners_of = [], [], []
    for number in range(draw(st.integers(0, max_tensors))):
        cut, files = draw(st.sampled_from(kinds))
        room = nfiles - 1 - max(files)
        base = draw(st.integers(0, room)) if max(files) >= 0 else 0
        tensors.append(
            TensorEntry(
                f"t{number}.{draw(st.sampled_from(['w', '@', '%', 'x y']))}",
                draw(st.sampled_from(DTYPE_NAMES)),
                cut.grid.shape,
                grids.setdefault(GridEntry.of(cut.grid), len(grids)),
                maps.setdefault(Owners.from_array(files).runs, len(maps)),
                base,
            )
        )
        cut_of.append(cut)
        owners_of.append([f if f == ABSENT else f + base for f in files])
    folder = data_folder(CommitName(12, 3), "a1")
    manifest = Manifest(
        step=12,
        generation=3,
        attempt="a1",
        world_size=nfiles,
        files=tuple(FileEntry(file_key(folder, i), i) for i in range(nfiles)),
        grids=tuple(grids),
        owners=tuple(maps),
        tensors=tuple(tensors),
    )
    model = walk(manifest, cut_of, owners_of)
    return Sample(with_sizes(manifest, model), cut_of, owners_of, model)


def with_sizes(manifest: Manifest, model: Model) -> Manifest:
    """Give the files the lengths that their chunks have."""
    files = []
    for entry, chunks in zip(manifest.files, model.chunks, strict=True):
        nbytes = chunks[-1][3] if chunks else 0
        files.append(
            FileEntry(entry.path, entry.rank, 4096, nbytes, "0f" * 16) if chunks else entry
        )
    return msgspec.structs.replace(manifest, files=tuple(files))
