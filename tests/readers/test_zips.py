"""Zips of torch: where tensors lie, and directories that lie."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.errors import CkptdError, CorruptError, RefusedError
from ckptd.readers.pickles import PickledTensor, walk_values
from ckptd.readers.zips import TorchZip, extent_of, open_zip


def reader(raw: bytes) -> Callable[[int, int], bytes]:
    def read(start: int, end: int) -> bytes:
        assert 0 <= start <= end <= len(raw), "a read outside of the file"
        return raw[start:end]

    return read


def opened(raw: bytes, start: int = 0) -> TorchZip:
    return open_zip(reader(raw), start, len(raw), "x.pt")


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def tensors(raw: bytes, start: int = 0) -> dict[str, np.ndarray]:
    file, out = opened(raw, start), {}
    for name, value in walk_values(file.value):
        if isinstance(value, PickledTensor):
            extent = extent_of(file, value, name)
            base = np.frombuffer(raw, np.uint8)
            dtype = np.dtype(value.dtype if value.dtype != "bfloat16" else "int16")
            strides = extent.strides or value.strides
            steps = tuple(s * dtype.itemsize for s in strides)
            out[name] = np.ndarray(value.shape, dtype, base, extent.start, steps)
    return out


STATE: dict[str, Any] = {
    "a": torch.arange(12.0).reshape(3, 4),
    "view": torch.arange(20.0)[4:9],
    "t": torch.arange(6).reshape(2, 3).t(),
    "wide": torch.ones(3).expand(4, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.5),
    "p": torch.nn.Parameter(torch.ones(2)),
    "nested": [torch.zeros(1), {"x": torch.tensor([True, False])}],
}


def test_tensors_are_ranges_of_the_file() -> None:
    found = tensors(saved(STATE))
    assert len(found) == 10
    for name in ("a", "view", "t", "wide", "empty", "scalar"):
        assert np.array_equal(found[name], STATE[name].numpy()), name
    assert found["half"].tobytes() == STATE["half"].view(torch.int16).numpy().tobytes()
    assert found["nested.1.x"].tolist() == [True, False]


def test_a_zip_in_a_file_of_several() -> None:
    raw = b"x" * 1000 + saved(STATE)
    assert np.array_equal(tensors(raw, 1000)["a"], STATE["a"].numpy())


@pytest.mark.parametrize(
    ("raw", "hint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (saved({"w": torch.ones(100)})[:-1], "is cut short"),
    ],
)
def test_what_is_no_whole_zip_says_what_it_seems_to_be(raw: bytes, hint: str) -> None:
    with pytest.raises(CkptdError) as caught:
        opened(raw)
    assert caught.value.kind == "bad-zip"
    assert hint in str(caught.value.hint)


def test_half_a_locator_before_the_end_is_no_locator() -> None:
    """A file shorter than both, found by fuzzing: a ``struct.error`` of the bytes that lacked."""
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, 0, 0, 0, 0)
    for more in range(20):
        raw = b"PK\6\7".ljust(20, b"\0")[:more] + end
        with pytest.raises(CorruptError):
            opened(raw)


def test_the_format_of_before_is_refused_by_name() -> None:
    out = io.BytesIO()
    torch.save(STATE["a"], out, _use_new_zipfile_serialization=False)
    with pytest.raises(RefusedError) as caught:
        opened(out.getvalue())
    assert caught.value.kind == "unreadable-format"
    assert "legacy format" in caught.value.message


# -- hostile ---------------------------------------------------------------------------------------


def made(
    entries: dict[str, bytes], method: int = zipfile.ZIP_STORED, top: str = "archive/"
) -> bytearray:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as packed:
        for name, data in entries.items():
            packed.writestr(top + name, data)
    return bytearray(out.getvalue())


ENTRIES = {"data.pkl": pickle.dumps({"step": 3}, 2), "data/0": b"0123", "data/1": b"4567"}
END = 22


def patched(at: int, form: str, *values: int, base: bytearray | None = None) -> bytes:
    """Overwrite numbers; `at` counts from the end of the file when it is negative."""
    raw = made(ENTRIES) if base is None else base
    at = at if at >= 0 else len(raw) + at
    raw[at : at + struct.calcsize(form)] = struct.pack(form, *values)
    return bytes(raw)


def central(number: int) -> int:
    """Where the directory's entry begins, from the end of the file."""
    raw, at = bytes(made(ENTRIES)), -1
    for _ in range(number + 1):
        at = raw.index(b"PK\x01\x02", at + 1)
    return at


def zip64(size: int, first: int, stop: int | None = None) -> bytes:
    raw = made(ENTRIES)
    body, end = raw[:-END], raw[-END:]
    at = len(body)
    body += struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 3, 3, size, first)
    body += struct.pack("<4sIQI", b"PK\x06\x07", 0, at if stop is None else stop, 1)
    return bytes(body + end[:8] + b"\xff" * 12 + end[20:])


def twice() -> bytes:
    """Two entries called data.pkl."""
    raw = bytes(made({"data.pkl": b"N.", "data.pkm": b"N."}))
    return raw.replace(b"data.pkm", b"data.pkl")


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "short": b"PK\x05\x06",
    "no zip": b"x" * 5000,
    "compressed": bytes(made(ENTRIES, zipfile.ZIP_DEFLATED)),
    "cut": bytes(made(ENTRIES))[:-1],
    "a comment": bytes(made(ENTRIES)) + b"a comment",
    "directory outside": patched(-END + 16, "<I", 1 << 30),
    "directory too long": patched(-END + 12, "<I", 1 << 30),
    "directory too short": patched(-END + 12, "<I", 50),
    "too many entries": patched(-END + 8, "<HH", 60000, 60000),
    "fewer entries": patched(-END + 8, "<HH", 1, 1),
    "several disks": patched(-END + 4, "<HH", 1, 1),
    "zip64 without its locator": patched(-END + 8, "<HH", 0xFFFF, 0xFFFF),
    "zip64 whose end is at the wrong position": zip64(100, 0, 1 << 60),
    "zip64 whose end is no end": zip64(100, 0, 0),
    "zip64 that lies about its size": zip64(1 << 62, 0),
    "zip64 that lies about its place": zip64(10, 1 << 62),
    "an entry of a wide size without one": patched(central(1) + 24, "<I", 0xFFFFFFFF),
    "overlapping entries": patched(central(1) + 42, "<I", 0),
    "an entry beyond the end": patched(central(2) + 42, "<I", 1 << 20),
    "an entry too long": patched(central(2) + 20, "<II", 1 << 20, 1 << 20),
    "a size that was compressed": patched(central(0) + 20, "<I", 3),
    "encrypted": patched(central(0) + 8, "<H", 1),
    "two data.pkl": twice(),
    "no data.pkl": bytes(made({"data/0": b"0123"})),
    "two tops": bytes(made({"data.pkl": b"N.", "../x/y": b""}, top="")),
    "another local name": patched(30, "<4s", b"evil"),  # type: ignore[arg-type]
    "a local header that is none": patched(0, "<I", 0),
    "a local header with a long field": patched(28, "<H", 60000),
    "a local entry that is compressed": patched(8, "<H", 8),
    "numbers of the other order": bytes(made({**ENTRIES, "byteorder": b"big"})),
    "a directory of rubbish": patched(central(0), "<I", 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    with pytest.raises(CkptdError) as caught:
        opened(HOSTILE[name])
    assert caught.value.kind in ("bad-zip", "unreadable-format")
    assert "x.pt" in str(caught.value.where)


def test_the_base_of_the_hostile_ones_is_good() -> None:
    file = opened(bytes(made(ENTRIES)))
    assert file.value == {"step": 3}
    first, size = file.locate("data/1")
    assert bytes(made(ENTRIES))[first : first + size] == b"4567"
    raw = zip64(len(made(ENTRIES)) - END - central(0), central(0))
    assert opened(raw).value == {"step": 3}


def tensor_of(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, numel: int) -> bytes:
    """A file whose storage has 40 bytes, and whatever a pickle says of it."""

    class Lie:
        def __reduce__(self) -> Any:
            return _rebuild, (_Stored(numel), offset, shape, strides, False, {})

    return _pickled(Lie())


def _rebuild() -> None: ...


class _Stored:
    def __init__(self, numel: int) -> None:
        self.numel = numel


_PICKLER: Any = vars(pickle)["_Pickler"]


def _pickled(value: object) -> bytes:
    out = io.BytesIO()

    class Pickler(_PICKLER):  # type: ignore[misc]
        def persistent_id(self, obj: object) -> object:
            return (
                ("storage", torch.FloatStorage, "0", "cpu", obj.numel)
                if isinstance(obj, _Stored)
                else None
            )

        def save_global(self, obj: object, name: str | None = None) -> None:
            known = {
                _rebuild: "torch._utils\n_rebuild_tensor_v2",
                torch.FloatStorage: "torch\nFloatStorage",
            }
            self.write(b"c" + known[obj].encode() + b"\n")

        dispatch = {**_PICKLER.dispatch}

    Pickler.dispatch[type(_rebuild)] = Pickler.save_global
    Pickler.dispatch[type] = Pickler.save_global
    Pickler(out, 2).dump(value)
    return bytes(made({"data.pkl": out.getvalue(), "data/0": bytes(40)}))


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "numel"),
    [
        ((11,), (1,), 0, 11),
        ((10,), (1,), 1, 10),
        ((10,), (1,), 0, 9),
        ((2, 5), (6, 1), 0, 10),
        ((2, 2), (1 << 40, 1), 0, 10),
        ((1 << 40,), (0,), 11, 10),
    ],
)
def test_tensors_outside_of_their_storage(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, numel: int
) -> None:
    file = opened(tensor_of(shape, strides, offset, numel))
    assert isinstance(file.value, PickledTensor)
    with pytest.raises(CkptdError) as caught:
        extent_of(file, file.value, "x.pt: w")
    assert "a tensor lies outside of its storage" in caught.value.message


def test_every_byte_may_be_damaged(tmp_path: Path) -> None:
    raw = bytearray(saved({"a": torch.arange(3.0), "step": 3}))
    rng = np.random.default_rng(0)
    for _ in range(400):
        bad = bytearray(raw)
        for at in rng.integers(0, len(raw), 3):
            bad[at] = int(rng.integers(0, 256))
        try:
            tensors(bytes(bad))
        except CkptdError:
            continue
