from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.checkpoint.torch.state.restore import apply_objects, prepare
from ckptd.errors import UsageError
from tests.checkpoint.torch.bridge import assert_same, give, take


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.lin(x))
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


BLOCK = [
    "lin.weight",
    "lin.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
]


def compiled(module: nn.Module) -> nn.Module:
    """Only the wrapper: nothing is compiled before the first call."""
    wrapper = torch.compile(module, backend="eager")
    assert isinstance(wrapper, nn.Module)
    return wrapper


def fqns(module: nn.Module) -> list[str]:
    return [n.removeprefix("m.") for n in flatten({"m": module}).tensors]


def refused(state: Any, words: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        flatten(state)
    assert words in f"{caught.value.kind}: {caught.value.message}"
    return caught.value


def test_parameters_and_persistent_buffers() -> None:
    assert set(fqns(Block())) == set(BLOCK) == set(Block().state_dict())


def test_tied_parameters_are_one_tensor_with_aliases() -> None:
    model = Tied()
    leaves = flatten({"m": model})
    assert leaves.tensors["m.embed.weight"].aliases == ("m.head.weight",)
    assert "m.head.weight" not in leaves.tensors
    assert {*leaves.tensors, *leaves.aliases} == {f"m.{k}" for k in model.state_dict()}


def test_a_shared_submodule_is_one_set_of_tensors() -> None:
    block = Block()
    leaves = flatten({"m": nn.ModuleDict({"a": block, "b": block})})
    assert list(leaves.tensors) == [f"m.a.{n}" for n in _order(leaves, "m.a.")]
    assert all(leaf.aliases for leaf in leaves.tensors.values())


def _order(leaves: Any, prefix: str) -> list[str]:
    return [n.removeprefix(prefix) for n in leaves.tensors if n.startswith(prefix)]


def test_wrappers_do_not_show_in_names() -> None:
    wanted = fqns(nn.Sequential(Block(), Block()))
    model = nn.Sequential(checkpoint_wrapper(Block()), compiled(Block()))
    assert fqns(model) == wanted
    assert fqns(compiled(model)) == wanted
    assert fqns(nn.DataParallel(model)) == wanted
    assert fqns(nn.DataParallel(compiled(checkpoint_wrapper(model)))) == wanted


def test_an_attribute_called_module_stays() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert fqns(Holder()) == ["module.weight", "module.bias"]


def test_a_wrapped_model_loads_what_a_bare_one_saved_and_back() -> None:
    taken = take({"m": Block()})
    wrapped = compiled(nn.DataParallel(Block()))
    give(taken, {"m": wrapped})
    assert_same(take({"m": wrapped}), taken)
    bare = Block()
    give(take({"m": wrapped}), {"m": bare})
    assert_same(take({"m": bare}), taken)


def test_parametrized_modules() -> None:
    model = parametrizations.weight_norm(nn.Linear(2, 3))
    assert set(fqns(model)) == set(model.state_dict())


def test_averaged_models() -> None:
    def make() -> dict[str, Any]:
        model = Block()
        return {"m": model, "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))}

    state = make()
    for _ in range(3):
        with torch.no_grad():
            state["m"].lin.weight.add_(1)
        state["ema"].update_parameters(state["m"])
    taken = take(state)
    assert {"ema.n_averaged", "ema.module.lin.weight"} <= set(taken.tensors)
    other = make()
    give(taken, other)
    assert_same(take(other), taken)
    assert int(other["ema"].n_averaged) == 3


class Scaled(nn.Linear):
    def __init__(self, value: Any = None) -> None:
        super().__init__(1, 1)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        if state == "poison":
            raise ValueError("cannot take it")
        self.value = state


@pytest.mark.parametrize("value", [3, {"amax": torch.ones(3), "n": (1, 2)}], ids=str)
def test_extra_state(value: Any) -> None:
    state = {"m": nn.Sequential(Scaled(value), Block())}
    taken = take(state)
    assert list(taken.objects) == ["m.0._extra_state"]
    other = {"m": nn.Sequential(Scaled(), Block())}
    give(taken, other)
    assert_same(take(other), taken)
    assert str(other["m"][0].value) == str(value)


def test_extra_state_in_a_buffer_of_bytes() -> None:
    other = {"m": Scaled()}
    give(take({"m": Scaled(io.BytesIO(b"abc"))}), other)
    assert other["m"].value.read() == b"abc"


def test_a_module_that_does_not_take_its_extra_state() -> None:
    taken = take({"m": Scaled("poison")})
    with pytest.raises(UsageError) as caught:
        give(taken, {"m": Scaled()})
    assert (caught.value.message, caught.value.where) == (
        "an object did not take its saved state",
        "m._extra_state",
    )
    assert isinstance(caught.value.__cause__, ValueError)


class Packed(nn.Module):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = torch.zeros(1)


def test_state_outside_parameters_and_buffers_is_not_lost_in_silence() -> None:
    error = refused(
        {"m": nn.Sequential(Block(), Packed())},
        "does not accept what its state_dict",
    )
    assert error.where == "m.1"
    assert error.found == "Packed: packed"


def test_fsdp1_is_refused() -> None:
    # Its constructor wants an accelerator; what flattening looks at is the type alone.
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    assert refused({"m": nn.Sequential(wrapped)}, "FullyShardedDataParallel (FSDP1)").where == "m.0"


def test_modules_that_contain_themselves() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model.add_module("loop", model)
    refused({"m": model}, "contains itself")


def test_flattening_changes_nothing() -> None:
    model = Tied().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.embed.weight.grad = torch.ones(5, 3)
    flatten({"m": model})
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.embed.weight.requires_grad
    assert model.embed.weight.grad is not None


# --- meta ----------------------------------------------------------------------------------------


def on_meta() -> Tied:
    with torch.device("meta"):
        model = Tied()
    for block in model.body:
        block.scratch = torch.zeros(2)
    return model


def test_meta_modules_get_memory_and_keep_ties_and_identity() -> None:
    taken = take({"m": Tied()})
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    identities = {id(p) for p in model.parameters()}
    give(taken, {"m": model})
    assert_same(take({"m": model}), taken)
    assert {id(p) for p in model.parameters()} == identities
    assert model.head.weight is model.embed.weight
    assert all(p.requires_grad and not p.is_meta for p in model.parameters())
    model.body[0](model.embed(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    assert not any(t.is_meta for t in model.buffers())


def test_meta_modules_with_an_optimizer_that_has_state() -> None:
    one = Tied()
    adam = torch.optim.AdamW(one.parameters())
    one.head(one.body[0](one.embed(torch.tensor([1, 2])))).sum().backward()
    adam.step()
    taken = take({"m": one, "o": adam})
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    give(taken, {"o": optimizer, "m": model})
    assert {n: t.device.type for n, t in take({"m": model, "o": optimizer}).tensors.items()} == (
        dict.fromkeys(taken.tensors, "cpu")
    )
    assert_same(take({"m": model, "o": optimizer}), taken)


def test_frozen_meta_parameters_stay_frozen() -> None:
    model = on_meta().requires_grad_(False)
    give(take({"m": Tied()}), {"m": model})
    assert not any(p.requires_grad for p in model.parameters())


def test_meta_modules_stay_meta_until_values_are_applied() -> None:
    taken = take({"m": Tied()})
    model = on_meta()
    leaves = prepare({"m": model}, taken.names)
    assert all(p.is_meta for p in model.parameters())
    assert not any(t.tensor.is_meta for t in leaves.tensors.values())
    apply_objects(leaves, {}, tensors=["m.embed.weight"])
    assert [n for n, p in model.named_parameters() if not p.is_meta] == ["embed.weight"]


def test_meta_tensors_that_the_checkpoint_lacks_stay_meta() -> None:
    taken = take({"m": Block()})
    with torch.device("meta"):
        model = nn.ModuleDict({"more": nn.Linear(1, 1)})
    leaves = prepare({"m": model}, taken.names)
    assert leaves.tensors["m.more.weight"].tensor.is_meta


def test_meta_tensors_in_containers() -> None:
    with torch.device("meta"):
        weights = nn.Linear(2, 2).state_dict()
        loose = torch.zeros(3)
    state = {"w": weights, "l": [loose]}
    give(take({"w": nn.Linear(2, 2).state_dict(), "l": [torch.ones(3)]}), state)
    assert not weights["weight"].is_meta
    assert state["l"] == [loose]
    assert loose.tolist() == [1, 1, 1]


def test_meta_buffers_that_are_not_saved_are_named() -> None:
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(UsageError) as caught:
        prepare({"m": model}, take({"m": Tied()}).names)
    assert "non-persistent buffers are on the meta device" in caught.value.message
    assert caught.value.found == "body.0.scratch, body.1.scratch"


def test_meta_tensors_that_cannot_be_swapped() -> None:
    import weakref

    model = on_meta()
    keep = weakref.ref(model.embed.weight)
    with pytest.raises(UsageError) as caught:
        prepare({"m": model}, take({"m": Tied()}).names)
    assert (caught.value.message, caught.value.where) == (
        "a meta tensor cannot be replaced while a weak reference to it exists",
        "m.embed.weight",
    )
    assert keep() is not None


def test_meta_tensors_cannot_be_saved() -> None:
    where = refused({"m": on_meta()}, "unsavable").where
    assert where is not None
    assert where.startswith("m.")


def test_the_device_can_be_chosen() -> None:
    leaves = prepare({"m": on_meta()}, take({"m": Tied()}).names, device="cpu")
    assert {t.tensor.device.type for t in leaves.tensors.values()} == {"cpu"}
