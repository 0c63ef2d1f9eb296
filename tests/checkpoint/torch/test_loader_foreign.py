"""A load from another place: checkpoints of other formats, and other roots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from ckptd.checkpoint.load.plan import read_plan
from ckptd.checkpoint.torch import Checkpointer, loader
from ckptd.errors import MismatchError, NotFoundError
from tests.readers.opening import write_model

pytestmark = pytest.mark.usefixtures("writing_thread")


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        self.head = nn.Linear(2, 5, bias=False)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def live(seed: int = 1) -> dict[str, Any]:
    net = Net(seed)
    return {"model": net, "optimizer": torch.optim.AdamW(net.parameters()), "seen": 3}


def write(folder: Path, how: str) -> Net:
    """Write weights as others do; their names begin with no section, but for "dcp, nested"."""
    net = Net()
    values = net.state_dict()
    folder.mkdir(exist_ok=True)
    match how:
        case "hf":
            save_file(values, folder / "model.safetensors")
        case "torch":
            torch.save(values, folder / "weights.pt")
        case "dcp":
            dcp.save(values, checkpoint_id=folder, no_dist=True)
        case "dcp, nested":
            dcp.save({"model": values, "epoch": 2}, checkpoint_id=folder, no_dist=True)
    return net


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", ["hf", "torch", "dcp", "dcp, nested"])
def test_weights_of_another_format(tmp_path: Path, how: str) -> None:
    wanted = write(tmp_path / "step_40", how)
    state = live()
    with Checkpointer(str(tmp_path / "root")) as ck:
        step = ck.load(state, source=tmp_path / "step_40", weights_only=True)
        assert step == 40
        assert equal(state["model"], wanted)
        assert state["seen"] == 3
        assert ck.latest() is None
        ck.save(1, state).durable()
        assert ck.generation == 1
        assert ck.latest() == 1


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    write(tmp_path / "hf", "hf")
    state = live()
    with Checkpointer(str(tmp_path / "root")) as ck:
        with pytest.raises(MismatchError) as caught:
            ck.load(state, source=tmp_path / "hf")
        assert "seen: missing" in caught.value.message
        assert "weights_only=" in str(caught.value.hint)
        ck.load(state, source=tmp_path / "hf" / "model.safetensors", strict=False)
        assert ck.last_load is not None
        assert "seen" in ck.last_load.missing
        with pytest.raises(NotFoundError):
            ck.load(state, source=tmp_path / "nothing")


def test_two_modules_of_one_kind(tmp_path: Path) -> None:
    wanted = write(tmp_path / "hf", "hf")
    state = {"model": Net(1), "ema": Net(2)}
    with Checkpointer(str(tmp_path / "root")) as ck:
        with pytest.raises(MismatchError, match="two parts"):
            ck.load(state, source=tmp_path / "hf", weights_only=True)
        ck.load(state, source=tmp_path / "hf", only="ema.*")
        assert equal(state["ema"], wanted)
        assert equal(state["model"], Net(1))
        ck.load(
            state,
            source=tmp_path / "hf",
            only="model.*",
            rename=lambda name: name.removeprefix("model."),
        )
        assert equal(state["model"], wanted)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Linear(2, 2, bias=False)


class Outer(nn.Module):
    """``x.weight`` and ``model.x.weight``: as the section ``model`` it has the latter twice."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.x = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize("strict", [True, False])
def test_a_name_that_could_be_two_parameters_is_refused(tmp_path: Path, strict: bool) -> None:
    net, one = Outer(), torch.ones(2, 2)
    before = {n: v.clone() for n, v in net.state_dict().items()}
    save_file({"model.x.weight": one}, tmp_path / "a.safetensors")
    save_file({"model.x.weight": one, "x.weight": 2 * one}, tmp_path / "whole.safetensors")
    with Checkpointer(str(tmp_path / "root")) as ck:
        with pytest.raises(MismatchError, match="with a section prefix, and some without"):
            ck.load({"model": net}, source=tmp_path / "a.safetensors", strict=strict)
        assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())
        # Where all names are there without the section, there is no doubt.
        ck.load({"model": net}, source=tmp_path / "whole.safetensors", strict=strict)
        assert torch.equal(net.model.x.weight, one)
        assert torch.equal(net.x.weight, 2 * one)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"weights_only": True}])
def test_tied_weights_that_are_there_twice(tmp_path: Path, options: dict[str, bool]) -> None:
    one = torch.ones(2, 2)
    save_file({"a.weight": one, "b.weight": one.clone()}, tmp_path / "equal.safetensors")
    save_file({"a.weight": one, "b.weight": 2 * one}, tmp_path / "other.safetensors")
    net = Tied()
    before = net.a.weight.detach().clone()
    with Checkpointer(str(tmp_path / "root")) as ck:
        with pytest.raises(MismatchError, match="two values") as caught:
            ck.load({"model": net}, source=tmp_path / "other.safetensors", **options)
        assert caught.value.where == "model.a.weight, model.b.weight"
        assert torch.equal(net.a.weight, before)
        ck.load({"model": net}, source=tmp_path / "equal.safetensors", **options)
        assert torch.equal(net.b.weight, one)
        assert ck.last_load is not None
        assert not ck.last_load.unexpected
        ck.load(
            {"model": net},
            source=tmp_path / "other.safetensors",
            only=lambda name: name != "model.b.weight",
        )
        assert torch.equal(net.b.weight, one)


class ThriceTied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight = nn.Parameter(torch.zeros(1024, 256))
        self.c = nn.Linear(2, 2, bias=False)
        self.b.weight = self.c.weight = self.a.weight


def test_tied_weights_are_compared_a_range_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory does not grow with the weight, and the first is read once for all its names."""
    monkeypatch.setattr(loader, "_COMPARED_BYTES", 3 * 20_000)  # 19 rows, the last range is short
    one = torch.rand(1024, 256)
    values = {f"{n}.weight": one.clone() for n in "abc"}
    save_file(values, tmp_path / "equal.safetensors")
    values["c.weight"][-1, -1] += 1
    save_file(values, tmp_path / "other.safetensors")
    net = ThriceTied()
    with Checkpointer(str(tmp_path / "root")) as ck:
        with pytest.raises(MismatchError, match="two values") as caught:
            ck.load({"model": net}, source=tmp_path / "other.safetensors")
        assert caught.value.where == "model.a.weight, model.c.weight"
        assert f" bytes of {one.nbytes} differ" in str(caught.value.found)
        plans = []

        def compared(*args: Any, **options: Any) -> Any:
            plan = read_plan(*args, **options)
            plans.append([t.nbytes for t in plan.targets])
            return plan

        monkeypatch.setattr(loader, "read_plan", compared)
        ck.load({"model": net}, source=tmp_path / "equal.safetensors")
        assert torch.equal(net.a.weight, one)
    *ranges, last = plans[::-1] if len(plans[0]) == 1 else plans
    assert max(map(sum, ranges)) <= 3 * 20_000
    assert [sum(sizes) for sizes in zip(*ranges, strict=True)] == [one.nbytes] * 3
    assert last == [one.nbytes]


def test_nothing_is_no_load(tmp_path: Path) -> None:
    save_file({"y": torch.ones(2)}, tmp_path / "a.safetensors")
    with Checkpointer(str(tmp_path / "root")) as ck:
        with pytest.raises(MismatchError, match="have no name in common"):
            ck.load({"model": Inner()}, source=tmp_path / "a.safetensors", strict=False)


def test_another_root_is_only_read(tmp_path: Path) -> None:
    state = live(0)
    with Checkpointer(str(tmp_path / "a")) as ck:
        ck.save(7, state).durable()
    there = sorted(tmp_path.joinpath("a").rglob("*"))
    new = live(1)
    with Checkpointer(str(tmp_path / "b")) as ck:
        assert ck.load(new, source=tmp_path / "a") == 7
        assert equal(new["model"], state["model"])
        ck.save(8, new).durable()
        assert ck.generation == 1
        assert ck.load(new) == 8
    assert sorted(p for p in tmp_path.joinpath("a").rglob("*") if "lease" not in str(p)) == [
        p for p in there if "lease" not in str(p)
    ]


def test_a_job_of_another_layout_needs_none_for_the_source(tmp_path: Path) -> None:
    """The files hint at theirs; where that is wrong the job's own counts, as without any."""
    wanted = write_model(tmp_path / "llama")
    fused = [torch.empty(48, 24) for _ in range(3)]
    names = (f"decoder.layers.{i}.self_attention.linear_qkv.weight" for i in range(3))
    state = {"model": dict(zip(names, fused, strict=True))}
    sizes = "let kv = 2\nlet rep = 2\nmesh M = pp:1 dp:1 tp:1\n"
    layout = f"{sizes}layout job on M {{ use megatron.gpt }}"
    name = "model.layers.1.self_attn.{}_proj.weight"
    q, k, v = (torch.from_numpy(wanted[name.format(x)]).reshape(2, -1, 6, 24) for x in "qkv")
    with Checkpointer(str(tmp_path / "root"), layout=layout) as ck:
        ck.load(state, source=tmp_path / "llama", strict=False)
        assert torch.equal(fused[1], torch.cat([q, k, v], 1).reshape(48, 24))
        config = tmp_path / "llama" / "config.json"
        wrong = {**json.loads(config.read_text()), "num_key_value_heads": 3}
        config.write_text(json.dumps(wrong))
        with pytest.raises(MismatchError, match="no rule of this layout matches"):
            ck.load(state, source=tmp_path / "llama", strict=False)
