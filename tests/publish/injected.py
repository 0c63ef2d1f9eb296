"""Calls of a publisher and of a subscriber that are interrupted, or met by another one.

`python -m tests.publish.injected FOLDER POINTS CALL WHAT [CALL WHAT]...`; `tests.injecting.play`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import ckptd
from tests.injecting import WAIT_S, kind_of, play

ONE = "mesh O = x:1\nspace s { w[n m] }\nlayout one of s on O { w = w[n m] }\n"
PUBLISHER = ("publish", "before_mutation", "whole", "leave", "end")
SUBSCRIBER = ("update", "close")


class Pair:
    """A publisher with one version, which its subscriber has; or with a newer one beside it."""

    def __init__(self, folder: Path, *, newer: bool) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(100, 500))
        self.optim = torch.optim.SGD([self.weight], lr=0.1)
        self.state = {"model": {"w": self.weight}, "optim": self.optim}
        self.into = {"w": torch.zeros(100, 500)}
        self.publisher = ckptd.Publisher(ONE, folder / "at", linger_s=0.0, timeout_s=WAIT_S)
        self.subscriber = ckptd.Subscriber(
            ONE, {"model": self.into}, folder / "at", timeout_s=WAIT_S
        )
        self.publication: Any = None
        self.publish(1)
        self.subscriber.update(WAIT_S)
        self.fill(2)
        if newer:
            self.publish(2)

    def fill(self, step: int) -> None:
        self.publisher.before_mutation()
        with torch.no_grad():
            self.weight.fill_(step)

    def publish(self, step: int) -> bool:
        self.fill(step)
        self.publication = self.publisher.publish(step, self.state, wait_s=3.0)
        return bool(self.publication.wait(WAIT_S))

    def call(self, name: str, step: int) -> object:
        match name:
            case "publish":
                return self.publisher.publish(step, self.state)
            case "whole":
                return self.publication.wait(WAIT_S)
            case "leave":
                return self.publisher.abandon()
            case "end":
                return self.publisher.close()
            case "before_mutation":
                return self.publisher.before_mutation()
            case "update":
                return self.subscriber.update()
        return self.subscriber.close()

    def after(self, call: str, what: str, outcome: str) -> str:
        """Publish more than there are slots; the worker gets each as a whole."""
        wrong = self.mixed("left")
        ended = {call, what.rpartition(":")[2]} & {"leave", "end"}
        for step in (4, 5, 6):
            found = kind_of(lambda step=step: self.fill(step))
            done = False
            if found == "done":
                found = kind_of(lambda step=step: self.publish(step))
                done = found == "done" and not self.publication.skipped
            if not (done or (ended and found == "closed")):
                wrong += f" publish {step}: {found} {self.publication.skipped}"
            if done:
                found = kind_of(lambda: self.subscriber.update(WAIT_S))
                version = self.subscriber.version
                if found != "done" or version is None or version.step != step:
                    wrong += f" update {step}: {found} {version}"
            wrong += self.mixed(f"after {step}")
        for close in (self.subscriber.close, self.publisher.close):
            if (found := kind_of(close)) != "done":
                wrong += f" {close.__qualname__}: {found}"
        if self.publisher._client._process.wait(WAIT_S):
            wrong += " the server failed"
        if self.optim._optimizer_step_pre_hooks:
            wrong += " a hook is left in the optimizer"
        return wrong.strip()

    def mixed(self, when: str) -> str:
        """Return what the worker's tensor holds, where that is not of its version."""
        version = self.subscriber.version
        values = set(self.into["w"].unique().tolist())
        # Step 3 is published while the weights are those of 2.
        if version is None or values == {{3: 2}.get(version.step, version.step)}:
            return ""
        return f" {when}: {sorted(values)} as step {version.step}"


def main(folder: str, points: str, *pairs: str) -> None:
    """Play pairs of calls."""

    def make(name: str) -> Pair:
        (at := Path(folder) / name).mkdir()
        return Pair(at, newer=name.startswith("update"))

    play(make, points, list(zip(pairs[::2], pairs[1::2], strict=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
