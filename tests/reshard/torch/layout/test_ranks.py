"""Real ranks whose tensors are plain and local: saved and loaded by what their layout says."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptd
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.store import open_store
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S
from tests.reshard.torch.layout.jobs import (
    PROGRAM,
    contents,
    differing,
    fsdp_job,
    megatron_job,
    whole_job,
)

pytestmark = [pytest.mark.usefixtures("writing_thread"), pytest.mark.dist, pytest.mark.timeout(400)]


def save_megatron(root: str, program: str, steps: int) -> None:
    module, optim = megatron_job(1, steps)
    with ckptd.Checkpointer(root, layout=f"{program}:mg", timeout_s=60.0) as ck:
        ck.save(1, {"model": module, "optim": optim, "n": 7})


def load_fsdp(root: str, program: str, steps: int) -> list[str]:
    module, optim = fsdp_job(5)
    state = {"model": module, "optim": optim, "n": 0}
    with ckptd.Checkpointer(root, layout=f"{program}:hf", timeout_s=60.0) as ck:
        assert ck.load(state) == 1
        assert state["n"] == 7
        assert optim.param_groups[0]["lr"] == 0.01
        ck.save(2, state)
    return differing(contents(module, optim), contents(*whole_job(1, steps)))


def load_megatron(root: str, program: str, layout: str, steps: int) -> list[str]:
    pipeline = 2 if layout == "mg" else 1
    module, optim = megatron_job(3, 0, pipeline)
    with ckptd.Checkpointer(root, layout=f"{program}:{layout}", timeout_s=60.0) as ck:
        assert ck.load({"model": module, "optim": optim, "n": 0}) == 2
    return differing(contents(module, optim), contents(*megatron_job(1, steps, pipeline)))


def test_megatron_to_fsdp_and_back(tmp_path: Path) -> None:
    program = tmp_path / "job.lay"
    program.write_text(PROGRAM)
    root = str(tmp_path / "root")
    run_ranks(4, save_megatron, root, str(program), 2, deadline_s=PATIENCE_S)
    with open_store(root) as store:
        catalogue = Catalogue(store)
        manifest = catalogue.manifest_of(catalogue.commit(catalogue.find(1)))
    shapes = {t.name: t.shape for t in manifest.tensors}
    assert shapes["model.decoder.layers.2.qkv.weight"] == (32, 16)
    assert shapes["optim.decoder.layers.2.fc1.weight.exp_avg"] == (24, 16)
    assert "layout mg" in manifest.lay
    groups = next(o for o in manifest.objects if o.name == "optim.groups")
    assert "decoder.layers.2.qkv.weight" in groups.value[0]["params"]
    for wrong in run_ranks(3, load_fsdp, root, str(program), 2, deadline_s=PATIENCE_S):
        assert wrong == []
    for layout in ("mg", "mgd"):
        for wrong in run_ranks(4, load_megatron, root, str(program), layout, 2):
            assert wrong == []
