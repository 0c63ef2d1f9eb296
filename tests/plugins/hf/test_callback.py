"""A Trainer that resumes at the end of an epoch, or by its metrics; what the callback refuses.

That a killed one goes on bit for bit, in the middle of an epoch, is in tests/trainers.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.errors import UsageError
from ckptd.testing.ranks import run_ranks

pytestmark = [pytest.mark.plugins, pytest.mark.dist, pytest.mark.timeout(400)]


def train(root: str, stop_at: int = 0, known: bool = True) -> Any:
    """Train for three epochs of five steps, or stop; return losses by step and all parameters."""
    warnings.simplefilter("ignore")
    import transformers
    from transformers.trainer_callback import ExportableState

    from ckptd_hf import CkptdCallback
    from tests.trainers.with_transformers import Texts

    torch.set_num_threads(1)
    transformers.set_seed(5)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 33}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)

    class Counts(transformers.TrainerCallback, ExportableState):
        """Has state of its own, as early stopping has."""

        def __init__(self, steps: int = 0) -> None:
            self.steps = steps

        def on_step_end(self, args: Any, state: Any, control: Any, **have: Any) -> None:
            self.steps += 1
            control.should_training_stop |= state.global_step == stop_at

        def state(self) -> dict[str, Any]:
            return {"args": {"steps": self.steps}, "attributes": {}}

    args = transformers.TrainingArguments(
        output_dir=str(Path(root).parent / "out"),
        num_train_epochs=3,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        restore_callback_states_from_checkpoint=True,
        disable_tqdm=True,
    )
    saves = CkptdCallback(root, every=5)
    trainer = transformers.Trainer(model, args, train_dataset=Texts(), callbacks=[Counts(), saves])
    trainer.train(resume_from_checkpoint=saves.resume(trainer) if known else None)
    losses = {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e}
    steps = [c.steps for c in trainer.callback_handler.callbacks if isinstance(c, Counts)]
    return losses, [p.detach().clone() for p in model.parameters()], trainer.state.epoch, steps


def test_an_epochs_end(tmp_path: Path) -> None:
    whole = run_ranks(1, train, str(tmp_path / "a/root"), deadline_s=120.0)[0]
    run_ranks(1, train, str(tmp_path / "b/root"), 10, deadline_s=120.0)
    again = run_ranks(1, train, str(tmp_path / "b/root"), deadline_s=120.0)[0]
    assert sorted(whole[0]) == list(range(1, 16))
    assert again[0].items() <= whole[0].items()
    assert set(range(11, 16)) <= set(again[0])
    assert all(torch.equal(a, b) for a, b in zip(whole[1], again[1], strict=True))
    assert whole[2:] == again[2:] == (3.0, [15])


def test_a_trainer_that_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not attached to"):
        run_ranks(1, train, str(tmp_path / "root"), 0, False, deadline_s=120.0)


def train_twice(root: str, resume: bool) -> Any:
    """Train for two epochs, then again, by four or from the start; return steps and lines."""
    warnings.simplefilter("ignore")
    import transformers

    import ckptd
    from ckptd.checkpoint.root.catalogue import Catalogue
    from ckptd.store import open_store
    from ckptd_hf import CkptdCallback
    from tests.trainers.with_transformers import Texts

    torch.set_num_threads(1)
    transformers.set_seed(5)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 33}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    args = transformers.TrainingArguments(
        output_dir=str(Path(root).parent / "out"),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    saves = CkptdCallback(root, every=4)
    model = transformers.GPT2LMHeadModel(config)
    trainer = transformers.Trainer(model, args, train_dataset=Texts(), callbacks=[saves])
    trainer.train(resume_from_checkpoint=saves.resume(trainer))
    trainer.args.num_train_epochs = 4 if resume else 3
    before = trainer.state.global_step
    trainer.train(resume_from_checkpoint=saves.resume(trainer) if resume else None)
    again = trainer.state.global_step
    catalogue = Catalogue(open_store(root))
    line = [name.step for name in catalogue.line()]
    state = {"model": model}
    kept = [p.detach().clone() for p in model.parameters()]
    with ckptd.Checkpointer(root) as checkpointer:
        checkpointer.load(state, weights_only=True)
    same = all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))
    return before, again, line, sorted(name.step for name in catalogue.commits()), same


@pytest.mark.parametrize("resume", [True, False])
def test_a_trainer_that_trains_again(tmp_path: Path, resume: bool) -> None:
    before, again, line, commits, same = run_ranks(
        1, train_twice, str(tmp_path / "root"), resume, deadline_s=120.0
    )[0]
    assert before == 10
    if resume:
        assert (again, line, commits) == (20, [4, 8, 12, 16, 20], [4, 8, 12, 16, 20])
        assert same
    else:
        assert (again, line, commits) == (15, [4, 8, 12], [4, 4, 8, 8, 12])


class Stopped(Exception):
    """A trainer is gone."""


def evaluated(root: str, how: str, stop_at: int = 0) -> Any:
    """Train with evaluations; return the log, the rate, whatever is saved, and what is left."""
    warnings.simplefilter("ignore")
    import transformers

    from ckptd_hf import CkptdCallback
    from tests.trainers.with_transformers import Texts

    torch.set_num_threads(1)
    transformers.set_seed(5)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 33}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    data = Texts()
    rates: list[tuple[int, float]] = []

    class Ends(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **have: Any) -> None:
            rates.append((state.global_step, have["optimizer"].param_groups[0]["lr"]))
            if stop_at and state.global_step == stop_at:
                raise Stopped

    real = tempfile.tempdir
    tempfile.tempdir = str(Path(root).parent)
    steps = {"eval_strategy": "steps", "eval_steps": 2}
    args = transformers.TrainingArguments(
        output_dir=str(Path(root).parent / "out"),
        num_train_epochs=4,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "threshold": 0.5},
        logging_steps=1,
        metric_for_best_model="loss",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        restore_callback_states_from_checkpoint=True,
        disable_tqdm=True,
        **(steps if how == "steps" else {"eval_strategy": "epoch"}),
    )
    saves = CkptdCallback(root, every=1)
    more = [transformers.EarlyStoppingCallback(2, 0.5)] if how == "early" else []
    trainer = transformers.Trainer(
        model, args, train_dataset=data, eval_dataset=data, callbacks=[saves, Ends(), *more]
    )
    try:
        trainer.train(resume_from_checkpoint=saves.resume(trainer))
    except Stopped:
        saves.checkpointer.close()
    made = [p.name for p in Path(root).parent.glob("ckptd-resume-*")]
    tempfile.tempdir = real
    timed = ("runtime", "per_second", "train_loss", "flos")
    log = [
        {k: v for k, v in line.items() if not any(word in k for word in timed)}
        for line in trainer.state.log_history
    ]
    return log, rates, [p.detach().clone() for p in model.parameters()], made


@pytest.mark.parametrize("how", ["steps", "epoch", "early"])
def test_logs_and_evaluations_are_neither_lost_nor_done_twice(how: str, tmp_path: Path) -> None:
    whole = run_ranks(1, evaluated, str(tmp_path / "a/root"), how, deadline_s=120.0)[0]
    assert len({rate for _, rate in whole[1]}) > 1
    assert (whole[1][-1][0] < 19) == (how == "early")
    for stop_at in (4, 5):
        root = str(tmp_path / f"{stop_at}/root")
        first = run_ranks(1, evaluated, root, how, stop_at, deadline_s=120.0)[0]
        again = run_ranks(1, evaluated, root, how, deadline_s=120.0)[0]
        assert first[1][:-1] + again[1] == whole[1], stop_at
        assert again[0] == whole[0], stop_at
        assert all(torch.equal(a, b) for a, b in zip(whole[2], again[2], strict=True))
        assert again[3] == []
