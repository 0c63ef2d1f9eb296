"""A job without a fault.

``python -m tests.monitor.faults.clean --minutes 30 [--load 2] [--loop hand]``

It checkpoints, evaluates, compiles and collects garbage, beside processes that only compute. Nobody
may be accused, and an unwatched run of as many steps must end with the same parameters.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from tests.monitor.faults.case import LOOPS, Case
from tests.monitor.faults.chain import Chain
from tests.monitor.faults.judge import Heard
from tests.monitor.faults.load import Load
from tests.monitor.faults.scene import END_S, Scene, results
from tests.monitor.faults.trainer import STOP
from tests.monitor.faults.zygote import Zygote
from tests.processes import until

__all__ = ["Clean", "main", "unwatched"]

LOOK_S = 5.0


class Clean(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes
    ----------
    loop, floor, minutes, load
        What was run.
    steps, collectives
        Steps, and calls of all ranks together.
    incidents
        What the daemon said; nothing is right.
    same
        Whether the unwatched run ended with the same parameters.
    codes
        Exit codes of the ranks.
    """

    loop: str
    floor: float
    minutes: float
    load: int
    steps: int
    collectives: int
    incidents: tuple[Heard, ...]
    same: bool
    codes: dict[int, int | None]

    @property
    def fine(self) -> bool:
        return self.same and not self.incidents and not any(self.codes.values())


def watched(zygote: Zygote, case: Case, folder: Path, minutes: float, load: int) -> Clean:
    """Run `case` for so long, then without the monitor, and compare."""
    scene = Scene(zygote, case, folder)
    with Load(load), Chain(case, folder) as chain:
        scene.chain = chain
        scene.start()
        chain.wait_for_ranks()
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end and not any(zygote.look().values()):
            time.sleep(min(LOOK_S, max(end - time.monotonic(), 0)))
        (folder / STOP).touch()
        codes = until(lambda: _ended(zygote), "the ranks to end", END_S)
        time.sleep(2.0)
        incidents = tuple(scene.heard())
    done = results(folder, case.world)
    again = unwatched(zygote, case, folder.with_name(f"{folder.name}-plain"), done[0].steps)
    return Clean(
        loop=case.loop,
        floor=case.floor,
        minutes=minutes,
        load=load,
        steps=done[0].steps,
        collectives=sum(r.calls for r in done),
        incidents=incidents,
        same=[r.digest for r in done] == again,
        codes=codes,
    )


def unwatched(zygote: Zygote, case: Case, folder: Path, steps: int) -> list[str]:
    """Make as many steps with no monitor at all; return the digests of the parameters."""
    plain = msgspec.structs.replace(case, steps=steps, watched=False)
    Scene(zygote, plain, folder)
    zygote.start(plain, folder, {})
    limit = 3600.0 + steps
    until(lambda: _ended(zygote), "the unwatched ranks to end", limit)
    return [r.digest for r in results(folder, case.world)]


def _ended(zygote: Zygote) -> dict[int, int | None] | None:
    told = zygote.look()
    return told if all(code is not None for code in told.values()) else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--load", type=int, default=2)
    parser.add_argument("--floor", type=float, default=5.0)
    parser.add_argument("--loop", default="hand", choices=LOOPS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="ckptd-clean-"))
    case = Case(kind="none", seed=0, loop=given.loop, floor=given.floor, every=50, compile=True)
    with Zygote() as zygote:
        said = watched(zygote, case, folder / "job", given.minutes, given.load)
    text = msgspec.json.format(msgspec.json.encode(said), indent=1)
    print(text.decode())
    if given.out:
        given.out.write_bytes(text + b"\n")
    return 0 if said.fine else 1


if __name__ == "__main__":
    sys.exit(main())
