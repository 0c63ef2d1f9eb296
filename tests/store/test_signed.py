"""Hashing what is written: the store stays a store, and hashes are those of the objects."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("blake3")

from blake3 import blake3

from ckptd.base.signatures import read_private, voucher
from ckptd.errors import CkptdError, RefusedError
from ckptd.store import Store, StoreSpec, open_store
from ckptd.store.base import TrustSpec, wrap
from ckptd.store.signed import WINDOW_BYTES, HashedStore, windows_key
from ckptd.testing.store import StoreContract
from ckptd.types import ByteRange
from tests.keys import key_pair

FOLDER = "data/000000000001-g00000001-0001ab/"


def hashed(inner: Store) -> HashedStore:
    return HashedStore(inner, lambda name, data: blake3(name.encode() + data).digest())


class TestHashedStore(StoreContract):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> StoreSpec:
        return StoreSpec(str(tmp_path / "store"))

    @pytest.fixture
    def store(self, spec: StoreSpec) -> Store:
        return hashed(spec.open())


@pytest.mark.parametrize("size", [0, 1, WINDOW_BYTES, WINDOW_BYTES + 1, 3 * WINDOW_BYTES + 7])
@pytest.mark.parametrize("how", ["put", "together", "writer"])
def test_hashes_are_those_of_what_lies_there(tmp_path: Path, how: str, size: int) -> None:
    inner = open_store(str(tmp_path / "store"))
    store, key = hashed(inner), FOLDER + "r00000.safetensors"
    raw = bytes(range(256)) * (size // 256 + 1)
    raw = raw[:size]
    match how:
        case "put":
            store.put(key, raw)
        case "together":
            store.put_together({key: raw})
        case "writer":
            with store.writer(key, size) as writer:
                for at in range(0, size, 300_001):
                    writer.write(memoryview(raw)[at : at + 300_001])
                writer.commit()
    assert inner.get(key) == raw
    assert store.hashes[key] == blake3(raw).hexdigest()
    where = windows_key(FOLDER, key)
    if how == "put" or size <= WINDOW_BYTES:
        assert where not in store.hashes
        return
    windows = [raw[at : at + WINDOW_BYTES] for at in range(0, size, WINDOW_BYTES)]
    assert inner.get(where) == b"".join(blake3(w).digest() for w in windows)
    assert store.hashes[where] == blake3(inner.get(where)).hexdigest()


def test_what_ranks_tell_each_other_is_of_a_process_with_the_key(tmp_path: Path) -> None:
    """The committing rank signs what others report, so a forged report was signed."""
    inner = open_store(str(tmp_path / "store"))
    keys = [read_private(key_pair(tmp_path, name)[0]) for name in ("release", "other")]
    told, by_another, of_another_root = (
        HashedStore(inner, voucher(key, root)) for key, root in zip(keys * 2, "aab", strict=False)
    )
    where = FOLDER + "parts/r00001"
    told.put(where, b"what rank 1 says")
    assert told.get(where) == b"what rank 1 says"
    assert told.get(where, ByteRange(5, 9)) == b"rank"
    buffer = bytearray(4)
    told.read_into(where, 5, memoryview(buffer))
    assert (bytes(buffer), where in told.hashes) == (b"rank", False)
    assert not [told.put(where + "b", b""), told.get(where + "b")][1]
    raw = inner.get(where)
    for name, data, store in (
        (where, raw, by_another),
        (where, raw, of_another_root),
        (FOLDER + "parts/r00002", raw, told),
        (where.replace("0001ab", "0001ac"), raw, told),
        (where, b"what rank 1 says", told),
        (where, raw.replace(b"1", b"2"), told),
        (where, b"", told),
    ):
        inner.put(name, data)
        with pytest.raises(RefusedError, match="not from a process that has the key"):
            store.get(name)
        with pytest.raises(RefusedError, match="not from a process that has the key"):
            store.read_into(name, 0, memoryview(buffer))


def test_nothing_of_a_store_without_signatures_is_read(tmp_path: Path) -> None:
    public = Path(key_pair(tmp_path, "release")[1]).read_text()
    inner = open_store(str(tmp_path / "store"))
    store = wrap(inner, TrustSpec((public,)))
    keys = ["model.safetensors", "annotations/x.json", FOLDER + "parts/r00000", "other/thing"]
    for key in keys:
        store.put(key, b"bytes")
        assert store.open_file(key) is None
        assert store.local_path(key) is None
        for read in (
            lambda k: store.get(k),
            lambda k: store.get(k, ByteRange(0, 2)),
            lambda k: store.read_into(k, 0, memoryview(bytearray(2))),
            lambda k: [*store.read_all(k[: k.rfind("/") + 1], most_bytes=9)],
        ):
            with pytest.raises(CkptdError) as caught:
                read(key)
            assert isinstance(caught.value, RefusedError), (key, caught.value)
    spec = store.describe()
    assert spec == type(spec).from_json(spec.to_json())
