"""Leaves that are recalled are those that another look would find, whatever was done between."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

import ckptd
from ckptd.checkpoint.torch.state import flatten as module
from ckptd.checkpoint.torch.state.flatten import Flattener, flatten
from ckptd.checkpoint.torch.state.leaves import Leaves
from ckptd.errors import CkptdError, UsageError
from tests.checkpoint.torch.state.test_wrapped import Codes

pytestmark = pytest.mark.usefixtures("writing_thread")

State = dict[str, Any]


def make() -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optim.step()
    return {
        "model": model,
        "optim": optim,
        "plain": {"w": torch.zeros(3), "n": 1},
        "tokens": 7,
        "list": [1, 2],
    }


def tie(s: State) -> None:
    s["model"][2].weight = nn.Parameter(s["model"][0].weight.detach().t().contiguous())


def swap_data(s: State) -> None:
    s["model"][0].weight.data = torch.ones_like(s["model"][0].weight)


def resize(s: State) -> None:
    s["plain"]["w"].resize_(5)


def in_place(s: State) -> None:
    with torch.no_grad():
        s["model"][0].weight.add_(1.0)


def learning_rate(s: State) -> None:
    s["optim"].param_groups[0]["lr"] *= 2


def new_group(s: State) -> None:
    extra = nn.Linear(2, 2)
    s[f"extra{len(s)}"] = extra
    s["optim"].add_param_group({"params": list(extra.parameters())})


def forget_state(s: State) -> None:
    s["optim"].state.pop(s["model"][0].weight, None)


def state_value(s: State) -> None:
    if s["model"][0].bias in s["optim"].state:
        s["optim"].state[s["model"][0].bias]["note"] = len(s)


def new_state_tensor(s: State) -> None:
    if s["model"][0].bias in s["optim"].state:
        s["optim"].state[s["model"][0].bias]["extra"] = torch.ones(2)


def alias(s: State) -> None:
    s["again"] = s["plain"]["w"]


def hide_buffer(s: State) -> None:
    s["model"][1]._non_persistent_buffers_set.add("running_mean")


def load_optimizer(s: State) -> None:
    s["optim"].load_state_dict(copy.deepcopy(s["optim"].state_dict()))


def other_hidden(s: State) -> None:
    """As many buffers as before are left out, and not the same ones."""
    hidden = s["model"][1]._non_persistent_buffers_set
    hidden ^= {"running_mean", "running_var"} if hidden else {"running_mean"}


def other_dicts(s: State) -> None:
    for inner in s["model"].modules():
        for name in ("_parameters", "_buffers", "_modules"):
            object.__setattr__(inner, name, OrderedDict(reversed(getattr(inner, name).items())))


class Speaker(nn.Linear):
    """Says what a test has put into it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.words: dict[str, Any] = {"count": 1}
        self.count = torch.zeros(2)

    def _save_to_state_dict(self, said: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(said, prefix, keep_vars)
        said.update({prefix + k: v() if callable(v) else v for k, v in self.words.items()})

    def _load_from_state_dict(self, given: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(given, prefix, *rest)


class Root(nn.Sequential):
    """Says its children's state under names that a test has given."""

    rename: Callable[[str], str] = staticmethod(str)  # type: ignore[assignment]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {self.rename(k): v for k, v in super().state_dict(*args, **kwargs).items()}

    def _load_from_state_dict(self, given: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(given, prefix, *rest)


class Extra(nn.Module):
    number = 1

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        self.number = state


def speaker(s: State) -> Speaker:
    """Return the speaking child, which appears with the first that asks for it."""
    if not any(isinstance(m, Speaker) for m in s["model"]):
        s["model"].append(Speaker())
    return next(m for m in s["model"] if isinstance(m, Speaker))


def says(**words: Any) -> Callable[[State], None]:
    return lambda s: speaker(s).words.update(words)


def root(rename: Callable[[str], str]) -> Callable[[State], None]:
    def change(s: State) -> None:
        if not isinstance(s["model"], Root):
            s["model"] = Root(*s["model"])
        s["model"].rename = rename

    return change


def hooked(s: State) -> None:
    """Let a plain layer leave out a key, or say another tensor for it, from now on."""
    s["model"][0].register_state_dict_post_hook(
        lambda own, said, prefix, meta: said.update({prefix + "bias": torch.full((4,), 3.0)})
    )
    s["model"][0].register_load_state_dict_pre_hook(lambda *_: None)


def unhooked(s: State) -> None:
    s["model"][0]._state_dict_hooks.clear()


def untaken(s: State) -> None:
    s["model"][0]._load_state_dict_pre_hooks.clear()


def refilled(s: State) -> None:
    """Put another buffer there whenever it is asked."""
    s["model"][1].register_state_dict_pre_hook(
        lambda own, *_: setattr(own, "running_mean", own.running_mean.clone())
    )


def metadata(s: State) -> None:
    """Write beside the version of a child without words of its own."""
    s["model"].register_state_dict_post_hook(
        lambda own, said, prefix, meta: said._metadata[prefix + "0"].update(n=s["tokens"])
    )


def sibling(s: State) -> None:
    """Let a child change what another one has said."""
    first = "0.weight"
    speaker(s).register_state_dict_post_hook(
        lambda own, said, prefix, meta: said.update(
            {k: v.clone() for k, v in said.items() if k.endswith(first)}
        )
    )


WORDS: dict[str, Callable[[State], Any]] = {
    "says another value": says(count=2),
    "says a new tensor": says(count=lambda: torch.ones(3)),
    "says a longer tensor": says(count=lambda: torch.ones(4)),
    "says another type": says(count=lambda: torch.ones(3).double()),
    "says several in one memory": says(count=lambda: torch.ones(3).expand(2, 3)),
    "says more": says(more=lambda: torch.arange(2)),
    "says a list": says(more=lambda: [torch.ones(1), {"a": torch.ones(2)}]),
    "says no more": lambda s: speaker(s).words.pop("more", None),
    "says nothing": lambda s: speaker(s).words.clear(),
    "says a parameter": lambda s: says(count=lambda: s["model"][0].weight.detach())(s),
    "says a part of one": lambda s: says(count=lambda: s["model"][0].weight.detach()[1:])(s),
    "says its kept tensor": lambda s: says(count=lambda: speaker(s).count)(s),
    "says two of one": lambda s: says(**dict.fromkeys(("count", "more"), speaker(s).count))(s),
    "says what is in a value": lambda s: s.update(list=[speaker(s).count]),
    "other order": lambda s: speaker(s).words.update(count=speaker(s).words.pop("count", 1)),
    "speaker gone": lambda s: s["model"].pop(-1) if len(s["model"]) > 3 else None,
    "speaker shared": lambda s: s["model"].append(speaker(s)) if len(s["model"]) < 6 else None,
    "speaker inside": lambda s: speaker(s).add_module("inner", Speaker()),
    "plain inside": lambda s: speaker(s).add_module("inner", nn.Linear(1, 1)),
    "version": lambda s: setattr(speaker(s), "_version", 7),
    "root": root(str),
    "root, renamed": root(lambda k: k.replace("0.weight", "first")),
    "root, less": root(lambda k: k.removeprefix("0.")),
    "hooked": hooked,
    "unhooked": unhooked,
    "untaken": untaken,
    "refilled": refilled,
    "sibling": sibling,
    "metadata": metadata,
    "extra": lambda s: s["model"].append(Extra()) if len(s["model"]) < 6 else None,
    "extra value": lambda s: [setattr(m, "number", 5) for m in s["model"] if type(m) is Extra],
    "held tensor": lambda s: s.update(held={"a": [torch.ones(2)]}),
    "held parameter": lambda s: s.update(held={"a": [s["model"][0].weight, 1]}),
}


class Low(Codes):
    """Says its parts under names, and with a context, that a test has given."""

    names: tuple[str, ...] = ("codes", "scale")

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [*self.names], self.note


class Lower(Low):
    """Another class of the same parts."""


def low(s: State) -> Any:
    """Return the parameter that wraps others, which appears with the first that asks for it."""
    if "low" not in s["model"]._parameters:
        s["model"].register_parameter("low", wrapping())
    return s["model"].low


def wrapping(note: Any = "a") -> nn.Parameter:
    return nn.Parameter(Low.of(torch.randn(2, 4), note), requires_grad=False)


def gives(name: str, make: Callable[[torch.Tensor], Any]) -> Callable[[State], None]:
    return lambda s: setattr(low(s), name, make(getattr(low(s), name)))


def notes(*said: Any) -> Callable[[State], None]:
    """Let a context be each of some values in turn."""
    return lambda s: setattr(low(s), "note", said[len(said) > 1 and low(s).note == said[0]])


def swapped(make: Callable[[], nn.Parameter], which: Callable[[State], Any]) -> Any:
    return lambda s: torch.utils.swap_tensors(which(s), make())


def plain() -> nn.Parameter:
    return nn.Parameter(torch.randn(2, 4), requires_grad=False)


def moment(s: State) -> None:
    if s["model"][0].bias in s["optim"].state:
        s["optim"].state[s["model"][0].bias]["low"] = Low.of(torch.ones(1, 4))


def second(s: State, scale: torch.Tensor | None = None) -> None:
    other: Any = wrapping()
    other.scale = low(s).scale if scale is None else scale
    s["model"].register_parameter("second", other)


WRAPPED: dict[str, Callable[[State], Any]] = {
    "wrapped": low,
    "part replaced": gives("codes", torch.clone),
    "part replaced by its like": gives("scale", lambda x: x.view_as(x)),
    "part wrapped": gives("scale", lambda x: x if type(x) is Low else Low.of(x)),
    "part turned": gives("codes", lambda x: x.t() if type(x) is torch.Tensor else x),
    "part expanded": gives("scale", lambda x: torch.ones(1).expand(2, 1)),
    "part's memory": lambda s: setattr(low(s).codes, "data", torch.ones(2, 4, dtype=torch.int8)),
    "part set": lambda s: low(s).codes.set_(torch.zeros(2, 4, dtype=torch.int8)),
    "part resized": lambda s: low(s).codes.resize_(3, 4),
    "part's values": lambda s: low(s).codes.fill_(len(s)),
    "a parameter's memory as a part": lambda s: setattr(
        low(s), "scale", s["model"][0].weight.detach()[:, :1]
    ),
    "one part fewer": lambda s: setattr(low(s), "names", ("codes",)),
    "other order": lambda s: setattr(low(s), "names", ("scale", "codes")),
    "other name": lambda s: vars(low(s)).update(again=low(s).scale, names=("codes", "again")),
    "both parts": lambda s: setattr(low(s), "names", Low.names),
    "copied": lambda s: low(s).detach().copy_(Low.of(torch.randn(2, 4))),
    "frozen": lambda s: low(s).requires_grad_(not low(s).requires_grad),
    "other data": lambda s: setattr(low(s), "data", Low.of(torch.randn(2, 4))),
    "swapped": swapped(wrapping, low),
    "swapped with a plain one": swapped(plain, low),
    "a plain one": lambda s: s["plain"].setdefault("p", plain()),
    "a plain one swapped": swapped(wrapping, lambda s: s["plain"].setdefault("p", plain())),
    "another class": lambda s: setattr(low(s), "__class__", Lower),
    "context": notes("a", "b"),
    "context, equal": notes(1, True),
    "context, equal numbers": notes(0.0, -0.0),
    "context, in place": lambda s: (
        low(s).note.append(1) if type(low(s).note) is list else notes([0])(s)
    ),
    "context, nested": notes({"a": (1, [torch.int8])}, {"a": (True, [torch.int8])}),
    "context, not plain": notes(object()),
    "shared part": second,
    "shared no more": lambda s: second(s, torch.ones(2, 1)),
    "moment": moment,
    "wrapped in a list": lambda s: s.update(list=[wrapping(), 1]),
    "tied": lambda s: s["model"].register_parameter("tied", low(s)),
}


class Speaking:
    """A wrapper that says what the optimizer says, or more."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.more: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), **self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def inner(s: State) -> torch.optim.Optimizer:
    """Return the optimizer itself."""
    found = s["optim"]
    return found.inner if isinstance(found, Speaking) else found


def told(change: Callable[[Any], Any], *, copies: bool = True) -> Callable[[State], None]:
    """Return how an optimizer gets a hook that changes what it says."""

    def hook(own: Any, said: Any) -> None:
        if copies:
            said["state"] = {n: dict(entry) for n, entry in said["state"].items()}
        change(said)

    return lambda s: inner(s).register_state_dict_post_hook(hook) and None


def entries(change: Callable[[Any], Any]) -> Callable[[State], None]:
    """Return how an optimizer gets a hook that says other state of its first parameter."""
    return told(lambda said: [change(e) for n, e in said["state"].items() if n == 0])


def first(key: str, value: Callable[[Any], Any]) -> Callable[[State], None]:
    return entries(lambda e: e.update({key: value(e["exp_avg"])}) if "exp_avg" in e else None)


def speaking(s: State) -> Speaking:
    """Return the wrapper, which appears with the first that asks for it."""
    if not isinstance(s["optim"], Speaking):
        s["optim"] = Speaking(s["optim"])
    wrapper: Speaking = s["optim"]
    return wrapper


def silent(s: State) -> None:
    for hooks in ("_optimizer_state_dict_post_hooks", "_optimizer_state_dict_pre_hooks"):
        vars(inner(s))[hooks].clear()
    vars(inner(s)).pop("state_dict", None)


def own_word(s: State) -> None:
    """Give an optimizer a ``state_dict`` of its own."""
    o = inner(s)
    vars(o)["state_dict"] = lambda: {**type(o).state_dict(o), "word": len(s)}


def crossed(said: Any) -> None:
    """Say the state of one parameter as that of another."""
    state = said["state"]
    if {0, 2} <= state.keys():
        state[0], state[2] = state[2], state[0]


def float_steps(s: State) -> None:
    for entry in inner(s).state.values():
        entry["step"] = float(entry.get("step", 0)) + 1


def refilled_state(s: State) -> None:
    """Put another tensor there whenever it is asked."""

    def hook(own: Any) -> None:
        for entry in own.state.values():
            entry["exp_avg"] = entry["exp_avg"].clone()

    inner(s).register_state_dict_pre_hook(hook)


TOLD: dict[str, Callable[[State], Any]] = {
    "o: more": told(lambda said: said.update(k=1), copies=False),
    "o: more, a tensor": told(lambda said: said.update(k=torch.ones(2)), copies=False),
    "o: more, a list": told(lambda said: said.update(k=[torch.ones(2), len(said)])),
    "o: copies": told(lambda said: None),
    "o: half": first("exp_avg", torch.Tensor.half),
    "o: another value": first("exp_avg", lambda t: t + 1),
    "o: a view": first("exp_avg", lambda t: t.view(-1)),
    "o: turned": first("exp_avg", torch.Tensor.t),
    "o: the same memory": first("exp_avg", torch.Tensor.detach),
    "o: twice": first("again", lambda t: t),
    "o: a number": first("again", lambda t: t.numel()),
    "o: another name": entries(lambda e: e.update(m=e.pop("exp_avg", 0))),
    "o: less": entries(lambda e: e.pop("exp_avg", None)),
    "o: other order": entries(lambda e: e.update(exp_avg=e.pop("exp_avg", 0))),
    "o: no state": told(lambda said: said["state"].clear()),
    "o: state of one gone": told(lambda said: said["state"].pop(0, None)),
    "o: state of no parameter": told(lambda said: said["state"].update(x={"a": torch.ones(1)})),
    "o: crossed": told(crossed),
    "o: in a group": told(lambda said: said["param_groups"][0].update(k=len(said))),
    "o: another rate": told(lambda said: said["param_groups"][0].update(lr=torch.ones(()))),
    "o: silent": silent,
    "o: own word": own_word,
    "o: refilled": refilled_state,
    "o: float steps": float_steps,
    "o: tensor steps": lambda s: [
        e.update(step=torch.tensor(2.0)) for e in inner(s).state.values()
    ],
    "o: wrapped": lambda s: speaking(s) and None,
    "o: wrapped, more": lambda s: speaking(s).more.update(n=len(s["list"])),
    "o: wrapped, other state": lambda s: speaking(s).more.update(state={0: {"q": torch.ones(1)}}),
    "o: wrapped, no more": lambda s: speaking(s).more.clear(),
    "o: unwrapped": lambda s: s.update(optim=inner(s)),
}
CHANGES: dict[str, Callable[[State], Any]] = {
    **WORDS,
    **WRAPPED,
    **TOLD,
    "optimizer loaded": load_optimizer,
    "optimizer's state replaced": lambda s: setattr(s["optim"], "state", defaultdict(dict)),
    "others hidden": other_hidden,
    "other dictionaries": other_dicts,
    "nothing": lambda s: None,
    "value": lambda s: s.update(tokens=s["tokens"] + 1),
    "value inside": lambda s: s["plain"].update(n=s["plain"]["n"] + 1),
    "list": lambda s: s["list"].append(3),
    "value becomes tensor": lambda s: s.update(tokens=torch.tensor(1)),
    "value with a tensor": lambda s: s.update(list=[torch.ones(2), 1]),
    "array": lambda s: s.update(array=np.arange(3)),
    "tensor replaced": lambda s: s["plain"].update(w=torch.ones(3)),
    "key": lambda s: s["plain"].update({f"k{len(s['plain'])}": torch.ones(1)}),
    "key gone": lambda s: s["plain"].pop("w", None) if len(s["plain"]) > 2 else None,
    "parameter": lambda s: setattr(s["model"][0], "scale", nn.Parameter(torch.ones(1))),
    "buffer": lambda s: s["model"][1].register_buffer("more", torch.ones(2)),
    "buffer replaced": lambda s: setattr(s["model"][1], "running_var", torch.full((4,), 2.0)),
    "child": lambda s: s["model"].append(nn.Linear(3, 3)),
    "generator": lambda s: s.update(rng=torch.Generator().manual_seed(1)),
    "tied": tie,
    "data": swap_data,
    "resized": resize,
    "in place": in_place,
    "rate": learning_rate,
    "group": new_group,
    "no state": forget_state,
    "state value": state_value,
    "state tensor": new_state_tensor,
    "alias": alias,
    "hidden": hide_buffer,
}


def seen(leaves: Leaves) -> Any:
    return (
        [(n, None if x.fresh or x.assign else x.tensor.data_ptr(), x.shape, x.dtype, x.kind,
          x.path, x.aliases)
         for n, x in leaves.tensors.items()],
        [(n, x.tensor.tolist(), x.local.tolist()) for n, x in leaves.tensors.items()],
        {n: (repr(x.raw), x.kind, x.path) for n, x in leaves.objects.items()},  # 1 is not True
        {n: x.raw for n, x in leaves.per_rank.items()},
        leaves.aliases,
        list(map(id, leaves.optimizers)),
    )  # fmt: skip


def outcome(look: Callable[[State], Leaves], state: State) -> Any:
    try:
        return seen(look(state))
    except Exception as error:  # noqa: BLE001 - the same one has to come from both
        return type(error), str(error)


@given(st.lists(st.sampled_from(sorted({*CHANGES} - {*WRAPPED})), max_size=6))
def test_what_is_recalled_is_what_is_there(changes: list[str]) -> None:
    compare(changes)


@given(st.lists(st.sampled_from(sorted({*WORDS, "data", "tied", "in place"})), max_size=8))
def test_what_is_said_is_asked_each_time(changes: list[str]) -> None:
    compare(changes)


@given(st.lists(st.sampled_from([*WRAPPED, "in place", "value", "no state"]), max_size=6))
def test_what_is_inside_of_others_is_looked_at_each_time(changes: list[str]) -> None:
    compare(changes)


def test_a_plain_tensor_that_becomes_a_wrapper_in_place_is_noticed() -> None:
    compare(["swapped with a plain one", "another class"])


@pytest.mark.parametrize("change", WRAPPED)
def test_each_way_to_change_what_is_inside_of_others(change: str) -> None:
    before = "a plain one" if change == "a plain one swapped" else "wrapped"
    compare([before, "nothing", change, "nothing", change])


def test_what_wraps_others_is_remembered(monkeypatch: Any) -> None:
    state, flattener = make(), Flattener()
    second(state)
    gives("scale", Low.of)(state)
    moment(state)
    first = flattener.flatten(state)
    monkeypatch.setattr(module, "collect", None)
    for _ in range(2):
        WRAPPED["copied"](state)
        WRAPPED["frozen"](state)
        again = flattener.flatten(state)
        assert again.known is first.known is not None
        for name, leaf in first.tensors.items():
            other = again.tensors[name]
            assert (leaf.wrapped, leaf.own) == (other.wrapped, other.own)
            assert leaf.origin is other.origin
            assert leaf.local.data_ptr() == other.local.data_ptr()


@given(st.lists(st.sampled_from(sorted({*TOLD, "rate", "group", "no state", "data"})), max_size=8))
def test_what_optimizers_say_is_asked_each_time(changes: list[str]) -> None:
    compare(changes)


@pytest.mark.parametrize("change", sorted(TOLD))
def test_each_way_in_which_optimizers_speak(change: str) -> None:
    compare([change, "nothing", "o: silent", change])


@pytest.mark.long
@pytest.mark.parametrize("second", sorted({**WORDS, **TOLD}))
def test_each_way_to_speak_after_each_other(second: str) -> None:
    for former in sorted(WORDS if second in WORDS else TOLD):
        compare([former, "nothing", second])


def compare(changes: list[str]) -> None:
    """Make changes, and look in between: once at what is remembered, and once at everything."""
    state, flattener = make(), Flattener()
    forms: dict[int, Any] = {}
    known = []
    for change in ["nothing", *changes, "nothing"]:
        absent = (RuntimeError, AttributeError) if change in WRAPPED else ()
        with contextlib.suppress(*absent):  # a part may have no such shape any more, or be gone
            CHANGES[change](state)
        found = outcome(flattener.flatten, state)
        fresh = outcome(flatten, state)
        if {"refilled", "o: refilled"} & {*changes}:  # each look puts another buffer there
            found, fresh = found[1:], fresh[1:]
        assert found == fresh, change
        try:
            leaves = flattener.flatten(state)
        except (CkptdError, AttributeError):  # as above
            continue
        known.append(leaves.known)  # kept, so that its id is its own
        if leaves.known is not None:
            form = seen(leaves)[0]
            assert forms.setdefault(id(leaves.known), form) == form, change


def test_what_asks_is_remembered_with_all_the_rest(monkeypatch: Any) -> None:
    """One module with words of its own, an array and a value with a tensor change nothing there."""
    state, flattener = make(), Flattener()
    state["model"].append(nn.Sequential(Speaker(), Extra()))
    state["array"], state["values"] = np.arange(3), [torch.ones(2), 1]
    speaking = state["model"][-1][0]
    speaking.words["new"] = lambda: torch.full((2,), float(speaking.words["count"]))
    first = flattener.flatten(state)
    monkeypatch.setattr(module, "collect", None)
    for speaking.words["count"] in (5, 6):
        state["values"][0] += 1
        again = flattener.flatten(state)
        assert again.known is first.known is not None
        assert list(again.tensors) == list(first.tensors)
        assert again.tensors["model.3.0.new"].tensor.tolist() == [speaking.words["count"]] * 2
        assert again.objects["model.3.0.count"].raw == speaking.words["count"]
        assert again.tensors["values.0"].tensor is not first.tensors["values.0"].tensor


@pytest.mark.parametrize("kind", ["plain", "more", "wrapped", "own word", "float steps"])
def test_an_optimizer_that_speaks_is_remembered_as_one_that_does_not(
    kind: str, monkeypatch: Any
) -> None:
    """What it says that is no memory of its own is read each time, all else is recalled."""
    state, flattener = make(), Flattener()
    more = {"number": 0, "tensor": torch.zeros(2)}
    if kind == "more":
        told(lambda said: said.update(more), copies=False)(state)
    elif kind == "wrapped":
        speaking(state).more = more
    elif kind != "plain":
        TOLD[f"o: {kind}"](state)
    known = flattener.flatten(state).known
    monkeypatch.setattr(module, "collect", None)
    optimizer = inner(state)
    for number in (3, 4):  # it has stepped once, and the change to floats added one
        more["number"] = number
        more["tensor"] += 1
        state["tokens"] = number
        for entry in optimizer.state.values():
            entry["step"] += 1  # in place, where it is a tensor
            entry["exp_avg"] += 1
        again = flattener.flatten(state)
        assert again.known is known is not None
        if kind == "float steps":
            assert again.objects["optim.0.weight.step"].raw == number
        held = optimizer.state[state["model"][0].weight]["exp_avg"]
        assert again.tensors["optim.0.weight.exp_avg"].origin is held
        if kind in ("more", "wrapped"):
            assert again.objects["optim.state_dict"].raw["number"] == number
            assert again.tensors["optim.state_dict.tensor"].tensor[0] == number - 2


def test_an_optimizer_is_asked_once_a_look() -> None:
    """Ranks may have to ask together, and one may remember less than the others."""
    state, flattener = make(), Flattener()
    asked: list[int] = []
    told(lambda said: asked.append(1), copies=False)(state)
    changes = [*TOLD.values(), swap_data, CHANGES["group"], says(count=3), CHANGES["nothing"]]
    for change in changes:
        if change is not silent:
            change(state)
        asked.clear()
        with contextlib.suppress(CkptdError):
            flattener.flatten(state)
        assert len(asked) == 1


def test_a_module_is_asked_once_a_look() -> None:
    """Ranks may have to ask together, and one may remember less than the others."""
    state, flattener = make(), Flattener()
    asked: list[int] = []
    for number, change in enumerate((None, None, says(count=3), says(more=1), swap_data, hooked)):
        if change is not None:
            change(state)
        speaker(state).words["count"] = lambda: asked.append(1) or torch.ones(1)  # type: ignore[func-returns-value]
        flattener.flatten(state)
        assert len(asked) == number + 1


def test_a_state_that_stays_is_not_looked_through_again(monkeypatch: Any) -> None:
    state, flattener = make(), Flattener()
    first = flattener.flatten(state)
    looked: list[str] = []
    monkeypatch.setattr(module, "collect", lambda *_: looked.append("again"))
    for change in ("value", "in place", "rate"):
        CHANGES[change](state)
        again = flattener.flatten(state)
        assert seen(again)[0] == seen(first)[0]
        assert all(x.origin is first.tensors[n].origin for n, x in again.tensors.items())
    assert not looked
    assert again.objects["tokens"].raw == 8


def test_memory_that_is_looked_at_in_another_order_is_another_state() -> None:
    weight = nn.Parameter(torch.arange(9.0).view(3, 3))
    state, flattener = {"w": weight}, Flattener()
    flattener.flatten(state)
    weight.data = weight.data.t()  # the same memory, the same shape
    found = flattener.flatten(state).tensors["w"].tensor
    assert torch.equal(found, torch.arange(9.0).view(3, 3).t())


def test_leaves_of_one_state_are_known_as_such() -> None:
    state, flattener = make(), Flattener()
    known = [flattener.flatten(state).known]
    for change in (CHANGES["value"], CHANGES["in place"], swap_data, CHANGES["nothing"]):
        change(state)
        known.append(flattener.flatten(state).known)
    assert known[0] is not None
    assert known[0] is known[1] is known[2]
    assert known[3] is not known[2]
    assert known[3] is known[4]


def parted(how: str, one: nn.Parameter, other: nn.Parameter) -> None:
    """Give `other` memory of its own again."""
    new = torch.full_like(other.data, 5.0)
    if how == "data":
        other.data = new
    elif how == "set_":
        with torch.no_grad():
            other.set_(new)
    elif how == "swap":
        torch.utils.swap_tensors(other, nn.Parameter(new))
    else:
        one.data = new  # the first of the two, whose name both have


WAYS_APART = ("data", "set_", "swap", "first")


@pytest.mark.parametrize("how", WAYS_APART)
def test_names_of_one_memory_part_when_their_memory_does(how: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    one, other = model["a"].weight, model["b"].weight
    other.data = one.data
    state, flattener = {"model": model}, Flattener()
    assert flattener.flatten(state).aliases == {"model.b.weight": "model.a.weight"}
    flattener.flatten(state)
    parted(how, one, other)
    leaves = flattener.flatten(state)
    assert not leaves.aliases
    assert torch.equal(leaves.tensors["model.b.weight"].tensor, other.detach())
    assert torch.equal(leaves.tensors["model.a.weight"].tensor, one.detach())


def test_an_empty_tensor_parts_from_its_alias_too() -> None:
    """It has no address, and ranks whose shards are not empty see the names part."""
    one, other = torch.empty(0), torch.empty(0)
    other.set_(one)
    state = {"a": one, "b": other}
    flattener = Flattener()
    assert flattener.flatten(state).aliases == {"b": "a"}
    other.set_(torch.empty(0))
    assert not flattener.flatten(state).aliases


def test_the_form_of_memory_is_looked_at() -> None:
    """Same address, same shape, same strides: other dtype, other sign."""
    state, flattener = {"w": torch.ones(4)}, Flattener()
    flattener.flatten(state)
    state["w"].data = state["w"].data.view(torch.int32)
    assert flattener.flatten(state).tensors["w"].dtype == "int32"
    state["w"].data = torch._neg_view(state["w"].data)
    found = flattener.flatten(state).tensors["w"].tensor
    assert torch.equal(found, state["w"])


@pytest.mark.parametrize("beside", [{}, {"v": torch.ones(2)}, {"p": nn.Parameter(torch.ones(2))}])
def test_the_bit_of_a_conjugate_is_looked_at(beside: State) -> None:
    """Same address, same shape, same strides, same dtype."""
    for other in ("_conj", "_neg_view"):
        state = {**beside, "w": torch.ones(2, dtype=torch.complex64) + 2j}
        flattener = Flattener()
        known = flattener.flatten(state).known
        assert flattener.flatten(state).known is known
        state["w"].data = getattr(torch, other)(state["w"].data)
        found = flattener.flatten(state)
        assert found.known is not known
        assert torch.equal(found.tensors["w"].tensor, state["w"])


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_module_is_recalled_like_any_other() -> None:
    """Its slots look like dicts, and are none: a save failed of a state with one."""
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    state: State = {"model": model, "optim": torch.optim.Adam(model.parameters())}
    flattener = Flattener()
    known = flattener.flatten(state).known
    assert flattener.flatten(state).known is known is not None
    model(torch.ones(4, 2)).sum().backward()
    state["optim"].step()
    found, wanted = flattener.flatten(state), flatten(state)
    assert found.known is not known
    assert {n: x.tensor.tolist() for n, x in found.tensors.items()} == {
        n: x.tensor.tolist() for n, x in wanted.tensors.items()
    }
    assert "optim.0.weight.exp_avg" in found.tensors


class Sometimes(nn.Linear):
    """Keeps state outside its parameters once it has been used."""

    used = False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.used:
            destination[prefix + "cache"] = torch.ones(1)


def test_a_module_that_writes_its_own_state_is_asked_each_time() -> None:
    state, flattener = {"model": Sometimes(2, 2)}, Flattener()
    flattener.flatten(state)
    state["model"].used = True
    with pytest.raises(UsageError) as caught:
        flattener.flatten(state)
    assert "does not accept what its state_dict" in caught.value.message


class Drained:
    """Gives what it has, and has it no more."""

    def __init__(self) -> None:
        self.queue: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        given, self.queue = self.queue, []
        return {"queue": given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.queue = state["queue"]


def test_an_object_is_asked_once_a_save_where_the_state_is_looked_at_again() -> None:
    drained, growing, model = Drained(), [torch.ones(1)], torch.nn.Linear(2, 2)
    with ckptd.Checkpointer("memory://drained") as ck:
        for step in (1, 2, 3):
            drained.queue = [step, step]
            state = {"m": model, "d": drained, "own": ckptd.PerRank(Drained()), "l": growing}
            ck.save(step, state).durable()
            fresh, lists = Drained(), [torch.zeros(1) for _ in range(step)]
            own = ckptd.PerRank(Drained())
            ck.load({"m": model, "d": fresh, "own": own, "l": lists})
            assert fresh.queue == [step, step]
            growing.append(torch.ones(1))


def test_a_version_that_a_class_has_since_the_last_save() -> None:
    class Versioned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))

        def _load_from_state_dict(self, state: Any, prefix: str, notes: Any, *rest: Any) -> None:
            if (notes.get("version") or 0) < 7:
                state[prefix + "w"] = state[prefix + "w"] * 100
            super()._load_from_state_dict(state, prefix, notes, *rest)

    model = Versioned()
    with ckptd.Checkpointer("memory://class-version") as ck:
        ck.save(1, {"m": model}).durable()
        Versioned._version = 7
        ck.save(2, {"m": model}).durable()
        fresh = Versioned()
        ck.load({"m": fresh})
    assert fresh.w.item() == 1


class Equal(torch.nn.Module):
    """Equal to all of its kind."""

    def __init__(self, said: int) -> None:
        super().__init__()
        self.said = said

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return type(other) is Equal


def speak(module: Equal) -> None:
    """Give a module words of its own."""

    def say(into: dict[str, Any], prefix: str, _: bool) -> None:
        into[prefix + "said"] = module.said

    def hear(state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.said = state.pop(prefix + "said", 0)

    vars(module).update(_save_to_state_dict=say, _load_from_state_dict=hear)


def test_modules_that_are_equal_and_not_the_same() -> None:
    def two(said: int) -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(1, 1), Equal(0), Equal(said))

    model = two(5)
    with ckptd.Checkpointer("memory://equal") as ck:
        ck.save(1, {"m": model}).durable()
        speak(model[2])
        ck.save(2, {"m": model}).durable()
        fresh = two(0)
        speak(fresh[2])
        ck.load({"m": fresh})
    assert fresh[2].said == 5


class Counting:
    """Wraps an optimizer, and says more than it from the first step on."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps = inner, 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), **({"steps": self.steps} if self.steps else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state.pop("steps", 0)
        self.inner.load_state_dict(state)


def test_a_wrapper_of_an_optimizer_that_says_more_since_the_last_save() -> None:
    model = torch.nn.Linear(2, 2)
    state = {"m": model, "o": Counting(torch.optim.SGD(model.parameters()))}
    with ckptd.Checkpointer("memory://counting") as ck:
        ck.save(1, state).durable()
        state["o"].step()
        ck.save(2, state).durable()
        fresh = {"m": model, "o": Counting(torch.optim.SGD(model.parameters()))}
        ck.load(fresh)
    assert fresh["o"].steps == 1
