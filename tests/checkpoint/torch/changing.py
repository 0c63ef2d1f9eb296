"""Legal changes of a training state, and what a checkpoint of it must hold.

What must be held is found through torch's own names alone, so that a defect of `flatten` is in one
of the two and not in both; and it is read from the files by their format, not by a load.
"""

from __future__ import annotations

import copy
import json
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

State = dict[str, Any]
Change = Callable[[State, random.Random], None]
Bytes = tuple[str, tuple[int, ...], bytes]
"""Dtype, shape and content of a tensor."""


class Net(nn.Module):
    """Two layers of one shape, buffers, a shared child, and more than 64 KiB in one tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.conv = nn.Conv2d(2, 3, 2)
        self.table = nn.Embedding(130, 128)
        self.register_buffer("wave", torch.randn(6, dtype=torch.complex64))
        self.register_buffer("mask", torch.randn(4, 4))
        self.register_buffer("hidden", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.norm(self.a(x)))
        return out + self.table.weight.sum() * 1e-3 + self.conv.weight.sum()


def new_optimizer(model: nn.Module, draw: random.Random) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    kind = draw.choice(["adamw", "sgd", "adagrad", "fused"])
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=0.1)
    alike = len({p.dtype for p in parameters}) == 1 and parameters[0].is_floating_point()
    return torch.optim.AdamW(parameters, lr=0.1, fused=kind == "fused" and alike)


def new_state(draw: random.Random) -> State:
    model = Net(draw.randrange(1000))
    return {
        "model": model,
        "optim": new_optimizer(model, draw),
        "plain": {"w": torch.randn(4, 4), "c": torch.randn(3, dtype=torch.complex64)},
        "tokens": 1,
    }


# --- what must be held ----------------------------------------------------------------------------


def content(tensor: torch.Tensor) -> Bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(plain.dtype).removeprefix("torch."), tuple(plain.shape), raw


def expected(state: State) -> tuple[dict[str, Bytes], dict[str, Any]]:
    """Copy tensors and values of a state, by their names in a checkpoint."""
    model, optimizer = state["model"], state["optim"]
    tensors = {f"model.{n}": content(t) for n, t in model.state_dict(keep_vars=True).items()}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    values: dict[str, Any] = {"tokens": state["tokens"]}
    for parameter, held in optimizer.state.items():
        for key, value in held.items():
            where = f"optim.{names[id(parameter)]}.{key}"
            if isinstance(value, torch.Tensor):
                tensors[where] = content(value)
            else:
                values[where] = value
    for key, value in state["plain"].items():
        tensors[f"plain.{key}"] = content(value)
    values["optim.groups"] = [
        (sorted(names[id(p)] for p in g["params"]), g["lr"]) for g in optimizer.param_groups
    ]
    return tensors, values


def stored(root: Path, step: int) -> tuple[dict[str, Bytes], dict[str, Any]]:
    """Read tensors and values of a checkpoint of one rank, in pieces that are whole tensors."""
    (commit,) = [p for p in (root / "commits").iterdir() if p.name.startswith(f"{step:012d}-")]
    record = json.loads(commit.read_bytes())
    raw = (root / record["folder"] / record["manifest"]).read_bytes()
    if record["manifest"].endswith(".zst"):
        import zstandard

        raw = zstandard.ZstdDecompressor().decompress(raw)
    manifest = json.loads(raw)
    bodies: dict[str, tuple[int, dict[str, Any], bytes]] = {}
    tensors = {}
    for entry in manifest["tensors"]:
        ((first, _, count),) = manifest["owners"][entry["owners"]]
        assert count == 1
        path = manifest["files"][first + entry.get("base", 0)]["path"]
        if path not in bodies:
            body = (root / path).read_bytes()
            head = 8 + int.from_bytes(body[:8], "little")
            bodies[path] = head, json.loads(body[8:head]), body
        head, entries, body = bodies[path]
        start, end = (head + at for at in entries[entry["name"]]["data_offsets"])
        for name in (entry["name"], *entry.get("aliases", ())):
            tensors[name] = (entry["dtype"], tuple(entry["shape"]), body[start:end])
    values = {o["name"]: o.get("value") for o in manifest.get("objects", ())}
    if "optim.groups" in values:
        values["optim.groups"] = [(g["params"], g["lr"]) for g in values["optim.groups"]]
    return tensors, values


# --- changes --------------------------------------------------------------------------------------


def own_everything(state: State, draw: random.Random) -> None:
    """Give the state a new optimizer where the old one holds what no module has any more."""
    owned = {id(p) for p in state["model"].parameters()}
    held = [p for g in state["optim"].param_groups for p in g["params"]]
    if not all(id(p) in owned for p in held):
        state["optim"] = new_optimizer(state["model"], draw)


def train(state: State, draw: random.Random) -> None:
    """Make a step of the optimizer, with gradients that are drawn."""
    for parameter in state["model"].parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.grad = torch.randn_like(parameter)
        else:
            parameter.grad = None
    try:
        state["optim"].step()
    except (RuntimeError, ValueError, KeyError):
        # Its state is of another dtype or shape than the parameters by now, or it is gone: older
        # PyTorch makes that of Adagrad with the optimizer, and never again.
        state["optim"] = new_optimizer(state["model"], draw)


def tensors_of(state: State) -> list[torch.Tensor]:
    held = [t for s in state["optim"].state.values() for t in s.values()]
    found = [*state["model"].parameters(), *state["model"].buffers(), *state["plain"].values()]
    return found + [t for t in held if isinstance(t, torch.Tensor)]


@torch.no_grad()
def in_place(state: State, draw: random.Random) -> None:
    draw.choice(tensors_of(state)).mul_(2)


def uncounted(state: State, draw: random.Random) -> None:
    """Write in a way that torch does not count."""
    tensor = draw.choice(tensors_of(state))
    how = draw.randrange(4)
    with torch.no_grad():
        if how == 0:
            tensor.data.add_(1)
        elif how == 1:
            torch._foreach_add_([t.data for t in state["model"].parameters()], 1)
        elif how == 2:
            tensor.untyped_storage().copy_(tensor.untyped_storage().clone().fill_(3))
        elif tensor.is_contiguous() and tensor.numel() and can_be_array(tensor):
            tensor.data.view(-1)[:1].numpy()[...] += 1


def can_be_array(tensor: torch.Tensor) -> bool:
    return not tensor.is_conj() and not tensor.is_neg() and tensor.dtype != torch.bfloat16


def can_grow(tensor: torch.Tensor) -> bool:
    """Tell whether torch resizes a tensor: not one whose memory an array of numpy has had."""
    return tensor.untyped_storage().resizable()


def loaded_optimizer(state: State, draw: random.Random) -> None:
    saved = copy.deepcopy(state["optim"].state_dict())
    state["optim"].load_state_dict(saved)


def fresh_state_dict(state: State, draw: random.Random) -> None:
    optimizer = state["optim"]
    how = draw.randrange(4)
    if how == 0:
        optimizer.state = defaultdict(dict)
    elif how == 1:
        optimizer.state.clear()
    elif how == 2:
        optimizer.state = defaultdict(dict, copy.copy(optimizer.state))
    elif optimizer.state:
        optimizer.state.pop(draw.choice(list(optimizer.state)))


def fresh_state_entry(state: State, draw: random.Random) -> None:
    held = state["optim"].state
    if not held:
        return
    parameter = draw.choice(list(held))
    key = draw.choice([*held[parameter], "note"])
    how = draw.randrange(4)
    if how == 0:
        held[parameter] = dict(held[parameter])
    elif how == 1:
        held[parameter] = {k: v.clone() if isinstance(v, torch.Tensor) else v
                           for k, v in held[parameter].items()}  # fmt: skip
    elif key == "note":
        held[parameter]["note"] = draw.randrange(9) if how == 2 else torch.ones(2)
    elif isinstance(held[parameter][key], torch.Tensor):
        held[parameter][key] = held[parameter][key].clone()


def new_group(state: State, draw: random.Random) -> None:
    model, optimizer = state["model"], state["optim"]
    if len(optimizer.param_groups) < 4:
        name = f"extra{draw.randrange(100)}"
        if not hasattr(model, name):
            model.add_module(name, nn.Linear(2, 2))
            optimizer.add_param_group({"params": list(getattr(model, name).parameters())})


def other_groups(state: State, draw: random.Random) -> None:
    groups = state["optim"].param_groups
    how = draw.randrange(4)
    if how == 0 and len(groups) > 1:
        for parameter in groups.pop()["params"]:
            state["optim"].state.pop(parameter, None)
    elif how == 1:
        state["optim"].param_groups = [dict(g, params=list(g["params"])) for g in groups]
    elif how == 2:
        draw.choice(groups)["lr"] = draw.random()
    else:
        draw.shuffle(groups[0]["params"])


def new_optim(state: State, draw: random.Random) -> None:
    state["optim"] = new_optimizer(state["model"], draw)


def tie(state: State, draw: random.Random) -> None:
    model = state["model"]
    model.b.weight = model.a.weight
    own_everything(state, draw)


def untie(state: State, draw: random.Random) -> None:
    model = state["model"]
    model.b.weight = nn.Parameter(model.b.weight.detach().clone())
    own_everything(state, draw)


def tie_memory(state: State, draw: random.Random) -> None:
    a, b = state["model"].a.weight, state["model"].b.weight
    if a.dtype == b.dtype and a.shape == b.shape:
        b.data = a.data


def part_memory(state: State, draw: random.Random) -> None:
    which = draw.choice([state["model"].a.weight, state["model"].b.weight])
    which.data = torch.randn_like(which.data)


def other_parameters(state: State, draw: random.Random) -> None:
    a, b = state["model"].a, state["model"].b
    a.weight, b.weight = b.weight, a.weight


def new_module(state: State, draw: random.Random) -> None:
    name = draw.choice(["a", "b"])
    setattr(state["model"], name, nn.Linear(4, 4))
    own_everything(state, draw)


def share_module(state: State, draw: random.Random) -> None:
    state["model"].b = state["model"].a if draw.random() < 0.5 else nn.Linear(4, 4)
    own_everything(state, draw)


def other_dicts(state: State, draw: random.Random) -> None:
    """Let a module have other dictionaries, with the same things in them or some others."""
    module = draw.choice(list(state["model"].modules()))
    name = draw.choice(["_parameters", "_buffers", "_modules"])
    held = getattr(module, name)
    items = list(held.items())
    if draw.random() < 0.5:
        items.reverse()
    if draw.random() < 0.5:
        object.__setattr__(module, name, OrderedDict(items))
    else:
        held.clear()
        held.update(items)


def other_buffer_slots(state: State, draw: random.Random) -> None:
    model = state["model"]
    hidden = model._non_persistent_buffers_set
    how = draw.randrange(4)
    if how == 0:
        hidden.clear()
        hidden.add(draw.choice(["hidden", "mask", "wave"]))
    elif how == 1:
        model._non_persistent_buffers_set = {draw.choice(["hidden", "mask"])}
    elif how == 2:
        model.mask = torch.randn(4, 4)
    else:
        model.register_buffer(f"more{draw.randrange(3)}", torch.randn(2))


def other_view(state: State, draw: random.Random) -> None:
    """Let a tensor be another view of what memory it has."""
    model, plain = state["model"], state["plain"]
    how = draw.randrange(8)
    if how == 0:
        model.wave.data = model.wave.data.conj()
    elif how == 1:
        model.wave = model.wave.conj()
    elif how == 2:
        plain["c"] = torch._neg_view(plain["c"])
    elif how == 3:
        model.mask.data = torch._neg_view(model.mask.data)
    elif how == 4:
        plain["c"] = plain["c"].conj()
    elif how == 5 and not model.mask.is_neg() and model.mask.element_size() == 4:
        kind = torch.int32 if model.mask.dtype == torch.float32 else torch.float32
        model.mask.data = model.mask.data.view(kind)
    elif how == 6:
        model.a.weight.data = model.a.weight.data.t()
    elif plain["w"].dim() == 2:
        plain["w"] = plain["w"].t()


@torch.no_grad()
def other_memory(state: State, draw: random.Random) -> None:
    """Let a tensor have other memory, by every door that torch has."""
    model, plain = state["model"], state["plain"]
    how = draw.randrange(9)
    if how == 0:
        plain["w"].set_(torch.randn(draw.randrange(1, 6), 2).to(plain["w"].dtype))
    elif how == 1 and can_grow(plain["w"]):
        plain["w"].resize_(draw.randrange(0, 5), 3).fill_(draw.random())
    elif how == 2 and not model.mask.is_neg() and can_grow(model.mask):
        model.mask.resize_(draw.randrange(1, 5), 4).fill_(7)
    elif how == 3:
        # What has a gradient's node, or is looked at weakly, cannot be swapped.
        one, other = model.a.weight, model.b.weight
        one.grad = other.grad = None
        if one is not other:
            try_swap(one, other)
    elif how == 4:
        model.to(draw.choice([torch.float64, torch.float32, torch.bfloat16]))
    elif how == 5:
        layout = draw.choice([torch.channels_last, torch.contiguous_format])
        model.conv.to(memory_format=layout)
    elif how == 6:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=draw.random() < 0.5)
        own_everything(state, draw)
    elif how == 7:
        fresh = copy.deepcopy(model.a.bias.data) + 1
        try_swap(model.a.bias, nn.Parameter(fresh))
    else:
        plain["w"] = torch.randn(4, 4)


def try_swap(one: torch.Tensor, other: torch.Tensor) -> None:
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError:
        return


def refilled_storage(state: State, draw: random.Random) -> None:
    """Free a storage and fill it again, as engines do that move what is not needed."""
    tensor = draw.choice(tensors_of(state))
    storage = tensor.untyped_storage()
    if not storage.resizable():
        return
    kept = storage.clone()
    storage.resize_(0)
    storage.resize_(kept.nbytes())
    storage.copy_(kept)


def plain_values(state: State, draw: random.Random) -> None:
    plain = state["plain"]
    how = draw.randrange(6)
    key = f"k{draw.randrange(3)}"
    if how == 0:
        plain[key] = torch.randn(2)
    elif how == 1:
        plain.pop(key, None)
    elif how == 2:
        plain[key] = plain["w"]
    elif how == 3:
        plain[key] = state["model"].a.weight
    elif how == 4:
        state["tokens"] += 1
    else:
        plain[key] = state["model"].mask.detach()


def other_model(state: State, draw: random.Random) -> None:
    model = copy.deepcopy(state["model"])
    state["model"] = model
    state["optim"] = new_optimizer(model, draw)


def frozen(state: State, draw: random.Random) -> None:
    parameter = draw.choice(list(state["model"].parameters()))
    if parameter.is_floating_point():
        parameter.requires_grad_(draw.random() < 0.5)


class Count(nn.Module):
    """Says a number and takes it again, and holds nothing."""

    number = 0.0

    def _save_to_state_dict(self, said: Any, prefix: str, keep_vars: bool) -> None:
        said[prefix + "number"] = torch.tensor(self.number)

    def _load_from_state_dict(self, given: Any, prefix: str, *rest: Any) -> None:
        self.number = float(given.pop(prefix + "number", 0.0))


FORMS = ("new", "longer", "typed", "kept", "parameter", "part", "instead", "less")


def say(own: Any, said: Any, prefix: str, meta: Any) -> None:
    """Say a tensor besides what there is: in one of eight ways, each of another memory."""
    number, form = vars(own).get("number", 0.0), vars(own).get("form", "new")
    first = next(own.parameters()).detach()
    value = torch.full((1 + int(number * 3) if form == "longer" else 3,), number)
    if form == "typed" and number < 0.5:
        value = value.double()
    elif form == "kept":
        value = vars(own).setdefault("kept", value).fill_(number)
    elif form == "parameter":
        value = first
    elif form == "part":
        value = first[:1]
    elif form == "instead":
        key = next(k for k in said if k.startswith(prefix))
        said[key] = said[key].clone() + (number if said[key].is_floating_point() else 1)
    if form != "less" or number < 0.5:
        said[prefix + "said"] = value


def take(own: Any, given: Any, prefix: str, *rest: Any) -> None:
    own.number = float(given.pop(prefix + "said", torch.zeros(1)).reshape(-1)[0])


def flush(own: Any, prefix: str, keep_vars: bool) -> None:
    own.mask = torch.full((2,), vars(own).get("number", 0.0))


def other_words(state: State, draw: random.Random) -> None:
    """Let a module say more than it holds, something else, or nothing besides."""
    model = state["model"]
    module = draw.choice([model, model.a])
    how = draw.randrange(8)
    if how == 0 and not module._load_state_dict_pre_hooks:
        module.register_state_dict_post_hook(say)
        module.register_load_state_dict_pre_hook(take)
    elif how == 1:
        model._state_dict_pre_hooks.clear()
        model.register_state_dict_pre_hook(flush)
    elif how == 2:
        module._state_dict_hooks.clear()
        module._load_state_dict_pre_hooks.clear()
        module._state_dict_pre_hooks.clear()
    elif how == 3:
        module.form = draw.choice(FORMS)
    elif how == 4 and "count" in model._modules:
        del model.count
    elif how == 4:
        model.count = Count()
    elif how == 5 and "count" in model._modules:
        model.count.number = draw.random()
    else:
        module.number = draw.random()


CHANGES: dict[str, Change] = {
    "nothing": lambda state, draw: None,
    **{
        f.__name__: f
        for f in (
            train,
            in_place,
            uncounted,
            loaded_optimizer,
            fresh_state_dict,
            fresh_state_entry,
            new_group,
            other_groups,
            new_optim,
            tie,
            untie,
            tie_memory,
            part_memory,
            other_parameters,
            new_module,
            share_module,
            other_dicts,
            other_buffer_slots,
            other_view,
            other_memory,
            refilled_storage,
            plain_values,
            other_model,
            other_words,
            frozen,
        )
    },
}
