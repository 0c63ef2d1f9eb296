"""Folders for torch.distributed.checkpoint, loaded by torch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptd
from ckptd.checkpoint.cli.address import opened
from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.format.names import escape_fqn
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.errors import UsageError
from ckptd.reshard.execute import Budget
from ckptd.reshard.groups import gathered
from ckptd.reshard.job import ReshardShare
from ckptd.reshard.prepare import prepare, source_program
from ckptd.reshard.source import open_own
from ckptd.reshard.writers.dcp import DcpPlace
from ckptd.reshard.writers.folder import FolderJob
from ckptd.reshard.writers.hf import HfPlace
from ckptd.store import open_store
from ckptd.testing.ranks import run_ranks
from tests.cli.running import Cli
from tests.processes import PATIENCE_S
from tests.reshard.llama import groups, per_rank, prepared, program, save, shapes, values

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures("writing_thread"),
]

NAMES = 'stored "{name}" states "optim.state.{name}.{state}"'


def write(source: Path, folder: Path, *rules: str, name: str = "fsdp") -> DcpPlace:
    with open_store(source) as store:
        found = prepared(store, program(name, *rules))
        place = DcpPlace(found.assembled, found.expected)
        job = FolderJob(found.stock.source, place, folder, identity=found.identity)
        job.run(ReshardShare(), Budget.of(64 << 20, store))
    return place


def test_a_plain_state_with_optimizer_and_objects(tmp_path: Path, cli: Cli) -> None:
    wanted = values()
    entry, saved = per_rank("rng", [[1, 2], [3, 4], [5, 6], [7, 8]], "drop")
    objects = [
        ObjectEntry("optim.groups", kind="groups", value=groups()),
        ObjectEntry("extra.note", value={"betas": {"$": "tuple", "v": [0.9, 0.95]}}),
        entry,
    ]
    with open_store(tmp_path / "source") as store:
        save(store, wanted, objects=objects, extra={"rng": saved})
    folder = tmp_path / "out"
    place = write(tmp_path / "source", folder, "mesh fsdp = dp:4", NAMES)
    assert not place.left_out
    weights = [n for n in wanted if not n.startswith("optim.")]
    states = ("exp_avg", "exp_avg_sq", "step")
    state: dict[str, Any] = {n: torch.full(wanted[n].shape, -1.0) for n in weights}
    empty = {s: torch.zeros(()) for s in states}
    moments = {n: {**empty, "exp_avg": torch.zeros(shapes()[n])} for n in shapes()}
    for n, found in moments.items():
        found["exp_avg_sq"] = torch.zeros(shapes()[n])
    state |= {
        "optim": {"state": moments, "param_groups": [{"lr": 0.0, "params": []} for _ in range(2)]},
        "extra": {"note": None},
        "rng": None,
    }
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    assert all(np.array_equal(state[n].numpy(), wanted[n]) for n in weights)
    for n in shapes():
        for s in states:
            assert np.array_equal(moments[n][s].numpy(), wanted[f"optim.{n}.{s}"]), (n, s)
    assert state["optim"]["param_groups"] == groups()
    assert state["extra"]["note"] == {"betas": (0.9, 0.95)}
    assert state["rng"] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    dcp_to_torch_save(str(folder), str(tmp_path / "whole.pt"))
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["optim"]["param_groups"] == groups()
    assert torch.equal(whole["lm_head.weight"], state["lm_head.weight"])
    # And by the readers of others' checkpoints.
    back = tmp_path / "back"
    assert cli("verify", str(folder)).code == 0
    assert cli("cp", str(folder), str(back)).code == 0
    assert cli("diff", str(folder), str(back)).code == 0


def test_a_value_that_lies_in_a_file_is_written(tmp_path: Path) -> None:
    # It was said to be a tensor that is not there.
    with ckptd.Checkpointer(tmp_path / "source") as ck:
        ck.save(1, {"w": torch.ones(2), "order": [*range(9000)]}).durable(PATIENCE_S)
    write(tmp_path / "source", tmp_path / "out", name="ddp")
    state: dict[str, Any] = {"w": torch.zeros(2), "order": []}
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert state["order"] == [*range(9000)]


@pytest.mark.parametrize("steps", [(7, 7.0), (7, 8)])
def test_groups_that_count_the_steps(steps: tuple[float, float], tmp_path: Path) -> None:
    """As Megatron has it: its groups name no parameters, and parameters have no counters."""
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters())
    data = {n: np.ones(tuple(p.shape), "f4") for n, p in model.named_parameters()}
    for moment in ("exp_avg", "exp_avg_sq"):
        data |= {f"optim.{n}.{moment}": 2 * data[n] for n in ("weight", "bias")}
    objects = [
        ObjectEntry(f"optimizer.optimizer.param_groups.{n}.step", value=step)
        for n, step in enumerate(steps)
    ]
    with open_store(tmp_path / "source") as store:
        save(store, data, objects=objects)
    names = 'stored "model.{name}" states "optim.state.{name}.{state}"'
    place = write(tmp_path / "source", tmp_path / "out", names, name="ddp")
    weights, states = get_state_dict(model, optim)
    state: dict[str, Any] = {"model": weights, "optim": states}
    found = [n.text for n in place.notes]
    assert any(t.startswith("optim.param_groups is not there") for t in found)
    if len(set(steps)) > 1:
        assert set(place.notes[0].names) == {f"optim.state.{n}.step" for n in ("weight", "bias")}
        assert "7, 8" in found[0]
        return
    assert len(found) == 1
    planner = DefaultLoadPlanner(allow_partial_load=True)  # as the note says
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), planner=planner, no_dist=True)
    set_state_dict(model, optim, model_state_dict=weights, optim_state_dict=states)
    for n, parameter in model.named_parameters():
        assert torch.equal(parameter, torch.from_numpy(data[n]))
        assert optim.state[parameter]["step"] == 7
        assert (optim.state[parameter]["exp_avg"] == 2).all()


def test_a_tied_weight_gets_the_name_that_the_source_lacks(tmp_path: Path, cli: Cli) -> None:
    """As files of Hugging Face are: the state dict of a tied model has one name more."""
    data = {"embed.weight": np.arange(12, dtype="f4").reshape(4, 3)}
    with open_store(tmp_path / "source") as store:
        save(store, data)
    lay = tmp_path / "tied.lay"
    lay.write_text(
        "space s { E[v h]; head[v h] }\n"
        "layout tied of s on none { embed.weight = E[v h]; head.weight = head[v h] }\n"
    )
    layout = f"{lay}:tied"
    words = ("--from", layout, "--to", layout, "--format", "dcp", "-e", "use names.dcp")
    source = str(tmp_path / "source")
    done = cli("reshard", source, str(tmp_path / "one"), *words)
    assert done.code == 0
    assert "does not find" in done.err
    assert "head.weight = head[v h]" in done.err
    both = (*words, "-e", "head.weight = alias E")
    done = cli("reshard", source, str(tmp_path / "two"), *both)
    assert done.code == 0
    assert "does not find" not in done.err
    state = {"model": {n: torch.zeros(4, 3) for n in ("embed.weight", "head.weight")}}
    dcp.load(state, checkpoint_id=str(tmp_path / "two"), no_dist=True)
    for found in state["model"].values():
        assert np.array_equal(found.numpy(), data["embed.weight"])


def test_names_are_those_that_torch_asks_for(tmp_path: Path) -> None:
    names = ["a/b", "100%", "tab\t", "new\nline", "ü.ö", "0.x"]
    state = {n: torch.arange(12.0).reshape(4, 3) + i for i, n in enumerate(names)}
    tensors = {f"t.{escape_fqn(n)}": v.numpy() for n, v in state.items()}
    objects = [
        ObjectEntry("o.lr%2Fa", value=0.5),
        ObjectEntry("o.x%2Ey", value={"k": 1}),
        ObjectEntry("o.some", value=codec.encode({"ids": {1, 2}})),
        ObjectEntry("o.large", value=codec.encode(2**2100)),
        ObjectEntry("o.keys", value=codec.encode({frozenset({1}): 2})),
    ]
    with open_store(tmp_path / "source") as store:
        save(store, tensors, objects=objects)
    place = write(tmp_path / "source", tmp_path / "out", "mesh fsdp = dp:2")
    assert sorted(place.left_out) == ["o.keys", "o.large"]
    assert place.simplified == ["o.some"]
    wanted: dict[str, Any] = {f"t.{n}": torch.zeros(4, 3) for n in names}
    wanted |= {"o.lr/a": None, "o.x.y": None}
    dcp.load(wanted, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert all(torch.equal(wanted[f"t.{n}"], v) for n, v in state.items())
    assert (wanted["o.lr/a"], wanted["o.x.y"]) == (0.5, {"k": 1})
    with open_store(tmp_path / "source") as store:
        found = prepared(store, program("ddp"))
        whole = HfPlace(found.assembled, {}, 10**9).target.tensors
    assert {t.name.removeprefix("t.") for t in whole} == set(names)
    # Names of a foreign checkpoint are no escaped ones.
    dcp.save({"a%2Fb": torch.ones(3)}, checkpoint_id=str(tmp_path / "foreign"), no_dist=True)
    with opened(str(tmp_path / "foreign"), 0, foreign=True) as catalogue:
        stock = open_own(CkptdReader(catalogue, catalogue.commit(catalogue.line()[-1])))
        found = prepare(stock, source_program(stock, None), program("ddp"))
        assert [t.name for t in DcpPlace(found.assembled, {}).target.tensors] == ["a%2Fb"]


def test_parts_of_flat_buffers_become_boxes(tmp_path: Path) -> None:
    """A range of a buffer begins and ends inside of rows."""
    wanted = values()
    with open_store(tmp_path / "source") as store:
        save(store, wanted)
    write(tmp_path / "source", tmp_path / "out", "mesh zero3 = dp:7", name="zero3")
    metadata = dcp.FileSystemReader(str(tmp_path / "out")).read_metadata()
    entry = metadata.state_dict_metadata["optim.lm_head.weight.exp_avg"]
    assert isinstance(entry, TensorStorageMetadata)
    assert len(entry.chunks) > 7
    state = {n: torch.full(v.shape, -1.0) for n, v in wanted.items()}
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert all(np.array_equal(state[n].numpy(), v) for n, v in wanted.items())


def test_torchtitan_asks_for_the_settings_of_each_parameter(tmp_path: Path) -> None:
    with open_store(tmp_path / "source") as store:
        objects = [ObjectEntry("optim.groups", kind="groups", value=groups())]
        save(store, values(), objects=objects)
    write(tmp_path / "source", tmp_path / "out", "mesh fsdp = dp:2", "use names.titan")
    state: dict[str, Any] = {
        "optimizer": {
            "state.lm_head.weight.step": torch.zeros(()),
            "param_groups.lm_head.weight.lr": 0.0,
            "param_groups.model.norm.weight.lr": 0.0,
        }
    }
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert list(state["optimizer"].values()) == [7, 0.1, 0.2]


@pytest.mark.parametrize("names", ["names.plain", "names.titan"])
def test_each_of_two_optimizers_keeps_its_settings(tmp_path: Path, names: str) -> None:
    first, second = groups(), [{**g, "lr": g["lr"] + 1} for g in groups()]
    with open_store(tmp_path / "source") as store:
        objects = [
            ObjectEntry("optim.groups", kind="groups", value=first),
            ObjectEntry("other.groups", kind="groups", value=second),
        ]
        save(store, values(), objects=objects)
    write(tmp_path / "source", tmp_path / "out", "mesh fsdp = dp:1", f"use {names}")
    if names == "names.plain":
        state: dict[str, Any] = {
            key: {"param_groups": [{"lr": 0.0} for _ in first]} for key in ("optim", "other")
        }
        wanted = [g["lr"] for g in (*first, *second)]
    else:
        name = first[0]["params"][0]
        state = {key: {f"param_groups.{name}.lr": 0.0} for key in ("optimizer", "other")}
        wanted = [first[0]["lr"], second[0]["lr"]]
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    if names == "names.plain":
        assert [g["lr"] for o in state.values() for g in o["param_groups"]] == wanted
    else:
        assert [v for o in state.values() for v in o.values()] == wanted


def test_an_optimizer_whose_key_ends_in_state_keeps_it(tmp_path: Path) -> None:
    wanted = {n.replace("optim.", "opt_state."): v for n, v in values().items()}
    with open_store(tmp_path / "source") as store:
        objects = [ObjectEntry("opt_state.groups", kind="groups", value=groups())]
        save(store, wanted, objects=objects)
    names = 'stored "{name}" states "opt_state.{name}.{state}"'
    place = write(tmp_path / "source", tmp_path / "out", "mesh fsdp = dp:1", names)
    assert not place.notes  # on what an optimizer of torch would ask for
    state: dict[str, Any] = {"opt_state": {"param_groups": [{"lr": 0.0} for _ in groups()]}}
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert [g["lr"] for g in state["opt_state"]["param_groups"]] == [g["lr"] for g in groups()]
    # And they are groups of an optimizer again where the folder is read.
    found = [ObjectEntry("opt_state.param_groups.0.params", value=list(shapes()))]
    assert [o.name for o in gathered(found, "opt_state.groups", [])] == ["opt_state.groups"]


def test_values_that_would_have_one_name_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "source") as store:
        objects = [
            ObjectEntry("optim.groups", kind="groups", value=groups()),
            ObjectEntry("optim.param_groups.0.lr", value=3.0),
        ]
        save(store, values(), objects=objects)
    with pytest.raises(UsageError) as caught:
        write(tmp_path / "source", tmp_path / "out", "mesh fsdp = dp:1", NAMES)
    assert "two objects would have one name" in caught.value.message
    assert "optim.param_groups.0.lr" in str(caught.value)


class Net(nn.Module):
    """Two layers, whose sizes nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    return optimizer


def whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: whole(v) for k, v in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def load_on_two(folder: str, wanted: Any) -> None:
    """Load into FSDP2, and into tensor parallelism, as torch's own recipe does."""
    for axis in ("dp", "tp"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
        torch.manual_seed(9)
        model = Net()
        if axis == "tp":
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            fully_shard(model, mesh=mesh)
        optimizer = trained(model)
        weights, states = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optim": states}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        weights, states = get_state_dict(model, optimizer)
        found = whole({"model": weights, "optim": states["state"]})
        for n, tensor in wanted["model"].items():
            assert torch.equal(found["model"][n], tensor), (axis, n)
            for s, value in wanted["optim"][n].items():
                assert torch.equal(found["optim"][n][s], value), (axis, n, s)
        assert [g["lr"] for g in optimizer.param_groups] == [0.01]


@pytest.mark.dist
def test_fsdp2_and_tensor_parallelism_load_it(tmp_path: Path, cli: Cli) -> None:
    torch.manual_seed(1)
    model = Net()
    optimizer = trained(model)
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.save(3, {"model": model, "optim": optimizer})
    args = ["--to", "fsdp", "-e", "mesh fsdp = dp:3", "-e", "use names.dcp", "--format", "dcp"]
    done = cli("reshard", str(tmp_path / "root"), str(tmp_path / "out"), *args)
    assert done.code == 0, done
    weights, states = get_state_dict(model, optimizer)
    wanted = {"model": weights, "optim": states["state"]}
    run_ranks(2, load_on_two, str(tmp_path / "out"), wanted, deadline_s=120.0)


def test_tied_names_share_items_and_names_that_collide_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    with open_store(tmp_path / "source") as store:
        save(store, {"embed": rng.standard_normal((8, 4)), "empty": np.zeros((0, 3))})
    tie = tmp_path / "tied.lay"
    tie.write_text(
        "space s { E[v h] Z[z w] }\nlayout t of s on none {\n"
        "  embed = E[v h]\n  empty = Z[z w]\n  head = E[v h] alias\n}\n"
    )
    with open_store(tmp_path / "source") as store:
        found = prepared(store, program(f"{tie}:t"), program(f"{tie}:t"))
        place = DcpPlace(found.assembled, found.expected)
        job = FolderJob(found.stock.source, place, tmp_path / "out", identity="a")
        job.run(ReshardShare(), Budget.of(64 << 20, store))
    metadata = dcp.FileSystemReader(str(tmp_path / "out")).read_metadata()
    spans = {k.fqn: (v.offset, v.length) for k, v in metadata.storage_data.items()}
    assert spans["embed"] == spans["head"]
    state = {"embed": torch.zeros(8, 4, dtype=torch.float64), "empty": torch.zeros(0, 3).double()}
    state["head"] = torch.zeros(8, 4, dtype=torch.float64)
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert torch.equal(state["embed"], state["head"])
    assert torch.count_nonzero(state["head"]) == 32
    with open_store(tmp_path / "source2") as store:
        note = ObjectEntry("a.b", value=1)
        save(store, {"a.b": np.zeros(3), "c": np.zeros(2)}, objects=[note])
    with pytest.raises(UsageError) as caught:
        write(tmp_path / "source2", tmp_path / "no")
    assert "two tensors or objects would have one name" in caught.value.message
