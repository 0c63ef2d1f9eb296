"""Memory of a reshard: what is out is counted, whenever it comes back."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptd.reshard import reading
from ckptd.reshard.reading import Ledger

_BYTES = 1 << 16


class _Memory(mmap.mmap):
    """Asked for its length, it first does what a collection of Python might do there."""

    meanwhile: Callable[[], object] | None = None

    def __len__(self) -> int:
        call, self.meanwhile = self.meanwhile, None
        if call is not None:
            call()
        return super().__len__()


@pytest.mark.parametrize("way", ["out", "back"])
def test_memory_that_comes_back_while_other_memory_is_counted_is_counted_too(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[_Memory] = []

    def pages(nbytes: int) -> _Memory:
        made.append(_Memory(-1, nbytes))
        made[-1].meanwhile = slabs.pop if len(made) > 2 else None
        return made[-1]

    monkeypatch.setattr(reading, "pages", pages)
    ledger = Ledger(8 * _BYTES)
    slabs: list[NDArray[np.uint8]] = []
    slabs += [ledger.slab(_BYTES) for _ in range(2)]
    if way == "out":
        slabs.append(ledger.slab(_BYTES))
    else:
        made[0].meanwhile = slabs.pop
        del slabs[0]
    assert ledger._out == len(slabs) * _BYTES
    slabs.clear()
    assert ledger._out == 0
