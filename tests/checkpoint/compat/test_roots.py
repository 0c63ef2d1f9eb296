"""Roots that older versions wrote: all that can be done with a root can be done with them."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptd
from ckptd.checkpoint.format.names import CommitName, commit_key
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import plan_gc, run_gc
from ckptd.checkpoint.tools.verify import check_records, verify
from ckptd.store import open_store
from tests.checkpoint.compat.training import Training
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("writing_thread")

BEFORE_DIGESTS = Path(__file__).parent / "root-539564c"
"""Records without digests. Steps 1 to 3, gone back to 2, loaded, step 4; step 1 is pinned."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BEFORE_DIGESTS, tmp_path / "root"))


def weights(step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def test_it_is_read(root: Path) -> None:
    catalogue = Catalogue(open_store(str(root)))
    assert catalogue.line() == [CommitName(1, 1), CommitName(2, 1), CommitName(4, 3)]
    assert catalogue.latest() == CommitName(4, 3)
    assert check_records(catalogue) == ()
    for name in catalogue.commits():
        assert verify(catalogue, name).ok
    assert catalogue.commit(CommitName(4, 3)).metadata == {"loss": 6.0}


def test_a_stranger_recovers_it(root: Path) -> None:
    recover = runpy.run_path(str(Path(__file__).parents[3] / "docs/recover.py"))["recover"]
    for step in (1, 2, 3):
        found = recover(root / commit_key(CommitName(step, 1)), "w")
        assert torch.equal(torch.from_numpy(found), weights(step))


def test_it_is_loaded_and_goes_on(root: Path) -> None:
    state = {"w": torch.zeros(6, 5), "step": 0}
    with ckptd.Checkpointer(str(root), keep=2) as ck:
        assert ck.load(state) == 4
        assert state["step"] == 4
        assert torch.equal(state["w"], weights(4))
        handle = ck.save(5, {"w": weights(5), "step": 5})
        assert handle is not None
        handle.durable(PATIENCE_S)
    catalogue = Catalogue(open_store(str(root)))
    assert catalogue.line() == [CommitName(1, 1), CommitName(4, 3), CommitName(5, 4)]
    run_gc(catalogue.store, plan_gc(catalogue, 1, abandoned_s=0.0))
    assert catalogue.commits() == [CommitName(1, 1), CommitName(5, 4)]
    catalogue.rollback(1)
    assert catalogue.latest() == CommitName(1, 1)


def as_kept(root: Path) -> Training:
    """Return the training of a root after step 3, with weights and moments as its file has them.

    Computed here, they would differ in the last bits where another processor made the root.
    """
    training = Training(1)
    for _ in range(3):
        training.step()
    kept = load_file(next(root.glob("data/000000000003-*")) / "r00000.safetensors")
    model = training.model.state_dict()
    training.model.load_state_dict({name: kept[f"model.{name}"] for name in model})
    for name, parameter in training.model.named_parameters():
        moments = training.optim.state[parameter]
        for key in moments:
            moments[key] = kept[f"optim.{name}.{key}"]
    return training


def test_a_training_of_before_the_slices_goes_on(tmp_path: Path) -> None:
    """Each kind of leaf: the next two steps are those of a training that was never interrupted."""
    kept = Path(__file__).parent / "root-d283f0fa"
    root = Path(shutil.copytree(kept, tmp_path / "root"))
    unbroken = as_kept(root)
    expected = [unbroken.step() for _ in range(2)]
    resumed = Training(2)
    with ckptd.Checkpointer(str(root)) as ck:
        state = resumed.state()
        assert ck.load(state) == 3
        assert torch.equal(resumed.others["half"], torch.full((3,), 1.0, dtype=torch.bfloat16))
        assert resumed.others["count"] == 1
        assert resumed.others["name"] == "1"
        assert resumed.others["list"][0] == 1
        assert torch.equal(resumed.others["list"][1]["b"], torch.full((2, 2), 1))
        assert state["mine"].value == {"count": 1}
        assert all(torch.equal(resumed.step(), step) for step in expected)
        ck.save(5, resumed.state()).durable(PATIENCE_S)
    catalogue = Catalogue(open_store(str(root)))
    assert all(verify(catalogue, name).ok for name in catalogue.commits())
