"""Aggregation rules with wrong workers: accuracy, and time a step.

    python bench/robust.py [--reps N] [--steps N]

Eight simulated workers train one network on a classification problem (ten classes in 32 dimensions
that a linear map cannot tell apart), each on a batch of its own. Some of them are wrong in every
step, in one of four ways: noise of ten times the length, the gradient turned around and ten times
as long, labels one class off, and one bit of the exponent flipped in one number of a hundred. Every
seed makes other data, networks and wrong workers. Time is that of the rule alone, one thread, on
the gradients of all eight workers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import common
import torch
from torch import nn

from ckptd.elastic.torch.hooks.robust import RULES

WORKERS, CLASSES, SIZE, BATCH = 8, 10, 32, 32
Wrong = Callable[[torch.Tensor], torch.Tensor]


def flipped(row: torch.Tensor) -> torch.Tensor:
    """Flip a high bit of the exponent in one number of a hundred."""
    bits = row.clone().view(torch.int32)
    hit = torch.rand(len(bits)) < 0.01
    return torch.where(hit, bits ^ (1 << 27), bits).view(torch.float32)


WRONG: dict[str, Wrong | None] = {
    "noise": lambda row: torch.randn_like(row) * 10 * row.norm() / len(row) ** 0.5,
    "turned": lambda row: -10 * row,
    "labels": None,  # made while the gradient is
    "bits": flipped,
}


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs and labels to train and to test on: three clumps for each class."""
    torch.manual_seed(seed)
    centers = torch.randn(3 * CLASSES, SIZE) * 0.9
    which = torch.randint(0, 3 * CLASSES, (12_000,))
    inputs = centers[which] + torch.randn(len(which), SIZE)
    labels = which % CLASSES
    return inputs[:10_000], labels[:10_000], inputs[10_000:], labels[10_000:]


def train(rule: str, wrong: str, bad: int, steps: int, seed: int) -> tuple[float, float]:
    """Return the accuracy, and the milliseconds that the rule took in one step."""
    inputs, labels, tests, answers = problem(seed)
    model = nn.Sequential(nn.Linear(SIZE, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    spent = 0.0
    for _ in range(steps):
        rows = []
        for worker in range(WORKERS):
            pick = torch.randint(0, len(inputs), (BATCH,))
            is_wrong = worker < bad
            told = (labels[pick] + (is_wrong and wrong == "labels")) % CLASSES
            loss = nn.functional.cross_entropy(model(inputs[pick]), told)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            row = torch.cat([g.reshape(-1) for g in grads])
            change = WRONG[wrong]
            rows.append(change(row) if is_wrong and change is not None else row)
        matrix = torch.stack(rows)
        start = time.perf_counter()
        update = RULES[rule](matrix)
        spent += time.perf_counter() - start
        update = update.split([p.numel() for p in model.parameters()])
        for parameter, part in zip(model.parameters(), update, strict=True):
            parameter.grad = part.view_as(parameter)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    with torch.no_grad():
        right = (model(tests).argmax(1) == answers).float().mean()
    return float(right), spent / steps * 1e3


def cost(rule: str, size: int) -> float:
    """Return the least milliseconds of a rule over gradients of `size` numbers."""
    rows = torch.randn(WORKERS, size)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        RULES[rule](rows)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main() -> None:
    options = common.arguments(__doc__, steps=150)
    torch.set_num_threads(1)
    cases = [("none", 0)] + [(w, bad) for w in WRONG for bad in (1, 2, 3)]
    found: dict[str, dict[str, list[float]]] = {}
    spent: dict[str, list[float]] = {rule: [] for rule in RULES}
    for wrong, bad in cases:
        row = found.setdefault(f"{bad} {wrong}" if bad else "none", {})
        for rule in RULES:
            runs = [
                train(rule, wrong if bad else "noise", bad, options.steps, seed)
                for seed in range(options.reps)
            ]
            row[rule] = [accuracy for accuracy, _ in runs]
            spent[rule] += [ms for _, ms in runs]
    times = {rule: [statistics.median(spent[rule]), cost(rule, 1_000_000)] for rule in RULES}
    table = [
        [case, *(f"{100 * statistics.median(row[rule]):.1f}" for rule in RULES)]
        for case, row in found.items()
    ]
    table.append(["ms, 11 thousand numbers", *(f"{times[rule][0]:.2f}" for rule in RULES)])
    table.append(["ms, 1 million numbers", *(f"{times[rule][1]:.0f}" for rule in RULES)])
    text = "Accuracy in percent, median of seeds.\n\n"
    text += common.table(["wrong workers of 8", *RULES], table)
    data = {"accuracy": found, "ms": times, "steps": options.steps}
    common.publish("robust", "python bench/robust.py", text, data)


if __name__ == "__main__":
    main()
