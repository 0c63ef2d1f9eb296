"""A checkpoint at every step: what does it cost a training step, and what does it hold?

    python bench/step.py --reps 1 [--cases "ckptd,DCP save"]

A GPT trains on one core while everything else runs on the other: each process times blocks of steps
without checkpoints and with one at each step, in turn. Then the same process saves, and the
optimizer steps right after the call: which step's values are stored? Each case is a fresh process;
all of them take about five minutes a repetition. Engines: ``bench/engines.py``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
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


# --- one case -----------------------------------------------------------------------------------


def step_case(name: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    training = Training(options.layers, options.tokens, options.words)
    memory = common.AllMemory()
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
    memory = common.AllMemory()
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
    """Times of some steps: in all, of the training thread's core, in the save, in the update."""

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


# --- telling ------------------------------------------------------------------------------------


def main() -> None:
    options = common.arguments(
        __doc__,
        cases=",".join(engines.ENGINES),
        steps=3,
        layers=8,
        tokens=96,
        words=32768,
    )
    folder = f"{options.dir}/case"
    if options.case:
        common.remove(folder)
        Path(folder).mkdir(parents=True)
        engines.tell(partial(step_case, options.case, folder, options))
    names = engines.chosen(options.cases)
    shared = ["--dir", options.dir]
    for key in ("steps", "layers", "tokens", "words"):
        shared += ["--" + key.replace("_", "-"), str(getattr(options, key))]
    report = partial(report_step, steps=options.steps)
    size = common.state_bytes(options.layers)
    common.alternate(__file__, options, shared, [*names, "no checkpoints"], size, report)


def report_step(found: dict[str, list[dict[str, Any]]], steps: int) -> None:
    m = common.median
    rows = []
    size = max(s["state_bytes"] for f in engines.measured(found).values() for s in f)
    for name, samples in engines.measured(found).items():
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
                common.milliseconds(samples, "blocked_s"),
                common.milliseconds(samples, "waited_s"),
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
        f"{max(s.get('load', 0.0) for f in engines.measured(found).values() for s in f):.1f}. "
        "Its core's time is what the training thread itself used: it does not count what other "
        "processes took from that core. The update is the optimizer's step and what waits before "
        "it. Extra memory: the peak of the proportional sizes of all processes together, above "
        "the training alone. On the memory tier durable is what survives the trainer. Holds: "
        "whose values a save has when the optimizer steps right after the call. torchsnapshot "
        "calls durable what is written and not synced; NVRx copies from devices only, and shares "
        "what is on the CPU; DCP's asynchronous staging documents a wait before the optimizer, "
        "which the loop makes and the last column does not.\n\n"
    )
    text += common.table(head, rows) + engines.skipped(found)
    common.publish("step", common.command(), text, found)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and engines.PRETEND in os.environ:
    engines.pretend_cuda()  # a process that an engine spawned imports this file first
