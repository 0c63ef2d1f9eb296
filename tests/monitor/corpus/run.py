"""Runs the corpus under ``ckptd watch``: ``python -m tests.monitor.corpus.run [NAME ...]``.

    python -m tests.monitor.corpus.run                               # all, some seconds each
    python -m tests.monitor.corpus.run --seconds 180 --at-once 5     # three minutes each
    python -m tests.monitor.corpus.run --seconds 600 --at-once 8 --rest 1    # hours of clean jobs

Programs are dealt out to so many watches; each runs its share one after the other, so that its
daemon sees jobs that change. Prints a row a program. The exit code is 1 if one failed by itself or
had an incident.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tests.monitor.corpus.base import REST_VARIABLE, SECONDS_VARIABLE
from tests.monitor.corpus.programs import PROGRAMS

__all__ = ["Outcome", "names", "run"]

ROOT = Path(__file__).parents[3]
_SHOWN = 40


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one program.

    Attributes
    ----------
    name, code
        Which, and its exit code.
    incidents
        As ``ckptd watch`` says them.
    seconds, load
        How long it took, and the machine's load average at its end.
    output
        The last lines, of one that failed.
    """

    name: str
    code: int
    incidents: tuple[str, ...]
    seconds: float
    load: float
    output: str = ""

    @property
    def fine(self) -> bool:
        return not self.code and not self.incidents


def names() -> list[str]:
    """Return the programs that can run here."""
    return [
        name
        for name, program in sorted(PROGRAMS.items())
        if not program.needs or importlib.util.find_spec(program.needs) is not None
    ]


def run(chosen: Sequence[str], seconds: float, rest: float = 0.0) -> Iterator[Outcome]:
    """Run programs one after the other, about so long each, and yield what came of each.

    Ranks sleep for about `rest` seconds before each round.
    """
    command = [
        *(sys.executable, "-c", "from ckptd.cli.main import main; main()", "watch", "--"),
        *(sys.executable, "-m", "tests.monitor.corpus.main", *chosen),
    ]
    env = {**os.environ, SECONDS_VARIABLE: str(seconds), REST_VARIABLE: str(rest)}
    env |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    began, name, lines, told = time.monotonic(), "", list[str](), list[str]()
    known: set[str] = set()
    for line in process.stdout:
        lines = [*lines[-_SHOWN:], line.rstrip()]
        if begun := re.search(r"begin (\w+)$", line):
            # That one of an earlier program is over is told in a later one.
            known |= {incident.partition(":")[0] for incident in told}
            began, name, told = time.monotonic(), begun[1], []
        elif "ckptd: incident" in line:
            incident = line.partition("ckptd: incident ")[2].rstrip()
            if incident.partition(":")[0] not in known:
                told.append(incident)
                print(f"{name}: {incident}", flush=True)
        elif ended := re.search(r"end (\w+) (-?\d+)$", line):
            yield Outcome(
                name=ended[1],
                code=int(ended[2]),
                incidents=tuple(told),
                seconds=time.monotonic() - began,
                load=os.getloadavg()[0],
                output="\n".join(lines) if int(ended[2]) else "",
            )
            name = ""
    if process.wait() or name:
        yield Outcome(
            name=name or "watch",
            code=process.returncode or 1,
            incidents=tuple(told),
            seconds=time.monotonic() - began,
            load=os.getloadavg()[0],
            output="\n".join(lines),
        )


def _row(outcome: Outcome) -> str:
    words = (
        f"{outcome.name}: {outcome.seconds:.0f} s, load {outcome.load:.1f}:",
        "fine" if outcome.fine else "",
        f"exit code {outcome.code}" if outcome.code else "",
        "; ".join(outcome.incidents),
        outcome.output,
    )
    return " ".join(filter(None, words))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="all, if left out")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds before each round")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    chosen = given.names or names()
    shares = [chosen[i :: given.at_once] for i in range(min(given.at_once, len(chosen)))]
    outcomes: list[Outcome] = []

    def follow(share: Sequence[str]) -> None:
        for outcome in run(share, given.seconds, given.rest):
            print(_row(outcome), flush=True)
            outcomes.append(outcome)

    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(follow, shares))
    if given.out is not None:
        given.out.write_bytes(msgspec.json.encode(outcomes))
    bad = [o.name for o in outcomes if not o.fine]
    hours = sum(o.seconds for o in outcomes) / 3600
    print(
        f"{len(outcomes)} programs in {hours:.1f} h, {len(bad)} with an incident or an error:"
        f" {' '.join(bad)}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
