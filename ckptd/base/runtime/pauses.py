"""Python's garbage collector, held while a burst of small objects is made.

Walking a state, planning and decoding a manifest make tens of thousands of objects that all live
on for a moment. That sets off full collections, which visit every object of the training process:
0.14 s each in a process that has imported torch, three times what the planning itself takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collection"]


@contextmanager
def no_collection() -> Iterator[None]:
    """Let no automatic collection start in the block; a collector that was off stays off.

    For short blocks: meanwhile cycles of all threads pile up. Blocks may overlap in threads; when
    all have ended the collector is as it was.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
