"""Names of parameters and states, from one format to another: shipped ``names.*``, and groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckptd
from ckptd.format.manifest import ObjectEntry
from ckptd.layout.lay.bind import bind_stored
from ckptd.layout.lay.stored import StoredForm
from ckptd.layout.lay.syntax import File, Layout, Stored, library
from ckptd.reshard.groups import gathered, groups_name
from ckptd.reshard.layouts import LayoutProgram, infer, wrapped
from tests.cli.running import Cli

NAMES = [n for n in library.names() if n.startswith("names.")]
SHAPES = {"layers.0.w": (4, 2), "layers.1.w": (4, 2), "norm": (3,)}


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def spelling(names: str) -> Stored:
    layout = next(i for i in library.load(names).items if isinstance(i, Layout))
    return next(s for s in layout.statements if isinstance(s, Stored))


def spelled(names: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield parameters, their states and a number that follows each, as a recipe names them."""
    stored = spelling(names)
    master = {s.name: s.stored for s in stored.renamed}.get("w", "master")
    for name, shape in SHAPES.items():
        yield stored.params.replace("{name}", name), shape
        for state in ("exp_avg", "exp_avg_sq", master, "step"):
            full = stored.states.replace("{state}", state).replace("{name}", name)
            yield full, () if state == "step" else shape


@pytest.mark.parametrize(("source", "target"), list(permutations(NAMES, 2)))
def test_each_spelling_is_recognised_and_changes_to_each(source: str, target: str) -> None:
    found, wanted = dict(spelled(source)), dict(spelled(target))
    base = infer(found)
    for program, shapes in (
        (base, found),
        (wrapped(LayoutProgram(File(()), target), base), wanted),
    ):
        bound = bind_stored(program.resolve(), shapes)
        tensors = {n for n, shape in shapes.items() if shape}
        assert set(StoredForm(bound).by_name) == tensors
        assert [s.name for s in bound.layout.scalars] == ["step"]
        assert {s.name for s in bound.layout.states} == {"m", "s", "w"}


def test_what_is_no_state_is_a_parameter() -> None:
    """One tensor that belongs to nothing else: then nothing is said to follow anything."""
    found = {**dict(spelled("names.dcp")), "extra.rng": (5,)}
    resolved = infer(found).resolve()
    assert resolved.params == "{name}"
    assert not resolved.states


def test_where_groups_are() -> None:
    assert groups_name(spelling("names.ckptd").states) == "optim.groups"
    assert groups_name(spelling("names.dcp").states) == "optim.state.groups"
    assert groups_name(spelling("names.megatron").states) == "optimizer.state.groups"


def entries(**values: Any) -> list[ObjectEntry]:
    return [ObjectEntry(n.replace("__", "."), v) for n, v in values.items()]


def test_groups_without_the_names_of_parameters_stay_values() -> None:
    known = entries(optim__param_groups__0__lr=0.1, optim__param_groups__0__params=["a"])
    assert gathered(known, "optim.state.groups", ["a"])[0].value == [{"lr": 0.1, "params": ["a"]}]
    for wrong in (
        entries(optim__param_groups__0__lr=0.1),
        entries(optim__param_groups__0__lr=0.1, optim__param_groups__0__params=[3]),
        entries(optim__param_groups__a__lr=0.1, optim__param_groups__b__lr=0.1),
        entries(optim__param_groups__0__betas__1=0.9, optim__param_groups__0__params=["a"]),
        [*known[:1], ObjectEntry("optim.param_groups.0.params", tensor="t")],
        entries(other__param_groups__0__lr=0.1, other__param_groups__0__params=["a"]),
    ):
        assert gathered(wrong, "optim.state.groups", ["a"]) == wrong


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, and an optimizer with two groups and its states."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    decayed = [p for n, p in model.named_parameters() if "weight" in n]
    others = [p for n, p in model.named_parameters() if "bias" in n]
    groups = [
        {"params": decayed, "weight_decay": 0.3 * seed},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1 * seed)
    for _ in range(seed):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("flat", [False, True])
def test_a_state_of_dcp_is_loaded_by_a_checkpointer(tmp_path: Path, cli: Cli, flat: bool) -> None:
    """Weights, moments, steps and groups; ``get_state_dict``, or torchtitan's flattened states."""
    model, optimizer = trained(2)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    whole: dict[str, Any] = {"model": weights, "optim": states}
    if flat:
        whole = {**weights, "optimizer": states}
    dcp.save(whole, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source, root = str(tmp_path / "dcp"), str(tmp_path / "root")
    found = cli("reshard", source, root, "--to", "names.ckptd")
    assert found.code == 0, found.err
    fresh, loaded = trained(1)
    with ckptd.Checkpointer(root) as ck:
        ck.load({"model": fresh, "optim": loaded})
    assert all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))
    assert [g["lr"] for g in loaded.param_groups] == [0.2, 0.2]
    assert [g["weight_decay"] for g in loaded.param_groups] == [0.6, 0.0]
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        for name, value in optimizer.state[theirs].items():
            assert torch.equal(loaded.state[mine][name], value), name


def test_names_and_cuts_go_together_and_back(tmp_path: Path, cli: Cli) -> None:
    model, optimizer = trained(2)
    with ckptd.Checkpointer(str(tmp_path / "a")) as ck:
        ck.save(1, {"model": model, "optim": optimizer})
    a, b, c = (str(tmp_path / n) for n in "abc")
    cut = ["-e", "use names.dcp", "-e", "mesh fsdp = dp:2"]
    assert cli("reshard", a, b, "--to", "fsdp", *cut).code == 0
    names = [t["name"] for t in cli("inspect", b, "--json").document["tensors"]]
    assert "optim.state.0.weight.exp_avg" in names
    assert cli("reshard", b, c, "--to", "names.ckptd").code == 0
    assert cli("diff", a, c).code == 0
    objects = [cli("inspect", root, "--json").document["objects"] for root in (a, c)]
    assert objects[0] == objects[1]
