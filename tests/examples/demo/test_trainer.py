"""The training job itself: the same on every layout, and learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptd.errors import MismatchError, UsageError
from ckptd.testing.ranks import run_ranks
from ckptd_demo.model import build
from ckptd_demo.processes import read_rows
from ckptd_demo.spec import Cut, GptShape, RunSpec, StateRow, StepRow
from ckptd_demo.trainer import Job, train

pytestmark = pytest.mark.usefixtures("writing_thread")

SHAPE = GptShape(layers=2, heads=2, width=40, seq=32)
STEPS = 6


def _spec(folder: Path, cut: Cut, **options: object) -> RunSpec:
    folder.mkdir(parents=True)
    return RunSpec(folder=str(folder), cut=cut, until=STEPS, steps=STEPS, shape=SHAPE, **options)  # type: ignore[arg-type]


def _rows(folder: Path, cut: Cut) -> list[StepRow]:
    spec = _spec(folder, cut)
    run_ranks(cut.ranks, train, spec)
    return read_rows(spec.files.steps, StepRow)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[StepRow]:
    """One rank's run, which the others have to follow."""
    return _rows(tmp_path_factory.mktemp("alone") / "run", Cut(dp=1))


@pytest.mark.dist
@pytest.mark.parametrize("cut", [Cut(dp=2, tp=2), Cut(dp=2), Cut(dp=3)], ids=str)
def test_every_layout_trains_alike(tmp_path: Path, cut: Cut, alone: list[StepRow]) -> None:
    rows = _rows(tmp_path / "cut", cut)
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert [row.ids for row in rows] == [row.ids for row in alone]
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in alone], rel=1e-5)
    assert rows[-1].loss < rows[0].loss


def _digests(spec: RunSpec) -> StateRow:
    job = Job(spec)
    for _ in range(2):
        job.step()
    row = job.digest("saved")
    with torch.no_grad():
        # One element of one moment on one rank: the digest of exactly that tensor must change.
        moment = job.optimizer.state[job.model.head.weight]["exp_avg"]
        local = moment.to_local()
        if local.numel() and torch.distributed.get_rank() == 1:
            local.view(-1)[-1] += 1e-6
    changed = job.digest("saved")
    assert {k for k in row.tensors if row.tensors[k] != changed.tensors[k]} == {
        "head.weight/exp_avg"
    }
    job.check_data()
    job.data["corpus"] = "of another Python"
    with pytest.raises(MismatchError, match="the text is not"):
        job.check_data()
    return row


@pytest.mark.dist
def test_digest_covers_all_and_is_the_same_on_every_rank_and_another_text_is_refused(
    tmp_path: Path,
) -> None:
    rows = run_ranks(4, _digests, _spec(tmp_path / "run", Cut(dp=2, tp=2)))
    assert all(row == rows[0] for row in rows)
    # Parameters, both moments, and a step count for each parameter.
    parameters = len(list(build(SHAPE, 1).parameters()))
    assert len(rows[0].tensors) == 4 * parameters
    assert rows[0].nbytes == 12 * SHAPE.parameters + 4 * parameters


def test_shape_counts_its_parameters() -> None:
    for shape in (SHAPE, GptShape()):
        assert sum(p.numel() for p in build(shape, 1).parameters()) == shape.parameters


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    first = build(SHAPE, 1).state_dict()
    torch.manual_seed(6)
    second = build(SHAPE, 1).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], build(SHAPE, 2).state_dict()["head.weight"])


def test_batch_that_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shared out"):
        Job(_spec(tmp_path / "run", Cut(dp=2), batch=7))
