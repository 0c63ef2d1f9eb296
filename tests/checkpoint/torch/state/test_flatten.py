from __future__ import annotations

import collections
import dataclasses
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptd.checkpoint.format import codec
from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.checkpoint.torch.state.leaves import PerRank
from ckptd.checkpoint.torch.state.restore import prepare
from ckptd.checkpoint.torch.state.rng import Rng
from ckptd.checkpoint.torch.state.values import MAX_INLINE_BYTES
from ckptd.errors import UsageError
from tests.checkpoint.torch.bridge import assert_same, give, take


def names(state: Any) -> tuple[list[str], list[str], list[str]]:
    leaves = flatten(state)
    return list(leaves.tensors), list(leaves.objects), list(leaves.per_rank)


def refused(state: Any, words: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        flatten(state)
    assert words in f"{caught.value.kind}: {caught.value.message}", caught.value
    return caught.value


# --- names ---------------------------------------------------------------------------------------


def test_dicts_are_walked_and_keys_escaped() -> None:
    state = {
        "a": {"b.c": 1, "d/e": 2, 7: 3, "7": 4, "": 5, "50%": 6},
        "t": {"x.y": torch.zeros(1), "n": 0},
    }
    assert names(state) == (
        ["t.x%2Ey"],
        ["a.b%2Ec", "a.d%2Fe", "a.7", "a.%37", "a.%", "a.50%25", "t.n"],
        [],
    )


def test_keys_of_a_state_dict_keep_their_dots() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wanted = [f"w.{k}" for k in model.state_dict()]
    assert names({"w": model.state_dict()})[0] == wanted
    assert names({"w": dict(model.state_dict())})[0] == wanted


def test_wrappers_vanish_from_the_keys_of_a_state_dict() -> None:
    found = names({"w": {"_orig_mod.0._checkpoint_wrapped_module.weight": torch.zeros(1)}})
    assert found[0] == ["w.0.weight"]


def test_a_state_dict_with_extra_state() -> None:
    weights = nn.Linear(2, 2).state_dict()
    weights["sub._extra_state"] = {"scale": 2}
    assert names({"w": weights}) == (["w.weight", "w.bias"], ["w.sub._extra_state.scale"], [])


def test_lists_of_values_are_one_object_with_tensors_apart() -> None:
    leaves = flatten({"l": [1, torch.ones(2), (torch.zeros(1), {"k": torch.ones(3)})]})
    assert list(leaves.tensors) == ["l.1", "l.2.0", "l.2.1.k"]
    assert list(leaves.objects) == ["l"]


def test_lists_of_live_things_are_walked() -> None:
    state = {"models": [nn.Linear(1, 1, bias=False), {"b": nn.Linear(1, 1, bias=False)}, 3]}
    assert names(state) == (["models.0.weight", "models.1.b.weight"], ["models.2"], [])


def test_sections_and_paths_tell_where_a_leaf_stands() -> None:
    leaves = flatten({"a.b": {"m": nn.Linear(1, 1)}, "c": [torch.zeros(1)]})
    assert [(t.section, t.path) for t in leaves.tensors.values()] == [
        ("a.b", "state['a.b']['m'].weight"),
        ("a.b", "state['a.b']['m'].bias"),
        ("c", "state['c'][0]"),
    ]


def test_kinds() -> None:
    model = nn.BatchNorm1d(1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(2, 1)).sum().backward()
    optimizer.step()
    leaves = flatten({"m": model, "o": optimizer, "t": torch.zeros(1), "a": np.zeros(1)})
    assert {t.kind for t in leaves.tensors.values()} == {
        "param",
        "buffer",
        "optim",
        "tensor",
        "ndarray",
    }
    assert leaves.objects["o.groups"].kind == "groups"


def test_leaves_are_the_live_memory() -> None:
    model, tensor, array = nn.Linear(2, 2), torch.zeros(2), np.zeros(2)
    leaves = flatten({"m": model, "t": tensor, "a": array})
    with torch.no_grad():
        model.weight.fill_(3)
        tensor.fill_(4)
    array[:] = 5
    assert [leaves.tensors[n].tensor.flatten()[0].item() for n in ("m.weight", "t", "a")] == [
        3,
        4,
        5,
    ]
    assert not any(t.tensor.requires_grad for t in leaves.tensors.values())


def test_values_are_copied() -> None:
    state: dict[str, Any] = {"xs": [1, 2], "d": {"n": 1}}
    leaves = flatten(state)
    state["xs"].append(3)
    state["d"]["n"] = 2
    assert (leaves.objects["xs"].raw, leaves.objects["d.n"].raw) == ([1, 2], 1)


# --- shared memory -------------------------------------------------------------------------------


def test_one_memory_is_one_tensor_with_aliases() -> None:
    weight = torch.zeros(4, 4)
    leaves = flatten({"a": weight, "b": {"c": weight, "n": 1}, "d": [weight.view(4, 4)]})
    assert list(leaves.tensors) == ["a"]
    assert leaves.tensors["a"].aliases == ("b.c", "d.0")
    assert leaves.tensor("d.0") is leaves.tensors["a"]
    assert leaves.tensor("nowhere") is None


def test_other_views_of_one_memory_are_tensors_of_their_own() -> None:
    flat = torch.arange(8)
    state = {
        "a": flat[:4],
        "b": flat[4:],
        "c": flat[:4].view(2, 2),
        "d": flat[:4].view(torch.uint8),
    }
    assert names(state)[0] == ["a", "b", "c", "d"]


def test_empty_tensors_are_not_taken_for_one() -> None:
    assert names({"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(2, 0)})[0] == [
        "a",
        "b",
        "c",
    ]


def test_a_module_and_its_state_dict_are_stored_once() -> None:
    model = nn.Linear(2, 2)
    leaves = flatten({"m": model, "w": model.state_dict()})
    assert {n: t.aliases for n, t in leaves.tensors.items()} == {
        "m.weight": ("w.weight",),
        "m.bias": ("w.bias",),
    }


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [None, [1], {1: 2}, {"a": 1, 2: 3}], ids=repr)
def test_a_state_is_a_mapping_with_string_keys(state: Any) -> None:
    refused(state, "the state must be a dict with string keys")


def test_a_read_only_mapping_at_the_top_is_fine_to_save() -> None:
    assert names(types.MappingProxyType({"a": torch.zeros(1)}))[0] == ["a"]


def test_two_values_with_one_name() -> None:
    error = refused(
        {"m": {"a._orig_mod.w": torch.zeros(1), "a.w": torch.ones(1)}},
        "two values of the state have one name",
    )
    assert error.where == "m.a.w"
    assert error.found == "state['m']['a._orig_mod.w'] and state['m']['a.w']"


def test_two_values_with_one_name_inside_a_value() -> None:
    value = [{"a._orig_mod.w": torch.zeros(1), "a.w": torch.ones(1)}]
    assert refused({"m": value}, "two values of the state have one name").where == "m.0.a.w"


def test_names_that_no_reader_would_accept() -> None:
    assert refused({"x" * 5000: 1}, "invalid name in a checkpoint").where
    assert names({"line\nbreak": 1})[1] == ["line%0Abreak"]


def test_cycles() -> None:
    d: dict[str, Any] = {"x": {}}
    d["x"]["back"] = d["x"]
    error = refused(d, "contains itself")
    assert error.where == "state['x']['back']"
    assert error.found == "also at state['x']"
    values: list[Any] = [1]
    values.append(values)
    assert refused({"l": values}, "contains itself").where == "state['l'][1]"
    live: list[Any] = [nn.Linear(1, 1)]
    live.append((live,))
    refused({"l": live}, "contains itself")
    top: dict[str, Any] = {}
    top["me"] = top
    refused(top, "contains itself")


def test_the_same_container_twice_is_no_cycle() -> None:
    shared = {"n": 1}
    assert names({"a": shared, "b": [shared, shared]})[1] == ["a.n", "b"]


def test_runaway_nesting() -> None:
    deep: Any = 1
    for _ in range(3000):
        deep = [deep]
    refused({"a": deep}, "unsavable")
    deep = 1
    for _ in range(3000):
        deep = {"a": deep}
    refused({"a": deep}, "unsavable")


@dataclasses.dataclass
class Unknown:
    n: int = 0


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (threading.Lock(), "a.b"),
        (Unknown(), "a.b"),
        (nn.Linear, "a.b"),
        ([1, {"k": object()}], "a.b[1].k"),
        (np.array(["x"], dtype=object), "a.b"),
        (np.array(["x"]), "a.b"),
        (np.zeros(2, dtype=[("x", "f4")]), "a.b"),
        (np.zeros(2, dtype="M8[s]"), "a.b"),
        (PerRank([lambda: 0]), "a.b[0]"),
        (torch.eye(2).to_sparse(), "a.b"),
        (torch.zeros(2, device="meta"), "a.b"),
        (nn.parameter.UninitializedParameter(), "a.b"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_what_cannot_be_saved_is_named(value: Any, where: str) -> None:
    assert refused({"a": {"b": value}}, "unsavable").where == where


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_dtypes_that_the_format_lacks() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
    refused({"q": quantized}, "unsavable")


def test_keys_that_cannot_be_names_are_fine_for_values_only() -> None:
    assert names({"a": {(1, 2): "x", None: 3}})[1] == ["a"]
    refused({"a": {(1, 2): nn.Linear(1, 1)}}, "a key cannot be used as a name in a checkpoint")
    refused({"a": {True: nn.Linear(1, 1)}}, "a key cannot be used as a name in a checkpoint")


def test_wrapped_modules_are_refused_as_per_rank_values() -> None:
    refused({"a": PerRank(nn.Linear(1, 1))}, "modules and optimizers cannot be PerRank values")
    refused({"a": PerRank(PerRank(1))}, "modules and optimizers cannot be PerRank values")


# --- values and back -----------------------------------------------------------------------------


@codec.register
@dataclasses.dataclass
class Position:
    epoch: int
    order: torch.Tensor


def values() -> dict[str, Any]:
    return {
        "n": 3,
        "x": float("-inf"),
        "text": "ü\ud800",
        "none": None,
        "nested": {"a": {"b": [1, [2, (3, b"x")]]}, "empty": {}, "void": []},
        "set": {1, 2},
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "layout": torch.strided,
        "scalar": np.float32(1.5),
        "complex": 1 + 2j,
        "position": Position(3, torch.arange(4)),
        "counter": collections.Counter("hello"),
        "queue": collections.deque([1, 2, 3], maxlen=4),
        "keys": {(1, 2): "pair"},
    }


def test_plain_values_come_back_into_their_containers() -> None:
    taken = take(values())
    state: dict[str, Any] = dict.fromkeys(values())
    state["nested"] = {"a": {"b": [9]}, "empty": {}, "void": [1, 2]}
    state["keys"] = {(3,): 0}
    inner, keys = state["nested"]["a"]["b"], state["keys"]
    give(taken, state)
    wanted = values()
    assert state.pop("position").order.tolist() == wanted.pop("position").order.tolist()
    assert state == wanted
    assert {k: type(v) for k, v in state.items()} == {k: type(v) for k, v in wanted.items()}
    assert state["queue"].maxlen == 4
    assert inner is state["nested"]["a"]["b"]
    assert keys is state["keys"]


def test_values_in_tuples_are_replaced_in_the_tuples_container() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    taken = take({"pair": (one, 5), "plain": (1, torch.ones(2))})
    state: dict[str, Any] = {"pair": (two, 0), "plain": (0, torch.zeros(2))}
    tensor = state["plain"][1]
    give(taken, state)
    assert state["pair"] == (two, 5)
    assert state["plain"][0] == 1
    assert state["plain"][1] is tensor
    assert tensor.tolist() == [1, 1]


def test_tensors_in_lists_are_filled_in_place_and_the_list_takes_the_saved_length() -> None:
    taken = take({"queue": [torch.ones(2), torch.full((3,), 2.0)], "short": [torch.ones(1)]})
    kept = nn.Parameter(torch.zeros(2))
    state: dict[str, Any] = {"queue": [kept], "short": [torch.zeros(1), torch.zeros(5), 3]}
    queue = state["queue"]
    give(taken, state)
    assert queue is state["queue"]
    assert queue[0] is kept
    assert [t.tolist() for t in queue] == [[1, 1], [2, 2, 2]]
    assert [t.tolist() for t in state["short"]] == [[1]]


def test_a_tensor_in_a_list_takes_the_saved_shape() -> None:
    state = {"l": [torch.zeros(5)]}
    give(take({"l": [torch.ones(2, 3)]}), state)
    assert state["l"][0].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_an_empty_dict_takes_what_was_saved_below_it() -> None:
    state: dict[str, Any] = {"best": {}}
    taken = take({"best": {"loss": 1.5, "at": {"step": 3, 2: "x", "a.b": 1}}})
    give(taken, state)
    assert state == {"best": {"loss": 1.5, "at": {"step": 3, 2: "x", "a.b": 1}}}


def test_a_dict_that_was_empty_when_saved_is_emptied() -> None:
    state: dict[str, Any] = {"best": {"loss": 1.5, "at": {"step": 3}}}
    inner = state["best"]
    give(take({"best": {}}), state)
    assert state == {"best": {}}
    assert state["best"] is inner


def test_a_state_that_cannot_be_changed_is_refused_before_the_load() -> None:
    with pytest.raises(UsageError) as caught:
        prepare(types.MappingProxyType({"n": 0}), take({"n": 1}).names)
    assert "values of this state cannot be replaced" in caught.value.message


def test_large_tensors_do_not_hide_in_values() -> None:
    error = refused(
        {"a": {"p": PerRank(torch.empty(MAX_INLINE_BYTES + 1, dtype=torch.uint8))}}, "unsavable"
    )
    assert error.where == "a.p"


def test_preparing_changes_nothing() -> None:
    def state(n: int) -> dict[str, Any]:
        return {"n": n, "l": [n, torch.full((n,), n)], "d": {}, "p": PerRank(n), "a": np.ones(n)}

    live = state(1)
    saved = take({**state(2), "d": {"x": 1}, "a": np.zeros(1)}).names
    before = take(live)
    leaves = prepare(live, saved)
    assert list(leaves.objects) == ["n", "l", "d.x"]
    assert leaves.tensors["l.1"].shape == (2,)
    assert_same(take(live), before)


# --- numpy ---------------------------------------------------------------------------------------


def arrays() -> dict[str, Any]:
    import ml_dtypes

    readonly = np.arange(3)
    readonly.flags.writeable = False
    return {
        "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
        "zero": np.array(2.5),
        "empty": np.zeros((0, 3), np.int16),
        "bool": np.array([True, False]),
        "wide": np.array([2**63], np.uint64),
        "complex": np.array([1 + 2j]),
        "strided": np.arange(10)[::2],
        "backwards": np.arange(4)[::-1],
        "swapped": np.arange(4, dtype=">i4"),
        "readonly": readonly,
        "bfloat16": np.arange(4).astype(ml_dtypes.bfloat16),
        "fp8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
        "broadcast": np.broadcast_to(np.float32(3), (2, 2)),
        "record": np.zeros(2, dtype=[("x", "f4"), ("y", "i1")])["x"],
    }


def test_numpy_arrays_come_back_in_place_where_they_can() -> None:
    taken = take({"a": arrays(), "top": np.ones(3)})
    state: dict[str, Any] = {"a": {k: np.zeros_like(v) for k, v in arrays().items()}}
    for key in ("readonly", "broadcast"):
        state["a"][key].flags.writeable = False
    state["a"]["backwards"] = np.zeros(4, int)[::-1]
    state["a"]["record"] = np.zeros(2, dtype=[("x", "f4"), ("y", "i1")])["x"]
    state["top"] = np.zeros(3)
    before = {"top": state["top"], **state["a"]}
    give(taken, state)
    for key, wanted in arrays().items():
        found = state["a"][key]
        assert found.dtype == wanted.dtype, key
        np.testing.assert_array_equal(found, wanted, err_msg=key)
        elsewhere = key in ("readonly", "broadcast", "backwards", "swapped", "record")
        assert (found is before[key]) == (not elsewhere), key
    assert state["top"] is before["top"]
    assert_same(take(state), taken)


def test_tensors_whose_memory_is_not_their_value() -> None:
    def state() -> dict[str, Any]:
        return {
            "conj": torch.tensor([1 + 2j]).conj(),
            "neg": torch.tensor([1 + 2j]).conj().imag,
            "wide": torch.tensor([[7.0]]).expand(2, 3),
            "t": torch.arange(6).reshape(2, 3).t(),
        }

    taken = take(state())
    assert taken.tensors["conj"].tolist() == [1 - 2j]
    assert taken.tensors["neg"].tolist() == [-2]
    live = {k: torch.zeros_like(v) for k, v in state().items()}
    live["conj"] = torch.zeros(1, dtype=torch.complex64).conj()
    live["neg"] = torch.zeros(1, dtype=torch.complex64).conj().imag
    live["wide"] = torch.zeros(1, 1).expand(2, 3)
    give(taken, live)
    for key, wanted in state().items():
        assert torch.equal(live[key].resolve_conj().resolve_neg(), wanted), key


# --- generators and per-rank values ---------------------------------------------------------------


class Loader:
    """Keeps its position, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.position = 0
        self.order = torch.arange(0)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order, "inner": ({"x": b"1"},)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.order = state["order"]
        assert state["inner"] == ({"x": b"1"},)


def per_rank_state() -> dict[str, Any]:
    return {
        "loader": PerRank(Loader()),
        "dict": PerRank({"pos": 0}),
        "tensor": PerRank(torch.zeros(2)),
        "grown": PerRank(torch.zeros(0)),
        "n": PerRank(0, on_change="drop"),
        "rng": Rng(),
        "generator": torch.Generator(),
        "declared": PerRank(torch.Generator(), on_change="drop"),
    }


def test_per_rank_values_come_back() -> None:
    one = per_rank_state()
    one["loader"].value.position = 7
    one["loader"].value.order = torch.arange(5)
    one["dict"].value["pos"] = 3
    one["tensor"].value.fill_(1)
    one["grown"].value = torch.ones(4)
    one["n"].value = 5
    one["generator"].manual_seed(3)
    one["declared"].value.manual_seed(4)
    torch.rand(2, generator=one["generator"])
    taken = take(one)
    two = per_rank_state()
    kept = two["dict"].value, two["tensor"].value
    give(taken, two)
    assert_same(take(two), taken)
    assert (two["loader"].value.position, two["n"].value) == (7, 5)
    assert kept[0] is two["dict"].value
    assert kept[1] is two["tensor"].value
    assert kept[1].tolist() == [1, 1]
    assert two["grown"].value.tolist() == [1, 1, 1, 1]


def test_per_rank_values_are_no_tensors_of_the_checkpoint() -> None:
    found = names(per_rank_state())
    assert found == ([], [], list(per_rank_state()))


def test_a_generator_is_reseeded_in_another_world_and_dropped_values_stay() -> None:
    taken = take(per_rank_state())
    drawn = []
    for rank in (0, 1):
        state = per_rank_state()
        state["loader"] = PerRank(Loader(), on_change="drop")
        state["dict"] = PerRank({"pos": 1}, on_change="reduce", reduce=lambda v: {"pos": len(v)})
        state["tensor"].on_change = state["grown"].on_change = "drop"
        state["n"].value = 9
        give(taken, state, saved_world=3, rank=rank, world=2, read=_different)
        drawn.append(torch.rand(2, generator=state["generator"]).tolist())
        assert state["n"].value == 9
        assert state["dict"].value == {"pos": 3}
    assert drawn[0] != drawn[1]


def _different(name: str) -> Any:
    def read(rank: int) -> Any:
        return torch.Generator().manual_seed(rank).get_state() if "gen" in name else {"pos": rank}

    return read


def test_an_int_is_reseeded() -> None:
    state = {"seed": PerRank(3, on_change="reseed")}
    give(take(state), state, saved_world=1, rank=0, world=2)
    assert state["seed"].value != 3
    assert state["seed"].value >= 0
