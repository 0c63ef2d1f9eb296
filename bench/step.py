"""A checkpoint at every step: what does it cost a training step, and what does it hold?

    python bench/step.py --parts step --reps 1 [--cases "ckptd,DCP save"]
    python bench/step.py --parts blocked --reps 1

*step*: a GPT that trains on one core while everything else runs on the other: each process times
blocks of steps without checkpoints and with one at each step, in turn. Then the same process saves,
and the optimizer steps right after the call: which step's values are stored? *blocked*: how long
one save of 2 GB in 2,320 tensors blocks. Each case is a fresh process; all of them take about five
minutes a repetition of a part. Engines: ``bench/engines.py``.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import common
import engines

WIDTH = 512
WARM_UP = 1
BLOCKS = 2
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
    """Peak of the proportional set sizes of this process and its children together, in bytes.

    Processes are looked at one after the other, and a page that one maps in between counts too
    much: of two looks that follow one another the smaller one is believed.
    """

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
        last = self.peak
        while not self._stop.wait(0.05):
            now = self.now()
            self.peak = max(self.peak, min(last, now))
            last = now

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
    run.warm_up()
    without, with_ = Steps(), Steps()
    saves = durable = 0
    for _ in range(BLOCKS):
        run.block(without, options.steps, checkpoint=False)
        for _ in range(WARM_UP):
            run.step(Steps(), checkpoint=True)
        before, number = engine.poll(), run.number
        run.block(with_, options.steps, checkpoint=True)
        durable += engine.poll() - before
        saves += run.number - number
        engine.wait()
    out = {
        "without_s": statistics.median(without.wall),
        "with_s": statistics.median(with_.wall),
        "without_cpu_s": statistics.median(without.cpu),
        "with_cpu_s": statistics.median(with_.cpu),
        "blocked_s": statistics.median(with_.blocked),
        "waited_s": statistics.median(with_.waited),
        "state_bytes": sum(t.nbytes for t in common.tensors(training.tree())),
        "saves": saves,
        "skips": engine.skipped,
        "durable": durable,
        "load": os.getloadavg()[0],
    }
    memory = AllMemory()
    for _ in range(2):
        run.step(Steps(), checkpoint=True)
    engine.wait()
    out["memory"] = (memory.done() - alone) / out["state_bytes"]
    out["all_durable"] = engine.poll() == run.number
    if name in engines.ENGINES:
        out["holds"] = consistency(training, engine, run.number)
    engine.close()
    return out


@dataclass
class Steps:
    """What some steps took: in all, of the training thread's core, in the save, in the update."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


class Run:
    """The loop."""

    def __init__(self, training: Training, engine: engines.Engine, elsewhere: Elsewhere) -> None:
        self._training = training
        self._engine = engine
        self._elsewhere = elsewhere
        self.number = 0

    def warm_up(self) -> None:
        """Touch memory, and let an engine plan."""
        self.step(Steps(), checkpoint=False)
        for _ in range(WARM_UP):
            self.step(Steps(), checkpoint=True)
        self._engine.wait()

    def block(self, steps: Steps, count: int, *, checkpoint: bool) -> None:
        for _ in range(count):
            self.step(steps, checkpoint=checkpoint)

    def step(self, steps: Steps, *, checkpoint: bool) -> None:
        """Train one step, with a checkpoint after it or without."""
        cpu, begin = time.thread_time(), time.perf_counter()
        self._training.compute()
        computed = time.perf_counter()
        self._engine.before_step()
        self._training.update()
        saved = time.perf_counter()
        steps.waited.append(saved - computed)
        if checkpoint:
            self.number += 1
            self._engine.save(self.number)
        steps.blocked.append(time.perf_counter() - saved)
        steps.wall.append(time.perf_counter() - begin)
        steps.cpu.append(time.thread_time() - cpu)
        if checkpoint:
            self._elsewhere.apply()
            self._engine.clean(self.number)


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


def stepped(layers: int) -> tuple[Any, Any]:
    """Return a model and an AdamW whose state is that after a step, without making one."""
    import torch
    from torch import nn

    live = common.state(common.noise(), layers)
    named = {name.replace(".", "_"): nn.Parameter(t) for name, t in live["model"].items()}
    model = nn.ParameterDict(named)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for name, parameter in zip(live["model"], named.values(), strict=True):
        moments = {kind: live[kind][name] for kind in ("exp_avg", "exp_avg_sq")}
        optim.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return model, optim


def blocked_case(name: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(2)
    model, optim = stepped(options.large_layers)

    def tree() -> engines.Tree:
        parameters = dict(model.named_parameters())
        states = {n: dict(optim.state[p]) for n, p in parameters.items()}
        return {"model": {n: p.detach() for n, p in parameters.items()}, "optim": states}

    engine = engines.ENGINES[name](folder, tree, {"model": model, "optim": optim})
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
        "tensors": len(common.tensors(tree())),
        "load": os.getloadavg()[0],
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
        steps=3,
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
        total = BLOCKS * steps * len(samples)
        skips = sum(s["skips"] for s in samples)
        rows.append(
            [
                name,
                statistics.median(s["with_s"] / s["without_s"] for s in samples),
                statistics.median(s["with_cpu_s"] / s["without_cpu_s"] for s in samples),
                m(samples, "without_s"),
                m(samples, "with_s"),
                milliseconds(samples, "blocked_s"),
                milliseconds(samples, "waited_s"),
                f"{saves} of {total}" + (f", {skips} skipped" if skips else ""),
                f"{durable}, then {'all' if all(s['all_durable'] for s in samples) else 'NOT all'}",
                m(samples, "memory"),
                ", or ".join(sorted({s["holds"] for s in samples if "holds" in s})) or "–",
            ]
        )
    head = ["engine", "step with / without", "its core's time with / without"]
    head += ["step without s", "step with s", "save call ms"]
    head += ["update ms", "saved", "durable in the loop", "extra memory / state", "holds"]
    text = (
        f"A checkpoint of {size / 1e6:.0f} MB at every step, training on one core, all else on the "
        f"other; medians of {len(next(iter(found.values())))} alternating repetitions of "
        f"{BLOCKS} blocks of {steps} steps each, at a load of "
        f"{max(s.get('load', 0.0) for f in measured(found).values() for s in f):.1f}. "
        "Its core's time is what the training thread itself used: it does not count what other "
        "processes took from that core. The update is the optimizer's step and what waits before "
        "it. Extra memory: the peak of the proportional sizes of all processes together, above "
        "the training alone. On the memory tier durable is what survives the trainer. Holds: "
        "whose values a save has when the optimizer steps right after the call. torchsnapshot "
        "calls durable what is written and not synced; NVRx copies from devices only, and shares "
        "what is on the CPU; DCP's asynchronous staging documents a wait before the optimizer, "
        "which the loop makes and the last column does not.\n\n"
    )
    text += common.table(head, rows) + skipped(found)
    command = f"python bench/step.py --parts step --reps {len(next(iter(found.values())))}"
    common.publish("step", command, text, found)


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
    command = f"python bench/step.py --parts blocked --reps {len(found['limit'])}"
    common.publish("step_blocked", command, text, found)


def milliseconds(samples: list[dict[str, Any]], key: str) -> str:
    value = 1e3 * common.median(samples, key)
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and engines.PRETEND in os.environ:
    engines.pretend_cuda()  # a process that an engine spawned imports this file first
