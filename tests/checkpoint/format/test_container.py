from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from ckptd.checkpoint.format import container
from ckptd.checkpoint.format.container import ALIGNMENT, build_header, header_bytes, parse_header
from ckptd.errors import CkptdError, CorruptError, UsageError
from ckptd.types import DTYPES
from tests.base.grids.strategies import shapes
from tests.checkpoint.format.strategies import DTYPE_NAMES, fqns


def torch_dtype(name: str) -> torch.dtype:
    """Return the type that safe_open gives for a logical dtype: the same, or bytes."""
    return getattr(torch, name) if DTYPES[name].safetensors else torch.uint8


def random_bytes(name: str, count: int) -> bytes:
    high = 2 if name == "bool" else 256
    return np.random.default_rng(0).integers(0, high, count, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_safetensors_opens_every_dtype(name: str, tmp_path: Path) -> None:
    dtype = DTYPES[name]
    chunks = {"a": (3, 4), "scalar@0,1": (), "empty": (0, 5), "b@7": (2,)}
    header, nbytes = build_header([(k, dtype, s) for k, s in chunks.items()], {"rank": "3"})
    data = random_bytes(name, nbytes)
    (tmp_path / "x.safetensors").write_bytes(header + data)
    at = 0
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"rank": "3"}
        assert set(file.keys()) == set(chunks)
        for key, shape in chunks.items():
            tensor = file.get_tensor(key)
            assert tuple(tensor.shape) == dtype.stored_shape(shape)
            assert tensor.dtype == torch_dtype(name)
            raw = tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes()
            assert raw == data[at : at + len(raw)]
            assert len(raw) == math.prod(shape) * dtype.itemsize
            at += len(raw)
    assert at == len(data)


@given(
    st.dictionaries(fqns, st.tuples(st.sampled_from(DTYPE_NAMES), shapes(max_dims=3)), max_size=8),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_header_round_trip(entries: dict[str, Any], metadata: dict[str, str]) -> None:
    entries.pop("__metadata__", None)
    chunks = [(name, DTYPES[d], shape) for name, (d, shape) in entries.items()]
    header, nbytes = build_header(chunks, metadata)
    assert len(header) % ALIGNMENT == 0
    assert header_bytes(header[:8], "x", len(header) + nbytes) == len(header)
    parsed, found = parse_header(header, "x", nbytes)
    assert found == metadata
    at = 0
    for name, dtype, shape in chunks:
        chunk = parsed[name]
        assert (chunk.code, chunk.shape) == (dtype.stored_code, dtype.stored_shape(shape))
        assert (chunk.start, chunk.end - chunk.start) == (at, math.prod(shape) * dtype.itemsize)
        at = chunk.end
    assert at == nbytes


def test_two_chunks_of_one_name_are_refused_when_written() -> None:
    entry = ("a", DTYPES["float32"], (2,))
    with pytest.raises(UsageError) as caught:
        build_header([entry, entry], {})
    assert "two chunks have one name" in caught.value.message


def test_a_header_that_strangers_cannot_open_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", 5000)
    with pytest.raises(UsageError) as caught:
        build_header([(f"t{i}", DTYPES["uint8"], (1,)) for i in range(200)], {})
    assert "too many chunks for one file" in caught.value.message


def raw_header(text: str | bytes) -> bytes:
    body = text.encode() if isinstance(text, str) else text
    return len(body).to_bytes(8, "little") + body


def entry(start: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


GOOD = json.dumps({"a": entry(), "b": entry(8, 16)})


@pytest.mark.parametrize(
    ("text", "data_bytes"),
    [
        ('{"a":' + json.dumps(entry()) + ',"a":' + json.dumps(entry(8, 16)) + "}", 16),
        ('{"a":' + json.dumps(entry()) + ',"a":' + json.dumps(entry()) + "}", 8),
        (json.dumps({"a": entry(shape=[1] * 64 + [2])}), 8),
        (json.dumps({"a": {**entry(), "data_offsets": "08"}}), 8),
        (json.dumps({"a": {**entry(), "data_offsets": [0, 8, 8]}}), 8),
        (json.dumps({"a": {**entry(), "data_offsets": [0]}}), 8),
        (json.dumps({"a": {**entry(), "data_offsets": [0.0, 8.0]}}), 8),
        (json.dumps({"a": {**entry(), "data_offsets": [0, None]}}), 8),
        (json.dumps({"a": {**entry(), "data_offsets": [-8, 0]}}), 0),
        (json.dumps({"a": entry(), "b": entry(9, 17)}), 17),
        (json.dumps({"a": entry(), "b": entry(7, 15)}), 15),
        (json.dumps({"a": entry(8, 16)}), 16),
        (GOOD, 15),
        (GOOD, 17),
        (GOOD, 0),
        (json.dumps({"a": entry(end=9)}), 9),
        (json.dumps({"a": entry(shape=(-2,), end=-8)}), 0),
        (json.dumps({"a": entry(shape=(2**62,), end=2**64)}), 2**64),
        (json.dumps({"a": entry(shape=(2.0,))}), 8),
        (json.dumps({"a": entry(shape=(True, 2))}), 8),
        (json.dumps({"a": entry(shape=2)}), 8),
        (json.dumps({"a": entry(dtype="F31")}), 8),
        (json.dumps({"a": entry(dtype=None)}), 8),
        (json.dumps({"a": entry(dtype=[])}), 8),
        (json.dumps({"a": {**entry(), "more": 1}}), 8),
        (json.dumps({"a": {"dtype": "F32"}}), 8),
        (json.dumps({"a": 1}), 8),
        (json.dumps({"__metadata__": {"a": 1}}), 0),
        (json.dumps({"__metadata__": None}), 0),
        ("[]", 0),
        ("", 0),
        ("  {}", 0),
        ("[" * 100_000, 0),
        ('{"a":' * 100_000, 0),
        ("{}".encode("utf-16"), 0),
        (b"\xff\xfe", 0),
        ('{"a": NaN}', 0),
        ('{"\\ud800": ' + json.dumps(entry()) + "}", 8),
    ],
)
def test_broken_headers(text: str | bytes, data_bytes: int) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_header(raw_header(text), "r00000.safetensors", data_bytes)
    assert re.search("chunk|data section|header|not a table of strings", caught.value.message)
    assert caught.value.where == "r00000.safetensors"


def test_a_short_data_section_is_called_truncated() -> None:
    with pytest.raises(CorruptError) as caught:
        parse_header(raw_header(GOOD), "x", 15)
    assert caught.value.kind == "truncated"


@pytest.mark.parametrize(
    ("prefix", "file_bytes"),
    [
        (b"", 0),
        (b"\x00" * 7, 7),
        (b"\x00" * 8, 100),
        ((93).to_bytes(8, "little"), 100),
        ((10**8 + 1).to_bytes(8, "little"), 10**9),
        (b"\xff" * 8, 10**12),
    ],
)
def test_impossible_header_lengths(prefix: bytes, file_bytes: int) -> None:
    with pytest.raises(CkptdError) as caught:
        header_bytes(prefix, "x", file_bytes)
    assert "not a safetensors file: impossible header length" in caught.value.message


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (gzip.compress(b"x" * 100, mtime=0), "gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(90), "zstd"),
        (b"PK\x03\x04" + bytes(90), "zip"),
        (b"<!DOCTYPE html>" + bytes(90), "web page"),
        (b"\xff" * 90, None),
    ],
)
def test_what_has_the_name_of_another_format(content: bytes, hint: str | None) -> None:
    with pytest.raises(CkptdError) as caught:
        header_bytes(content[:8], "x", len(content))
    said = caught.value.hint
    assert said is None if hint is None else hint in str(said)


def test_a_stranger_s_file_parses(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.arange(6, dtype=np.float16).reshape(2, 3)}, tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    head = header_bytes(raw[:8], "x", len(raw))
    chunks, _ = parse_header(raw[:head], "x", len(raw) - head)
    assert (chunks["w"].code, chunks["w"].shape, chunks["w"].end) == ("F16", (2, 3), 12)
