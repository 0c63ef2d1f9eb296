"""Python's garbage collector: paused while many objects are made, kept from what stays.

Walking a state, planning and decoding a manifest make tens of thousands of objects that all live
on for a moment. That sets off full collections, which visit every object of the training process:
0.14 s each in a process that has imported torch, three times what the planning itself takes.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Prevent automatic collections in the block; a collector that was off stays off.

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


def spare() -> None:
    """Keep collections from all objects that there are, for as long as the process lives.

    Nor does its end look for cycles in them, unless Triton was imported: its native code writes
    dozens of lines about leaks if types and functions of it are still there.
    """
    gc.freeze()
    atexit.register(_back)


def _back() -> None:
    if "triton" in sys.modules:
        gc.unfreeze()
