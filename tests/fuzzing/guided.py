"""Runs targets under atheris, in a process each: ``python -m tests.fuzzing.guided FOLDER RUNS``.

FOLDER gets the inputs that reach new code, and in ``found/`` the one that a target fails with; a
campaign that is given the same folder again goes on from there. RUNS are inputs of each target;
with an ``s`` behind the number they are seconds of processor time, whatever else the machine does,
and how many inputs that were is printed. libFuzzer, which atheris drives, ends an input after 10 s
and a process above 2 GiB (https://github.com/google/atheris).
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import atheris

TIMEOUT_S = 10
MEMORY_MB = 2048
LONGEST = 4096
ROUND_S = 20.0
"""Seconds of a process: atheris keeps every array that a comparison of arrays returns."""
FOLLOWED = ["ckptd", "ckptd_nccl", "h11", "http", "prometheus_client", "starlette", "wsgiref"]
"""Packages whose branches lead to the next inputs, as far as `targets` imports them first."""


def main() -> int:
    """Fuzz all targets, or those named behind; the exit code is how many failed."""
    folder, runs, *names = Path(sys.argv[1]).absolute(), *sys.argv[2:]
    (folder / "found").mkdir(parents=True, exist_ok=True)
    os.environ["CKPTD_FUZZ_SCRATCH"] = str(folder)
    with atheris.instrument_imports(include=FOLLOWED, enable_loader_override=False):
        from tests.fuzzing.targets import TARGETS
    timed = runs.endswith("s")
    rounds = math.ceil(float(runs[:-1]) / ROUND_S) if timed else 1
    each = f"{float(runs[:-1]) / rounds:g}s" if timed else runs
    failed = 0
    for name, number in itertools.product(names or TARGETS, range(1, rounds + 1)):
        pid = os.fork()
        if pid == 0:
            _fuzz(name, folder, each, number)
        failed += os.waitpid(pid, 0)[1] != 0
    return min(failed, 125)


def _fuzz(name: str, folder: Path, runs: str, seed: int) -> None:
    from ckptd.errors import CkptdError
    from tests.fuzzing.targets import TARGETS

    target = TARGETS[name]
    short = name.replace(" ", "-")
    inputs = folder / short
    inputs.mkdir(exist_ok=True)
    for number, raw in enumerate(target.seeds):
        target.read(raw)  # a good input is read
        (inputs / f"seed-{number}").write_bytes(raw)

    timed, numbers, began = runs.endswith("s"), itertools.count(1), time.process_time()
    most, most_s = (math.inf, float(runs[:-1])) if timed else (int(runs), math.inf)

    def one(raw: bytes) -> None:
        with suppress(CkptdError):
            target.read(raw)
        number, spent_s = next(numbers), time.process_time() - began
        if number >= most or spent_s >= most_s:
            print(f"{name}: {number} inputs in {spent_s:.1f} s of processor time", flush=True)
            os._exit(0)  # the end of an interpreter costs more than all inputs of a short run

    if seed == 1:
        print(f"== {name}", flush=True)
    told = [
        "-runs=-1",
        f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-max_len={LONGEST}",
    ]
    told += [
        f"-seed={seed}",
        "-keep_seed=1",
        f"-artifact_prefix={folder}/found/{short}-",
    ]
    atheris.Setup([sys.argv[0], *told, str(inputs)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
