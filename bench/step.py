"""A checkpoint at every step: what does it cost a training step, and what does it hold?

    python bench/step.py --reps 2 [--cases "ckptd,DCP save"] [--parts step,blocked]

First a GPT that trains on one core while everything else runs on the other: each process times its
steps without checkpoints, then with one at each step. Then the same process saves, and the
optimizer steps right after the call: which step's values are stored? Second, how long one save of
2 GB in 2,320 tensors blocks. Each case is a fresh process; all of them take about five minutes a
repetition. Engines: ``bench/engines.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import common
import engines

WIDTH = 512
WARM_UP = 1
BLOCKED_SAVES = 3


# --- the training -------------------------------------------------------------------------------


class Training:
    """A GPT of the sizes of `common.shapes`, with AdamW: 12 bytes a parameter."""

    def __init__(self, layers: int, tokens: int, words: int) -> None:
        import torch
        from torch import nn

        torch.set_num_threads(1)
        torch.manual_seed(0)
        sizes = common.shapes(WIDTH, layers, words)
        self.model = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(torch.empty(s)) for name, s in sizes.items()}
        )
        for parameter in self.model.values():
            nn.init.normal_(parameter, std=0.02)
        self.layers = layers
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, words, (2, tokens + 1))
        self.train()

    def _block(self, x: Any, i: int) -> Any:
        from torch.nn import functional as F

        def p(name: str) -> Any:
            return self.model[f"blocks_{i}_{name}"]

        def norm(name: str) -> Any:
            return F.layer_norm(x, (WIDTH,), p(f"{name}_weight"), p(f"{name}_bias"))

        batch, length, _ = x.shape
        heads = F.linear(norm("ln1"), p("attn_qkv_weight"), p("attn_qkv_bias"))
        q, k, v = (
            h.view(batch, length, WIDTH // 64, 64).transpose(1, 2) for h in heads.split(WIDTH, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + F.linear(seen.reshape(x.shape), p("attn_out_weight"), p("attn_out_bias"))
        inner = F.gelu(F.linear(norm("ln2"), p("mlp_fc_weight"), p("mlp_fc_bias")))
        return x + F.linear(inner, p("mlp_proj_weight"), p("mlp_proj_bias"))

    def compute(self) -> None:
        """Run forward and backward."""
        from torch.nn import functional as F

        ids, targets = self.tokens[:, :-1], self.tokens[:, 1:]
        x = F.embedding(ids, self.model["tok_weight"]) + self.model["pos_weight"][: ids.shape[1]]
        for i in range(self.layers):
            x = self._block(x, i)
        x = F.layer_norm(x, (WIDTH,), self.model["ln_f_weight"], self.model["ln_f_bias"])
        logits = F.linear(x, self.model["tok_weight"])
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    def update(self) -> None:
        self.optim.step()
        self.optim.zero_grad()

    def train(self) -> None:
        self.compute()
        self.update()

    def tree(self) -> engines.Tree:
        """Return the state as peers get it: nested dicts of the live tensors."""
        parameters = dict(self.model.named_parameters())
        states = {n: dict(self.optim.state[p]) for n, p in parameters.items()}
        return {"model": {n: p.detach() for n, p in parameters.items()}, "optim": states}

    def engine(self, name: str, folder: str) -> engines.Engine:
        objects = {"model": self.model, "optim": self.optim}
        kind = engines.ENGINES.get(name, engines.Nothing)
        return kind(folder, self.tree, objects)


class Elsewhere:
    """Keeps this thread on the first core, and all other threads and children off it.

    A new thread or process starts where its parent runs, so `apply` follows each call of an engine.
    """

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        cores = sorted(os.sched_getaffinity(0))
        self.pinned = len(cores) > 1
        self._mine, self._others = {cores[0]}, set(cores[1:] or cores)
        self._known = {threading.get_native_id()}
        os.sched_setaffinity(0, self._mine)

    def apply(self) -> None:
        pids = [self._process.pid, *(c.pid for c in self._process.children(recursive=True))]
        for pid in pids:
            for thread in _threads(pid) - self._known:
                with suppress(OSError):
                    os.sched_setaffinity(thread, self._others)
                    self._known.add(thread)


def _threads(pid: int) -> set[int]:
    with suppress(OSError):
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    return set()


class AllMemory:
    """Peak of the proportional set sizes of this process and its children together, in bytes."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._stop = threading.Event()
        self.peak = self.now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def now(self) -> int:
        pids = [self._process.pid, *(c.pid for c in self._process.children(recursive=True))]
        return sum(_pss(pid) for pid in pids)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.peak = max(self.peak, self.now())

    def done(self) -> int:
        """Stop and return the peak."""
        self._stop.set()
        self._thread.join()
        return max(self.peak, self.now())


def _pss(pid: int) -> int:
    with suppress(OSError):
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(r.split()[1]) for r in rows if r.startswith("Pss:"))
    return 0


# --- one case -----------------------------------------------------------------------------------


def step_case(name: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    training = Training(options.layers, options.tokens, options.words)
    memory = AllMemory()
    training.train()
    alone = memory.done()
    elsewhere = Elsewhere()
    engine = training.engine(name, folder)
    elsewhere.apply()
    run = Run(training, engine, elsewhere)
    for _ in range(WARM_UP):
        run.step(checkpoint=False)
    without = [run.step(checkpoint=False) for _ in range(options.steps)]
    for _ in range(WARM_UP):
        run.step(checkpoint=True)
    engine.wait()
    blocked, waited = run.forget()
    durable, saves = engine.poll(), run.number
    times = [run.step(checkpoint=True) for _ in range(options.steps)]
    durable = engine.poll() - durable
    out = {
        "without_s": statistics.median(without),
        "with_s": statistics.median(times),
        "blocked_s": statistics.median(blocked),
        "waited_s": statistics.median(waited),
        "state_bytes": sum(t.nbytes for t in common.tensors(training.tree())),
        "saves": run.number - saves,
        "durable": durable,
    }
    memory = AllMemory()
    for _ in range(2):
        run.step(checkpoint=True)
    engine.wait()
    out["memory"] = (memory.done() - alone) / out["state_bytes"]
    out["all_durable"] = engine.poll() == run.number
    if name in engines.ENGINES:
        out["holds"] = consistency(training, engine, run.number)
    engine.close()
    return out


class Run:
    """The loop, and what it measured."""

    def __init__(self, training: Training, engine: engines.Engine, elsewhere: Elsewhere) -> None:
        self._training = training
        self._engine = engine
        self._elsewhere = elsewhere
        self.number = 0
        self._blocked: list[float] = []
        self._waited: list[float] = []

    def step(self, *, checkpoint: bool) -> float:
        """Train one step, with a checkpoint after it or without; return the seconds."""
        begin = time.perf_counter()
        self._training.compute()
        computed = time.perf_counter()
        self._engine.before_step()
        self._training.update()
        self._waited.append(time.perf_counter() - computed)
        if not checkpoint:
            return time.perf_counter() - begin
        self.number += 1
        saved = time.perf_counter()
        self._engine.save(self.number)
        self._blocked.append(time.perf_counter() - saved)
        seconds = time.perf_counter() - begin
        self._elsewhere.apply()
        self._engine.clean(self.number)
        return seconds

    def forget(self) -> tuple[list[float], list[float]]:
        """Begin new lists of the seconds in saves and in updates, and return those."""
        self._blocked, self._waited = [], []
        return self._blocked, self._waited


def consistency(training: Training, engine: engines.Engine, last: int) -> str:
    """Save, and let the optimizer step at once, twice; tell whose values are stored."""
    import torch

    found: set[str] = set()
    for step in (last + 1, last + 2):
        training.compute()
        before = [t.clone() for t in common.tensors(training.tree())]
        engine.save(step)
        training.optim.step()
        after = [t.clone() for t in common.tensors(training.tree())]
        engine.wait()
        for tensor in common.tensors(training.tree()):
            tensor.zero_()
        engine.load(step)
        live = common.tensors(training.tree())
        for now, old, new in zip(live, before, after, strict=True):
            if torch.equal(now, old):
                found.add("the step saved")
            else:
                found.add("the next step" if torch.equal(now, new) else "neither")
        training.optim.zero_grad()
    return found.pop() if len(found) == 1 else "a mixture: " + ", ".join(sorted(found))


def blocked_case(name: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(2)
    live = common.state(common.noise(), options.large_layers)
    live["step"] = {name: torch.tensor(1.0) for name in live["model"]}
    engine = engines.ENGINES[name](folder, lambda: {k: dict(v) for k, v in live.items()})
    blocked, durable = [], []
    for step in range(1, BLOCKED_SAVES + 1):
        common.settle()
        begin = time.perf_counter()
        engine.save(step)
        blocked.append(time.perf_counter() - begin)
        engine.wait()
        durable.append(time.perf_counter() - begin)
        engine.clean(step)
    engine.close()
    return {
        "first_blocked_s": blocked[0],
        "blocked_s": statistics.median(blocked[1:]),
        "first_durable_s": durable[0],
        "durable_s": statistics.median(durable[1:]),
        "tensors": len(common.tensors(live)),
    }


PARTS: dict[str, Callable[[str, str, argparse.Namespace], dict[str, Any]]] = {
    "step": step_case,
    "blocked": blocked_case,
}


def one(options: argparse.Namespace, folder: str) -> None:
    common.remove(folder)
    Path(folder).mkdir(parents=True)
    try:
        found = PARTS[options.parts](options.case, folder, options)
    except ImportError as error:
        found = {"skipped": str(error)}
        print(f"SKIPPED: {options.case}: {error}", file=sys.stderr)
    print(json.dumps(found), flush=True)
    common.remove(folder)
    engines.end_children()
    os._exit(0)  # what engines leave to the interpreter's exit may hang


# --- telling ------------------------------------------------------------------------------------


def main() -> None:
    options = common.arguments(
        __doc__,
        parts=",".join(PARTS),
        cases=",".join(engines.ENGINES),
        steps=4,
        layers=8,
        tokens=96,
        words=32768,
        large_layers=48,
    )
    folder = f"{options.dir}/case"
    if options.case:
        one(options, folder)
        return
    names = options.cases.split(",")
    if unknown := set(names) - set(engines.ENGINES):
        raise SystemExit(f"no such case: {unknown}; there are {sorted(engines.ENGINES)}")
    shared = ["--dir", options.dir]
    for key in ("steps", "layers", "tokens", "words", "large_layers"):
        shared += ["--" + key.replace("_", "-"), str(getattr(options, key))]
    for part in options.parts.split(","):
        cases = [*names, "no checkpoints"] if part == "step" else names
        layers = options.layers if part == "step" else options.large_layers
        size = common.state_bytes(layers)
        report = {
            "step": partial(report_step, steps=options.steps),
            "blocked": partial(report_blocked, size=size),
        }[part]
        common.alternate(__file__, options, [*shared, "--parts", part], cases, size, report)


def measured(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Leave out the disk and what could not be imported."""
    found = {n: [s for s in f if "skipped" not in s] for n, f in found.items() if n != "limit"}
    return {n: samples for n, samples in found.items() if samples}


def skipped(found: dict[str, list[dict[str, Any]]]) -> str:
    rows = {n: f[0]["skipped"] for n, f in found.items() if f and "skipped" in f[0]}
    return "".join(f"\n\nSkipped: {name} ({why})." for name, why in rows.items())


def report_step(found: dict[str, list[dict[str, Any]]], steps: int) -> None:
    m = common.median
    rows = []
    size = max(s["state_bytes"] for f in measured(found).values() for s in f)
    for name, samples in measured(found).items():
        saves, durable = (sum(s[k] for s in samples) for k in ("saves", "durable"))
        total = steps * len(samples)
        rows.append(
            [
                name,
                statistics.median(s["with_s"] / s["without_s"] for s in samples),
                m(samples, "without_s"),
                m(samples, "with_s"),
                milliseconds(samples, "blocked_s"),
                milliseconds(samples, "waited_s"),
                f"{saves} of {total}",
                f"{durable}, then {'all' if all(s['all_durable'] for s in samples) else 'NOT all'}",
                m(samples, "memory"),
                ", or ".join(sorted({s["holds"] for s in samples if "holds" in s})) or "–",
            ]
        )
    head = ["engine", "step with / without", "step without s", "step with s", "save call ms"]
    head += ["update ms", "saved", "durable in the loop", "extra memory / state", "holds"]
    text = (
        f"A checkpoint of {size / 1e6:.0f} MB at every step, training on one core, all else on the "
        f"other; medians of {len(next(iter(found.values())))} alternating repetitions of "
        f"{steps} steps. The update is the optimizer's step and what waits before it. "
        "Extra memory: the peak of the proportional sizes of all processes together, above the "
        "training alone. Holds: whose values a save has when the optimizer steps right after the "
        "call. torchsnapshot calls durable what is written and not synced; NVRx copies from "
        "devices only, and shares what is on the CPU; DCP's asynchronous staging documents a wait "
        "before the optimizer, which the loop makes and the last column does not.\n\n"
    )
    text += common.table(head, rows) + skipped(found)
    common.publish("step", "python bench/step.py --reps 2", text, found)


def report_blocked(found: dict[str, list[dict[str, Any]]], size: int) -> None:
    m = common.median
    keys = ("durable_s", "first_durable_s")
    rows = [
        [
            name,
            milliseconds(samples, "blocked_s"),
            milliseconds(samples, "first_blocked_s"),
            *(m(samples, k) for k in keys),
        ]
        for name, samples in measured(found).items()
    ]
    rows.append(["disk limit", "–", "–", common.limit_of(found["limit"], "write"), "–"])
    count = max(s["tensors"] for f in measured(found).values() for s in f)
    head = ["engine", "blocked ms", "first save blocked ms", "durable s", "first save durable s"]
    text = f"One save of {size / 1e9:.2f} GB in {count} tensors, both cores free; medians of "
    text += f"{len(found['limit'])} alternating repetitions.\n\n"
    text += common.table(head, rows) + skipped(found)
    common.publish("step_blocked", "python bench/step.py --reps 2", text, found)


def milliseconds(samples: list[dict[str, Any]], key: str) -> str:
    value = 1e3 * common.median(samples, key)
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and engines.PRETEND in os.environ:
    engines.pretend_cuda()  # a process that an engine spawned imports this file first
