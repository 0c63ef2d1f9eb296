"""Runs the corpus under ``ckptd watch``: ``python -m tests.monitor.corpus.run [NAME ...]``.

    python -m tests.monitor.corpus.run                               # all, some seconds each
    python -m tests.monitor.corpus.run --seconds 180 --at-once 8     # three minutes each

Prints a row a program. The exit code is 1 if one failed by itself or had an incident.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from tests.monitor.corpus import idioms, libraries, pipelines, roles, sharded  # noqa: F401
from tests.monitor.corpus.base import PROGRAMS, SECONDS_VARIABLE

__all__ = ["Outcome", "names", "run", "run_all"]

ROOT = Path(__file__).parents[3]
_START_S = 400.0
_SHOWN = 1500


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one program: its exit code, the incidents, and the end of its output."""

    name: str
    code: int
    incidents: list[dict[str, Any]]
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


def run(name: str, seconds: float) -> Outcome:
    """Run one program for about so long, watched as anybody would."""
    beside = Path(sys.executable)
    command = [
        *(str(beside.with_name("ckptd")), "watch", "--json", "--"),
        *(str(beside.with_name("torchrun")), "--nproc-per-node", str(PROGRAMS[name].ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", name),
        *("-m", "tests.monitor.corpus.main", name),
    ]
    env = {**os.environ, SECONDS_VARIABLE: str(seconds), "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=seconds + _START_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate()
    incidents: list[dict[str, Any]] = []
    code = 1
    for line in err.splitlines():
        if line.startswith("{"):
            told = msgspec.json.decode(line)
            incidents, code = told.get("incidents", []), told.get("exit_code", 1)
    return Outcome(
        name=name,
        code=code or (process.returncode or 0),
        incidents=incidents,
        seconds=time.monotonic() - began,
        load=os.getloadavg()[0],
        output=(out + err)[-_SHOWN:] if code else "",
    )


def run_all(chosen: Sequence[str], seconds: float, at_once: int) -> list[Outcome]:
    """Run programs, some at a time, and print what came of each as it ends."""

    def one(name: str) -> Outcome:
        outcome = run(name, seconds)
        print(_row(outcome), flush=True)
        return outcome

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, chosen))


def _row(outcome: Outcome) -> str:
    told = "; ".join(f"{i['kind']}: {_said(i)}" for i in outcome.incidents)
    words = (
        "fine" if outcome.fine else "",
        f"exit code {outcome.code}" if outcome.code else "",
        told,
        outcome.output,
    )
    head = f"{outcome.name}: {outcome.seconds:.0f} s, load {outcome.load:.1f}:"
    return " ".join(filter(None, (head, *words)))


def _said(incident: dict[str, Any]) -> str:
    verdict = incident["verdict"]
    who = [f"{s['target']} {s['name']} {s['detail']}" for s in verdict["suspects"][:3]]
    return " | ".join([*who, *verdict["evidence"][:2], str(verdict["numbers"])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="all, if left out")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    outcomes = run_all(given.names or names(), given.seconds, given.at_once)
    if given.out is not None:
        given.out.write_bytes(msgspec.json.encode(outcomes))
    bad = [o.name for o in outcomes if not o.fine]
    print(f"{len(outcomes)} programs, {len(bad)} with an incident or an error: {' '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
