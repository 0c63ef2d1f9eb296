"""Cost of a controller's decisions, by ranks: processor time of state machine and policy.

python bench/elastic_scale.py
"""

from __future__ import annotations

import time
from typing import Any

import common

RANKS = (16, 128, 1024, 4096, 16384)
GPUS = 8


def measure(ranks: int) -> dict[str, Any]:
    """Return milliseconds of processor time for one job of so many ranks."""
    from ckptd.elastic.control.statemachine import State, StateMachine
    from ckptd.elastic.messages import Ended, Fenced, Loaded, NodeUp, Progress, Tick
    from ckptd.elastic.policy import JobSpec, Shape

    nodes = ranks // GPUS
    pipeline = 16 if nodes % 16 == 0 else 1
    job = JobSpec(microbatches=4 * nodes, planned=Shape(pipeline, nodes // pipeline, GPUS))
    machine = StateMachine(job)
    names = [f"n{k:05d}" for k in range(nodes)]
    now = 0.0

    def hear(event: Any) -> float:
        nonlocal now
        now += 1e-6
        began = time.process_time()
        machine.handle(event, now)
        return 1000 * (time.process_time() - began)

    def up(name: str) -> NodeUp:
        known = machine.nodes[name]
        return NodeUp(node=name, life="1", slots=GPUS, running=known.running, fenced=known.fenced)

    start = sum(hear(up(name)) for name in names)
    start += sum(hear(Loaded(node=name, generation=1)) for name in names)
    start += hear(Progress(generation=1, step=1))
    beats = [hear(up(name)) for name in names]
    tick = min(hear(Tick()) for _ in range(5))
    recovery = hear(Ended(node=names[0], generation=1, code=1))
    recovery += sum(hear(Fenced(node=n, generation=machine.generation)) for n in names)
    generation = machine.generation
    recovery += sum(hear(Loaded(node=name, generation=generation)) for name in names)
    recovery += hear(Progress(generation=generation, step=2))
    if machine.state is not State.RUNNING:
        raise RuntimeError(machine.reason)
    return {
        "ranks": ranks,
        "first start ms": start,
        "beat us": 1000 * sum(beats) / len(beats),
        "tick ms": tick,
        "recovery ms": recovery,
    }


def main() -> None:
    rows = [min((measure(r) for _ in range(3)), key=lambda m: m["recovery ms"]) for r in RANKS]
    text = (
        "Processor time of all that is heard and decided, without messages and log; best of 3.\n\n"
    )
    text += common.table(list(rows[0]), [list(row.values()) for row in rows])
    common.publish("elastic_scale", "python bench/elastic_scale.py", text, rows)


if __name__ == "__main__":
    main()
