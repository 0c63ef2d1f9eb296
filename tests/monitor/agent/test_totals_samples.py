"""Samples of ranks reach the sheet, each once; files that are bad or not ours do not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ckptd.monitor.agent.rings import Ring, Rings
from ckptd.monitor.agent.totals import RingSamples
from ckptd.monitor.ring import RingIdentity, RingWriter
from ckptd.monitor.samples import SampleKind, SampleWriter, samples_path
from tests.monitor.agent.test_rings import rings

WHO = RingIdentity(rank=1, world=2)


@contextmanager
def a_rank(folder: Path) -> Iterator[tuple[Ring, Path]]:
    writer = RingWriter(folder / f"x-1-{os.getpid()}.ring", WHO)
    with rings(folder) as found:
        assert isinstance(found, Rings)
        found.refresh(time.monotonic())
        yield found.ranks[1], samples_path(writer.path)


def test_samples_are_taken_once(tmp_path: Path) -> None:
    samples = RingSamples()
    with a_rank(tmp_path) as (ring, path):
        samples.add(ring)
        assert len(samples.take({1: 0})) == 0
        writer = SampleWriter(path, WHO)
        writer.add(SampleKind.SUM, 77, 2, 5, 123)
        writer.norm(78, 2, 6, 1.5)
        samples.add(ring)
        rows = samples.take({1: 3})
        assert rows["row"].tolist() == [3, 3]
        assert rows["step"].tolist() == [5, 6]
        assert rows["what"].tolist() == [0, 1]
        assert rows["set"].tolist() == [77, 78]
        assert rows["value"][0] == 123
        assert rows["value"][1:].copy().view(np.float64).tolist() == [1.5]
        samples.add(ring)
        assert len(samples.take({1: 3})) == 0
        samples.close()


def test_a_damaged_file_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = RingSamples()
    with a_rank(tmp_path) as (ring, path):
        path.write_bytes(os.urandom(3000))
        for _ in range(3):
            samples.add(ring)
        assert len(samples.take({1: 0})) == 0
    assert len(caplog.records) == 1
    samples.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    samples = RingSamples()
    with a_rank(tmp_path) as (ring, path):
        writer = SampleWriter(tmp_path / "elsewhere", WHO)
        writer.add(SampleKind.SUM, 77, 2, 5, 123)
        path.symlink_to(writer.path)
        samples.add(ring)
        assert len(samples.take({1: 0})) == 0


def test_nothing_is_left_open(tmp_path: Path) -> None:
    samples = RingSamples()
    with a_rank(tmp_path) as (ring, path):
        SampleWriter(path, WHO).add(SampleKind.SUM, 77, 2, 5, 123)
        before = len(os.listdir("/proc/self/fd"))
        samples.add(ring)
        samples.keep_only([])
        assert len(os.listdir("/proc/self/fd")) == before
