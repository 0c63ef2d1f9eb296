"""Referring to unchanged chunks: what it saves where most is frozen, and costs where nothing is.

    python bench/refer.py [--mib 512] [--reps 5]

One process saves a state of tensors of 4 MiB ten times. *frozen*: a tenth changes between saves, as
with LoRA and its optimizer; *dense*: everything does. Each with and without ``refer``, in
alternation, in fresh processes. A dense state is searched in saves 2 to 4 and then no more.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import common

SAVES = 10
SEARCHED, SETTLED = slice(1, 4), slice(4, SAVES)
CASES = ("frozen refer", "frozen all", "dense refer", "dense all")


def measure(folder: str, case: str, mib: int) -> dict[str, Any]:
    """Return seconds until durable and bytes written of each save."""
    import ckptd
    from ckptd.checkpoint.root.catalogue import Catalogue
    from ckptd.store import open_store

    kind, how = case.split()
    make = common.noise()
    live = {f"t{i:04d}": make((1024, 1024)) for i in range(mib // 4)}
    hot = list(live.values())[:: 10 if kind == "frozen" else 1]
    seconds, sent = [], []
    with (
        ckptd.Checkpointer(folder, keep=2, storage=ckptd.Storage(dedup=how == "refer")) as ck,
        open_store(folder) as root,
    ):
        for step in range(1, SAVES + 1):
            for tensor in hot:
                tensor.add_(1.0)
            common.settle()
            start = time.perf_counter()
            handle = ck.save(step, {"model": live})
            assert handle is not None
            handle.durable()
            seconds.append(time.perf_counter() - start)
            catalogue = Catalogue(root)
            name = catalogue.latest()
            assert name is not None
            manifest = catalogue.manifest(name)
            own = (f for f in manifest.files if f.path.startswith(manifest.folder))
            sent.append(sum(f.data_bytes for f in own))
    return {
        "searched_s": middle(seconds[SEARCHED]),
        "settled_s": middle(seconds[SETTLED]),
        "written_mb": middle(sent[SETTLED]) / 1e6,
        "state_mb": sum(t.nbytes for t in live.values()) / 1e6,
    }


def middle(values: list[Any]) -> float:
    """Return the median."""
    return common.median([{"x": v} for v in values], "x")


def main() -> None:
    options = common.arguments(__doc__, mib=512)
    folder = f"{options.dir}/refer"
    if options.case:
        print(json.dumps(measure(folder, options.case, options.mib)))
        common.remove(folder)
        return
    command = f"python bench/refer.py --mib {options.mib} --reps {options.reps}"

    def report(found: dict[str, list[Any]]) -> None:
        cases = {n: s for n, s in found.items() if n != "limit"}
        columns = ("written_mb", "searched_s", "settled_s")
        rows = [[n, *(common.median(s, c) for c in columns)] for n, s in cases.items()]
        rows.append(
            ["disk limit", float("nan"), float("nan"), common.limit_of(found["limit"], "write")]
        )

        def ratio(a: str, b: str, column: str) -> float:
            pairs = zip(cases[a], cases[b], strict=True)
            return common.median([{"r": x[column] / y[column]} for x, y in pairs], "r")

        ratios = [
            [
                "frozen: bytes written, all / refer",
                ratio("frozen all", "frozen refer", "written_mb"),
            ],
            ["frozen: seconds, all / refer", ratio("frozen all", "frozen refer", "settled_s")],
            [
                "dense, searched: seconds, refer / all",
                ratio("dense refer", "dense all", "searched_s"),
            ],
            [
                "dense, search off: seconds, refer / all",
                ratio("dense refer", "dense all", "settled_s"),
            ],
        ]
        size = common.median(cases["dense all"], "state_mb")
        head = ("case", "MB a save", "saves 2 to 4 s", "saves 5 to 10 s")
        text = (
            f"A state of {size:.0f} MB, one process; medians of {len(found['limit'])} alternating "
        )
        text += "repetitions.\n\n" + common.table(head, rows)
        text += "\n\n" + common.table(("ratio", "value"), ratios)
        common.publish("refer", command, text, found)

    arguments = ["--dir", options.dir, "--mib", str(options.mib)]
    common.alternate(sys.argv[0], options, arguments, CASES, options.mib << 20, report)


if __name__ == "__main__":
    main()
