"""``python -m tests.simdevice [OPTION...] PROGRAM``: run a program on simulated devices."""

from __future__ import annotations

import argparse
import runpy
import sys

from tests.simdevice.loading import install
from tests.simdevice.simulator import Simulator


def main(arguments: list[str] | None = None) -> None:
    """Run a program, and write to standard error what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simdevice", description=__doc__)
    parser.add_argument("--name", default="cuda", help="cuda, xpu, or a name of your own")
    parser.add_argument("--devices", type=int, default=2, help="how many (2)")
    parser.add_argument("--schedule", default="eager", help="lazy, eager, starve:side, ...")
    parser.add_argument("--delays", type=int, help="seed of random moments in each call")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("program", help="a file, or a module after -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    given = parser.parse_args(arguments)
    simulator = install(given.name, given.devices)
    simulator.schedule = given.schedule
    simulator.delay(given.delays)
    sys.argv = [given.program, *given.arguments]
    try:
        if given.module:
            sys.path.insert(0, "")
            runpy.run_module(given.program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, given.program.rpartition("/")[0])
            runpy.run_path(given.program, run_name="__main__")
    finally:
        _report(simulator)


def _report(simulator: Simulator) -> None:
    lines = [f"simulated device: {len(simulator.problems)} problems, {len(simulator.waits)} waits"]
    lines += [f"  problem: {problem}" for problem in simulator.problems]
    sys.stderr.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
