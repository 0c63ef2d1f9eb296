"""What the programs share: who they are, when they end, and a small model."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

__all__ = [
    "NEXT",
    "PLANTED",
    "PLANTED_VARIABLE",
    "PROGRAMS",
    "REST_VARIABLE",
    "SECONDS_VARIABLE",
    "WIDTH",
    "Plan",
    "Program",
    "batch",
    "net",
    "pause",
    "plant",
    "program",
    "rank",
    "rest",
    "rounds",
    "world",
]

SECONDS_VARIABLE = "CORPUS_SECONDS"
REST_VARIABLE = "CORPUS_REST"
"""Seconds that a rank sleeps before a round, in the median; each time others."""
PLANTED_VARIABLE = "CORPUS_PLANTED"
"""Folder for ``N.planted`` of a case: when the fault came, and the process that it met."""
PLANTED, NEXT = "planted", "next"
WIDTH = 16
_AHEAD = 10
"""No rank is so many rounds ahead of rank 0."""


@dataclass(frozen=True)
class Program:
    """One of the corpus: what runs on each rank, on how many, and what has to be installed."""

    main: Callable[[], None]
    ranks: int
    needs: str = ""


class Plan(NamedTuple):
    """A program of the corpus, and the fault that comes to one of its ranks; or none."""

    name: str
    fault: str = ""
    victim: int = -1

    def __str__(self) -> str:
        return f"{self.name}:{self.fault}:{self.victim}" if self.fault else self.name

    @classmethod
    def of(cls, text: str) -> Self:
        name, *rest = text.split(":")
        return cls(name, rest[0], int(rest[1])) if rest else cls(name)


PROGRAMS: dict[str, Program] = {}
_plan = Plan("")
_AT_ROUND, _AT_S = 25, 10.0
"""A fault comes in the first round after both: places of the program are known then."""
_FOR_EVER_S = 3600.0


def plant(plan: Plan) -> None:
    """Let the fault of a plan come to this rank, if it is the victim."""
    global _plan
    _plan = plan


def _harm() -> None:
    """Do to this rank what is planned."""
    number = os.environ["CKPTD_GENERATION"]
    place = Path(os.environ[PLANTED_VARIABLE]) / f"{number}.{PLANTED}"
    new = place.with_suffix(".new")
    new.write_text(f"{time.time()} {os.getpid()}")
    new.rename(place)
    match _plan.fault:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(_FOR_EVER_S)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise RuntimeError("a planted error")
        case "extra":
            dist.all_reduce(torch.ones(3))


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


def rest() -> None:
    """Sleep before a round, where the programs are to last for hours and cost little."""
    if median := float(os.environ.get(REST_VARIABLE, "0")):
        pause(median * random.lognormvariate(0, 0.7))


def rounds(least: int = 8) -> Iterator[int]:
    """Yield numbers of rounds, equally many on all ranks, for as long as the program is to last.

    Ranks agree through the job store, and not by a call of their own.
    """
    store = dist.distributed_c10d._get_default_store()
    end = time.monotonic() + float(os.environ.get(SECONDS_VARIABLE, "3"))
    last, number = 0, 0
    harm_at = time.monotonic() + _AT_S if _plan.fault and rank() == _plan.victim else math.inf
    while not last or number < last:
        if number >= _AT_ROUND and time.monotonic() >= harm_at:
            harm_at = math.inf
            _harm()
        rest()
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
