"""ZeRO of DeepSpeed: a real checkpoint of stage 3, and what stages 1 and 2 write, made here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.errors import CkptdError
from ckptd.tools.export import plan_export
from tests.readers.opening import fails, open_reader

TAG = "global_step2"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
SHAPES = [{"a.weight": (5, 3), "b.weight": (7,)}, {"a.bias": (4,), "n": ()}]
RANKS = 3
GROUPS = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [7]}]
"""Of torch's optimizer; the second one says what is not there."""


@pytest.fixture
def zero3(foreign: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(foreign / "deepspeed" / "zero3-fp32", tmp_path / "zero3"))


def test_stage_3_is_read_bit_by_bit(zero3: Path) -> None:
    wanted = np.load(zero3 / "expected.npz")
    for folder in (zero3, zero3 / TAG):
        reader = open_reader(folder)
        found = reader.tensors(reader.names)
        steps = {f"optim.{n}.step" for n in found if f"optim.{n}.exp_avg" in found}
        assert set(found) == {*wanted, *steps}
        assert [found[n].tolist() for n in steps] == [2.0] * 7
        assert all(found[n].tobytes() == wanted[n].tobytes() for n in wanted)
        assert all(found[n].shape == wanted[n].shape for n in wanted)
        assert reader.commit.step == 2
        assert reader.objects()["seen"] == 7
        groups = [reader.objects()[f"optim.param_groups.{i}.params"] for i in range(2)]
        assert groups[1] == ["norm.bias", "norm.weight", "up.bias"]
        assert reader.objects()["optim.param_groups.1.betas"] == (0.9, 0.999)
        assert reader.layout("up.weight").words == "flat ranges / 2"
        # Nothing has to be said for an export: names of weights are their own.
        plan = plan_export(reader)
        assert [item.name for _, items in plan.files for item in items] == [
            n for n in reader.names if not n.startswith("optim.")
        ]


def test_a_missing_rank(zero3: Path) -> None:
    (zero3 / TAG / OPTIM.format(1)).unlink()
    error = fails(zero3)
    assert error.kind == "missing-file"
    assert str(error.wanted).startswith("2 ranks")


def test_a_folder_that_latest_names_and_is_not_there(zero3: Path) -> None:
    (zero3 / "latest").write_text("global_step4")
    assert fails(zero3).kind == "missing-file"


def test_pipelines_and_experts_are_refused(zero3: Path) -> None:
    path = zero3 / TAG / "layer_00-model_states.pt"
    torch.save({}, path)
    assert fails(zero3).kind == "unreadable-format"
    path.rename(zero3 / TAG / "expp_rank_0_mp_rank_00_optim_states.pt")
    open_reader(zero3)
    torch.save({}, zero3 / TAG / "layer_0_expert_0_mp_rank_00_model_states.pt")
    assert fails(zero3).kind == "unreadable-format"


# -- stages 1 and 2 --------------------------------------------------------------------------------


def whole() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=rng) for g in SHAPES for n, s in g.items()}


def write(
    folder: Path, stage: int = 2, *, lean: bool = False, **more: Any
) -> dict[str, torch.Tensor]:
    """Write as DeepSpeed does: groups end to end, padded to the ranks, cut evenly.

    With `lean` as versions of today do: the last rank leaves the padding out, and the model has
    tied weights under all of their names.
    """
    folder = folder / TAG
    folder.mkdir()
    weights = whole()
    module = {n: t.to(torch.bfloat16) for n, t in weights.items()}
    module["frozen"] = torch.arange(3.0)
    if lean:
        module |= {alias: module[name] for alias, name in more["shared_params"].items()}
    shapes = [{n: torch.Size(s) for n, s in g.items()} for g in SHAPES]
    model = {"module": module, "param_shapes": shapes, "global_steps": 9, **more}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(RANKS):
        parts, state = [], {}
        for number, group in enumerate(SHAPES):
            flat = torch.cat([weights[n].reshape(-1) for n in group])
            share = -(-len(flat) // RANKS)
            if not lean:
                flat = torch.nn.functional.pad(flat, (0, share * RANKS - len(flat)))
            part = flat[rank * share : (rank + 1) * share].clone()
            parts.append(part)
            state[number] = {"step": torch.tensor(9.0), "exp_avg": part * 2, "exp_avg_sq": part * 3}
        optimizer = {
            "zero_stage": stage,
            "partition_count": [RANKS, RANKS],
            "single_partition_of_fp32_groups": parts,
            "base_optimizer_state": {"state": state, "param_groups": GROUPS},
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / OPTIM.format(rank))
    return weights


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2(tmp_path: Path, stage: int, lean: bool) -> None:
    weights = write(tmp_path, stage, lean=lean, shared_params={"tied": "a.weight"})
    reader = open_reader(tmp_path / TAG)
    found = reader.tensors(reader.names)
    for name, tensor in weights.items():
        assert found[name].tobytes() == tensor.numpy().tobytes(), name
        assert found[name].shape == tuple(tensor.shape)
        for state, factor in (("exp_avg", 2), ("exp_avg_sq", 3)):
            assert found[f"optim.{name}.{state}"].tobytes() == (tensor * factor).numpy().tobytes()
    assert found["tied"].tobytes() == weights["a.weight"].numpy().tobytes()
    assert found["frozen"].tolist() == [0, 1, 2]
    steps = [found[f"optim.{name}.step"].tolist() for name in weights]
    assert steps == [9.0] * len(weights)
    assert len(found) == 4 * len(weights) + 2
    assert reader.commit.step == 9
    assert reader.objects()["optim.param_groups.0.lr"] == 0.1
    assert reader.objects()["optim.param_groups.0.params"] == ["a.weight", "b.weight"]
    assert "optim.param_groups.1" in reader.manifest.metadata["ckptd.foreign"]["left_out"]


def test_a_rank_too_many(tmp_path: Path) -> None:
    write(tmp_path)
    files = tmp_path / TAG
    shutil.copy(files / OPTIM.format(0), files / OPTIM.format(3))
    assert fails(files).kind == "missing-file"


def test_shapes_that_are_too_large_for_the_buffers(tmp_path: Path) -> None:
    write(tmp_path, param_shapes=[{"a.weight": torch.Size([50, 3])}, {"a.bias": torch.Size([4])}])
    assert fails(tmp_path / TAG).kind == "bad-pieces"


@pytest.mark.parametrize("shapes", [None, [], 3, [{"a": 3}], [{"a": ("x",)}], [{"a": (-1,)}]])
def test_shapes_that_are_none(tmp_path: Path, shapes: object) -> None:
    write(tmp_path, param_shapes=shapes)
    error: CkptdError = fails(tmp_path / TAG)
    assert error.kind in ("bad-pickle", "bad-size")


@pytest.mark.parametrize("shared", [5, [[[], []]], [("a",)], {"a": 3}, {"tied": ("a.weight",)}])
def test_shared_parameters_that_are_none(tmp_path: Path, shared: object) -> None:
    write(tmp_path, shared_params=shared)
    assert fails(tmp_path / TAG).kind == "bad-pickle"


def test_a_number_of_ranks_that_laughs(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / TAG / OPTIM.format(0)
    value = torch.load(path)
    for _ in range(60):
        value["optimizer_state_dict"]["partition_count"] = (
            value["optimizer_state_dict"]["partition_count"],
        ) * 2
    torch.save(value, path)
    assert fails(tmp_path / TAG).kind == "bad-pickle"


# -- the universal form ----------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
def test_the_universal_form(tmp_path: Path, flat: bool) -> None:
    """Stage 3 leaves its parameters flat, and in the model's file what is not trained."""
    weights = whole()
    model: dict[str, Any] = {"module": {"table": torch.arange(3.0)}, "global_steps": 9}
    if flat:
        model["param_shapes"] = [{n: torch.Size(s) for n, s in g.items()} for g in SHAPES]
        model["shared_params"] = {"tied": "a.weight"}
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    for name, tensor in weights.items():
        folder = tmp_path / "zero" / name
        folder.mkdir(parents=True)
        for state, factor in (("fp32", 1), ("exp_avg", 2)):
            value = (tensor * factor).reshape(-1) if flat else tensor * factor
            torch.save(value if flat else {"param": value, "cat_dim": 0}, folder / f"{state}.pt")
        torch.save(9, folder / "step.pt")
    reader = open_reader(tmp_path)
    for name, tensor in weights.items():
        found = reader.tensors([name, f"optim.{name}.exp_avg"])
        assert [t.shape for t in found.values()] == [tuple(tensor.shape)] * 2
        assert found[name].tobytes() == tensor.numpy().tobytes()
        assert found[f"optim.{name}.exp_avg"].tobytes() == (tensor * 2).numpy().tobytes()
    assert reader.tensor("table").tolist() == [0, 1, 2]
    assert len(reader.names) == 2 * len(weights) + 1 + flat
    if flat:
        assert reader.tensor("tied").tobytes() == weights["a.weight"].numpy().tobytes()
        torch.save(torch.ones(3), tmp_path / "zero" / "a.weight" / "fp32.pt")
        assert fails(tmp_path).kind == "bad-pieces"
