"""The gate: training goes on while the state is copied, and what is saved is of one step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.torch import copy as copying
from ckptd.checkpoint.torch.gate import Gate
from ckptd.checkpoint.torch.schedule import Admission
from ckptd.errors import DeadlineError, SaveError
from ckptd.store.wrap import _ThrottledWriter
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("writing_thread")

WIDTH = 32


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Late copies wait for this event: whoever is not held back by the gate comes first."""
    go = threading.Event()
    whole = copying.Snapshot.copy_rest

    def wait_first(self: copying.Snapshot) -> None:
        assert go.wait(PATIENCE_S)
        whole(self)

    monkeypatch.setattr(copying.Snapshot, "copy_rest", wait_first)
    yield go
    go.set()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A root with a rate is given no tensors before this event."""
    free = threading.Event()
    write = _ThrottledWriter.write

    def late(writer: _ThrottledWriter, data: memoryview) -> None:
        assert free.wait(PATIENCE_S)
        write(writer, data)

    monkeypatch.setattr(_ThrottledWriter, "write", late)
    yield free
    free.set()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))


def backward(model: nn.Module) -> None:
    model(torch.randn(8, WIDTH)).sum().backward()


def copy_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    out = {n: t.detach().clone() for n, t in state["model"].state_dict().items()}
    for i, values in enumerate(state["optim"].state.values()):
        out |= {f"{i}.{k}": v.clone() for k, v in values.items() if isinstance(v, torch.Tensor)}
    return out


def assert_loads(root: str, state: dict[str, Any], step: int, wanted: dict[str, Any]) -> None:
    with ckptd.Checkpointer(root) as ck:
        assert ck.load(state, step) == step
    found = copy_of(state)
    assert found.keys() == wanted.keys()
    assert not [n for n in wanted if not torch.equal(found[n], wanted[n])]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
}


def steps_late(slow: threading.Event, state: dict[str, Any]) -> threading.Thread:
    """Step the optimizer in another thread, and see that it waits."""
    stepped = threading.Thread(target=state["optim"].step)
    stepped.start()
    stepped.join(0.1)
    assert stepped.is_alive()
    slow.set()
    stepped.join(PATIENCE_S)
    assert not stepped.is_alive()
    return stepped


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_waits_until_the_state_is_copied(
    kind: str, root: str, slow: threading.Event
) -> None:
    model = network()
    state = {"model": model, "optim": OPTIMIZERS[kind](model.parameters())}
    backward(model)
    state["optim"].step()
    with ckptd.Checkpointer(root) as ck:
        wanted = copy_of(state)
        handle = ck.save(1, state)
        assert handle is not None
        assert handle.progress.phase == "staging"
        backward(model)  # BatchNorm's buffers change now: they were copied at once
        steps_late(slow, state)
        handle.durable(PATIENCE_S)
        assert not torch.equal(model[0].weight, wanted["0.weight"])
    assert_loads(root, state, 1, wanted)


class Moded(torch.optim.SGD):
    """Rewrites its parameters as its mode changes, as those that need no schedule do."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 2.0)

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.5)


class Heir(Moded):
    def train(self) -> None:
        super().train()


@pytest.mark.parametrize("kind", [Moded, Heir])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_change_of_mode_waits_until_the_state_is_copied(
    kind: Any, mode: str, root: str, slow: threading.Event
) -> None:
    # The save failed as `mutated`.
    model = network()
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optim": optimizer}
    other = kind(network().parameters(), lr=0.1)
    with ckptd.Checkpointer(root) as ck:
        wanted = copy_of(state)
        ck.save(1, state)
        deepcopy(optimizer).eval()  # neither another one nor a copy waits
        other.eval()
        changed = threading.Thread(target=getattr(optimizer, mode))
        changed.start()
        changed.join(0.1)
        assert changed.is_alive()
        assert torch.equal(model[0].weight, wanted["0.weight"])
        slow.set()
        changed.join(PATIENCE_S)
        ck.wait()
        assert not torch.equal(model[0].weight, wanted["0.weight"])
    slow.set()
    assert_loads(root, state, 1, wanted)


def test_gradients_may_be_accumulated_meanwhile(root: str, slow: threading.Event) -> None:
    model = network()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    with ckptd.Checkpointer(root) as ck:
        wanted = copy_of(state)
        handle = ck.save(1, state)
        assert handle is not None
        for _ in range(3):
            backward(model)
        assert handle.progress.phase == "staging"
        steps_late(slow, state)
    for name, tensor in wanted.items():
        if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert not torch.equal(tensor, model.state_dict()[name])
    assert_loads(root, state, 1, wanted)


def test_each_of_several_optimizers_waits(root: str, slow: threading.Event) -> None:
    one, two = network(), network()
    state = {
        "model": nn.ModuleDict({"one": one, "two": two}),
        "optim": [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)],
    }
    for model in (one, two):
        backward(model)
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, state)
        for optimizer in state["optim"]:
            slow.clear()
            steps = threading.Thread(target=optimizer.step)
            if optimizer is state["optim"][0]:
                steps.start()
                steps.join(0.1)
                assert steps.is_alive()
                slow.set()
                steps.join(PATIENCE_S)
            else:
                optimizer.step()  # everything is copied by now
        ck.wait()


def test_averages_are_copied_at_once(root: str, slow: threading.Event) -> None:
    """An averaged model follows the steps, and no optimizer's hook stands before it."""
    model = network()
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    state = {"model": model, "ema": averaged, "optim": torch.optim.AdamW(model.parameters())}
    backward(model)
    state["optim"].step()
    averaged.update_parameters(model)
    with ckptd.Checkpointer(root) as ck:
        wanted = {n: t.clone() for n, t in averaged.state_dict().items()}
        ck.save(1, state)
        with torch.no_grad():
            for p in averaged.parameters():
                p.add_(1.0)
        slow.set()
        ck.wait()
        ck.load(state, 1)
    found = averaged.state_dict()
    assert not [n for n in wanted if not torch.equal(found[n], wanted[n])]


def test_what_changes_without_asking_is_named(root: str, slow: threading.Event) -> None:
    model = network()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    with ckptd.Checkpointer(root) as ck:
        handle = ck.save(1, state)
        assert handle is not None
        with torch.no_grad():
            model[2].weight.clamp_(-0.01, 0.01)
        slow.set()
        with pytest.raises(SaveError) as caught:
            handle.durable(PATIENCE_S)
        assert caught.value.kind == "mutated"
        assert caught.value.where == "model.2.weight"
        assert "before_mutation" in (caught.value.hint or "")
        ck.save(2, state)
    with ckptd.Checkpointer(root) as ck:
        assert ck.latest() == 2


def test_before_mutation_lets_it_be_copied_first(root: str) -> None:
    model = network()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    with ckptd.Checkpointer(root) as ck:
        wanted = copy_of(state)
        ck.save(1, state)
        ck.before_mutation()
        with torch.no_grad():
            model[2].weight.zero_()
    assert_loads(root, state, 1, wanted)


@pytest.mark.parametrize("debug", [False, True])
def test_what_torch_does_not_count_is_found(debug: bool, root: str, slow: threading.Event) -> None:
    model = network()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    with ckptd.Checkpointer(root, copy=ckptd.CopyOptions(debug=debug)) as ck:
        handle = ck.save(1, state)
        assert handle is not None
        model[0].bias.detach().numpy()[:] = 7.0
        slow.set()
        with pytest.raises(SaveError) as caught:
            handle.durable(PATIENCE_S)
        assert (caught.value.kind, caught.value.where) == ("mutated", "model.0.bias")


def test_off_copies_everything_at_once(root: str) -> None:
    model = network()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    with ckptd.Checkpointer(root, copy=ckptd.CopyOptions(lazy="off")) as ck:
        wanted = copy_of(state)
        handle = ck.save(1, state)
        assert handle is not None
        handle.staged(0.0)
        with torch.no_grad():
            model[0].weight.zero_()
        handle.durable(PATIENCE_S)
    assert_loads(root, state, 1, wanted)


def test_staged_means_copied_also_when_writing_has_begun(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = {"w": torch.zeros(8 << 20)}  # several slices: the first is written while others wait
    with ckptd.Checkpointer(
        root, storage=ckptd.Storage(dedup=False), copy=ckptd.CopyOptions(lazy="all")
    ) as ck:
        ck.save(1, live)
        ck.wait()
        held = threading.Event()
        plain = copying.Snapshot._check

        def late(self: copying.Snapshot) -> None:
            self._slot.staged = 16 << 20
            assert held.wait(PATIENCE_S)
            plain(self)

        monkeypatch.setattr(copying.Snapshot, "_check", late)
        handle = ck.save(2, live)
        assert handle is not None
        until = time.monotonic() + 30.0
        while not handle.progress.done_bytes:
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(DeadlineError):
            handle.staged(0.1)
        held.set()
        handle.staged(PATIENCE_S)
        handle.durable(PATIENCE_S)
        assert handle.progress.phase == "durable"


def test_all_copies_plain_tensors_late(root: str, slow: threading.Event) -> None:
    live = {"w": torch.arange(100.0)}
    with ckptd.Checkpointer(root, copy=ckptd.CopyOptions(lazy="all")) as ck:
        handle = ck.save(1, live)
        assert handle is not None
        assert handle.progress.phase == "staging"
        slow.set()
        ck.before_mutation()
        live["w"].zero_()
        handle.durable(PATIENCE_S)
        ck.load(live, 1)
    assert torch.equal(live["w"], torch.arange(100.0))


def test_saves_overlap_in_slots(root: str, full: threading.Event) -> None:
    """Three saves of a slow store: the second does not wait for the first to be written."""
    live = {"w": torch.zeros(1 << 18)}
    with ckptd.Checkpointer(
        root, storage=ckptd.Storage(throttle=1e9), copy=ckptd.CopyOptions(slots=2)
    ) as ck:
        handles = []
        for step in (1, 2, 3):
            live["w"].fill_(step)
            handles.append(ck.save(step, live))
            if step == 2:
                first = handles[0]
                assert first is not None
                assert not first.done
                full.set()
        ck.wait()
    for step in (3, 2, 1):  # a load begins a new line, so from the last to the first
        with ckptd.Checkpointer(root) as ck:
            ck.load(live, step)
        assert bool((live["w"] == step).all())


def test_a_save_without_a_slot_is_skipped_and_counted(
    root: str, caplog: pytest.LogCaptureFixture, full: threading.Event
) -> None:
    live = {"w": torch.zeros(1 << 18)}
    with ckptd.Checkpointer(
        root, storage=ckptd.Storage(throttle=1e9), copy=ckptd.CopyOptions(slots=1, when_full="skip")
    ) as ck:
        assert ck.save(1, live)
        assert not ck.save(2, live)
        full.set()
        assert ck.skipped == 1
        assert "step 2 is not saved" in caplog.text
        forced = ck.save(3, live, force=True)
        assert forced is not None
        forced.durable(PATIENCE_S)
        assert ck.latest() == 3
    wrong: Any
    for wrong in ({"when_full": "latest"}, {"lazy": "sometimes"}, {"slots": 0}):
        with pytest.raises(ckptd.CkptdError) as caught:
            ckptd.CopyOptions(**wrong)
        assert any(name in caught.value.message for name in wrong)


@pytest.mark.parametrize(
    "wrong", [{"copy": {"lazy": "off"}}, {"storage": 1}, {"preemption": 15}], ids=str
)
def test_a_group_of_options_that_is_none_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ckptd.UsageError, match=r"must be (Preemption|CopyOptions|Storage)"):
        ckptd.Checkpointer(str(tmp_path), **wrong)


def test_ranks_skip_together() -> None:
    boards = [LocalBoard(0, 2)]
    boards.append(LocalBoard(1, 2, boards[0]))
    both = [Admission(b, 5.0) for b in boards]
    for full in (False, True, False):
        assert [a.grants(1, full and a is both[0]) for a in both] == [not full] * 2
        assert both[1].skipped == both[0].skipped
    alone = Admission(LocalBoard(1, 2), 0.1)
    with pytest.raises(DeadlineError):
        alone.grants(1, False)


def test_a_copy_that_hangs_does_not_hang_training() -> None:
    gate = Gate(timeout_s=0.1)
    given_up: list[str] = []
    never: Future[None] = Future()
    never.set_running_or_notify_cancel()
    gate.close(never, given_up.append)
    start = time.monotonic()
    gate.wait()
    gate.wait()
    assert time.monotonic() - start < 10.0
    assert len(given_up) == 1
    with pytest.raises(SaveError) as caught:
        gate.check()
    assert "the copying of an earlier save still hangs" in caught.value.message
    never.set_result(None)
    gate.check()


def test_a_closed_checkpointer_lets_go_of_optimizers(root: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"model": model, "optim": optimizer})
        assert len(optimizer._optimizer_step_pre_hooks) == 1
        ck.save(2, {"model": model, "optim": optimizer})
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert not optimizer._optimizer_step_pre_hooks
