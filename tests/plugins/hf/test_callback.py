"""A Trainer that resumes at the end of an epoch; and what the callback refuses.

That a killed one goes on bit for bit, in the middle of an epoch, is in tests/trainers.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.errors import UsageError
from ckptd.testing.ranks import run_ranks
from tests.trainers.packages import needs

pytestmark = [pytest.mark.long, pytest.mark.dist, pytest.mark.timeout(400)]


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
    needs("transformers")
    whole = run_ranks(1, train, str(tmp_path / "a/root"), deadline_s=120.0)[0]
    run_ranks(1, train, str(tmp_path / "b/root"), 10, deadline_s=120.0)
    again = run_ranks(1, train, str(tmp_path / "b/root"), deadline_s=120.0)[0]
    assert sorted(whole[0]) == list(range(1, 16))
    assert again[0].items() <= whole[0].items()
    assert set(range(11, 16)) <= set(again[0])
    assert all(torch.equal(a, b) for a, b in zip(whole[1], again[1], strict=True))
    assert whole[2:] == again[2:] == (3.0, [15])


def test_a_trainer_that_it_does_not_know(tmp_path: Path) -> None:
    needs("transformers")
    with pytest.raises(UsageError, match="does not know"):
        run_ranks(1, train, str(tmp_path / "root"), 0, False, deadline_s=120.0)
