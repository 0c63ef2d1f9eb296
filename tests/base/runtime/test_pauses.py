"""No collection starts in the block, and the collector is as it was afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from ckptd.base.runtime.pauses import no_collection


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def litter() -> None:
    for _ in range(2 * gc.get_threshold()[0]):
        cycle: list[object] = []
        cycle.append(cycle)


def test_no_collection_starts_in_the_block() -> None:
    before = collections()
    with no_collection():
        litter()
        assert collections() == before
    litter()
    assert collections() > before


def test_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(RuntimeError), no_collection():
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection(), no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_overlapping_blocks_end_with_the_collector_on() -> None:
    first, second = no_collection(), no_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.mark.parametrize("imported", ["", "triton"])
def test_what_was_spared_is_looked_at_in_the_end_for_triton(imported: str) -> None:
    program = f"""
import gc, sys, types
from ckptd.base.runtime.pauses import spare
class Cycle:
    def __del__(self): print("collected", flush=True)
kept = Cycle()
kept.itself = kept
if {imported!r}:
    sys.modules[{imported!r}] = types.ModuleType({imported!r})
spare()
gc.collect()
print("spared", flush=True)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["spared", *["collected"] * (imported != "")]
