"""Every checkpoint is a deep copy of the state at the call of save, whatever was done between."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

import ckptd
from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.errors import CkptdError, SaveError
from tests.checkpoint.torch import changing
from tests.checkpoint.torch.changing import CHANGES, State
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("writing_thread")

LIVES = 40
"""Changes of one state; the next one is new, and the checkpointer the same."""


class Machine:
    """One checkpointer, and states that change between its saves."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.draw = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.step = 0
        self.state: State = changing.new_state(self.draw)

    def run(self, steps: int) -> None:
        with ckptd.Checkpointer(str(self.root), keep=2, copy=ckptd.CopyOptions(slots=1)) as ck:
            for number in range(steps):
                if number % LIVES == 0:
                    self.state = changing.new_state(self.draw)
                self._once(ck)

    def _once(self, ck: ckptd.Checkpointer) -> None:
        state, draw = self.state, self.draw
        names = [draw.choice(list(CHANGES)) for _ in range(draw.choice([1, 1, 2]))]
        for name in names:
            CHANGES[name](state, draw)
            self.done[name] += 1
        self.step += 1
        about = f"step {self.step} after {names}"
        try:
            flatten(state)
        except CkptdError as error:
            with pytest.raises(type(error)):
                ck.save(self.step, state)
            self.done["refused"] += 1
            self.state = changing.new_state(draw)
            return
        tensors, values = changing.expected(state)
        handle = ck.save(self.step, state)
        assert handle is not None
        after = draw.choice(["nothing", "train", "asked", "not asked"])
        if after == "train":
            changing.train(state, draw)
        elif after == "asked":
            ck.before_mutation()
            changing.uncounted(state, draw)
        elif after == "not asked":
            changing.uncounted(state, draw)
        self.done[f"then {after}"] += 1
        try:
            handle.durable(PATIENCE_S)
        except SaveError as error:
            if (error.kind, after) != ("mutated", "not asked"):
                raise
            self.done["found"] += 1
            return
        found, objects = changing.stored(self.root, self.step)
        wrong = [n for n in {*tensors, *found} if tensors.get(n) != found.get(n)]
        assert not wrong, f"{about}, then {after}: {wrong}"
        assert {n: objects.get(n) for n in values} == values, about
        self.done["compared"] += 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_checkpoints_are_copies_of_the_state(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "root", 1)
    machine.run(100)
    assert machine.done["compared"] > 60


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_checkpoints_are_copies_of_the_state_in_ten_thousand_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.randrange(10**9)
    machine = Machine(tmp_path / "root", seed)
    print(f"seed {seed}")
    machine.run(10_000)
    with capsys.disabled():
        print(f"\n  seed {seed}: {dict(machine.done)}")
