"""Measures every headline table again, one after the other, each on an idle machine.

    python bench/all.py [first step ...]   # all of them, or those that are named
    python bench/all.py --check            # is a table too old for the code that it measures?

What the README and the guides quote comes from these tables, each with its peers in turn, in fresh
processes, five repetitions. Before each one the machine has to be idle (a load below 0.5, waited
for up to ``--wait`` minutes); a table says what the load was as it began. A table is too old when
its commit is more than 200 commits to the code that it measures behind, and when nobody knows its
commit: then ``--check`` ends with 1, and so do the project's checks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import common

SAVING = ("ckptd/checkpoint", "ckptd/base", "ckptd/store")
HEADLINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "first": ("first.py --reps 5", SAVING),
    "save_load": ("save_load.py --reps 5", SAVING),
    "states": ("states.py --reps 5", SAVING),
    "step": ("step.py --reps 5", SAVING),
    "ranks": ("ranks.py --layers 12 --reps 5", SAVING),
    "scale": ("scale.py", SAVING),
    "remote": ("remote.py --reps 5", SAVING),
    "publish": ("publish.py --gb 2 --reps 5 --steps 20", ("ckptd/publish", "ckptd/base")),
    "recorder": ("recorder.py --reps 5", ("ckptd/monitor",)),
    "daemon": ("daemon.py", ("ckptd/monitor",)),
    "elastic": ("elastic.py", ("ckptd/elastic",)),
}
"""Tables: how each is measured, and the code that it measures."""
IDLE = 0.5
MOST_COMMITS = 200


def await_idle(minutes: float) -> None:
    """Return when the machine is idle, or when the time is over, and say which."""
    end = time.monotonic() + 60 * minutes
    while (load := os.getloadavg()[0]) >= IDLE and time.monotonic() < end:
        time.sleep(5.0)
    state = "idle" if load < IDLE else f"NOT idle after {minutes:g} minutes"
    print(f"== load {load:.2f}: {state}", flush=True)


def measure(names: list[str], minutes: float) -> list[str]:
    """Run benches, and return the names of those that failed."""
    failed = []
    for name in names:
        await_idle(minutes)
        script, *options = HEADLINES[name][0].split()
        print(f"== {name}: {script} {' '.join(options)}", flush=True)
        began = time.monotonic()
        ended = subprocess.run([sys.executable, str(common.HERE / script), *options], check=False)
        print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)
        if ended.returncode:
            failed.append(name)
    return failed


def _git(*arguments: str) -> str | None:
    git = ["git", "-C", str(common.HERE.parent), *arguments]
    ended = subprocess.run(git, capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else None


def age(commit: str, paths: tuple[str, ...]) -> int | None:
    """Return how many commits to some code came after one; None when nobody knows that one."""
    counted = _git("rev-list", "--count", f"{commit.rstrip('+')}..HEAD", "--", *paths)
    return None if counted is None else int(counted)


def too_old(names: list[str]) -> list[str]:
    """Return a sentence for each table that has to be measured again."""
    found = []
    for name in names:
        path = common.RESULTS / f"{name}.json"
        commit = json.loads(path.read_text()).get("commit") if path.exists() else None
        passed = age(commit, HEADLINES[name][1]) if commit else None
        if passed is None:
            found.append(f"{name}: its commit ({commit}) is not in this history")
        elif passed > MOST_COMMITS:
            found.append(f"{name}: {passed} commits to its code since {commit}")
    return found


def main() -> None:
    """Measure, or check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(HEADLINES))
    parser.add_argument("--check", action="store_true", help="measure nothing, tell what is old")
    parser.add_argument("--wait", type=float, default=10.0, metavar="MINUTES")
    options = parser.parse_args()
    names = options.tables or list(HEADLINES)
    if unknown := set(names) - set(HEADLINES):
        parser.error(f"no such table: {', '.join(sorted(unknown))}")
    if options.check:
        if _git("rev-parse", "--is-shallow-repository") != "false":
            print("ages of headline tables are not checked: this clone has no history")
            return
        if old := too_old(names):
            raise SystemExit("\n".join(["headline tables to measure again:", *old]))
        print(f"{len(names)} headline tables are of today's code")
        return
    if failed := measure(names, options.wait):
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
