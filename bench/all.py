"""Measures every headline table again, one after the other, each on an idle machine.

    python bench/all.py [first step ...]   # all of them, or those that are named
    python bench/all.py --check            # is a table too old for the code that it measures?

What the README and the guides quote comes from these tables, each with its peers in turn, in fresh
processes, five repetitions. Before each one the machine has to be idle (a load below 0.5, waited
for up to ``--wait`` minutes); a table says what the load was as it began. At the end the README's
figures are written again. A table is too old when its commit is more than 200 commits to the code
that it measures behind, and when nobody knows its commit: then ``--check`` ends with 1, and so do
the project's checks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from typing import Any

import common

SAVING = ("ckptd/checkpoint", "ckptd/base", "ckptd/store")
PEERS = '"ckptd,torch.save,DCP save,DCP async thread,DCP async process async staging'
RESTARTS = "--system ckptd-run --system ckptd-run-watched --system ckptd-session"
RESTARTS += " --system ckptd-torchrun --system torchrun --system torchrun-tuned"
RESTARTS += " --case kill-worker --case lose-node --case lose-store-host --case restart"
HEADLINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "first": ("first.py --reps 5", SAVING),
    "save_load": (
        f'save_load.py --reps 5 --layers 6 --cases {PEERS},torchsnapshot async_take"',
        SAVING,
    ),
    "states": (
        'states.py --reps 5 --saves 4 --cases "1 MB;1,000 tensors;10,000 tensors"',
        SAVING,
    ),
    "many": ('states.py --reps 5 --saves 2 --cases "100,000 tensors" --table many', SAVING),
    "large": ('states.py --reps 5 --saves 2 --cases "4 GB" --table large', SAVING),
    "step": (f'step.py --reps 5 --layers 4 --words 8192 --cases {PEERS}"', SAVING),
    "ranks": ("ranks.py --layers 6 --reps 5", SAVING),
    "scale": ("scale.py", SAVING),
    "remote": ("remote.py --reps 5", SAVING),
    "publish": ("publish.py --gb 1 --reps 5 --steps 20", ("ckptd/publish", "ckptd/base")),
    "recorder": ("recorder.py --reps 5", ("ckptd/monitor",)),
    "daemon": ("daemon.py", ("ckptd/monitor",)),
    "elastic": (f"elastic.py --reps 5 {RESTARTS}", ("ckptd/elastic",)),
}
"""Tables: how each is measured, and the code that it measures."""
UNTOLD = frozenset({"elastic"})
"""Those that were written before tables told commit, date and load, or not yet: it only shrinks."""
FIGURES = (
    ("first save: training waits, s", "first", "blocked_s"),
    ("first save: durable, with imports, s", "first", "durable_s"),
    ("load in a new process, with imports, s", "first", "cached_s"),
    ("later save: training waits, s", "save_load", "blocked_s"),
    ("step with a save, by a step without", "step", "with_s"),
    ("save of 16,384 ranks: CPU of rank 0, s", "scale", "total s"),
)
"""Figures of the README: in which table, and where in a sample."""
README = common.HERE.parent / "README.md"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"
IDLE = 0.5
MOST_COMMITS = 200


def await_idle(minutes: float) -> bool:
    """Return when the machine is idle, or when the time is over, and tell which."""
    end = time.monotonic() + 60 * minutes
    while (load := os.getloadavg()[0]) >= IDLE and time.monotonic() < end:
        time.sleep(5.0)
    state = "idle" if load < IDLE else f"NOT idle after {minutes:g} minutes"
    print(f"== load {load:.2f}: {state}", flush=True)
    return load < IDLE


def measure(names: list[str], minutes: float) -> list[str]:
    """Run benches, and return a sentence for each that failed or had no idle machine."""
    told = []
    for name in names:
        if not await_idle(minutes):
            told.append(f"{name}: the machine was not idle")
        script, *options = shlex.split(HEADLINES[name][0])
        print(f"== {name}: {HEADLINES[name][0]}", flush=True)
        began = time.monotonic()
        ended = subprocess.run([sys.executable, str(common.HERE / script), *options], check=False)
        print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)
        if ended.returncode:
            told.append(f"{name}: failed")
    return told


def result(name: str) -> dict[str, Any]:
    """Return what is kept of a table: nothing when it was never measured."""
    path = common.RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def figures() -> str:
    """Return the README's table: what is measured, by ckptd, by torch.save and DCP, and how."""
    rows: list[list[Any]] = []
    for words, table, key in FIGURES:
        found = result(table)
        if "commit" not in found:
            continue
        samples: dict[str, list[dict[str, Any]]] = found["data"].get("runs", found["data"])
        if table == "scale":
            wanted = {"save": "later", "ranks": 16384, "layout": "fsdp2", "board": "TCPStore"}
            samples = {"ckptd": [r for r in samples["pays"] if wanted.items() <= r.items()]}
        by = "without_s" if table == "step" else ""
        values = {
            name: statistics.median(s[key] / s.get(by, 1.0) for s in taken if key in s)
            for name, taken in samples.items()
            if name != "limit" and any(key in s for s in taken)
        }
        best = min(((v, n) for n, v in values.items() if n.startswith("DCP")), default=None)
        peers = [values.get("torch.save", "–"), "–" if best is None else "{:.2f}, {}".format(*best)]
        how = f"`{found['command']}`, {found['date']}"
        rows.append([words, values["ckptd"], *peers, how])
    head = ["what", "ckptd", "torch.save, fsync, torch.load(mmap)", "DCP's best way", "measured by"]
    return common.table(head, rows) + "\n"


def written(page: str) -> str:
    """Return the README with the figures of today's tables."""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + figures() + END + rest.partition(END)[2]


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
        commit = result(name).get("commit")
        passed = age(commit, HEADLINES[name][1]) if commit else None
        if passed is None:
            found.append(f"{name}: its commit ({commit}) is not in this history")
        elif passed > MOST_COMMITS:
            found.append(f"{name}: {passed} commits to its code since {commit}")
    return found


def untold() -> list[str]:
    """Return a sentence for each table that does not say where it comes from, as all have to."""
    page = (common.HERE / "RESULTS.md").read_text()
    found = []
    for name in HEADLINES:
        origin, block = result(name), page.partition(f"<!-- {name} -->")[2]
        said = (
            all(
                (key in origin and str(origin[key])[:12] in block.partition("<!-- /")[0])
                for key in ("commit", "date")
            )
            and {"load", "machine", "command"} <= origin.keys()
        )
        if said and name in UNTOLD:
            found.append(f"{name}: it tells its commit now: take it off UNTOLD")
        elif not said and name not in UNTOLD:
            found.append(f"{name}: it does not tell commit, date, load, machine and command")
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
        if not options.tables:
            names = [name for name in names if name not in UNTOLD or "commit" in result(name)]
            rest = [name for name in HEADLINES if name not in names]
            print(f"not checked, as they do not tell their commit yet: {', '.join(rest) or 'none'}")
        if old := [*too_old(names), *untold()]:
            raise SystemExit("\n".join(["headline tables to measure again:", *old]))
        print(f"{len(names)} headline tables are of today's code")
        return
    told = measure(names, options.wait)
    README.write_text(written(README.read_text()))
    if told:
        raise SystemExit("\n".join(told))


if __name__ == "__main__":
    main()
