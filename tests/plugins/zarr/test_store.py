"""A checkpoint through zarr: every slice is what numpy says, whatever the cut and the type."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import pickle
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import ABSENT
from ckptd.checkpoint.format.names import commit_key
from ckptd.checkpoint.root.index import Index
from ckptd.checkpoint.root.leases import MAX_TRIES, hold_or_read, leases
from ckptd.errors import CkptdError, CorruptError, NotFoundError
from ckptd.store.base import Store
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore, forget_memory
from ckptd.types import DTYPES
from tests.checkpoint.load.builder import Saved, build, random_box, random_saved, take
from tests.processes import until

zarr = pytest.importorskip("zarr")
from zarr.abc.store import (  # noqa: E402
    OffsetByteRequest,
    RangeByteRequest,
    SuffixByteRequest,
)
from zarr.core.buffer import default_buffer_prototype  # noqa: E402
from zarr.core.metadata import v3  # noqa: E402

from ckptd_zarr import kinds, zarr_store  # noqa: E402
from ckptd_zarr import store as zarrview  # noqa: E402

HAS_UNEVEN = hasattr(v3, "RectilinearChunkGridMetadata")
GRIDS = [False, *([True] if HAS_UNEVEN else [])]
Array = np.ndarray[Any, Any]
_names = itertools.count()


@pytest.fixture
def root() -> Iterator[MemoryStore]:
    name = f"zarr-{next(_names)}"
    yield MemoryStore(name)
    forget_memory(name)


def saved() -> dict[str, Saved]:
    rng = np.random.default_rng(1)
    tensors = {
        "w": Saved.rows(rng.standard_normal((11, 6)).astype(np.float32), 4),
        "scalar": Saved.whole(np.array(-3, np.int64)),
        "empty": Saved.whole(np.zeros((0, 3), np.float16)),
    }
    return {**tensors, "w": replace(tensors["w"], aliases=("tied",))}


def opened(store: Any, **options: Any) -> Any:
    return zarr.open_group(store, mode="r", **options)


def values(array: Any) -> Array:
    found: Array = np.asarray(array[...])
    return found


def same(found: Array, wanted: Array) -> bool:
    alike = (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    return alike and found.tobytes() == wanted.tobytes()


def get(store: Any, key: str, part: Any = None) -> bytes | None:
    found = asyncio.run(store.get(key, default_buffer_prototype(), part))
    return None if found is None else found.to_bytes()


def listed(keys: Any) -> list[str]:
    async def collect() -> list[str]:
        return [key async for key in keys]

    return asyncio.run(collect())


def error_in(act: Any) -> CkptdError:
    with pytest.raises(CkptdError) as caught:
        act()
    return caught.value


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from(GRIDS))
def test_every_slice_is_what_numpy_says(seed: int, uneven: bool) -> None:
    rng = random.Random(seed)
    tensors: dict[str, Saved] = {}
    for number in range(3):
        shape = tuple(rng.randrange(9) for _ in range(rng.randrange(4)))
        kind = rng.choice(["uint8", "float32", "bfloat16", "complex128", "float8_e5m2"])
        size = DTYPES[kind].itemsize
        raw = np.frombuffer(rng.randbytes(int(np.prod(shape)) * size), DTYPES[kind].numpy)
        tensors[f"t{number}"] = random_saved(rng, raw.reshape(shape), 3)
    name = f"zarr-{next(_names)}"
    build(MemoryStore(name), tensors, witness=False)
    with (
        pytest.MonkeyPatch.context() as patch,
        zarr.config.set({"array.rectilinear_chunks": uneven}),
    ):
        patch.setattr(zarrview, "CHUNK_BYTES", rng.choice([16, 64, 1 << 20]))
        with zarr_store(f"memory://{name}") as store:
            group = opened(store)
            for key, tensor in tensors.items():
                assert same(values(group[key]), tensor.values)
                box = random_box(rng, tensor.values.shape)
                index = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
                assert same(np.asarray(group[key][index]), take(tensor.values, box))
    forget_memory(name)


@pytest.mark.parametrize("name", DTYPES)
def test_types(root: MemoryStore, name: str) -> None:
    kind = DTYPES[name]
    raw = np.arange(256, dtype=np.uint8)
    raw = raw % 2 if name == "bool" else raw
    tensor = Saved.rows(raw.view(kind.numpy), 3)
    build(root, {"t": replace(tensor, dtype=name)}, witness=False)
    with zarr_store(root.url) as store:
        array = opened(store)["t"]
        assert same(values(array), tensor.values)
        assert array.attrs["ckptd"]["dtype"] == name
        # The bits of what is missing are zero: of one type that is no zero.
        assert np.asarray(array.fill_value).tobytes() == bytes(kind.itemsize)
        about = json.loads(get(store, "t/zarr.json") or b"")
        assert array.metadata.to_dict()["data_type"] == about["data_type"]


@pytest.mark.parametrize("name", kinds.EXTENSIONS)
def test_scalars_of_types_that_zarr_lacks(name: str) -> None:
    kind = kinds.MlType(name=name)
    assert kind == kinds.MlType.from_native_dtype(DTYPES[name].numpy)
    assert kind == kinds.MlType.from_json(kind.to_json(3), zarr_format=3)
    for value in range(256):
        scalar = np.array([value], f"u{kind.item_size}").view(DTYPES[name].numpy)[0]
        text = kind.to_json_scalar(scalar, zarr_format=3)
        assert np.asarray(kind.from_json_scalar(text, zarr_format=3)).tobytes() == scalar.tobytes()
    assert kind.from_json_scalar(2, zarr_format=3) == kind.cast_scalar(2.0) == 2
    assert np.isnan(kind.from_json_scalar("NaN", zarr_format=3))
    for bad in ("float8_e4m3", {"name": name, "configuration": {}}, 3):
        with pytest.raises(ValueError, match="is not one of"):
            kinds.MlType.from_json(bad, zarr_format=3)
    with pytest.raises(TypeError):
        kind.cast_scalar("two")


def test_pieces_are_chunks_where_zarr_has_such_a_grid(
    root: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Axis.from_sizes([4, 4, 3])
    uneven = Grid((Axis.from_sizes([2, 5, 1, 3]), Axis(((6, 1),))))
    tall = np.arange(66, dtype=np.float32).reshape(11, 6)
    wide = np.arange(72, dtype=np.float32).reshape(3, 24)
    tensors = {
        "even": Saved(tall, Grid((rows, Axis(((3, 2),)))), [0] * 6),
        "uneven": Saved(tall, uneven, [0, 1, 2, 3]),
        "wide": Saved(wide, Grid((Axis(((3, 1),)), Axis(((12, 2),)))), [0, 1]),
        "cells": Saved(tall, Grid((Axis(((11, 1),)), Axis.from_sizes([2, 4]))), [0, 1]),
    }
    build(root, tensors, witness=False)

    def chunks(flag: bool) -> dict[str, Any]:
        with zarr.config.set({"array.rectilinear_chunks": flag}):
            with zarr_store(root.url) as store:
                for key, array in opened(store).arrays():
                    assert same(values(array), tensors[key].values)
                return {
                    key: json.loads(get(store, f"{key}/zarr.json") or b"")["chunk_grid"]
                    for key in tensors
                }

    def shape(grid: Mapping[str, Any]) -> Any:
        return grid["configuration"].get("chunk_shape", grid["configuration"].get("chunk_shapes"))

    assert {k: shape(g) for k, g in chunks(False).items()} == {
        "even": [4, 3],
        "uneven": [11, 6],
        "wide": [3, 12],
        "cells": [11, 6],
    }
    if HAS_UNEVEN:
        found = chunks(True)
        assert shape(found["even"]) == [4, 3]
        assert shape(found["uneven"]) == [[2, 5, 1, 3], [6]]
        assert shape(found["cells"]) == [[11], [2, 4]]
    # Large pieces are cut: evenly where that works, from the outermost dimension on.
    monkeypatch.setattr(zarrview, "CHUNK_BYTES", 24)
    assert {k: shape(g) for k, g in chunks(False).items()} == {
        "even": [2, 3],
        "uneven": [1, 6],
        "wide": [1, 6],
        "cells": [1, 6],
    }
    if HAS_UNEVEN:
        assert shape(chunks(True)["uneven"]) == [[[1, 11]], [6]]


def test_names_that_no_node_may_have(root: MemoryStore) -> None:
    names = ["a/b", "a%2Fb", "...", "__x", "zarr.json", "c", "back\\slash", "a b", "ä.ö"]
    wanted = {n: np.array([i], np.int32) for i, n in enumerate(names)}
    build(root, {n: Saved.whole(v) for n, v in wanted.items()}, witness=False)
    with zarr_store(root.url) as store:
        for consolidated in (None, False):
            found = dict(opened(store, use_consolidated=consolidated).arrays())
            assert {unquote(node) for node in found} == set(names)
            for node, array in found.items():
                assert same(values(array), wanted[unquote(node)])
                assert array.attrs["ckptd"]["name"] == unquote(node)
        assert {"ä.ö", "a b", "c"} <= set(found)


def test_dimensions_have_names_of_one_length_and_of_no_array(root: MemoryStore) -> None:
    """As xarray wants it, for which a name of an array is a coordinate of that dimension."""
    names = {"w": (3, 3), "w.0": (5,), "w.0.0": (2,), "a/b": (4, 2), "step": (), "w/0": (7,)}
    build(root, {n: Saved.whole(np.zeros(s)) for n, s in names.items()}, witness=False)
    with zarr_store(root.url) as store:
        found = dict(opened(store).arrays())
        assert len(found) == len(names)
        dims = [d for a in found.values() for d in a.metadata.dimension_names]
        assert len(dims) == len({*dims}) == sum(map(len, names.values()))
        assert not found.keys() & {*dims}
    build(root, saved(), step=7, witness=False)
    with zarr_store(root.url) as store:
        group = opened(store)
        first, tied = (group[n].metadata.dimension_names for n in ("w", "tied"))
        assert first == tied == ("w/0", "w/1")


def test_aliases_and_what_the_group_says(
    root: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(root, saved(), step=7, witness=False)
    with zarr_store(root.url) as store:
        group = opened(store)
        assert sorted(group.array_keys()) == ["empty", "scalar", "tied", "w"]
        about = {"url": root.url, "step": 7, "generation": 1, "format": "ckptd"}
        assert group.attrs["ckptd"] == about
        assert same(values(group["tied"]), saved()["w"].values)
        about = {"name": "w", "alias": "tied", "dtype": "float32", "pieces": 4}
        assert group["tied"].attrs["ckptd"] == about
        assert group.metadata.consolidated_metadata is not None
    monkeypatch.setattr(zarrview, "_MOST_CONSOLIDATED", 3)
    with zarr_store(root.url) as store:
        group = opened(store)
        assert group.metadata.consolidated_metadata is None
        assert sorted(group.array_keys()) == ["empty", "scalar", "tied", "w"]


def test_keys(root: MemoryStore) -> None:
    build(root, {**saved(), "wo": saved()["scalar"]}, witness=False)
    with zarr_store(root.url) as store:
        rows = [f"w/c/{i}/0" for i in range(4)]
        assert listed(store.list_dir("")) == ["zarr.json", "w", "tied", "scalar", "empty", "wo"]
        assert listed(store.list_dir("w/")) == ["zarr.json", "c"]
        assert listed(store.list_dir("w/c")) == ["0", "1", "2", "3"]
        assert listed(store.list_dir("w/c/1")) == ["0"]
        assert listed(store.list_dir("scalar")) == ["zarr.json", "c"]
        assert listed(store.list_dir("empty")) == ["zarr.json"]
        assert listed(store.list_dir("nothing")) == []
        assert listed(store.list_prefix("w")) == ["w/zarr.json", *rows]
        assert listed(store.list_prefix("w/c/3")) == rows[3:]
        assert listed(store.list_prefix("sc")) == ["scalar/zarr.json", "scalar/c"]
        everything = listed(store.list())
        assert len(everything) == len(set(everything)) == 1 + 5 + 2 * 4 + 2
        for key in everything:
            raw = get(store, key)
            assert raw is not None
            assert asyncio.run(store.exists(key))
            assert asyncio.run(store.getsize(key)) == len(raw)
        for key in (
            *("", "c", "w", "w/", "w/c", "w/c/", "w/c/0", "w/c/4/0", "w/c/0/1", "w/c/-1/0"),
            *("w/c/00/0", "w/c/+1/0", "w/c/0/0/0", "w/c/٠/0", "w/d/0/0", "v/zarr.json"),
            *("empty/c/0/0", "scalar/c/0", "w/zarr.json/", "zarr.json/c"),
        ):
            assert get(store, key) is None, key
            assert not asyncio.run(store.exists(key))
        with pytest.raises(FileNotFoundError):
            asyncio.run(store.getsize("w/c/4/0"))
        raw = saved()["w"].values[:3].tobytes()
        parts = (
            (RangeByteRequest(4, 9), raw[4:9]),
            (OffsetByteRequest(60), raw[60:]),
            (SuffixByteRequest(5), raw[-5:]),
            (SuffixByteRequest(0), b""),
            (SuffixByteRequest(1000), raw),
        )
        for part, wanted in parts:
            assert get(store, "w/c/0/0", part) == wanted
        several = store.get_partial_values(
            default_buffer_prototype(), [("w/c/0/0", parts[0][0]), ("no", None), ("w/c/0/0", None)]
        )
        found = [b and b.to_bytes() for b in asyncio.run(several)]
        assert found == [raw[4:9], None, raw]


def test_nothing_is_written(root: MemoryStore) -> None:
    build(root, saved(), witness=False)
    with zarr_store(root.url) as store:
        before = {i.key for i in root.list("data/")}
        group = opened(store)
        for act in (
            lambda: group.create_array("x", shape=(1,), dtype="f4"),
            lambda: group["w"].__setitem__(0, 1),
            lambda: asyncio.run(store.set("x", default_buffer_prototype().buffer.from_bytes(b""))),
            lambda: asyncio.run(store.delete("w/zarr.json")),
            lambda: store.with_read_only(False),
            lambda: zarr.open_group(store, mode="a"),
        ):
            with pytest.raises(ValueError):
                act()
        assert store.with_read_only(True) is store
        assert {i.key for i in root.list("data/")} == before


def test_what_is_absent_is_missing(root: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Saved.rows(np.arange(1, 41, dtype=np.float32).reshape(10, 4), 5)
    build(root, {"w": Saved(tensor.values, tensor.grid, [0, ABSENT, 0, ABSENT, ABSENT])})
    wanted = tensor.values.copy()
    wanted[2:4] = wanted[6:] = 0
    with zarr_store(root.url) as store:
        array = opened(store)["w"]
        assert same(values(array), wanted)
        assert array.attrs["ckptd"]["absent_elements"] == 24
        assert listed(store.list_prefix("w/c")) == ["w/c/0/0", "w/c/2/0"]
        assert not asyncio.run(store.exists("w/c/1/0"))
        assert array.nchunks_initialized == 2
    # A chunk that is there in part has zeros for the rest.
    monkeypatch.setattr(zarrview, "_is_regular", lambda axis: False)
    with zarr_store(root.url) as store:
        assert listed(store.list_prefix("w/c")) == ["w/c/0/0"]
        assert same(values(opened(store)["w"]), wanted)


def data_file(store: Store) -> str:
    return next(i.key for i in store.list("data/") if i.key.endswith(".safetensors"))


def test_damage_is_an_error(tmp_path: Path) -> None:
    built = build(LocalStore(tmp_path), saved(), witness=False)
    file = tmp_path / built.manifest.files[0].path
    good = file.read_bytes()
    for raw, words in (
        (good[:-1] + bytes([good[-1] ^ 1]), "digest mismatch"),
        (good[:-1], "a data file has the wrong size"),
        (good + b"x", "a data file has the wrong size"),
        (None, "a data file of the checkpoint is missing"),
    ):
        file.unlink()
        if raw is not None:
            file.write_bytes(raw)
        with zarr_store(str(tmp_path)) as store:
            array = opened(store)["w"]
            found = error_in(lambda array=array: values(array))
            assert isinstance(found, CorruptError)
            assert words in found.message
        file.write_bytes(good)
    with zarr_store(str(tmp_path)) as store:
        array = opened(store)["w"]
        assert same(values(array), saved()["w"].values)
    assert error_in(lambda: values(array)).kind == "closed"


def test_steps_and_what_is_not_there(root: MemoryStore) -> None:
    for number in (1, 2):
        build(root, {"w": Saved.whole(np.array([number]))}, step=number, witness=False)
    wanted: tuple[int | None, ...] = (1, 2, None)
    for step in wanted:
        with zarr_store(root.url, step=step) as store:
            assert store.commit.step == (step or 2)
            assert values(opened(store)["w"]) == [step or 2]
    assert isinstance(error_in(lambda: zarr_store(root.url, step=3)), NotFoundError)
    assert isinstance(error_in(lambda: zarr_store("memory://nowhere")), NotFoundError)
    assert leases(Index(root)) == {}


def test_the_newest_is_replaced_while_it_is_opened(
    root: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(root, {"w": Saved.whole(np.array([1]))}, witness=False)
    true, tries, last = hold_or_read, [], 1

    def hold(catalogue: Any, name: Any, **options: Any) -> Any:
        tries.append(name.step)
        if len(tries) <= last:
            build(root, {"w": Saved.whole(np.array([2]))}, step=name.step + 1, witness=False)
            root.delete([commit_key(name)])
        return true(catalogue, name, **options)

    monkeypatch.setattr("ckptd.checkpoint.root.leases.hold_or_read", hold)
    with zarr_store(root.url) as store:
        assert (tries, store.commit.step) == ([1, 2], 2)
    assert "no checkpoint of step" in error_in(lambda: zarr_store(root.url, step=1)).message
    tries, last = [], MAX_TRIES  # each newest one is replaced
    assert error_in(lambda: zarr_store(root.url)).kind == "busy"


def test_a_lease_for_as_long_as_it_is_open(root: MemoryStore) -> None:
    build(root, saved(), witness=False)
    store = zarr_store(root.url)
    [lease] = leases(Index(root)).values()
    assert (lease.step, lease.holder.split()[0]) == (1, "zarr")
    store.close()
    store.close()
    assert leases(Index(root)) == {}
    store = zarr_store(root.url)
    array = opened(store)["w"]
    del store
    gc.collect()
    assert values(array).shape == (11, 6)
    del array

    def gone() -> bool:
        gc.collect()
        return leases(Index(root)) == {}

    until(gone, "a store that nobody has is closed")


def test_a_pickled_store_is_of_the_same_checkpoint(root: MemoryStore) -> None:
    build(root, saved(), witness=False)
    with zarr.config.set({"array.rectilinear_chunks": HAS_UNEVEN}):
        store = zarr_store(root.url)
        array = opened(store)["w"]
        raw = pickle.dumps((store, array))
    build(root, {"w": Saved.whole(np.zeros(3))}, step=2, witness=False)
    other, again = pickle.loads(raw)
    assert other == store
    assert other is not store
    # The chunks are those that the pickled array knows of, whatever is configured here.
    assert get(other, "w/zarr.json") == get(store, "w/zarr.json")
    assert same(values(again), saved()["w"].values)
    with zarr_store(root.url) as newest:
        assert newest != store
    for each in (store, other):
        each.close()


def test_checkpoints_of_others(tmp_path: Path) -> None:
    wanted = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.array([1, 2])}
    save_file(wanted, tmp_path / "model.safetensors")
    for place in (tmp_path, tmp_path / "model.safetensors"):
        with zarr_store(str(place)) as store:
            group = opened(store)
            assert group.attrs["ckptd"]["format"] == "hf"
            assert {key for key, _ in group.arrays()} == set(wanted)
            for key, array in group.arrays():
                assert same(values(array), wanted[key])
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    with zarr_store(str(tmp_path), step=5) as store:
        assert store.commit.step == 5


def test_many_threads_read_one_store(tmp_path: Path) -> None:
    wanted = np.random.default_rng(3).integers(0, 255, (64, 1 << 17), dtype=np.uint8)
    build(LocalStore(tmp_path), {"w": Saved.rows(wanted, 4)}, witness=False)
    with zarr_store(str(tmp_path)) as store:
        array = opened(store)["w"]
        assert array.nchunks == 4
        with zarr.config.set({"async.concurrency": 16}):
            assert (values(array) == wanted).all()
        assert (np.asarray(array[31:33, 5:9]) == wanted[31:33, 5:9]).all()
