"""Samples: what is written is read, once, and nothing else is believed."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from ckptd.errors import CkptdError, CorruptError, NotFoundError, StoreError, UsageError
from ckptd.monitor.ring import RingIdentity
from ckptd.monitor.samples import (
    SAMPLE,
    SampleKind,
    SampleReader,
    SampleWriter,
    samples_path,
)

WHO = RingIdentity(rank=2, world=4)


def write(path: Path, number: int, slots: int = 8) -> SampleWriter:
    writer = SampleWriter(path, WHO, slots)
    for k in range(number):
        writer.add(SampleKind.SUM, 7, 4, k, (1 << 64) - 1 - k)
    return writer


def test_samples_are_read_once_in_order(tmp_path: Path) -> None:
    path = samples_path(tmp_path / "x.ring")
    writer = write(path, 3)
    with SampleReader(path) as reader:
        assert (path.name, reader.rank) == ("x.samples", 2)
        rows = reader.new()
        assert rows["step"].tolist() == [0, 1, 2]
        assert rows["value"].tolist() == [(1 << 64) - 1 - k for k in range(3)]
        assert set(rows["members"]) == {4}
        assert not len(reader.new())
        writer.norm(9, 2, 5, 1.5)
        [row] = reader.new()
        assert (row["what"], row["set"]) == (SampleKind.NORM, 9)
        assert struct.unpack("<d", row["value"].tobytes()) == (1.5,)


def test_samples_that_were_overwritten_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a", 21)
    with SampleReader(tmp_path / "a") as reader:
        assert reader.new()["step"].tolist() == list(range(13, 21))


def test_a_sample_under_way_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a", 3)
    with (tmp_path / "a").open("r+b") as file:
        file.seek(256 + SAMPLE.itemsize)
        file.write(bytes(8))
    with SampleReader(tmp_path / "a") as reader:
        assert reader.new()["step"].tolist() == [0, 2]


def test_what_is_no_samples_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        SampleReader(tmp_path / "none")
    with pytest.raises(StoreError):
        (tmp_path / "link").symlink_to(tmp_path / "none")
        SampleReader(tmp_path / "link")
    (tmp_path / "short").write_bytes(b"CKPTSMPL")
    with pytest.raises(CorruptError):
        SampleReader(tmp_path / "short")
    with pytest.raises(UsageError):
        SampleWriter(tmp_path / "a", WHO, 0)
    with pytest.raises(StoreError):
        SampleWriter(tmp_path / "no-folder" / "a", WHO)


def test_damage_is_an_error_or_other_samples(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, 20)
    good = path.read_bytes()
    dice = np.random.default_rng(4)
    for _ in range(300):
        raw = bytearray(good[: int(dice.integers(0, 2 * len(good)))])
        for at in dice.integers(0, max(len(raw), 1), 4):
            if raw:
                raw[at] = int(dice.integers(0, 256))
        path.write_bytes(raw)
        try:
            with SampleReader(path) as reader:
                assert len(reader.new()) <= 8
        except CkptdError as error:
            assert "not a" in error.message  # noqa: PT017
