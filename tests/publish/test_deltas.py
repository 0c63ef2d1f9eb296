"""Deltas of blocks: every bit comes back, as few bytes as it takes, and nothing bad is believed."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptd.base.digest import digest
from ckptd.base.runtime import copier
from ckptd.base.runtime.copier import COPIER
from ckptd.errors import CorruptError
from ckptd.publish import deltas
from ckptd.publish.deltas import NOTHING, PLANES, SPARSE, WHOLE, apply, encode

U8 = NDArray[np.uint8]
BLOCK = 1 << 18
PARTS = (0.0, 0.0003, 0.001, 0.01, 0.045, 0.3, 0.6, 0.8, 1.0)


@pytest.fixture(params=["native", "numpy"])
def ways(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    builds = tmp_path_factory.getbasetemp() / f"deltas-{request.param}"
    monkeypatch.setenv("CKPTD_BUILDS", str(builds))
    if request.param == "native":
        COPIER.build()
    copier._native.cache_clear()
    assert request.param == "numpy" or copier._native() is not None
    yield
    copier._native.cache_clear()


def changed(
    rng: np.random.Generator, count: int, size: int, part: float, how: str
) -> tuple[U8, U8]:
    """Return a block before and after; NaNs, signed zeros and infinities are among its values."""
    old = rng.integers(0, 256, count * size, dtype=np.uint8)
    rows = old.reshape(-1, size)
    rows[rng.random(count) < 0.05, -1] |= 0x7F
    rows[rng.random(count) < 0.05] = 0
    new = rows.copy()
    at = np.flatnonzero(rng.random(count) < part)
    if how == "near":
        new[at, 0] ^= 1
    elif how == "sign":
        new[at, -1] ^= 0x80
    elif how == "together":
        at = np.arange(len(at)) + count - len(at)
        new[at] = rng.integers(0, 256, (len(at), size), dtype=np.uint8)
    elif how == "first":  # so dense that by these the block would be
        at = np.arange(len(at))
        new[at] = rng.integers(0, 256, (len(at), size), dtype=np.uint8)
    else:
        new[at] = rng.integers(0, 256, (len(at), size), dtype=np.uint8)
    return old, new.reshape(-1)


@pytest.mark.usefixtures("ways")
def test_every_bit_comes_back_in_a_form_that_is_no_larger_than_the_block() -> None:
    rng, draw = np.random.default_rng(0), random.Random(0)
    forms = set()
    for _ in range(1500):
        size = draw.choice((1, 2, 4, 8, 16))
        count = draw.choice((1, 2, 3, 31, 33, 257, 4096, 5000))
        how = draw.choice(("any", "near", "sign", "together"))
        old, new = changed(rng, count, size, draw.choice(PARTS), how)
        delta = encode(old, new, size)
        assert len(delta) <= 1 + len(new)
        forms.add(delta[:1])
        found = old.copy()
        apply(found, delta, size)
        assert found.tobytes() == new.tobytes(), (size, count, how)
        if delta[:1] != WHOLE:  # two that follow each other are joined without their blocks
            further = changed(rng, count, size, 0.1, how)[1] if draw.random() < 0.2 else old
            second = encode(new, further, size)
            if second[:1] != WHOLE:
                xor, ends = np.zeros_like(old), old.copy()
                apply(xor, delta, size)
                apply(xor, second, size)
                apply(ends, encode(np.zeros_like(xor), xor, size), size)
                assert ends.tobytes() == further.tobytes()
    assert forms == {NOTHING, SPARSE, PLANES, WHOLE}


def bound_bytes(count: int, size: int, part: float) -> float:
    """Return the entropy of which elements changed, and of any values."""
    rest = 1.0 - part
    each = -(part * math.log2(part) + (rest * math.log2(rest) if rest else 0.0))
    return count * (each + 8 * size * part) / 8


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("part", [0.001, 0.01, 0.045, 0.3, 1.0])
def test_scattered_changes_take_little_more_than_their_entropy(size: int, part: float) -> None:
    rng = np.random.default_rng(1)
    count = BLOCK // size
    old = rng.integers(0, 256, BLOCK, dtype=np.uint8)
    new = old.copy().reshape(-1, size)
    at = np.flatnonzero(rng.random(count) < part)
    new[at] = rng.integers(0, 256, (len(at), size), dtype=np.uint8)
    delta = encode(old, new.reshape(-1), size)
    assert len(delta) <= 1.6 * bound_bytes(count, size, part)
    assert len(delta) <= 1.01 * BLOCK


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(("part", "most"), [(0.001, 0.0013), (0.01, 0.008), (0.045, 0.026)])
def test_a_last_bit_that_changes_takes_less_than_a_byte(part: float, most: float) -> None:
    rng = np.random.default_rng(2)
    old, new = changed(rng, BLOCK // 2, 2, part, "near")
    assert len(encode(old, new, 2)) <= most * BLOCK


@pytest.mark.parametrize("processor", ["as it is", "of another kind"])
def test_a_change_and_its_digest_are_the_same_natively_and_by_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: str
) -> None:
    monkeypatch.setenv("CKPTD_BUILDS", str(tmp_path))
    if processor == "of another kind":  # than has the wider registers
        code, source = COPIER.source.read_text(), tmp_path / "copier.cpp"
        source.write_text(
            code.replace("static const bool wide = ", "static const bool wide = 0 && ")
        )
        assert source.read_text() != code
        monkeypatch.setattr(copier, "COPIER", replace(COPIER, source=source))
    copier.COPIER.build()
    copier._native.cache_clear()
    rng, draw = np.random.default_rng(3), random.Random(3)
    digested = 0
    counts = (1, 2, 15, 63, 64, 65, 120, 121, 511, 513, 4097)
    for size, count, part, how in product(
        (1, 2, 4, 8), (*counts, 70_000), PARTS, ("any", "near", "together", "first")
    ):
        if count > 5000 and draw.random() < 0.7:
            continue
        old, new = changed(rng, count, size, part, how)
        shift = draw.choice((0, 0, 1, 3))  # what is sent may lie anywhere
        memory = np.empty(len(new) + 8, np.uint8)[shift : shift + len(new)]
        memory[:] = new
        most = draw.choice((max(1, 3 * count // 4), max(1, count // 50), count))
        found = copier.change_of(old, memory, size, most)
        assert found is not None
        wanted = deltas._changed(old, new, size, most)
        assert found[:3] == wanted[:3], (size, count, part, how, most)
        assert found.digest in (b"", digest(new.data))
        digested += bool(found.digest)
    copier._native.cache_clear()
    wide = processor == "as it is" and "avx512_vbmi2" in Path("/proc/cpuinfo").read_text()
    assert digested > 300 if wide else not digested


def refused(base: U8, delta: bytes, size: int) -> bool:
    before = base.copy()
    try:
        apply(base, delta, size)
    except CorruptError:
        assert base.tobytes() == before.tobytes()  # not half of it
        return True
    return False


PLANE, PLANES_OF_2 = b"\x01\x00\x00\x00\x05", b"\x02\x00\x00\x00\x05\x06"
ONE_OF_64 = b"\x05\x01\x00\x00\x00\x05\x01" + PLANE * 2
"""How element 5 of 64 has changed."""


def test_one_element_has_this_form() -> None:
    found = np.zeros(128, np.uint8)
    apply(found, b"\x01" + ONE_OF_64, 2)
    assert np.flatnonzero(found).tolist() == [10, 11]
    assert encode(np.zeros_like(found), found, 2) == b"\x01" + ONE_OF_64


@pytest.mark.parametrize(
    "delta",
    [
        b"",
        b"\x00\x00",
        b"\x04",
        b"\x01\x05\x01\x00\x00\x00",
        b"\x01\x05\x00\x00\x00\x00",
        b"\x01\x05\xff\xff\xff\xff" + bytes(10),
        b"\x01\x04\x01\x00\x00\x00" + ONE_OF_64,  # so many low bits are not the fewest in all
        b"\x01\x05\x01\x00\x00\x00\x05\x00" + PLANE * 2,  # no place
        b"\x01\x05\x01\x00\x00\x00\x05\x03" + PLANE * 2,  # two
        b"\x01\x05\x01\x00\x00\x00\x05\x04" + PLANE * 2,  # beyond the block
        b"\x01\x04\x02\x00\x00\x00\x55\x03" + PLANES_OF_2 * 2,  # one place twice
        b"\x01\xff\x20\x00\x00\x00" + b"\xff" * 8,  # 64 places, and not 32
        b"\x01" + ONE_OF_64 + PLANE,
        b"\x01\x05\x01\x00\x00\x00\x05\x01" + PLANE,
        b"\x01\x05\x01\x00\x00\x00\x05\x01" + PLANE * 3,
        b"\x01\x05\x01\x00\x00\x00\x05\x01" + b"\x02\x00\x00\x40\x05\x05" * 2,
        b"\x01\x05\x01\x00\x00\x00\x05\x01" + b"\xff\xff\xff\x7f\x05" * 2,
        b"\x01\x05\x01\x00\x00\x00\x05\x01" + b"\x02\x00\x00\x80\x05\x05" * 2,
        b"\x02" + b"\x00\x00\x00\x00" * 2,
        b"\x03" + bytes(127),
        b"\x03" + bytes(129),
    ],
    ids=range(21),
)
def test_what_is_no_delta_is_refused(delta: bytes) -> None:
    assert refused(np.arange(128, dtype=np.uint8), delta, 2)


def test_what_unpacks_to_more_than_the_block_is_refused_before_there_is_memory_for_it() -> None:
    large = np.zeros(1 << 24, np.uint8)
    bomb = encode(large, large ^ np.uint8(1), 2)
    assert bomb[:1] == PLANES
    assert len(bomb) < 4096
    assert refused(np.zeros(256, np.uint8), bomb, 2)


@pytest.mark.parametrize("said", [1 << 40, (1 << 64) - 3, 1 << 20, 64])
def test_a_stream_that_says_its_length_gets_no_memory_for_it(said: int) -> None:
    # zstd without magic: a descriptor for eight bytes of length, a window of 1 KiB, the length.
    stream = b"\xc0\x00" + said.to_bytes(8, "little") + b"\x01\x00\x00"
    delta = PLANES + (len(stream) | 1 << 31).to_bytes(4, "little") + stream
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            apply(np.zeros(64, np.uint8), delta, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_bytes_at_random_are_refused_or_fill_the_block() -> None:
    rng, draw = np.random.default_rng(4), random.Random(4)
    ends = 0
    for _ in range(4000):
        size = draw.choice((1, 2, 4, 8))
        old, new = changed(rng, 300, size, draw.choice(PARTS), draw.choice(("any", "near")))
        raw = bytearray(encode(old, new, size))
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(raw)) if raw else 0
            kind = draw.random()
            if kind < 0.5 and raw:
                raw[at] ^= 1 << draw.randrange(8)
            elif kind < 0.75:
                del raw[at:]
            else:
                raw[at:at] = draw.randbytes(draw.randint(1, 9))
        ends += refused(old.copy(), bytes(raw), size)
        refused(old.copy(), draw.randbytes(draw.randint(0, 40)), size)
    assert ends > 1000
