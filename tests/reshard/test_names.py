"""Names of parameters and states, from one format to another: shipped ``names.*``, and groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckptd
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.errors import MismatchError
from ckptd.lay.bind import bind_stored
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax import library
from ckptd.lay.syntax.tree import File, Layout, Stored
from ckptd.reshard.groups import gathered, groups_name
from ckptd.reshard.layouts import LayoutProgram, infer, wrapped
from tests.cli.running import Cli
from tests.readers.opening import write_model

pytestmark = pytest.mark.usefixtures("writing_thread")

NAMES = [n for n in library.names() if n.startswith("names.")]
SHAPES = {"layers.0.w": (4, 2), "layers.1.w": (4, 2), "norm": (3,), "logit_scale": ()}


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
        tensors = {n for n in shapes if "step" not in n}
        assert set(StoredForm(bound).by_name) == tensors
        assert [s.name for s in bound.layout.scalars] == ["step"]
        assert {s.name for s in bound.layout.states} == {"m", "s", "w"}


def test_what_neither_is_nor_follows_a_parameter_is_not_spoken_of() -> None:
    """It does not make the names of all others mean nothing; without any states nothing is told."""
    known = dict(spelled("names.dcp"))
    others = {"extra.rng": (5,), "optim.state.norm.row": (2, 1), "step": ()}
    assert infer({**known, **others}) == infer(known)
    resolved = infer({"model.x": (2,), "extra.rng": (5,)}).resolve()
    assert resolved.params == "{name}"
    assert len(resolved.families) == 2
    # What is called as any parameter is one; a state of another shape is none.
    known = dict(spelled("names.titan"))
    others = {"optimizer.state.norm.row": (2, 1)}
    assert infer({**known, **others}) == infer(known)


def test_names_that_differ_in_dots_alone(tmp_path: Path, cli: Cli) -> None:
    names = ("t", "t.", "t..", "..", "t..a", "t.a", "dotted.1", "a b.", "a b")
    values = {name: torch.full((2, 3), float(n)) for n, name in enumerate(names)}
    torch.save(values, tmp_path / "a.pt")
    a, b = str(tmp_path / "a.pt"), str(tmp_path / "b")
    found = cli("reshard", a, b, "--to", "fsdp", "-e", "mesh fsdp = dp:2")
    assert found.code == 0, found.err
    assert cli("diff", a, b).code == 0
    # And by its stored program.
    found = cli("reshard", b, str(tmp_path / "c"), "--to", "ddp")
    assert found.code == 0, found.err
    assert cli("diff", a, str(tmp_path / "c")).code == 0


def test_groups_say_what_is_a_parameter() -> None:
    shapes = {"layers.0.w": (4, 2), "norm": (3,)}
    titan = [ObjectEntry(f"optimizer.param_groups.{n}.lr", 0.1) for n in shapes]
    found = infer(shapes, objects=titan).resolve()
    assert (found.params, groups_name(found.state_names)) == ("{name}", "optimizer.state.groups")
    group = {"params": list(shapes)}
    objects = [ObjectEntry("adam.groups", [group], kind="groups")]
    found = infer({f"net.{n}": s for n, s in shapes.items()}, objects=objects).resolve()
    assert (found.params, found.state_names) == ("net.{name}", "adam.{name}.{state}")
    # Two models have these names, and two optimizers.
    both = {f"{net}.{n}": s for net in ("gen", "dis") for n, s in shapes.items()}
    assert infer(both, objects=objects).resolve().params == "{name}"
    objects.append(ObjectEntry("other.groups", [group], kind="groups"))
    found = infer({f"net.{n}": s for n, s in shapes.items()}, objects=objects).resolve()
    assert found.params == "{name}"


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("flat", [False, True])
def test_groups_of_two_optimizers_do_not_become_those_of_one(
    tmp_path: Path, cli: Cli, flat: bool
) -> None:
    """No state loads that: as they are, names of DCP keep what its own load takes."""
    net = nn.Sequential(nn.Linear(4, 4))
    both = [torch.optim.Muon([net[0].weight], lr=0.1), torch.optim.AdamW([net[0].bias], lr=0.1)]
    net(torch.ones(1, 4)).sum().backward()
    for optimizer in both:
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(net, both, options=options)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "weights", no_dist=True)
    found = cli("reshard", str(tmp_path / "dcp"), str(tmp_path / "root"), "--to", "names.ckptd")
    assert found.code == 1
    assert "groups of several optimizers" in found.err
    assert "ns_coefficients" in found.err
    assert not (tmp_path / "root").exists() or not any((tmp_path / "root").rglob("*.safetensors"))
    # What the hint says.
    assert cli("export", str(tmp_path / "dcp"), str(tmp_path / "hf")).code == 0
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == weights.keys()
    found = cli("reshard", str(tmp_path / "weights"), str(tmp_path / "r"), "--to", "names.ckptd")
    assert found.code == 0, found.err


TORCHS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
]


def test_any_two_kinds_of_torchs_optimizers_are_told_apart() -> None:
    assert len(TORCHS) > 12
    groups = [
        {**kind([torch.ones(2, 2)], lr=0.1).param_groups[0], "params": [kind.__name__]}
        for kind in TORCHS
        if kind is not torch.optim.Optimizer
    ]
    for pair in permutations(groups, 2):
        known = [
            ObjectEntry(f"optim.param_groups.{n}.{key}", value)
            for n, group in enumerate(pair)
            for key, value in group.items()
        ]
        with pytest.raises(MismatchError) as caught:
            gathered(known, "optim.state.groups", [])
        assert caught.value.kind == "lay-fit"


def test_groups_of_one_optimizer_may_have_settings_of_their_own() -> None:
    """As those of one Muon for matrices, which is an Adam for the rest."""
    known = entries(
        optim__param_groups__0__use_muon=True,
        optim__param_groups__0__momentum=0.9,
        optim__param_groups__0__params=["a"],
        optim__param_groups__1__use_muon=False,
        optim__param_groups__1__betas=[0.9, 0.95],
        optim__param_groups__1__params=["b"],
    )
    assert len(gathered(known, "optim.state.groups", ["a", "b"])[0].value) == 2


class Tied(nn.Module):
    """A model whose output weight is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def tied(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for _ in range(seed):
        model.embed.weight.grad = torch.randn_like(model.embed.weight)
        optimizer.step()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("make", [trained, tied])
@pytest.mark.parametrize("above", ["app", "run.actor"])
def test_a_section_is_read_as_what_has_none(
    tmp_path: Path, cli: Cli, above: str, make: Callable[..., Any]
) -> None:
    """``{"app": AppState}`` of DCP's tutorial, and one of several models."""
    model, optimizer = make(2)
    weights, states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optim": states, "seen": torch.tensor(3)}
    for key in reversed(above.split(".")):
        state = {key: state}
    state["step"] = 7
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source, root = str(tmp_path / "dcp"), str(tmp_path / "root")
    found = cli("reshard", source, root, "--to", "names.ckptd")
    assert found.code == 1
    assert f"--section {above}," in found.err
    found = cli("reshard", source, root, "--to", "names.ckptd", "--section", above)
    assert found.code == 0, found.err
    assert "left out: step (1 in all)" in found.err
    fresh, loaded = make(1)
    others: dict[str, Any] = {"seen": torch.tensor(0)}
    with ckptd.Checkpointer(root) as ck:
        ck.load({"model": fresh, "optim": loaded, **others})
    assert others["seen"] == 3
    assert all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))
    assert {g["lr"] for g in loaded.param_groups} == {0.2}
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert optimizer.state[theirs]
        for name, value in optimizer.state[theirs].items():
            assert torch.equal(loaded.state[mine][name], value), name


KV_SWAPPED = """
use llama
layout swapped of llama on none {
  model.layers.{l}.self_attn.{k,v}_proj.weight = L{l}.{v,k}[(kv hd) h]
  use hf.llama
}
"""


def test_a_section_has_the_names_of_a_layout(tmp_path: Path, cli: Cli) -> None:
    """A root of ``{"model": model}`` is told to have one, and what it keeps still counts."""
    made = write_model(tmp_path / "hf")
    net = nn.Module()
    for name, value in made.items():
        at, (*above, last) = net, name.split(".")
        for key in above:
            if not hasattr(at, key):
                at.add_module(key, nn.Module())
            at = getattr(at, key)
        at.register_parameter(last, nn.Parameter(torch.from_numpy(value)))
    root, kept, out = (str(tmp_path / n) for n in ("root", "kept", "out"))
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"model": net, "seen": torch.tensor(3)})
    command = ("--from", "hf.llama", "--to", "hf.llama", "-e", "let kv = 2")
    found = cli("reshard", root, out, *command, "--format", "hf")
    assert found.code == 1
    assert "--section model" in found.err
    assert "= drop" not in found.err
    found = cli("reshard", root, out, *command, "--section", "model", "--format", "hf")
    assert found.code == 0, found.err
    assert "left out: seen" in found.err
    values = load_file(tmp_path / "out" / "model.safetensors")
    assert values.keys() == made.keys()
    assert all(torch.equal(values[n], torch.from_numpy(v)) for n, v in made.items())
    # What it keeps is compared with what is said, under the names that are left.
    found = cli("reshard", str(tmp_path / "hf"), kept, *command, "-e", "use names.ckptd")
    assert found.code == 0, found.err
    wrong = tmp_path / "swapped.lay"
    wrong.write_text(KV_SWAPPED)
    said = ("--from", str(wrong), "--to", "hf.llama", "-e", "let kv = 2", "--section", "model")
    assert "contradicts the one stored in the source" in cli("reshard", kept, f"{out}2", *said).err
    # A rule for the source, where its stored program was made with rules.
    more = ("-e", "from: lm_head.weight = head[v h]")
    found = cli("reshard", kept, f"{out}3", *more, "--to", "hf.llama")
    assert found.code == 0, found.err


def test_a_section_of_files_of_ranks_is_said_by_the_layout(tmp_path: Path, cli: Cli) -> None:
    for rank in range(2):
        torch.save({"model": {"w": torch.ones(3)}}, tmp_path / f"part{rank}.pt")
    rules = 'files "part{tp}.pt"; model.w = W[o@tp]'
    text = f"mesh M = tp:2\nspace s {{ W[o] }}\nlayout x of s on M {{ {rules} }}\n"
    (tmp_path / "p.lay").write_text(text)
    said = ("--from", str(tmp_path / "p.lay"), "--to", "ddp", "--section", "model")
    found = cli("reshard", str(tmp_path), str(tmp_path / "o"), *said)
    assert found.code == 2
    assert "stored" in found.err


@pytest.mark.parametrize("section", ["b", "a.w", "a.other"])
def test_a_section_that_is_none(tmp_path: Path, cli: Cli, section: str) -> None:
    root = str(tmp_path / "root")
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"a": {"w": torch.ones(2), "other": ["x" * 9] * 40_000}, "c": 3})
    command = ("reshard", root, str(tmp_path / "o"), "--to", "ddp", "--section")
    found = cli(*command, section, "--json")
    assert "the source has no section" in found.error["message"]
    # Large values go with their section.
    assert cli(*command, "a").code == 0
    with ckptd.Checkpointer(str(tmp_path / "o")) as ck:
        state: dict[str, Any] = {"w": torch.zeros(2), "other": []}
        ck.load(state)
    assert state["w"].tolist() == [1, 1]
    assert state["other"] == ["x" * 9] * 40_000


class Scaled(nn.Module):
    """A parameter without dimensions, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.25),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.25)),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.25),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.25),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_all_that_a_state_has_arrives(tmp_path: Path, cli: Cli, kind: str) -> None:
    """Weights, states of any shape, settings, and what is beside the model and the optimizer."""
    torch.manual_seed(1)
    model = Scaled()
    optimizer = OPTIMIZERS[kind](model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    ema = {n: v.detach() / 2 for n, v in model.named_parameters()}
    root, folder, plain, back = (str(tmp_path / n) for n in ("root", "dcp", "plain", "back"))
    key = "optimizer" if kind == "adamw" else "optim"
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"model": model, key: optimizer, "ema": ema, "seen": torch.tensor(3)})
    steps = [
        (root, plain, "--to", "fsdp", "-e", "use names.plain", "-e", "mesh fsdp = dp:3"),
        (plain, folder, "--to", "names.dcp", "--format", "dcp"),
        (folder, back, "--to", "names.ckptd"),
    ]
    for step in steps:
        found = cli("reshard", *step)
        assert found.code == 0, found.err
        assert "seen" in found.err
    fresh = Scaled()
    other = OPTIMIZERS[kind](fresh)
    for group in other.param_groups:
        group["lr"], group["weight_decay"] = 7.0, 0.5
    state = {
        "model": fresh,
        "optim": other,
        "ema": {n: torch.zeros_like(v) for n, v in ema.items()},
        "seen": torch.tensor(0),
    }
    with ckptd.Checkpointer(back) as ck:
        ck.load(state)
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))
    assert all(torch.equal(state["ema"][n], v) for n, v in ema.items())
    assert state["seen"] == 3
    assert [g["lr"] for g in other.param_groups] == [0.25]
    assert [g["weight_decay"] for g in other.param_groups] == [
        g["weight_decay"] for g in optimizer.param_groups
    ]
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert other.state[mine].keys() == optimizer.state[theirs].keys()
        for name, value in optimizer.state[theirs].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(other.state[mine][name], value), name
    # As a model of others: its parameters, and nothing that an optimizer has.
    found = cli("reshard", plain, str(tmp_path / "hf"), "--format", "hf", "--to", "names.plain")
    assert found.code == 0, found.err
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == dict(model.named_parameters()).keys()
    if kind == "adafactor":
        found = cli(
            "reshard", back, str(tmp_path / "u"), "--format", "universal", "--to", "names.plain"
        )
        assert found.code == 0, found.err
        assert "left out" in found.err
        parameters = {p.name for p in tmp_path.glob("u/global_step*_universal/zero/*/")}
        assert parameters == weights.keys()


def test_names_that_tell_nothing_are_not_changed(tmp_path: Path, cli: Cli) -> None:
    """Two models and two optimizers: nobody says whose states are whose."""
    (one, first), (two, second) = trained(1), trained(2)
    with ckptd.Checkpointer(str(tmp_path / "a")) as ck:
        ck.save(1, {"gen": one, "dis": two, "og": first, "od": second})
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    for command in (("--to", "names.dcp"), ("--to", "names.plain", "--format", "hf")):
        found = cli("reshard", a, b, *command)
        assert found.code != 0
        assert "exp_avg" in found.err
        assert not (tmp_path / "b").exists()
    assert cli("reshard", a, b, "--to", "fsdp", "-e", "mesh fsdp = dp:2").code == 0
    assert cli("diff", a, b).code == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_known_by_number_are_renamed_by_nothing_and_can_be_left_out(
    tmp_path: Path, cli: Cli
) -> None:
    model, optimizer = trained(3)
    torch.save({**model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    a, b = str(tmp_path / "a.pt"), str(tmp_path / "b")
    to = ("--to", "names.dcp", "--format", "dcp")
    found = cli("reshard", a, b, *to)
    assert found.code != 0
    assert "where:  optimizer.state.0.exp_avg" in found.err
    without = "from: optimizer.** = drop"
    assert without in found.err
    assert cli("reshard", a, b, *to, "-e", without, "--allow", "lossy").code == 0
    into = {"model": {n: torch.zeros_like(v) for n, v in model.state_dict().items()}}
    dcp.load(into, checkpoint_id=b)
    assert all(torch.equal(into["model"][n], v) for n, v in model.state_dict().items())


def test_what_is_not_spoken_of_may_not_have_the_new_name_of_a_parameter(
    tmp_path: Path, cli: Cli
) -> None:
    named = nn.ModuleDict({"ema": nn.Linear(2, 3)})
    optimizer = torch.optim.AdamW(named.parameters())
    torch.stack([p.sum() for p in named.parameters()]).sum().backward()
    optimizer.step()
    other = {"weight": torch.zeros(5)}
    with ckptd.Checkpointer(str(tmp_path / "a")) as ck:
        ck.save(1, {"model": named, "optim": optimizer, "ema": other})
    found = cli("reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "names.plain")
    assert found.code == 2
    assert "ema.weight" in found.err
    assert "has the name of another one" in found.err


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


def test_what_a_recipe_leaves_out_is_left_out_of_a_source_that_was_cut(
    tmp_path: Path, cli: Cli
) -> None:
    model, optimizer = trained(2)
    with ckptd.Checkpointer(str(tmp_path / "a")) as ck:
        ck.save(1, {"model": model, "optim": optimizer})
    a, b, c = (str(tmp_path / n) for n in "abc")
    assert cli("reshard", a, b, "--to", "fsdp", "-e", "mesh fsdp = dp:2").code == 0
    to = ("--to", "fsdp", "-e", "mesh fsdp = dp:3", "-e", "from: 0.weight = drop")
    refused = cli("reshard", b, c, *to)
    assert refused.code != 0
    assert "lossy" in refused.err
    assert cli("reshard", b, c, *to, "--allow", "lossy").code == 0
    before, after = (
        {t["name"] for t in cli("inspect", root, "--json").document["tensors"]} for root in (b, c)
    )
    assert {n for n in before if "0.weight" in n} == before - after
    assert before - after
