"""What the programs share: who they are, when they end, and a small model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["PROGRAMS", "Program", "batch", "net", "pause", "program", "rank", "rounds", "world"]

SECONDS_VARIABLE = "CORPUS_SECONDS"
WIDTH = 16
_AHEAD = 10
"""No rank is so many rounds ahead of rank 0."""


@dataclass(frozen=True)
class Program:
    """One of the corpus: what runs on each rank, on how many, and what has to be installed."""

    main: Callable[[], None]
    ranks: int
    needs: str = ""


PROGRAMS: dict[str, Program] = {}


def program(ranks: int = 4, needs: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Put a function into the corpus under its own name."""

    def put(main: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[main.__name__] = Program(main, ranks, needs)
        return main

    return put


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def pause(seconds: float = 0.02) -> None:
    """Compute for so long, for what a sleep stands here."""
    time.sleep(seconds)


def rounds(least: int = 8) -> Iterator[int]:
    """Yield numbers of rounds, equally many on all ranks, for as long as the program is to last.

    Ranks agree through the job store, and not by a call of their own.
    """
    store = dist.distributed_c10d._get_default_store()
    end = time.monotonic() + float(os.environ.get(SECONDS_VARIABLE, "3"))
    last, number = 0, 0
    while not last or number < last:
        if not last and rank() == 0 and number >= least and time.monotonic() >= end:
            last = number + _AHEAD
            store.set("last", str(last))
        elif not last and number % 5 == 0 and store.check(["last"]):
            last = int(store.get("last"))
        yield number
        number += 1


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def batch(size: int = 4) -> torch.Tensor:
    return torch.randn(size, WIDTH)
