"""How long the command line takes to start: ``--version``, ``--help``, ``ls`` and ``inspect``.

    python bench/cli_start.py

Against a bare interpreter and against one that imports torch, in the same run.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import common


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=60)
    return time.perf_counter() - start


def main() -> None:
    options = common.arguments(__doc__)
    root = f"{options.dir}/root"
    save = f"import ckptd; ck = ckptd.Checkpointer({root!r}); ck.save(1, {{'n': 1}}); ck.close()"
    subprocess.run([sys.executable, "-c", save], check=True, timeout=120)
    foreign = f"{options.dir}/dcp"
    save = (
        "import torch, torch.distributed.checkpoint as d;"
        f"d.save({{'w': torch.ones(3)}}, checkpoint_id={foreign!r}, no_dist=True)"
    )
    subprocess.run([sys.executable, "-c", save], check=True, timeout=120)
    ckptd = str(Path(sys.executable).with_name("ckptd"))
    cases = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
        "ckptd --version": [ckptd, "--version"],
        "ckptd --help": [ckptd, "--help"],
        "ckptd ls ROOT": [ckptd, "ls", root],
        "ckptd inspect ROOT": [ckptd, "inspect", root],
        "ckptd inspect DCP": [ckptd, "inspect", foreign],
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    order = random.Random(0)
    for _ in range(max(options.reps, 9)):
        names = list(cases)
        order.shuffle(names)
        for name in names:
            found[name].append({"s": seconds(cases[name])})
    torch = common.median(found["python -c 'import torch'"], "s")
    rows = [[n, common.median(s, "s"), torch / common.median(s, "s")] for n, s in found.items()]
    text = common.table(["command", "s", "import torch / this"], rows)
    common.publish("cli_start", "python bench/cli_start.py", text, found)
    common.remove(options.dir)


if __name__ == "__main__":
    main()
