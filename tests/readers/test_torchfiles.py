"""Files of torch.save: whole, in shards, and a file a rank."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from ckptd.errors import CkptdError
from ckptd.readers import torchfiles
from ckptd.readers.pickles import PickledObject, PickledStorage, PickledTensor, read_pickle
from ckptd.testing.ranks import run_ranks
from ckptd.types import Box
from tests.cli.running import Cli
from tests.readers.opening import fails, open_reader

VERL = "model_world_size_4_rank_{}.pt"
VERL2 = "model_world_size_2_rank_{}.pt"


def bits(t: torch.Tensor) -> bytes:
    return bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def test_one_file_and_what_is_in_it(foreign: Path) -> None:
    reader = open_reader(foreign / "misc")
    wanted = dict(np.load(foreign / "misc" / "torch-save.expected.npz"))
    assert all(reader.tensor(n).tobytes() == wanted[n].tobytes() for n in wanted)
    assert reader.tensor("t").tolist() == [[0, 3], [1, 4], [2, 5]]
    assert reader.tensor("big_view").tolist() == [4, 5, 6, 7, 8]
    assert reader.info("bf").dtype.name == "bfloat16"
    objects = reader.objects()
    assert objects["step"] == 3
    assert objects["optim.param_groups.0.lr"] == 0.01


@pytest.mark.parametrize("end", [".pt", ".pth", ".bin", ".ckpt"])
def test_a_file_may_be_named(tmp_path: Path, end: str) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / f"a{end}")
    torch.save({"w": torch.zeros(3)}, tmp_path / "b.pt")
    reader = open_reader(tmp_path, only=f"a{end}")
    assert reader.tensor("w").tolist() == [1, 1, 1]


def test_models_of_torch(tmp_path: Path) -> None:
    linear = nn.Linear(4, 8)
    net = nn.Sequential(linear, nn.LayerNorm(8), nn.LSTM(8, 3), nn.Embedding(9, 2))
    tied = nn.Linear(4, 4)
    tied.weight = nn.Parameter(linear.weight.detach()[:4])
    opt = torch.optim.AdamW(net.parameters())
    torch.autograd.backward([p.sum() for p in net.parameters()])
    opt.step()
    state: dict[str, object] = {
        "net": net.state_dict(),
        "opt": opt.state_dict(),
        "tied": tied.state_dict(),
    }
    state["params"] = [nn.Parameter(torch.ones(2)), torch.arange(6, dtype=torch.int16)[::2]]
    torch.save(state, tmp_path / "model.pt")
    reader = open_reader(tmp_path)
    for name, tensor in net.state_dict().items():
        assert reader.tensor(f"net.{name}").tobytes() == bits(tensor), name
    assert reader.tensor("tied.weight").tobytes() == bits(tied.weight)
    assert reader.tensor("params.1").tolist() == [0, 2, 4]
    for name, value in opt.state_dict()["state"][0].items():
        assert reader.tensor(f"opt.state.0.{name}").tobytes() == bits(value)


def test_shards_with_an_index(tmp_path: Path) -> None:
    weights = {}
    for n in range(3):
        file = f"pytorch_model-{n + 1:05d}-of-00003.bin"
        torch.save({f"w{n}": torch.full((2,), float(n))}, tmp_path / file)
        weights[f"w{n}"] = file
    torch.save({"lr": 1.0}, tmp_path / "optimizer.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weights}))
    reader = open_reader(tmp_path)
    assert reader.names == ["w0", "w1", "w2"]
    assert reader.tensor("w2").tolist() == [2, 2]
    assert reader.manifest.metadata["ckptd.foreign"]["unread"] == ["optimizer.bin"]
    (tmp_path / "pytorch_model-00002-of-00003.bin").unlink()
    assert "a file of the checkpoint is missing" in fails(tmp_path).message
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    error = fails(tmp_path)
    assert (error.message, error.where) == ("a file of the checkpoint is missing", "shard 2 of 3")
    assert open_reader(tmp_path, "pytorch_model-00003-of-00003.bin").names == ["w2"]


# -- a file a rank ---------------------------------------------------------------------------------


@pytest.fixture
def ranks(foreign: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(foreign / "dcp" / "torch-save-dtensor", tmp_path / "ranks"))


def test_dtensors_of_fsdp_over_tensor_parallel(ranks: Path) -> None:
    reader = open_reader(ranks)
    wanted = dict(np.load(ranks / "expected.npz"))
    assert len(wanted) == 12
    assert all(reader.tensor(n).tobytes() == wanted[n].tobytes() for n in wanted)
    assert reader.layout("layers.0.up.weight").words == "rows / 4 (6+5+6+5)"
    assert reader.layout("layers.0.down.weight").words == "grid 2 x 2"
    assert "optimizer.state.0.exp_avg" in reader.names


def test_what_verl_keeps_beside_the_weights_of_each_rank_is_left_out(ranks: Path) -> None:
    files = [f"extra_state_world_size_4_rank_{rank}.pt" for rank in range(4)]
    for rank, file in enumerate(files):
        torch.manual_seed(rank)
        torch.save(
            {"lr_scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.get_rng_state()}}, ranks / file
        )
    reader = open_reader(ranks)
    wanted = dict(np.load(ranks / "expected.npz"))
    assert all(reader.tensor(n).tobytes() == wanted[n].tobytes() for n in wanted)
    assert not [n for n in reader.names if n.startswith("rng")]
    assert reader.manifest.metadata["ckptd.foreign"]["unread"] == files


def test_weights_of_ranks_are_exported_without_the_optimizer(
    ranks: Path, tmp_path: Path, cli: Cli
) -> None:
    found = cli("export", str(ranks), str(tmp_path / "hf"))
    assert found.code == 0, found.err
    values = load_file(tmp_path / "hf" / "model.safetensors")
    wanted = dict(np.load(ranks / "expected.npz"))
    assert sorted(values) == sorted(wanted)
    assert all(values[n].tobytes() == wanted[n].tobytes() for n in wanted)


@pytest.mark.parametrize(
    ("state", "sections"),
    [
        ({"model.w": torch.ones(2), "lm_head.w": torch.ones(3)}, False),
        ({"model": {"w": torch.ones(2)}, "step": 3}, True),
        ({"model": {"w": torch.ones(2)}, "beside": torch.ones(1)}, True),
        ({"model.w": torch.ones(2), "step": 3}, False),
    ],
)
def test_names_at_the_top_are_the_weights_own(
    state: dict[str, Any], sections: bool, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "a.pt")
    assert open_reader(tmp_path).has_sections is sections


@pytest.fixture
def fsdp1(foreign: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(foreign / "fsdp1" / "sharded", tmp_path / "sharded"))


def test_sharded_tensors_of_fsdp1(fsdp1: Path) -> None:
    reader = open_reader(fsdp1)
    wanted = dict(np.load(fsdp1 / "expected.npz"))
    assert len(wanted) == 15
    named = {f"optimizer.{n}" if n.startswith("state.") else n: wanted[n] for n in wanted}
    assert all(reader.tensor(n).tobytes() == named[n].tobytes() for n in named)
    assert reader.layout("0.weight").words == "rows / 4 (2+2+2+1)"
    assert reader.objects()["optimizer.param_groups.0.lr"] == 0.01


def test_flat_parameters_of_fsdp1(foreign: Path) -> None:
    folder = foreign / "fsdp1" / "local"
    wanted, found = (
        dict(np.load(folder / "expected.npz")),
        open_reader(folder).tensor("0._flat_param"),
    )
    flat = np.concatenate([wanted["0.weight"].reshape(-1), wanted["0.bias"]])
    assert found.tobytes() == flat.tobytes()


def test_sharded_tensors_of_other_ranks(fsdp1: Path) -> None:
    file = "model_world_size_4_rank_{}.pt".format
    one, two = fsdp1 / file(1), fsdp1 / file(2)
    kept = one.read_bytes()
    shutil.copy(two, one)
    error = fails(fsdp1)
    assert (error.message, error.found) == (
        "a file was renamed or belongs to another job: its tensors are another rank's",
        "rank 2",
    )
    one.write_bytes(kept)
    two.unlink()
    assert "files of ranks are missing" in fails(fsdp1).message
    for name in (1, 3):
        fsdp1.joinpath(file(name)).rename(fsdp1 / f"w{name}.pt")
    for path in fsdp1.glob("*world*"):
        path.unlink()
    assert (
        "a tensor begins with a hole" in fails(fsdp1).message
    )  # holes: nothing else says how many ranks there were


@pytest.mark.parametrize("state", [None, (), ([], None, None), ([3], PickledObject("m"), None)])
def test_sharded_tensors_that_are_none(state: object) -> None:
    value = PickledObject("torch.distributed._shard.sharded_tensor.api.ShardedTensor")
    value.fields = {"state": state}
    with pytest.raises(CkptdError) as caught:
        torchfiles._shards(value, 0, "x")
    assert "unsupported sharded tensor" in caught.value.message


def test_a_missing_rank(ranks: Path) -> None:
    (ranks / VERL.format(3)).unlink()
    assert "files of ranks are missing" in fails(ranks).message


def test_a_rank_of_another_job(ranks: Path) -> None:
    shutil.copy(ranks / VERL.format(3), ranks / VERL.format(4))
    assert "files of ranks are missing" in fails(ranks).message


def test_renumbered_ranks(ranks: Path) -> None:
    one, two, other = (ranks / VERL.format(1), ranks / VERL.format(2), ranks / "x")
    one.rename(other)
    two.rename(one)
    other.rename(two)
    error = fails(ranks)
    assert (error.message, error.wanted) == (
        "a file was renamed or belongs to another job: its tensors are another rank's",
        "rank 1, as its name says",
    )


def test_plain_tensors_of_ranks_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.ones(3), "step": torch.tensor(1.0)}, tmp_path / f"rank_{rank}.pt")
    error = fails(tmp_path)
    assert "and it is unknown which one is current" in error.message
    assert "--from LAYOUT" in str(error.hint)


def save_with_buffers(folder: str) -> None:
    """Save a model of FSDP2 a file a rank, as verl does: alike, and with other values on rank 1."""
    from torch.distributed.fsdp import fully_shard  # slow, and for one test only

    rank = dist.get_rank()
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    net = nn.Sequential(nn.Linear(4, 6), norm)
    net.register_buffer("router_bias", torch.arange(12.0).reshape(3, 4).t())
    fully_shard(net)
    for case, value in {"other": float(rank), "alike": 0.0}.items():
        assert norm.running_var is not None
        norm.running_var.fill_(1.0)[3] = 1.0 + value
        name = f"model_world_size_2_rank_{rank}.pt"
        torch.save(net.state_dict(), Path(folder) / case / name)
    state = net.state_dict()
    state["router_bias"] = state["router_bias"].contiguous()  # the same values, lying otherwise
    torch.save(state, Path(folder) / "lying" / f"model_world_size_2_rank_{rank}.pt")
    state["router_bias"] = torch.ones(4, 3 + rank)
    torch.save(state, Path(folder) / "shapes" / f"model_world_size_2_rank_{rank}.pt")
    dist.barrier()


@pytest.mark.dist
def test_buffers_beside_dtensors_are_taken_once_where_all_ranks_have_the_same(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in ("alike", "other", "lying", "shapes"):
        (tmp_path / case).mkdir()
    run_ranks(2, save_with_buffers, str(tmp_path))
    shutil.copy(tmp_path / "alike" / VERL2.format(0), tmp_path / "lying")
    monkeypatch.setattr(torchfiles, "_BLOCK", 20)
    wanted = torch.arange(12.0).reshape(3, 4).t().contiguous()
    for case in ("alike", "lying"):
        found = cli("export", str(tmp_path / case), str(tmp_path / f"{case}-hf"))
        assert found.code == 0, found.err
        values = load_file(tmp_path / f"{case}-hf" / "model.safetensors")
        assert values["router_bias"].tobytes() == bits(wanted)
        assert values["1.running_var"].tolist() == [1.0] * 6
        assert values["0.weight"].shape == (6, 4)
        assert "1.num_batches_tracked" in values
    error = fails(tmp_path / "other")
    assert error.kind == "replicas-differ"
    assert error.where == f"{VERL2.format(0)} and {VERL2.format(1)}: 1.running_var"
    assert "and it is unknown which one is current" in fails(tmp_path / "shapes").message


def test_items_of_torch_checkpointing(foreign: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(foreign / "torch-checkpointing", tmp_path / "a"))
    reader = open_reader(folder)
    wanted = dict(np.load(folder / "expected.npz"))
    assert {*reader.names} == {*wanted}
    assert all(reader.tensor(n).tobytes() == wanted[n].tobytes() for n in wanted)
    assert reader.layout("model.0.weight").words == "rows / 2 (3+2)"
    objects = reader.objects()
    assert objects["step"] == 7
    assert objects["optimizer.param_groups.0.lr"] == 0.001
    assert reader.manifest.metadata["ckptd.foreign"]["left_out"] == ["loader.at"]
    assert reader.has_sections
    one, other = folder / "model_0.pt", folder / "model_1.pt"
    kept = other.read_bytes()
    shutil.copy(one, other)
    assert fails(folder).wanted == "rank 1, as its name says"
    other.unlink()
    assert (
        "and it is unknown which one is current" in fails(folder).message
    )  # no longer a file of each item of each rank
    other.write_bytes(kept)
    assert open_reader(folder).names == reader.names


def test_parts_in_safetensors_are_not_taken_for_whole(foreign: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(foreign / "torch-checkpointing" / "safetensors", tmp_path / "a"))
    error = fails(folder)
    assert (error.kind, error.where) == ("unreadable-format", "model_0.safetensors")
    assert "torch_checkpointing.hf" in (error.hint or "")
    (folder / "model_1.safetensors").unlink()
    assert fails(folder).kind == "unreadable-format"
    # Never by pickle itself; and of one rank they are whole.
    (folder / "metadata.pkl").write_bytes(pickle.dumps(Path.cwd))
    assert fails(folder).kind == "unreadable-format"
    (folder / "metadata.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert fails(folder).kind == "unsafe-pickle"
    (folder / "metadata.pkl").write_bytes(pickle.dumps({"world_size": 1}))
    assert open_reader(folder).info("0.weight").shape == (3, 4)


@pytest.mark.parametrize("names", [("model_0.pt", "model_1.pt"), ("a_0.pt", "b_1.pt")])
def test_files_of_epochs_are_no_ranks(tmp_path: Path, names: tuple[str, ...]) -> None:
    for number, name in enumerate(names):
        torch.save({"w": torch.full((3,), float(number)), "epoch": number}, tmp_path / name)
    assert "and it is unknown which one is current" in fails(tmp_path).message


def test_hostile_files(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(300)}, tmp_path / "a.pt")
    raw = (tmp_path / "a.pt").read_bytes()
    for bad in (b"", raw[:-100], raw[:200], b"rubbish" * 100):
        (tmp_path / "a.pt").write_bytes(bad)
        assert fails(tmp_path).kind == "bad-zip"


def test_a_file_without_tensors(tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / "a.pt")
    assert "the files of the checkpoint hold no tensor" in fails(tmp_path).message


def test_an_expanded_tensor_of_a_terabyte(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "a.pt")
    assert fails(tmp_path).kind == "truncated"


LAYOUT = """
space s { w[n m] }
mesh M = tp:2
layout local of s on M {
  files "mp_rank_{tp:02}/model.pt"
  model.w = w[n m@tp]
}
layout whole of s on none {
  w = w[n m]
}
"""


def test_plain_tensors_of_ranks_with_a_layout(tmp_path: Path, cli: Cli) -> None:
    whole = torch.arange(24.0).reshape(3, 8)
    for rank, part in enumerate(whole.chunk(2, 1)):  # views of the whole storage
        folder = tmp_path / "a" / f"mp_rank_{rank:02}"
        folder.mkdir(parents=True)
        torch.save({"model": {"w": part}, "step": 3}, folder / "model.pt")
    (tmp_path / "p.lay").write_text(LAYOUT)
    layout, target = str(tmp_path / "p.lay"), str(tmp_path / "hf")
    given = ["--from", f"{layout}:local", "--to", f"{layout}:whole", "--format", "hf"]
    found = cli("reshard", str(tmp_path / "a"), target, *given)
    assert found.code == 0, found.err
    assert load_file(tmp_path / "hf" / "model.safetensors")["w"].tolist() == whole.tolist()


def test_legacy_files_of_megatron_with_a_layout(tmp_path: Path, cli: Cli) -> None:
    """What the refusal of the legacy form advises."""
    for rank in range(2):
        folder = tmp_path / "a" / f"mp_rank_{rank:02}"
        folder.mkdir(parents=True)
        part = torch.full((3, 4), float(rank))
        torch.save({"model": {"w": part}}, folder / "model_optim_rng.pt")
    assert fails(tmp_path / "a").kind == "unreadable-format"
    (tmp_path / "p.lay").write_text(LAYOUT.replace("model.pt", "model_optim_rng.pt"))
    layout, target = str(tmp_path / "p.lay"), str(tmp_path / "hf")
    given = ["--from", f"{layout}:local", "--to", f"{layout}:whole", "--format", "hf"]
    found = cli("reshard", str(tmp_path / "a"), target, *given)
    assert found.code == 0, found.err
    assert load_file(tmp_path / "hf" / "model.safetensors")["w"][0].tolist() == [0] * 4 + [1] * 4


Splits = list[tuple[int | None, int]]


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, list[int], Splits]:
    """A length, a mesh, and how its axes split one dimension: plain, or FSDP over the rest."""
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    plain = [draw(st.sampled_from([0, None])) for _ in mesh]
    strided = draw(st.integers(0, len(mesh) - 1))
    rest = zip(plain[strided + 1 :], mesh[strided + 1 :], strict=True)
    right = math.prod(n for d, n in rest if d == 0)
    splits: Splits = [(d, 1) for d in plain]
    if right > 1 and draw(st.booleans()):
        splits[strided] = (0, right)
        splits[:strided] = [(None, 1)] * strided
    return draw(st.integers(1, 40)), mesh, splits


@settings(max_examples=300, deadline=None)
@given(placements())
def test_boxes_are_those_of_torch(case: tuple[int, list[int], Splits]) -> None:
    """Numbers of elements are split as torch splits tensors, or refused: never another box."""
    n, mesh, splits = case
    for here in itertools.product(*map(range, mesh)):
        held: Any = torch.arange(n)
        for (d, factor), size, at in zip(splits, mesh, here, strict=True):
            if d is not None:
                how: Any = Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor)
                held = how._split_tensor(held, size, with_padding=False)[0][at]
        try:
            box = torchfiles._cut((n,), tuple(mesh), here, splits, "x")
        except CkptdError:
            continue
        mine = list(range(box.offset[0], box.offset[0] + box.shape[0]))
        # What has another number of elements than the local tensor is refused where it is read.
        assert box.shape[0] != len(held) or mine == held.tolist(), (here, held)


# -- what must not be read as something else -------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [("epoch1.pt", "epoch2.pt"), ("model.bin", "model_ema.bin"), ("consolidated.00.pth", "x.ckpt")],
)
def test_two_files_with_one_tensor(tmp_path: Path, files: tuple[str, str]) -> None:
    for number, name in enumerate(files):
        torch.save({"w": torch.full((3,), float(number))}, tmp_path / name)
    error = fails(tmp_path)
    assert ("it is unknown which one is current" in error.message, error.hint) == (
        True,
        "give the path of one file",
    )
    assert all(name in str(error.where) for name in files)
    assert open_reader(tmp_path, files[1]).tensor("w").tolist() == [1, 1, 1]


def test_files_of_ranks_that_are_not_named_so(ranks: Path) -> None:
    for path in sorted(ranks.glob("*.pt")):
        path.rename(ranks / path.name.replace("_world_size_4_rank_", "-"))
    error = fails(ranks)
    assert "and it is unknown which one is current" in error.message
    assert str(error.where).startswith("optim-0.pt and optim-1.pt: state.0.")
    assert "NAME_rank_N.pt" in str(error.hint)
    for path in sorted(ranks.glob("*.pt")):
        path.rename(ranks / path.name.replace("-", "_rank_"))
    wanted = dict(np.load(ranks / "expected.npz"))
    reader = open_reader(ranks)
    assert all(reader.tensor(n).tobytes() == wanted[n].tobytes() for n in wanted)
    assert "optimizer.state.0.exp_avg" in reader.names


def test_dtensors_of_two_checkpoints(ranks: Path) -> None:
    for rank in range(4):
        shutil.copy(ranks / VERL.format(rank), ranks / f"old_world_size_4_rank_{rank}.pt")
    assert "and it is unknown which one is current" in fails(ranks).message


def test_single_elements_of_ranks(tmp_path: Path) -> None:
    for step in (1.0, 2.0):
        for rank in range(2):
            value = {"step": torch.tensor(1.0 if rank == 0 else step), "rank": rank, "epoch": 3}
            torch.save(value, tmp_path / f"rank_{rank}.pt")
        if step == 1:
            reader = open_reader(tmp_path)
            assert reader.tensor("step") == 1
            assert reader.objects() == {"epoch": 3}
            assert reader.manifest.metadata["ckptd.foreign"]["left_out"] == ["rank"]
    assert fails(tmp_path).kind == "replicas-differ"


@pytest.mark.parametrize(
    "view",
    [
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch._neg_view(torch.ones(3)),
    ],
    ids=["conj", "conj.imag", "neg"],
)
def test_views_that_change_values(tmp_path: Path, view: torch.Tensor) -> None:
    torch.save({"x": view}, tmp_path / "a.pt")
    error = fails(tmp_path)
    assert error.kind == "unreadable-format"
    assert "x (a view that conjugates" in str(error.found)
    torch.save({"x": view.resolve_conj().resolve_neg()}, tmp_path / "a.pt")
    assert open_reader(tmp_path).tensor("x").tolist() == view.tolist()


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)},
        {0: torch.ones(1), "0": torch.zeros(1)},
        {None: torch.ones(1), "None": torch.zeros(1)},
        {"": {"w": torch.ones(1)}, "w": torch.zeros(1)},
        {"w": torch.ones(1), "a": {1: 2, "1": 3}},
        {"w": torch.ones(1), "a": [5], "a.0": torch.zeros(1)},
    ],
)
def test_two_values_with_one_name(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "a.pt")
    error = fails(tmp_path)
    assert (error.message, error.message) == (
        "two values of one file have one name",
        "two values of one file have one name",
    )


def test_a_tensor_alone(tmp_path: Path) -> None:
    torch.save(torch.arange(3.0), tmp_path / "a.pt")
    assert open_reader(tmp_path).tensor("tensor").tolist() == [0, 1, 2]


# -- hostile values --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["line\nend", "nul\0", "\u200b"])
def test_a_name_that_no_tensor_may_have(tmp_path: Path, name: str) -> None:
    """The error names the file that holds it."""
    torch.save({"w": torch.ones(2), name: torch.ones(3)}, tmp_path / "a.pt")
    error = fails(tmp_path)
    assert (error.message, error.where) == ("invalid name", "a.pt")
    assert error.found == repr(name[:80])


@pytest.mark.parametrize("tensor", ["qint8", "surrogate"])
def test_tensors_of_other_kinds(tmp_path: Path, tensor: str) -> None:
    value = {"w": torch.ones(2)}
    if tensor == "qint8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value["q"] = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    else:
        value["\ud800"] = torch.ones(1)
    torch.save(value, tmp_path / "a.pt")
    if tensor == "qint8":
        reader = open_reader(tmp_path)
        assert reader.tensor("w").tolist() == [1, 1]
        assert reader.unread == {"q": "torch._utils._rebuild_qtensor"}
        return
    assert "invalid name" in fails(tmp_path).message


def test_numbers_beyond_reason_are_left_out(tmp_path: Path) -> None:
    value = {"w": torch.ones(1), "n": 1 << 160_000, "\udc80": {1}, "m": 1 << 100}
    torch.save(value, tmp_path / "a.pt")
    reader = open_reader(tmp_path)
    assert reader.objects() == {"m": 1 << 100}
    assert reader.manifest.metadata["ckptd.foreign"]["left_out"] == ["n", "\\udc80"]


LOOP: list[Any] = []
LOOP.append(LOOP)
TWICE: Any = 1
for _ in range(60):
    TWICE = TWICE, TWICE


def dtensor(
    shape: Any = (4,),
    mesh: Any = (1,),
    placement: Any = None,
    said: Any = None,
    *,
    has_axes: bool = True,
) -> Any:
    made = PickledObject("torch.DTensor")
    spec, meta, device, layout, axis = (PickledObject(n) for n in ("s", "t", "m", "l", "a"))
    axis.fields = {"shape": mesh}
    layout.fields = {"axes": [axis]} if has_axes else axis.fields
    device.fields = {"_layout": layout, "_coordinate_on_dim": (0,), "_rank": said}
    meta.fields = {"shape": shape}
    shard = PickledObject("torch.Shard")
    shard.fields = {"dim": 0}
    spec.fields = {"tensor_meta": meta, "mesh": device, "placements": (placement or shard,)}
    made.fields = {"_spec": spec}
    return made


def strided(factor: Any) -> PickledObject:
    made = PickledObject("torch._StridedShard")
    made.fields = {"dim": 0, "split_factor": factor}
    return made


DTENSORS = {
    "a mesh of itself": {"mesh": LOOP},
    "a mesh that laughs": {"mesh": TWICE},
    "a mesh of text": {"mesh": ("9",)},
    "a shape of text": {"shape": ("4",)},
    "a shape that laughs": {"shape": TWICE},
    "a shape of 2**66": {"shape": (1 << 66,)},
    "a factor of text": {"placement": strided("a")},
    "a rank that laughs": {"said": TWICE},
}


@pytest.mark.parametrize("has_axes", [True, False])
@pytest.mark.parametrize("name", DTENSORS)
def test_hostile_dtensors(name: str, has_axes: bool) -> None:
    plain = dtensor(said=3, has_axes=has_axes)
    assert torchfiles._box(plain, 3, "x")[:2] == ((4,), Box((0,), (4,)))
    with pytest.raises(CkptdError) as caught:
        torchfiles._box(dtensor(**DTENSORS[name], has_axes=has_axes), 0, "x")
    assert "unsupported DTensor" in caught.value.message


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_splits_from_right_to_left(axes: tuple[int, ...]) -> None:
    made = dtensor()
    entry = PickledObject("torch.distributed.tensor._dtensor_spec.ShardOrderEntry", (0, axes))
    made.fields["_spec"].fields["shard_order"] = (entry,)
    if axes == (0, 1):
        assert torchfiles._box(made, 0, "x")[1] == Box((0,), (4,))
        return
    with pytest.raises(CkptdError) as caught:
        torchfiles._box(made, 0, "x")
    assert caught.value.kind == "unreadable-format"


@pytest.mark.parametrize(
    ("extents", "ranks", "ascend"),
    [
        ((4,), (0, 1, 2, 3), True),
        ((4,), (3, 1, 2, 0), False),
        ((2, 2), (0, 2, 1, 3), True),
        ((2, 2), (1, 0, 3, 2), False),
        ((2,), (0, 1, 2, 3), True),
        ((2,), (0, 2, 1, 3), False),
    ],
)
@pytest.mark.parametrize("name", ["_flatten_rank_map", "_flatten_mesh_list"])
def test_ranks_in_another_order(
    name: str, extents: tuple[int, ...], ranks: tuple[int, ...], ascend: bool
) -> None:
    made = dtensor()
    mesh = made.fields["_spec"].fields["mesh"]
    mesh.fields[name] = ranks
    assert torchfiles._ascend(mesh, extents) is ascend
    if len(ranks) > math.prod(extents) or len(extents) > 1:
        return
    mesh.fields["_layout"].fields["axes"][0].fields["shape"] = extents
    if ascend:
        assert torchfiles._box(made, 0, "x")[1] == Box((0,), (1,))
        return
    with pytest.raises(CkptdError) as caught:
        torchfiles._box(made, 0, "x")
    assert caught.value.kind == "unreadable-format"


MADE = b"\x80\x02ctorch.distributed._mesh_layout\n_MeshLayout\nq\x00)\x81q\x01}q\x02"
SHAPE = MADE + b"(X\x05\x00\x00\x00shapeq\x03"
AXES = MADE + (
    b"X\x04\x00\x00\x00axesq\x03ctorch.distributed._mesh_layout\n_FlatLayout\nq\x04)\x81q\x05}q\x06"
    b"(X\x05\x00\x00\x00shapeq\x07"
)
STRIDE = b"X\x06\x00\x00\x00strideq"
MESHES = {
    "2.10 to 2.12, two axes": (
        SHAPE + b"K\x02K\x04\x86q\x04" + STRIDE + b"\x05K\x04K\x01\x86q\x06ub.",
        (2, 4),
    ),
    "2.10 to 2.12, ranks in another order": (
        SHAPE
        + b"ctorch\nSize\nq\x04K\x02K\x04\x86q\x05\x85q\x06Rq\x07"
        + (STRIDE + b"\x08K\x04K\x01\x86q\tub."),
        (2, 4),
    ),
    "2.10 to 2.12, two axes of three as one": (
        SHAPE + b"K\x02K\x02\x86q\x04\x85q\x05" + (STRIDE + b"\x06K\x04K\x01\x86q\x07\x85q\x08ub."),
        (4,),
    ),
    "2.10 to 2.12, all axes as one": (SHAPE + b"K\x08" + STRIDE + b"\x04K\x01ub.", (8,)),
    "2.13, two axes": (
        AXES
        + b"K\x02\x85q\x08"
        + (STRIDE + b"\tK\x04\x85q\nubh\x04)\x81q\x0b}q\x0c")
        + b"(h\x07K\x04\x85q\rh\tK\x01\x85q\x0eub\x86q\x0fsb.",
        (2, 4),
    ),
    "2.13, two axes of three as one": (
        AXES + b"K\x02K\x02\x86q\x08" + STRIDE + b"\tK\x04K\x01\x86q\nub\x85q\x0bsb.",
        (4,),
    ),
    "2.13, one rank": (AXES + b")" + STRIDE + b"\x08)ub\x85q\tsb.", (1,)),
}
"""What `pickle.dumps(mesh._layout, 2)` gave with these versions, for meshes of 8 ranks."""


@pytest.mark.parametrize("version", MESHES)
def test_meshes_of_each_version(version: str) -> None:
    raw, extents = MESHES[version]
    mesh = PickledObject("torch.distributed.device_mesh.DeviceMesh")
    mesh.fields = {"_layout": read_pickle(raw, version)}
    assert torchfiles._extents(mesh) == extents


def test_a_mesh_of_2_9() -> None:
    mesh = PickledObject("torch.distributed.device_mesh.DeviceMesh")
    ranks = PickledStorage("0", "int64", 8)
    mesh.fields = {"mesh": PickledTensor(ranks, 0, (2, 4), (4, 1), "int64")}
    assert torchfiles._extents(mesh) == (2, 4)
