"""The matrix of kinds and seeds.

``python -m tests.monitor.faults.run --seeds 5 [--kinds ...] [--floor 2] [--load 2]``

Each kind is planted with each seed in a job of real ranks, watched by the real agent and daemon.
What was recorded is judged again afterwards, and must say the same. Results go to standard output
and, with ``--out``, as JSON to a file; recordings stay in ``--folder``.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from tests.monitor.faults.case import Case, draw
from tests.monitor.faults.judge import Outcome, summary, table
from tests.monitor.faults.kinds import KINDS
from tests.monitor.faults.load import Load
from tests.monitor.faults.scene import RECORDING, Scene, replay
from tests.monitor.faults.zygote import Zygote

__all__ = ["main", "run"]


def run(
    zygote: Zygote, kinds: list[str], seeds: range, floor: float, folder: Path, *, again: bool
) -> list[Outcome]:
    """Run each of `kinds` with each of `seeds`; print a line a case."""
    cases = [_case(kind, seed, floor) for seed in seeds for kind in kinds]
    random.Random(seeds.start).shuffle(cases)
    outcomes = []
    for number, case in enumerate(cases, 1):
        begun = time.monotonic()
        place = folder / case.name
        outcome = Scene(zygote, case, place).run()
        if again and (place / RECORDING).exists():
            outcome = msgspec.structs.replace(outcome, replay=replay(place, case))
        outcomes.append(outcome)
        _say(f"{number}/{len(cases)} {time.monotonic() - begun:.0f} s {line(outcome)}")
        with (folder / "outcomes.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")
        if outcome.right:
            _clear(place)
    return outcomes


def line(outcome: Outcome) -> str:
    """Return one case in one line."""
    case = outcome.case
    latency = "" if outcome.latency_s is None else f"{outcome.latency_s:+.2f} s"
    names = "; ".join(f"{h.kind}: {', '.join(h.names[:5])}" for h in outcome.heard)
    again = outcome.replay is not None and not same_again(outcome)
    parts = [
        "ok " if outcome.right else "BAD",
        f"{case.kind} {case.seed} ({case.loop}, rank {case.victim}, {case.point})",
        f"-> {names or 'nothing'} {latency}",
        f"replay: {outcome.replay}" if again else "",
        outcome.note,
    ]
    return " ".join(filter(None, parts))


def same_again(outcome: Outcome) -> bool:
    """Whether the recording says what was said live."""
    live = tuple(" ".join([h.kind, *h.names]) for h in outcome.heard)
    return outcome.replay == live


def _case(kind: str, seed: int, floor: float) -> Case:
    row = KINDS[kind]
    return draw(kind, seed, floor=floor, nodes=row.nodes, pause=row.pause)


def _clear(place: Path) -> None:
    """Keep the recording and what the case was; the rest of a right case tells nothing."""
    for path in place.iterdir():
        if path.name != RECORDING:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--floor", type=float, default=2.0)
    parser.add_argument("--load", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="ckptd-faults-"))
    seeds = range(given.first, given.first + given.seeds)
    with ExitStack() as stack:
        stack.enter_context(Load(given.load))
        zygote = stack.enter_context(Zygote())
        outcomes = run(zygote, given.kinds.split(","), seeds, given.floor, folder, again=True)
    _say("\n".join(["", *table(outcomes), ""]))
    said = summary(outcomes) | {
        "floor s": given.floor,
        "load": given.load,
        "replayed": sum(o.replay is not None for o in outcomes),
        "replay says the same": sum(same_again(o) for o in outcomes if o.replay is not None),
    }
    _say(msgspec.json.encode(said).decode())
    if given.out:
        given.out.write_bytes(msgspec.json.encode({"summary": said, "outcomes": outcomes}))
    _say(f"recordings: {folder}")
    return 0 if all(o.right for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
