"""Faults of the monitor itself: ``python -m tests.monitor.faults.upset [--seeds 3] [--kinds ...]``.

A job makes a fixed number of steps while its agent or daemon is killed, its rings are overwritten
at random, or there is no room for them. It must end as it does unwatched, to the bit, with nobody
accused, and be watched again in the end where that is possible.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.monitor.faults.case import LOOPS, Case
from tests.monitor.faults.chain import Chain
from tests.monitor.faults.clean import unwatched
from tests.monitor.faults.judge import Heard
from tests.monitor.faults.scene import Scene, results
from tests.monitor.faults.zygote import Zygote
from tests.processes import until

__all__ = ["UPSETS", "Upset", "main", "upset"]

STEPS = 300
AT_STEP = 40
ROOM = "size=300k"


class Upset(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one: whether parameters are the same, who was accused, who reported again."""

    kind: str
    seed: int
    loop: str
    same: bool
    incidents: tuple[Heard, ...]
    reporting: int
    wanted: int

    @property
    def fine(self) -> bool:
        return self.same and not self.incidents and self.reporting == self.wanted


def _agent(chain: Chain, rng: random.Random) -> None:
    chain.kill(chain.agents[0])
    chain.agents[0] = chain.start_agent(0)


def _daemon(chain: Chain, rng: random.Random) -> None:
    chain.kill(chain.daemon)
    chain.daemon = chain.start_daemon()


def _ring(chain: Chain, rng: random.Random) -> None:
    """Overwrite a tenth of one rank's ring, here and there, under the hands of both sides."""
    path = rng.choice(sorted(chain.folder.glob("rings/*/*.ring")))
    size = path.stat().st_size
    fd = os.open(path, os.O_WRONLY)
    try:
        for _ in range(200):
            os.pwrite(fd, rng.randbytes(size // 2000), rng.randrange(size - size // 2000))
    finally:
        os.close(fd)


def _nothing(chain: Chain, rng: random.Random) -> None:
    pass


UPSETS: dict[str, tuple[Callable[[Chain, random.Random], None], int]] = {
    "agent": (_agent, 4),
    "daemon": (_daemon, 4),
    # A ring that lies is not read any more, or what it says is refused: the others are.
    "ring": (_ring, -1),
    "full": (_nothing, 0),
}
"""What is done, and how many ranks must report at the end; -1 is any number."""


def upset(zygote: Zygote, kind: str, seed: int, folder: Path, plain: dict[str, list[str]]) -> Upset:
    """Run one job with its monitor upset; `plain` remembers how loops end unwatched."""
    rng = random.Random(f"{kind} {seed}")
    loop = rng.choice(LOOPS)
    case = Case(kind="none", seed=seed, loop=loop, floor=3.0, steps=STEPS)
    if loop not in plain:
        plain[loop] = unwatched(zygote, case, folder / f"plain-{loop}", STEPS)
    act, wanted = UPSETS[kind]
    place = folder / f"{kind}-{seed}"
    scene = Scene(zygote, case, place)
    if kind == "full":
        _little_room(place)
    try:
        with Chain(case, place) as chain:
            scene.chain = chain
            scene.start()
            if kind != "full":
                until(lambda: _step(chain) > AT_STEP, "some steps", 120.0)
            act(chain, rng)
            reporting, seen = 0, -1
            while seen != 0:
                told = chain.job()
                reporting = told["ranks_reporting"] if told is not None else reporting
                seen = sum(code is None for code in zygote.look().values())
            until(lambda: chain.job() is not None, "the daemon")
            incidents = tuple(scene.heard())
        same = [r.digest for r in results(place, case.world)] == plain[loop]
    finally:
        zygote.end()
        if kind == "full":
            subprocess.run(["umount", str(place / "rings")], check=True)
    return Upset(
        kind=kind,
        seed=seed,
        loop=loop,
        same=same,
        incidents=incidents,
        reporting=reporting,
        wanted=reporting if wanted < 0 else wanted,
    )


def _little_room(place: Path) -> None:
    """Give rings a file system that has no room for one of them; needs root."""
    rings = place / "rings"
    rings.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", ROOM, "tmpfs", str(rings)], check=True)


def _step(chain: Chain) -> int:
    told = chain.job()
    return told["step"]["min"] if told is not None and told["step"] else -1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(UPSETS))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckptd-upset-"))
    plain: dict[str, list[str]] = {}
    outcomes = []
    with Zygote() as zygote:
        for seed in range(given.seeds):
            for kind in given.kinds.split(","):
                outcomes.append(upset(zygote, kind, seed, folder, plain))
                print(msgspec.json.encode(outcomes[-1]).decode(), flush=True)
    return 0 if all(o.fine for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
