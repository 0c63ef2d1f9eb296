"""Calls of a checkpointer, of batches and of a handle that are interrupted, or met by another one.

`python -m tests.checkpoint.torch.injected POINTS CALL WHAT [CALL WHAT]...`; `tests.injecting.play`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import ckptd
from tests.injecting import WAIT_S, kind_of, play

LETTING_GO = ("close", "abandon")
CALLS = ("save", "load", "wait", "latest", "pin", "next", "durable", "before_mutation", *LETTING_GO)


class Job:
    """A checkpointer with one durable step, and a state whose values say their step."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(50_000))])
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = ckptd.Batches(_numbers())
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optim,
            "data": self.data,
            "at": 0.0,
        }
        self.ck = ckptd.Checkpointer(url, when_failed="warn", timeout_s=WAIT_S)
        self.handle = self.save(1)
        next(self.data)
        self.fill(2)

    def fill(self, step: int) -> None:
        self.ck.before_mutation()
        with torch.no_grad():
            self.model[0].fill_(step)
        self.state["at"] = float(step)

    def save(self, step: int) -> Any:
        self.fill(step)
        handle = self.ck.save(step, self.state)
        handle.durable(WAIT_S)
        return handle

    def call(self, name: str, step: int) -> object:
        match name:
            case "save":
                return self.ck.save(step, self.state)
            case "load":
                return self.ck.load(self.state)
            case "next":
                return next(self.data)
            case "durable":
                return self.handle.durable(WAIT_S)
            case "pin":
                return self.ck.pin(1)
        return getattr(self.ck, name)()

    def after(self, call: str, what: str, outcome: str) -> str:
        """Save again and end; look at what is on disk."""
        wrong = ""
        ended = {call, what.rpartition(":")[2]} & set(LETTING_GO)
        if call == "load" and outcome == "interrupted":
            # A program may save what it has now: that is of one step, or it is refused.
            found = kind_of(lambda: self.ck.save(4, self.state).durable(WAIT_S))
            if found == "crashed":
                found = kind_of(lambda: self.ck.load(self.state))
            if found not in ("done", "closed" if ended else ""):
                wrong += f" after a load: {found}"
        for step in (5, 6):
            found = kind_of(lambda step=step: self.save(step))
            if found not in ("done", "closed" if ended else ""):
                wrong += f" save {step}: {found}"
        if (found := kind_of(self.ck.close)) != "done":
            wrong += f" close: {found}"
        if self.optim._optimizer_step_pre_hooks:
            wrong += " a hook is left in the optimizer"
        return (wrong + self.mixed()).strip()

    def mixed(self) -> str:
        """Return the steps on disk whose values are not those of one step."""
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(50_000))])
        state: dict[str, Any] = {
            "model": model,
            "optim": torch.optim.SGD(model.parameters(), lr=0.1),
            "at": -1.0,
            "data": ckptd.Batches(_numbers()),
        }
        wrong = ""
        with ckptd.Checkpointer(self.url) as ck:
            for step in range(1, 7):
                try:
                    ck.load(state, step, only="*")
                except ckptd.NotFoundError:
                    continue
                values = set(model[0].tolist())
                # Steps 2 to 4 are saved as they are: a load of step 1 may have come before.
                allowed = {1.0, 2.0} if step in (2, 3, 4) else {float(step)}
                if values != {state["at"]} or not values <= allowed:
                    wrong += f" step {step} has {sorted(values)} and {state['at']}"
        return wrong


def _numbers() -> Any:
    return torch.utils.data.DataLoader(torch.arange(64), batch_size=1)


def main(points: str, *pairs: str) -> None:
    """Play pairs of calls."""
    play(
        lambda name: Job(f"memory://injected-{name}"),
        points,
        list(zip(pairs[::2], pairs[1::2], strict=True)),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
