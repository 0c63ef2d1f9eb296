"""ZeRO of DeepSpeed: a real checkpoint of stage 3, and what stages 1 and 2 write, made here."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16

from ckptd.errors import CkptdError
from ckptd.reshard.export import plan_export
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
    wanted = dict(np.load(zero3 / "expected.npz"))
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
    assert "files of ranks are missing" in error.message
    assert str(error.wanted).startswith("2 ranks")


def test_a_folder_that_latest_names_and_is_not_there(zero3: Path) -> None:
    (zero3 / "latest").write_text("global_step4")
    assert "a file of the checkpoint is missing" in fails(zero3).message


# -- experts and pipelines -------------------------------------------------------------------------


@pytest.fixture
def sample(foreign: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(foreign / "deepspeed" / name, tmp_path / name))


SAMPLES = ["moe0-fp32", "moe1-bf16", "moe2-fp32", "moeshared2-fp32", "pipe0-fp32", "pipe1-bf16"]
"""In "moeshared" neighbours have the same experts, elsewhere different ones."""


@pytest.mark.parametrize("name", SAMPLES)
def test_experts_and_pipelines(foreign: Path, name: str) -> None:
    """32-bit weights, which rounded are the parameters that each rank had."""
    wanted = dict(np.load(foreign / "deepspeed" / name / "expected.npz"))
    reader = open_reader(foreign / "deepspeed" / name)
    found = reader.tensors(reader.names)
    # Without ZeRO, layers that share weights have them by the names of the layers alone.
    names = [n for n in wanted if name != "pipe0-fp32" or "tied" not in n]
    assert len(names) >= 6
    for one in names:
        value = found[one]
        rounded = value.astype(bfloat16) if "bf16" in name else value
        assert rounded.astype(np.float32).tobytes() == wanted[one].tobytes(), one
        if "0-" not in name:
            assert found[f"optim.{one}.exp_avg"].shape == value.shape
            assert found[f"optim.{one}.step"] == 2
            assert value.dtype == np.float32
    assert reader.commit.step == 2


def test_a_pipeline_as_deepspeed_itself_joins_it(foreign: Path) -> None:
    """Weights, moments, steps and groups are those that `ds_to_universal.py` made of the ranks."""
    ranks, joined = (
        open_reader(foreign / "deepspeed" / name) for name in ("pipe1-bf16", "pipe1-universal")
    )
    names = [n for n in joined.names if not n.startswith(("0.", "4."))]
    assert len(names) == 28
    found, wanted = ranks.tensors(names), joined.tensors(names)
    assert all(found[n].tobytes() == wanted[n].tobytes() for n in names)
    groups = "optim.param_groups.0.params"
    assert ranks.objects()[groups] == joined.objects()[groups]
    assert len(ranks.objects()[groups]) == 7


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("moe1-bf16", "layer_0_expert_3_mp_rank_00_model_states.pt"),
        ("moe2-fp32", "zero_pp_rank_3_mp_rank_00_optim_states.pt"),
        ("pipe0-fp32", "mp_rank_01_model_states.pt"),
        ("pipe1-bf16", "mp_rank_00_model_states.pt"),
        ("pipe1-bf16", "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"),
    ],
)
def test_a_file_of_a_stage_or_an_expert_is_missing(
    sample: Callable[[str], Path], name: str, file: str
) -> None:
    folder = sample(name)
    (folder / TAG / file).unlink()
    assert fails(folder).message in (
        "a file of the checkpoint is missing",
        "files of ranks are missing, or of another number of ranks",
    )


@pytest.mark.parametrize("number", [1, 4])
def test_an_expert_under_the_number_of_another(sample: Callable[[str], Path], number: int) -> None:
    """Instead of it, or beside all others."""
    folder, file = sample("moe0-fp32") / TAG, "layer_0_expert_{}_mp_rank_00_model_states.pt"
    shutil.copy(folder / file.format(0), folder / file.format(number))
    error = fails(folder)
    assert (error.message, error.where) == (
        "a file holds the contents of another file",
        file.format(number),
    )
    assert str(error.wanted) == f"weights of expert {number}"


@pytest.mark.parametrize("number", ["00", "01", "03", "04", "05"])
def test_layers_that_are_missing(sample: Callable[[str], Path], number: str) -> None:
    """The optimizers know how many weights of each shape are trained; layer 2 has none."""
    folder = sample("pipe0-fp32") / TAG
    (folder / "layer_02-model_states.pt").unlink()
    open_reader(folder)
    if number in ("00", "04"):
        # These share a weight; one of both has it.
        (folder / f"layer_{number}-model_states.pt").unlink()
        open_reader(folder)
        number = {"00": "04", "04": "00"}[number]
    (folder / f"layer_{number}-model_states.pt").unlink()
    assert "files of layers are missing" in fails(folder).message


def rename_key(path: Path, key: str) -> None:
    """Give a key in a pickle a name that nobody knows; its classes cannot be loaded here."""
    raw = path.read_bytes()
    assert raw.count(key.encode()) == 1
    path.write_bytes(raw.replace(key.encode(), b"_" * len(key)))


@pytest.mark.parametrize("name", ["moe2-fp32", "moeshared2-fp32"])
def test_experts_of_ranks_that_do_not_say_where_parameters_are(
    sample: Callable[[str], Path], name: str
) -> None:
    """The configuration says which ranks share experts; without it there are two ways."""
    folder = sample(name)
    wanted = dict(np.load(folder / "expected.npz"))
    for rank in range(4):
        rename_key(folder / TAG / OPTIM.format(rank), "param_slice_mappings")
    reader = open_reader(folder)
    assert all(reader.tensor(n).tobytes() == value.tobytes() for n, value in wanted.items())
    rename_key(folder / TAG / "mp_rank_00_model_states.pt", "ds_config")
    assert fails(folder).kind == "unreadable-format"


def test_one_name_in_two_files(sample: Callable[[str], Path]) -> None:
    folder, file = sample("pipe0-fp32") / TAG, "layer_{}-model_states.pt"
    shutil.copy(folder / file.format("01"), folder / file.format("001"))
    assert "a file holds the contents of another file" in fails(folder).message


def test_a_file_of_an_expert_with_an_absurd_number(sample: Callable[[str], Path]) -> None:
    """A layer more than `num_experts` knows, so that the number in the name is all there is."""
    folder, file = sample("moe0-fp32") / TAG, "layer_{}_expert_{}_mp_rank_00_model_states.pt"
    shutil.copy(folder / file.format(0, 3), folder / file.format(1, 3 * 10**10))
    error = fails(folder)
    assert (error.message, error.where) == (
        "a file of the checkpoint is missing",
        file.format(1, 0),
    )


def test_tensor_parallelism_is_refused(sample: Callable[[str], Path]) -> None:
    folder = sample("moe0-fp32") / TAG
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    error = fails(folder)
    assert error.kind == "unreadable-format"
    assert "ds_to_universal" in str(error.hint)
    (folder / "mp_rank_01_model_states.pt").rename(folder / "layer_01-model_01-model_states.pt")
    shutil.copy(
        folder / "layer_01-model_01-model_states.pt", folder / "layer_01-model_00-model_states.pt"
    )
    assert fails(folder).kind == "unreadable-format"


@pytest.mark.parametrize("shapes", [SHAPES, [{f"p{i}": (i % 5 + 1,) for i in range(80)}]])
def test_parameters_that_are_aligned(tmp_path: Path, shapes: Any) -> None:
    """`parameter_alignment` leaves gaps between the parameters of a buffer."""
    weights = write(tmp_path, align=4, shapes=shapes)
    reader = open_reader(tmp_path / TAG)
    for name, tensor in weights.items():
        assert reader.tensor(name).tobytes() == tensor.numpy().tobytes(), name


# -- stages 1 and 2 --------------------------------------------------------------------------------


def whole(shapes: Sequence[Mapping[str, Sequence[int]]] = SHAPES) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=rng) for g in shapes for n, s in g.items()}


def pad(n: int) -> torch.Tensor:
    return torch.full((n,), float("nan"))


def write(
    folder: Path,
    stage: int = 2,
    *,
    lean: bool = False,
    align: int = 1,
    fillers: bool = False,
    shapes: Sequence[Mapping[str, Sequence[int]]] = SHAPES,
    **more: Any,
) -> dict[str, torch.Tensor]:
    """Write as DeepSpeed does: groups end to end, padded to the ranks, cut evenly.

    With `lean` as versions of today do: the last rank leaves the padding out, and the model has
    tied weights under all of their names. With `fillers` each rank says how much fills it up.
    """
    folder = folder / TAG
    folder.mkdir()
    weights = whole(shapes)
    module = {n: t.to(torch.bfloat16) for n, t in weights.items()}
    module["frozen"] = torch.arange(3.0)
    if lean:
        module |= {alias: module[name] for alias, name in more["shared_params"].items()}
    stated = [{n: torch.Size(s) for n, s in g.items()} for g in shapes]
    model = {"module": module, "param_shapes": stated, "global_steps": 9, **more}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(RANKS):
        parts, state, gaps, fill = [], {}, [], []
        for number, group in enumerate(shapes):
            pads = [0 if n == [*group][-1] else -math.prod(s) % align for n, s in group.items()]
            padded = zip(group, pads, strict=True)
            flat = torch.cat([t for n, p in padded for t in (weights[n].reshape(-1), pad(p))])
            gaps.append(pads)
            share = -(-len(flat) // RANKS)
            fill.append(max(0, (rank + 1) * share - len(flat)) if rank == RANKS - 1 else 0)
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
            **({"param_alignment_paddings": gaps} if align > 1 else {}),
            **({"group_paddings": fill} if fillers else {}),
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
    assert "files of ranks are missing" in fails(files).message


def test_files_of_different_steps(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / TAG / OPTIM.format(1)
    value = torch.load(path)
    for group in value["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        group["step"] += 2
    torch.save(value, path)
    error = fails(tmp_path / TAG)
    assert (error.message, error.where) == ("the files belong to different steps", path.name)
    assert "different steps" in error.message


def change(path: Path, act: Callable[[Any], object]) -> None:
    value = torch.load(path, weights_only=False)
    act(value)
    torch.save(value, path)


def test_a_model_of_an_earlier_step_than_its_optimizer(tmp_path: Path) -> None:
    """A later one is right: an optimizer may have been made anew."""
    write(tmp_path, skipped_steps=0)
    path = tmp_path / TAG / "mp_rank_00_model_states.pt"
    change(path, lambda value: value.update(global_steps=12))
    assert open_reader(tmp_path / TAG).commit.step == 12
    change(path, lambda value: value.update(skipped_steps=4))
    error = fails(tmp_path / TAG)
    assert (error.message, error.found) == ("the files belong to different steps", "9.0")
    assert str(error.wanted).startswith("at most 8")


def test_stages_of_a_pipeline_of_different_steps(tmp_path: Path) -> None:
    write(tmp_path)
    files = tmp_path / TAG
    for rank in range(RANKS):
        other = OPTIM.format(rank).replace("mp_rank_00", "mp_rank_01")
        value = torch.load(files / OPTIM.format(rank))
        for group in value["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            group["step"] -= 2
        torch.save(value, files / other)
    value = torch.load(files / "mp_rank_00_model_states.pt")
    names = {n for g in SHAPES for n in g}
    value["module"] = {f"1.{n}": t for n, t in value["module"].items() if n in names}
    value["param_shapes"] = [{f"1.{n}": s for n, s in g.items()} for g in value["param_shapes"]]
    torch.save(value, files / "mp_rank_01_model_states.pt")
    error = fails(files)
    assert (error.message, error.where) == (
        "the files belong to different steps",
        OPTIM.format(0).replace("_00_", "_01_"),
    )
    assert "different steps" in error.message


@pytest.mark.parametrize("both", [False, True])
def test_files_of_ranks_under_the_numbers_of_others(zero3: Path, both: bool) -> None:
    """Copied, or swapped: torch writes into a file the name that it had."""
    one, two = (zero3 / TAG / OPTIM.format(rank) for rank in range(2))
    before = two.read_bytes()
    shutil.copy(one, two)
    if both:
        one.write_bytes(before)
    error = fails(zero3)
    assert (error.message, error.where) == (
        "a file holds the contents of another file",
        f"{TAG}/{(one if both else two).name}",
    )


def test_a_copy_of_a_rank_that_was_written_into_a_stream(tmp_path: Path) -> None:
    """The checksums of what ranks hold show it; what is zero everywhere may be alike."""
    write(tmp_path, shapes=[{"a": (70, 3)}])
    paths = [tmp_path / TAG / OPTIM.format(rank) for rank in range(RANKS)]
    value = torch.load(paths[0])
    for path in paths:
        with path.open("wb") as file:
            torch.save(value, file)
    error = fails(tmp_path / TAG)
    assert (error.message, error.where) == (
        "a file holds the contents of another file",
        OPTIM.format(1),
    )
    for part in (*value["optimizer_state_dict"]["base_optimizer_state"]["state"][0].values(),):
        part.zero_()
    for path in paths:
        with path.open("wb") as file:
            torch.save(value, file)
    assert len(open_reader(tmp_path / TAG).names) == 5


def test_shapes_that_are_too_large_for_the_buffers(tmp_path: Path) -> None:
    write(tmp_path, param_shapes=[{"a.weight": torch.Size([50, 3])}, {"a.bias": torch.Size([4])}])
    assert "the buffers of a rank and the shapes of parameters" in fails(tmp_path / TAG).message


def drop_first(groups: list[dict[str, Any]]) -> None:
    groups[0].pop(next(iter(groups[0])))


def drop_last(groups: list[dict[str, Any]]) -> None:
    groups[-1].pop([*groups[-1]][-1])


def make_smaller(groups: list[dict[str, Any]]) -> None:
    name, shape = next(iter(groups[0].items()))
    groups[0][name] = torch.Size([shape[0] - 1, *shape[1:]])


def one_too_many(groups: list[dict[str, Any]]) -> None:
    groups[-1]["more"] = torch.Size([8])


CHANGES = [drop_first, drop_last, make_smaller, one_too_many]


@pytest.mark.parametrize("change", [*CHANGES, lambda groups: groups.reverse()])
def test_shapes_that_do_not_end_with_the_buffers_of_stage_3(
    zero3: Path, change: Callable[[list[dict[str, Any]]], None]
) -> None:
    path = zero3 / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    value = torch.load(path)
    change(value["param_shapes"])
    torch.save(value, path)
    assert "the buffers of a rank and the shapes of parameters" in fails(zero3).message


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fillers", ["left out", "written", "unknown"])
def test_shapes_that_do_not_end_with_the_buffers_of_stages_1_and_2(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], fillers: str
) -> None:
    """Without `param_slice_mappings`; parameters have more elements than could be a filler."""
    shapes = [{"a": (5, 7), "b": (9,)}, {"c": (8, 2), "d": (7,)}]
    lean, known = fillers == "left out", fillers != "unknown"
    write(tmp_path, lean=lean, fillers=known, shapes=shapes, shared_params={})
    files = tmp_path / TAG
    path = files / "mp_rank_00_model_states.pt"
    value = torch.load(path)
    groups = [dict(g) for g in value["param_shapes"]]
    open_reader(files)
    value["param_shapes"] = groups
    change(groups)
    torch.save(value, path)
    assert "the buffers of a rank and the shapes of parameters" in fails(files).message


@pytest.mark.parametrize("shapes", [None, [], 3, [{"a": 3}], [{"a": ("x",)}], [{"a": (-1,)}]])
def test_shapes_that_are_none(tmp_path: Path, shapes: object) -> None:
    write(tmp_path, param_shapes=shapes)
    error: CkptdError = fails(tmp_path / TAG)
    assert re.search("shapes of (its )?parameters", error.message)


@pytest.mark.parametrize("shared", [5, [[[], []]], [("a",)], {"a": 3}, {"tied": ("a.weight",)}])
def test_shared_parameters_that_are_none(tmp_path: Path, shared: object) -> None:
    write(tmp_path, shared_params=shared)
    assert "a value of a model's file is not a dict of names" in fails(tmp_path / TAG).message


def test_a_number_of_ranks_that_laughs(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / TAG / OPTIM.format(0)
    value = torch.load(path)
    for _ in range(60):
        value["optimizer_state_dict"]["partition_count"] = (
            value["optimizer_state_dict"]["partition_count"],
        ) * 2
    torch.save(value, path)
    assert "invalid optimizer file of a rank of ZeRO" in fails(tmp_path / TAG).message


# -- the universal form ----------------------------------------------------------------------------


def test_frozen_parameters_of_stage_3_beside_the_universal_form(tmp_path: Path) -> None:
    """Nobody trains them, so that they have no folder, and each rank has a share."""
    kept = torch.arange(7.0)
    for rank in range(2):
        share = torch.nn.functional.pad(kept, (0, 1))[rank * 4 : rank * 4 + 4].clone()
        model = {
            "module": {},
            "param_shapes": [{"w": torch.Size([3])}],
            "frozen_param_shapes": {"kept": torch.Size([7])},
            "frozen_param_fragments": {"kept": share},
        }
        torch.save(model, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    (tmp_path / "zero" / "w").mkdir(parents=True)
    for state in ("fp32", "exp_avg"):
        torch.save({"param": torch.ones(3)}, tmp_path / "zero" / "w" / f"{state}.pt")
    reader = open_reader(tmp_path)
    assert reader.tensor("kept").tolist() == kept.tolist()
    assert reader.tensor("w").tolist() == [1, 1, 1]
    (tmp_path / "zero" / "w" / "fp32.pt").unlink()
    error = fails(tmp_path)
    assert (error.message, error.where) == ("a file of the checkpoint is missing", "zero/w/fp32.pt")


@pytest.fixture
def joined(tmp_path: Path) -> Path:
    """Return what is joined of two parts of tensor parallelism."""
    for rank in range(2):
        model = {
            "module": {"w": torch.ones(2, 2), "bias": torch.ones(2), "table": torch.arange(3.0)},
            "param_shapes": [{"w": torch.Size([2, 2]), "bias": torch.Size([2])}],
            "frozen_param_shapes": {"kept": torch.Size([5])},
        }
        torch.save(model, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    for name, shape in {"w": (4, 2), "bias": (2,)}.items():
        (tmp_path / "zero" / name).mkdir(parents=True)
        for state in ("fp32", "exp_avg"):
            torch.save({"param": torch.ones(shape)}, tmp_path / "zero" / name / f"{state}.pt")
    return tmp_path


def test_the_universal_form_of_tensor_parallelism(joined: Path) -> None:
    """Files of models have parts, so that what only they have is named."""
    reader = open_reader(joined)
    assert sorted(reader.names) == ["bias", "optim.bias.exp_avg", "optim.w.exp_avg", "w"]
    assert reader.tensor("w").shape == (4, 2)
    left_out = reader.manifest.metadata["ckptd.foreign"]["left_out"]
    assert set(left_out) >= {"kept", "table"}
    assert "w" not in left_out
    torch.save({"param": torch.ones(3, 2)}, joined / "zero" / "w" / "exp_avg.pt")
    error = fails(joined)
    assert (error.message, error.where) == (
        "a file and the shapes of parameters disagree",
        "zero/w/exp_avg.pt",
    )


def test_a_parameter_that_the_universal_form_of_tensor_parallelism_lacks(joined: Path) -> None:
    shutil.rmtree(joined / "zero" / "w")
    error = fails(joined)
    assert (error.message, error.where) == ("a file of the checkpoint is missing", "zero/w/fp32.pt")


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
        assert "a file and the shapes of parameters disagree" in fails(tmp_path).message
