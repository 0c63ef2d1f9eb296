"""The checkpointer in one process: what a user meets, and what bad input gets."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptd
from ckptd.checkpoint.format.manifest import INLINE_BYTES
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import (
    ConflictError,
    CorruptError,
    MismatchError,
    NotFoundError,
    RefusedError,
    SaveError,
    UsageError,
)
from ckptd.store import StoreSpec, open_store
from tests.processes import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("writing_thread")


class Net(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.body = nn.Sequential(nn.Linear(width, 9), nn.BatchNorm1d(9), nn.Linear(9, width))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)))


class Run:
    """A small training run with everything a state may hold."""

    def __init__(self, seed: int, root: str, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 3)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optim,
            "sched": self.sched,
            "rng": ckptd.Rng(),
            "data": {"position": seed, "order": (1, 2, b"\x00")},
            "own": ckptd.PerRank([seed]),
            "list": [torch.full((3,), float(seed)), None, np.arange(4) + seed],
        }
        self.ck = ckptd.Checkpointer(root, **options)

    def train(self, steps: int = 1) -> list[float]:
        losses = []
        for _ in range(steps):
            ids = torch.randint(0, 7, (6,))
            loss = nn.functional.cross_entropy(self.model(ids), ids)
            loss.backward()
            self.optim.step()
            self.optim.zero_grad()
            self.sched.step()
            losses.append(loss.item())
        return losses


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "ckpts")


@pytest.mark.usefixtures("writing_process")
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(root: str) -> None:
    first = Run(1, root)
    first.train(4)
    assert first.ck.latest() is None
    handle = first.ck.save(4, first.state)
    assert handle is not None
    handle.staged()
    expected = first.train(5)
    first.ck.close()

    second = Run(2, root)
    assert second.ck.latest() == 4
    assert second.ck.load(second.state) == 4
    assert second.state["data"] == {"position": 1, "order": (1, 2, b"\x00")}
    assert second.state["own"].value == [1]
    assert torch.equal(second.state["list"][0], torch.full((3,), 1.0))
    assert second.state["list"][2].tolist() == [1, 2, 3, 4]
    assert second.model.head.weight is second.model.embed.weight
    assert second.train(5) == expected
    second.ck.close()


def test_saving_changes_nothing(root: str) -> None:
    run = Run(1, root)
    run.train(2)
    before = copy.deepcopy(run.model.state_dict())
    streams = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    run.ck.save(2, run.state)
    run.ck.close()
    assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (np.random.get_state()[1] == streams[1]).all()
    assert random.getstate() == streams[2]


@pytest.mark.usefixtures("writing_process")
def test_what_is_saved_is_what_was_there_at_the_call(root: str) -> None:
    # Overlapping saves of other engines held the values of a later step: buffers were reused.
    state = {"w": torch.zeros(1 << 20), "n": 0}
    with ckptd.Checkpointer(root) as ck:
        for step in range(1, 5):
            state["w"].fill_(step)
            state["n"] = step
            ck.save(step, state)
            state["w"].fill_(-1.0)
        ck.wait()
        for step in (4, 3, 2, 1):
            assert ck.load(state, step) == step
            assert state["n"] == step
            assert (state["w"] == step).all()


def test_every_and_keep(root: str) -> None:
    state = {"w": torch.zeros(3)}
    with ckptd.Checkpointer(root, every=10, keep=2) as ck:
        saved = [s for s in range(1, 51) if ck.save(s, state)]
        assert saved == [10, 20, 30, 40, 50]
        assert ck.save(51, state, force=True)
    assert steps_on_line(root) == [50, 51]


def steps_on_line(root: str) -> list[int]:
    return [n.step for n in Catalogue(open_store(root)).line()]


def test_best_metric_and_pins_are_kept(root: str) -> None:
    state = {"w": torch.zeros(3)}
    keep = ckptd.Keep(last=1, best=("loss", "min", 1))
    with ckptd.Checkpointer(root, keep=keep) as ck:
        for step, loss in enumerate([3.0, 1.0, 2.0, 5.0], start=1):
            ck.save(step, state, metadata={"loss": loss})
            ck.wait()
            if step == 1:
                ck.pin(1, "first")
    assert steps_on_line(root) == [1, 2, 4]
    with ckptd.Checkpointer(root, keep=keep) as ck:
        ck.load(state)
        ck.unpin(1)
        ck.save(5, state, metadata={"loss": 9.0})
    assert steps_on_line(root) == [2, 5]


def test_the_best_by_a_metric_that_comes_later(root: str) -> None:
    """A process that evaluates is two saves behind, and reads what it evaluates."""
    state, found = {"w": torch.zeros(3)}, {"w": torch.zeros(3)}
    keep = ckptd.Keep(last=1, best=("loss", "min", 1))
    kept = [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [2, 4, 5, 6]]
    losses = [None, None, 3.0, 1.0, 2.0, 5.0]
    with ckptd.Checkpointer(root, keep=keep) as ck, ckptd.Checkpointer(root) as evaluation:
        for step, (loss, there) in enumerate(zip(losses, kept, strict=True), start=1):
            state["w"].fill_(step)
            ck.save(step, state)
            until(lambda there=there: steps_on_line(root) == there)
            if loss is not None:
                assert evaluation.load(found, step - 2, only="w") == step - 2
                assert found["w"][0] == step - 2
                evaluation.annotate(step - 2, {"loss": torch.tensor(loss)})
        with pytest.raises(NotFoundError):
            evaluation.annotate(3, {"loss": 0.0})
        ck.annotate(6, {"loss": 0.5})
        ck.save(7, state, metadata={"loss": 1.0})
    assert steps_on_line(root) == [6, 7]


def test_a_misspelt_metric_is_told_once(root: str, caplog: pytest.LogCaptureFixture) -> None:
    with ckptd.Checkpointer(root, keep=ckptd.Keep(last=1, best=("los", "min", 1))) as ck:
        for step in range(1, 6):
            ck.save(step, {"w": torch.zeros(3)}, metadata={"loss": 1.0})
            ck.wait()
    assert steps_on_line(root) == [1, 2, 3, 4, 5]
    (once,) = [r.getMessage() for r in caplog.records if "los" in r.getMessage()]
    assert once == (
        "after step 3: no checkpoint has the metric los, so each waits and stays; there: loss"
    )


def test_a_tag_stands_where_a_step_does(root: str) -> None:
    state = {"w": torch.zeros(3)}
    with ckptd.Checkpointer(root, keep=1) as ck:
        for step in (1, 2, 3):
            state["w"].fill_(step)
            ck.save(step, state)
            ck.wait()
            if step < 3:
                ck.tag(step, "prod" if step == 1 else "good")
        assert steps_on_line(root) == [1, 2, 3]
        ck.annotate("good", {"loss": 1.0})
        ck.tag("good", "prod")
        ck.save(4, state)
        until(lambda: steps_on_line(root) == [2, 4])
        with pytest.raises(NotFoundError, match="no checkpoint is tagged bad"):
            ck.load(state, "bad")
        with pytest.raises(UsageError, match="not a name"):
            ck.tag(4, "4")
    with ckptd.Checkpointer(root) as ck:
        assert ck.load(state, "prod") == 2
        assert torch.equal(state["w"], torch.full((3,), 2.0))
        ck.untag("prod")
        ck.untag("good")
        state["w"].fill_(5)
        ck.save(5, state)  # goes on from what the tag named
    assert steps_on_line(root) == [2, 5]
    with ckptd.Checkpointer(root + ".other") as ck:
        with pytest.raises(NotFoundError, match="no checkpoint is tagged prod"):
            ck.load(state, "prod", source=root)
        Catalogue(open_store(root)).tag(Catalogue(open_store(root)).find(2), "prod")
        assert ck.load(state, "prod", source=root) == 2


def test_going_back_leaves_later_steps_beside_the_line(root: str) -> None:
    state = {"w": torch.zeros(2)}
    with ckptd.Checkpointer(root) as ck:
        for step in (1, 2, 3):
            ck.save(step, state)
    with ckptd.Checkpointer(root) as ck:
        ck.load(state, 1)
        ck.save(5, state)
    assert steps_on_line(root) == [1, 5]


def test_a_first_save_continues_the_line_only_forwards(root: str) -> None:
    state = {"w": torch.zeros(2)}
    with ckptd.Checkpointer(root) as ck:
        ck.save(10, state)
    with ckptd.Checkpointer(root) as ck:
        with pytest.raises(RefusedError) as caught:
            ck.save(10, state)
        assert caught.value.kind == "behind"
        assert "load" in (caught.value.hint or "")
        assert "new_run" in (caught.value.hint or "")
    with ckptd.Checkpointer(root, new_run=False) as ck:
        ck.save(11, state)
    assert steps_on_line(root) == [10, 11]
    with ckptd.Checkpointer(root, new_run=True) as ck:
        ck.save(1, state)
    assert steps_on_line(root) == [1]


def test_an_empty_root_has_nothing_to_load(root: str) -> None:
    with ckptd.Checkpointer(root) as ck:
        assert ck.latest() is None
        with pytest.raises(NotFoundError):
            ck.load({"w": torch.zeros(1)})


def test_one_error_lists_everything_that_does_not_fit(root: str) -> None:
    saved = {"a": torch.zeros(2), "b": torch.zeros(3), "weight": torch.zeros(4), "n": 1}
    live = {"a": torch.zeros(9), "b": torch.zeros(3).double(), "wieght": torch.zeros(4), "m": 1}
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, saved)
        with pytest.raises(MismatchError) as caught:
            ck.load(live)
        text = str(caught.value)
        for part in (
            "a: wanted float32[9], found float32[2]",
            "b: wanted float64[3]",
            "wieght",
            "nearest: weight",
            "m: missing",
            "n: not in the live state",
        ):
            assert part in text, part
        assert live["a"].shape == (9,)


def test_not_strict_loads_what_fits_and_reports(root: str) -> None:
    live = {"a": torch.zeros(2), "new": torch.full((2,), 5.0), "n": 0}
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"a": torch.ones(2), "old": torch.zeros(3), "n": 4})
        ck.load(live, strict=False)
        assert ck.last_load is not None
        assert ck.last_load.missing == ("new",)
        assert ck.last_load.unexpected == ("old",)
    assert live["a"].tolist() == [1.0, 1.0]
    assert live["new"].tolist() == [5.0, 5.0]
    assert live["n"] == 4


def test_weights_only(root: str) -> None:
    first = Run(1, root)
    first.train(3)
    first.ck.save(3, first.state)
    first.ck.close()
    model = Net()
    with ckptd.Checkpointer(root) as ck:
        ck.load({"model": model}, weights_only=True)
        for name, value in first.model.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        with pytest.raises(MismatchError, match="not in the live state"):
            ck.load({"model": model})


@pytest.mark.parametrize("part", [{"weights_only": True}, {"only": "model.*"}])
def test_who_evaluates_takes_nothing_from_who_trains(root: str, part: dict[str, Any]) -> None:
    trainer = Run(1, root)
    trainer.train(1)
    trainer.ck.save(1, trainer.state).durable(PATIENCE_S)
    model = Net()
    evaluator = ckptd.Checkpointer(root)
    for step in (2, 3):
        assert evaluator.load({"model": model}, **part) == step - 1
        assert evaluator.generation == 0
        trainer.train(1)
        trainer.ck.save(step, trainer.state).durable(PATIENCE_S)
    assert [name.generation for name in Catalogue(open_store(root)).line()] == [1, 1, 1]
    # Who goes on from what it has loaded is a new generation all the same.
    evaluator.load({"model": model}, **part)
    evaluator.save(4, {"model": model}).durable(PATIENCE_S)
    newest = Catalogue(open_store(root)).line()[-1]
    assert (newest.step, newest.generation) == (4, 2)
    with pytest.raises(ConflictError) as caught:
        trainer.ck.save(5, trainer.state).durable(PATIENCE_S)
    assert caught.value.kind == "superseded"
    evaluator.close()


def test_only_and_rename(root: str) -> None:
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"old": {"w": torch.ones(2)}, "keep": torch.ones(2)})
        live = {"new": {"w": torch.zeros(2)}, "keep": torch.zeros(2)}
        ck.load(live, rename=lambda n: n.replace("new.", "old."))
        assert live["new"]["w"].tolist() == [1, 1]
        live = {"old": {"w": torch.zeros(2)}, "keep": torch.zeros(2)}
        ck.load(live, only="old.*")
        assert (live["old"]["w"].tolist(), live["keep"].tolist()) == ([1, 1], [0, 0])
        live = {"mine": torch.zeros(2), "old": {"w": torch.zeros(2)}}
        ck.load(live, rename={"mine": "keep"})
        assert live["mine"].tolist() == [1, 1]


def test_a_meta_model_and_a_fresh_optimizer(root: str) -> None:
    first = Run(1, root)
    first.train(3)
    first.ck.save(3, first.state)
    first.ck.close()
    with torch.device("meta"):
        model = Net()
    with ckptd.Checkpointer(root) as ck:
        ck.load({"model": model}, weights_only=True, device="cpu")
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert torch.equal(model.head.weight, first.model.head.weight)
    assert model.head.weight is model.embed.weight


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.usefixtures("writing_process")
def test_all_dtypes_round_trip(root: str) -> None:
    from ckptd.types import DTYPES

    state: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        kind = getattr(torch, name)
        raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
        state[name] = (raw.bool() if kind == torch.bool else raw.view(kind)).reshape(2, 3)
    live = {n: torch.zeros_like(t.view(torch.uint8)).view(t.dtype) for n, t in state.items()}
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, state)
        ck.load(live)
    for name, tensor in state.items():
        assert tensor.view(torch.uint8).tolist() == live[name].view(torch.uint8).tolist(), name


def test_strided_and_expanded_tensors(root: str) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    live = torch.zeros(6, 4)
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"t": base.t()})
        ck.load({"t": live.t().contiguous().t()})
        target = torch.zeros(4, 6).t()
        ck.load({"t": target})
    assert torch.equal(target, base.t())


def damage(root: str, pattern: str, at: int = -5) -> None:
    path = max(Path(root).glob(pattern))
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_a_flipped_bit_falls_back_to_the_older_step(root: str) -> None:
    live = {"w": torch.zeros(1000)}
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"w": torch.full((1000,), 1.0)})
        ck.save(2, {"w": torch.full((1000,), 2.0)})
    damage(root, "data/*2-g*/r00000.safetensors")
    with ckptd.Checkpointer(root) as ck:
        with pytest.raises(CorruptError) as caught:
            ck.load(live, 2)
        assert caught.value.kind == "digest"
        assert "r00000.safetensors" in str(caught.value)
        assert (live["w"] == 0).all()
        assert ck.load(live) == 1
        assert ck.last_load is not None
        assert [s for s, _ in ck.last_load.skipped] == [2]
        ck.save(3, live)
    assert steps_on_line(root) == [1, 3]


NOT_SMALL = INLINE_BYTES // 4 + 1


@pytest.mark.parametrize(
    "pattern", ["data/*/manifest.json", "data/*/r00000.digests", "data/*/witness", "commits/*"]
)
def test_damage_elsewhere_is_found_as_well(root: str, pattern: str) -> None:
    live = {"w": torch.zeros(NOT_SMALL)}
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"w": torch.full((NOT_SMALL,), 1.0)})
    damage(root, pattern, 10)
    with ckptd.Checkpointer(root) as ck, pytest.raises(CorruptError):
        ck.load(live)


def test_a_state_left_half_written_cannot_be_saved(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = {"w": torch.zeros(1000)}
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"w": torch.full((1000,), 1.0)})
        import ckptd.checkpoint.torch.filling as witnessing

        genuine = witnessing.gather
        monkeypatch.setattr(witnessing, "gather", lambda *a: genuine(*a) ^ 1)
        with pytest.raises(CorruptError) as caught:
            ck.load(live)
        assert caught.value.state_corrupted
        assert "values arrived at the wrong places" in caught.value.message
        with pytest.raises(CorruptError, match="an earlier call failed"):
            ck.save(2, live)
        monkeypatch.undo()
        ck.load(live)
        ck.save(2, live)


@pytest.mark.usefixtures("writing_process")
def test_a_failed_save_is_raised_by_the_next_call(tmp_path: Path) -> None:
    root = tmp_path / "ckpts"
    state = {"w": torch.zeros(1000)}
    ck = ckptd.Checkpointer(str(root))
    ck.save(1, state)
    ck.wait()
    data = root / "data"
    moved = root / "elsewhere"
    data.rename(moved)
    data.write_text("a file where the folder should be")
    handle = ck.save(2, state)
    assert handle is not None
    with pytest.raises(ckptd.CkptdError):
        handle.durable(PATIENCE_S)
    data.unlink()
    moved.rename(data)
    ck.save(2, state)
    ck.close()
    assert steps_on_line(str(root)) == [1, 2]


@pytest.mark.usefixtures("writing_process")
def test_an_unseen_failure_surfaces_at_close(tmp_path: Path) -> None:
    root = tmp_path / "ckpts"
    ck = ckptd.Checkpointer(str(root))
    ck.save(1, {"w": torch.zeros(1000)})
    ck.wait()
    (root / "data").rename(root / "moved")
    (root / "data").write_text("in the way")
    ck.save(2, {"w": torch.zeros(1000)})
    with pytest.raises(ckptd.CkptdError):
        ck.close()


@pytest.mark.usefixtures("writing_process")
def test_a_dead_worker_is_replaced(root: str) -> None:
    import os
    import signal

    state = {"w": torch.zeros(1000)}
    ck = ckptd.Checkpointer(root)
    ck.save(1, state)
    ck.wait()
    assert ck.writer_pid is not None
    os.kill(ck.writer_pid, signal.SIGKILL)
    handle = ck.save(2, state)
    assert handle is not None
    handle.durable(PATIENCE_S)
    ck.close()
    assert steps_on_line(root) == [1, 2]


@pytest.mark.usefixtures("writing_process")
def test_where_there_is_a_root_the_writing_process_starts_behind_the_load(root: str) -> None:
    state = {"w": torch.zeros(1000)}
    with ckptd.Checkpointer(root) as ck:
        assert ck.writer_pid is not None
        ck.save(1, state)
    with ckptd.Checkpointer(root) as ck:
        ck.load(state, weights_only=True)
        assert ck.writer_pid is None
        ck.load(state)
        assert ck.writer_pid is not None
        ck.save(2, state)
    with ckptd.Checkpointer(root, new_run=False) as ck:
        assert ck.writer_pid is None
        ck.save(3, state)
    with ckptd.Checkpointer(root) as ck:  # one that does nothing ends as well
        assert ck.writer_pid is None
    assert steps_on_line(root) == [1, 2, 3]


@pytest.mark.usefixtures("writing_process")
def test_killing_the_worker_in_mid_save_loses_nothing(root: str) -> None:
    import os
    import signal

    state = {"w": torch.zeros(200_000)}
    ck = ckptd.Checkpointer(root, storage=ckptd.Storage(throttle=400_000.0))
    handle = ck.save(1, state)
    assert handle is not None
    assert ck.writer_pid is not None
    os.kill(ck.writer_pid, signal.SIGKILL)
    handle.durable(PATIENCE_S)
    ck.save(2, {"w": torch.zeros(10)})
    ck.close()
    assert steps_on_line(root) == [1, 2]


def test_values_that_cannot_be_saved_say_how(root: str) -> None:
    with ckptd.Checkpointer(root) as ck:
        with pytest.raises(UsageError) as caught:
            ck.save(1, {"x": object()})
        assert caught.value.kind == "unsavable"
        assert "register" in (caught.value.hint or "")
        ck.save(1, {"x": 1})


def test_bad_steps_and_a_closed_checkpointer(root: str) -> None:
    ck = ckptd.Checkpointer(root)
    for step in (-1, 1.5, True, 10**12):
        with pytest.raises(UsageError):
            ck.save(step, {"x": 1})  # type: ignore[arg-type]
    ck.save(5, {"x": 1})
    with pytest.raises(RefusedError):
        ck.save(4, {"x": 1})
    ck.close()
    ck.close()
    with pytest.raises(UsageError, match="closed"):
        ck.save(6, {"x": 1})


def test_an_error_in_the_loop_is_not_hidden_by_closing(root: str) -> None:
    with pytest.raises(ZeroDivisionError), ckptd.Checkpointer(root) as ck:
        ck.save(1, {"x": 1})
        raise ZeroDivisionError
    assert steps_on_line(root) == [1]


def test_memory_roots_work_in_one_process() -> None:
    live = {"w": torch.zeros(5)}
    with ckptd.Checkpointer("memory://checkpointer-test") as ck:
        ck.save(1, {"w": torch.ones(5)})
        assert ck.load(live) == 1
    assert live["w"].tolist() == [1.0] * 5


def test_data_files_open_with_safetensors(root: str) -> None:
    from safetensors import safe_open

    with ckptd.Checkpointer(root) as ck:
        ck.save(
            1, {"model": Net(), "z": torch.zeros(0, 3), "c": torch.zeros(2, dtype=torch.complex128)}
        )
    path = next(Path(root).glob("data/*/r00000.safetensors"))
    with safe_open(path, framework="pt") as file:
        assert "model.embed.weight" in file.keys()  # noqa: SIM118
        assert file.get_tensor("z").shape == (0, 3)
        assert file.get_tensor("c").shape == (2, 16)
        assert file.offset_keys()


def test_large_objects_leave_the_manifest(root: str) -> None:
    big = {"table": list(range(20_000))}
    live: dict[str, Any] = {"big": {"table": []}}
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"big": big})
        ck.load(live)
    assert live["big"] == big
    manifest = next(Path(root).glob("data/*/manifest.json"))
    assert manifest.stat().st_size < 20_000


def test_nothing_is_said_about_no_problem(root: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ckptd.Checkpointer(root) as ck:
            ck.save(1, {"x": 1})


@pytest.mark.usefixtures("writing_process")
def test_the_staging_buffer_grows_with_the_state(root: str) -> None:
    live = {"w": torch.zeros(300_000)}
    with ckptd.Checkpointer(root) as ck:
        for step, n in enumerate([10, 1000, 300_000, 5], start=1):
            ck.save(step, {"w": torch.full((n,), float(step))})
        ck.load(live, 3)
    assert (live["w"] == 3.0).all()


@pytest.mark.usefixtures("writing_process")
def test_no_memory_is_said_plainly(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ckptd.checkpoint.save.arena as arena

    def refuse(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arena.os, "posix_fallocate", refuse)
    with ckptd.Checkpointer(root) as ck:
        with pytest.raises(SaveError) as caught:
            ck.save(1, {"w": torch.zeros(1000)})
        assert caught.value.kind == "no-memory"
        monkeypatch.undo()
        ck.save(1, {"w": torch.zeros(1000)})


def test_a_spec_of_a_root_retries_what_may_heal(root: str) -> None:
    from ckptd.checkpoint.root.opening import root_spec

    spec = root_spec(root, {}, 5.0)
    assert isinstance(spec, StoreSpec)
    assert [type(w).__name__ for w in spec.wrappers] == ["ThrottleSpec", "PackSpec", "RetrySpec"]


# -- what is refused before a byte is copied ------------------------------------------------------


def refused(root: Path, state: dict[str, Any], **options: Any) -> UsageError:
    """Return the error of a save; the writer is alive, nothing is written, the next save works."""
    with ckptd.Checkpointer(str(root)) as checkpointer:
        writer = checkpointer.writer_pid
        with pytest.raises(UsageError) as caught:
            checkpointer.save(1, state, **options)
        assert open_store(str(root)).children("data/") == []
        handle = checkpointer.save(2, {"w": torch.zeros(2)}, metadata={"loss": 1.5})
        assert handle is not None
        handle.durable(PATIENCE_S)
        assert checkpointer.writer_pid == writer
        assert checkpointer.latest() == 2
    return caught.value


@pytest.mark.parametrize(
    ("key", "value"), [("text", "x" * 300_000), ("loss", torch.zeros(2)), (3, "a number as key")]
)
def test_metadata_that_cannot_be_kept(tmp_path: Path, key: Any, value: Any) -> None:
    metadata = {"fine": 1, key: value}
    error = refused(tmp_path, {"w": torch.zeros(2)}, metadata=metadata)
    assert "of the metadata" in error.message or "the metadata is too large" in error.message
    assert error.where == f"metadata[{key!r}]"


def test_metadata_that_cannot_be_kept_is_refused_where_nothing_is_due(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)}
    with ckptd.Checkpointer(str(tmp_path), every=10) as ck:
        wrong: list[Any] = [{"loss": torch.zeros(2)}, {"net": nn.Linear(1, 1)}, ["loss", 1.0]]
        for bad in wrong:
            with pytest.raises(UsageError) as caught:
                ck.save(1, state, metadata=bad)
            assert caught.value.message in (
                "a value of the metadata is not JSON",
                "metadata must be a dict",
            )
        for step in range(1, 11):
            loss = torch.tensor(step / 2, requires_grad=True)
            norm = {"norm": np.float32(step), "seen": np.int64(step), "ok": np.bool_(True)}
            ck.save(step, state, metadata={"loss": loss, "more": [norm, np.ones(1)]})
    catalogue = Catalogue(open_store(str(tmp_path)))
    [name] = catalogue.commits()
    norm = {"norm": 10.0, "seen": 10, "ok": True}
    assert catalogue.commit(name).metadata == {"loss": 5.0, "more": [norm, 1.0]}


def test_names_that_are_too_long(tmp_path: Path) -> None:
    error = refused(tmp_path, {"model": {"w" * 2100: {"v" * 2100: torch.zeros(2)}}})
    assert "invalid name in a checkpoint" in error.message
    assert str(error.where).startswith("state['model']['www")


def test_too_many_dimensions(tmp_path: Path) -> None:
    error = refused(tmp_path, {"model": {"w": torch.zeros([1] * 65)}})
    assert (error.kind, error.where) == ("unsavable", "model.w")


def test_more_chunks_than_a_header_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.checkpoint.format.container.MAX_HEADER_BYTES", 20_000)
    error = refused(tmp_path, {f"w{i}": torch.zeros(1) for i in range(400)})
    assert "too many chunks for one file" in error.message
    assert "400 chunks" in str(error.found)
