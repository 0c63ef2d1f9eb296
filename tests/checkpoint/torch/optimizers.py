"""Every optimizer of some libraries, saved after two steps and loaded into a fresh one.

    python -m tests.checkpoint.torch.optimizers [LIBRARY ...]

plays all classes of the libraries that are installed and prints counts. The measure is torch's own
way: ``load_state_dict(torch.load(torch.save(optimizer.state_dict())))`` into a fresh optimizer over
fresh parameters. What ckptd brings there is compared bit for bit, and so is the step after it.
"""

from __future__ import annotations

import importlib
import io
import itertools
import math
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import ckptd
from ckptd.errors import CkptdError

__all__ = ["LIBRARIES", "Result", "classes", "play"]

LIBRARIES = {
    "torch": "torch.optim",
    "torch_optimizer": "torch_optimizer",
    "pytorch_optimizer": "pytorch_optimizer",
    "schedulefree": "schedulefree",
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
}

_roots = itertools.count()
Make = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Result:
    """What became of one class.

    Attributes
    ----------
    outcome
        ``exact``: what torch brings, bit for bit, and the next step as well. ``kept``: what was
        saved, bit for bit, where torch's load changes it. ``refused``: by name, at the save.
        ``absent``: it does not run here, or torch's own load fails. ``wrong``: anything else.
    text
        Why.
    """

    name: str
    outcome: str
    text: str = ""


def classes(library: str) -> dict[str, type[Optimizer]]:
    """Return the optimizers of an installed library, by name."""
    module = importlib.import_module(LIBRARIES[library])
    found = {n: getattr(module, n) for n in dir(module)}
    return {
        n: c
        for n, c in found.items()
        if isinstance(c, type) and issubclass(c, Optimizer) and c is not Optimizer
    }


def play(name: str, kind: type[Optimizer]) -> Result:
    """Save and load one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make, step, model, optimizer = _running(kind)
        except RuntimeError as error:
            return Result(name, "absent", str(error))
        try:
            return _compared(name, make, step, model, optimizer)
        except Exception as error:  # noqa: BLE001 - one that cannot be compared is not exact
            return Result(name, "wrong", f"{error!r}"[:300])


def _compared(name: str, make: Make, step: Any, model: nn.Module, optimizer: Any) -> Result:
    other, plain = _fresh(model, make)
    third, ours = _fresh(model, make)
    with ckptd.Checkpointer(f"memory://optimizers{next(_roots)}") as ck:
        try:
            ck.save(1, {"model": model, "optim": optimizer}).durable(60)
        except CkptdError as error:
            return Result(name, "refused", f"{error.kind}: {error.found}"[:200])
        file = io.BytesIO()
        try:
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            plain.load_state_dict(torch.load(file, weights_only=False))
        except Exception as error:  # noqa: BLE001 - whatever a library raises
            return Result(name, "absent", f"torch's own load: {error!r}"[:200])
        try:
            ck.load({"model": third, "optim": ours})
        except Exception as error:  # noqa: BLE001
            return Result(name, "wrong", f"load: {error!r}"[:300])
    first = _said(optimizer), _said(plain), _said(ours)
    why = differs(first[1], first[2])
    kept = why is not None and differs(first[0], first[2]) is None
    if why is not None and not kept:
        return Result(name, "wrong", why)
    pairs = ((model, optimizer), (other, plain), (third, ours))
    for at, (m, o) in enumerate(pairs):
        if not (kept and at == 1):
            step(m, o, 3)
    wanted = pairs[0 if kept else 1]
    found = differs(wanted[0].state_dict(), third.state_dict())
    if found is None:
        found = differs(_said(wanted[1]), _said(ours))
    if found is not None:
        return Result(name, "wrong", f"after the next step: {found}")
    return Result(name, "kept" if kept else "exact", why or "")


def _fresh(model: nn.Module, make: Make) -> tuple[nn.Module, Any]:
    """Return a model with the same parameters, and a fresh optimizer of them."""
    other = type(model)()
    other.load_state_dict(model.state_dict())
    torch.manual_seed(5)
    return other, make(other)


def _said(optimizer: Any) -> dict[str, Any]:
    """Return what an optimizer says, without empty entries: ``optimizer.state`` makes them anew."""
    said = dict(optimizer.state_dict())
    said["state"] = {k: v for k, v in said["state"].items() if not (isinstance(v, dict) and not v)}
    return said


# --- models and steps -----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(80, 64)
        self.last = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).tanh())
        return out


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(80, 64, bias=False)
        self.last = nn.Linear(64, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).tanh())
        return out


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(x[:, :3].abs().mul(2).long().clamp(max=8))
        return out


def _loss(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, 6 * 80).reshape(6, 80).roll(number * 7).mul(number + 1).sin()
    out: torch.Tensor = model(x).square().mean()
    return out


def _step(model: nn.Module, optimizer: Any, number: int, *, graph: bool, closure: bool) -> None:
    torch.manual_seed(number)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = _loss(model, number)
        value.backward(create_graph=graph)
        return value

    if closure:
        optimizer.step(torch.enable_grad()(loss))
    else:
        loss()
        optimizer.step()


def _running(kind: type[Optimizer]) -> tuple[Make, Any, nn.Module, Any]:
    """Return how an optimizer is made and stepped, and one after two steps with its model."""
    failed: list[str] = []
    for model_kind, make in _ways(kind):
        for graph, closure in ((False, False), (False, True), (True, False), (True, True)):

            def step(m: nn.Module, o: Any, n: int, g: bool = graph, c: bool = closure) -> None:
                _step(m, o, n, graph=g, closure=c)

            torch.manual_seed(1)
            model = model_kind()
            try:
                optimizer = make(model)
                if callable(getattr(optimizer, "train", None)):
                    optimizer.train()
                step(model, optimizer, 1)
                step(model, optimizer, 2)
            except Exception as error:  # noqa: BLE001 - another way may do
                failed.append(repr(error)[:120])
                continue
            if all(p.isfinite().all() for p in model.parameters()):
                return make, step, model, optimizer
            failed.append("not finite")
    common = Counter(failed).most_common(2)
    raise RuntimeError("; ".join(text for text, _ in common))


def _ways(kind: Any) -> Iterator[tuple[type[nn.Module], Make]]:
    base: Callable[[nn.Module], Optimizer] = lambda m: torch.optim.SGD(  # noqa: E731
        m.parameters(), lr=0.01, momentum=0.9
    )
    yield Net, lambda m: kind(m.parameters(), lr=0.01)
    yield Net, lambda m: kind(m.parameters())
    yield Net, lambda m: kind(m.parameters(), lr=0.01, momentum=0.9)
    yield Matrices, lambda m: kind(m.parameters(), lr=0.01)
    yield Sparse, lambda m: kind(m.parameters(), lr=0.01)
    yield Net, lambda m: kind(_muons(m), lr=0.01)
    yield Net, lambda m: kind(_muons(m))
    yield Net, lambda m: kind(m.parameters(), lr=0.01, total_steps=100)
    yield Net, lambda m: kind(m.parameters(), lr=0.01, num_iterations=100)
    yield Net, lambda m: kind(m.parameters(), num_iterations=10, num_epochs=3, lr=0.01)
    yield Net, lambda m: kind(m.parameters(), 10)
    yield Net, lambda m: kind(m, lr=0.01)
    yield Net, lambda m: kind(m)
    yield Net, lambda m: kind(base(m))
    yield Net, lambda m: kind(m.parameters(), torch.optim.SGD, lr=0.01)
    yield Net, lambda m: kind(m.parameters(), base_optimizer=torch.optim.SGD, lr=0.01)
    yield Net, lambda m: kind(m.parameters(), torch.optim.SGD)
    yield Net, lambda m: kind(m, base(m))
    yield Net, lambda m: kind(m, m.parameters(), torch.optim.SGD, lr=0.01)
    yield Net, lambda m: kind(m.parameters(), num_data=6)


def _muons(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim == 2], "use_muon": True},
        {"params": [p for p in params if p.ndim != 2], "use_muon": False},
    ]


# --- comparing ------------------------------------------------------------------------------------


def differs(a: Any, b: Any, at: str = "") -> str | None:
    """Say where two values differ, to the bit; None where they do not."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if is_traceable_wrapper_subclass(a) and type(a) is type(b):
            (names, context), other = a.__tensor_flatten__(), b.__tensor_flatten__()
            if (names, repr(context)) != (other[0], repr(other[1])):
                return f"{at}: {context}, {other[1]}"
            return differs(*({n: getattr(t, n) for n in names} for t in (a, b)), at)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{at}: {a.dtype}{list(a.shape)}, {b.dtype}{list(b.shape)}"
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return None if torch.equal(*raw) else f"{at}: values"
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return f"{at}: keys {sorted(map(str, a.keys() ^ b.keys()))}"
        return next((w for k in a if (w := differs(a[k], b[k], f"{at}.{k}"))), None)
    if isinstance(a, list | tuple | deque) and type(a) is type(b):
        if len(a) != len(b):
            return f"{at}: lengths {len(a)}, {len(b)}"
        pairs = enumerate(zip(a, b, strict=True))
        return next((w for i, (x, y) in pairs if (w := differs(x, y, f"{at}.{i}"))), None)
    if isinstance(a, np.ndarray):
        return None if np.array_equal(a, b) else f"{at}: values"
    if isinstance(a, float) and type(b) is float and math.isnan(a) and math.isnan(b):
        return None
    same = type(a) is type(b) and (a is b or bool(a == b))
    return None if same else f"{at}: {a!r}, {b!r}"[:200]


def main(names: list[str]) -> int:
    wrong = 0
    for library in names or LIBRARIES:
        try:
            found = classes(library)
        except ImportError as error:
            print(f"{library}: not here ({error})")
            continue
        results = [play(name, kind) for name, kind in found.items()]
        counts = Counter(r.outcome for r in results)
        print(f"{library}: {len(results)} classes, {dict(sorted(counts.items()))}")
        for result in results:
            if result.outcome != "exact":
                print(f"    {result.name}: {result.outcome}: {result.text}")
        wrong += counts["wrong"]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
