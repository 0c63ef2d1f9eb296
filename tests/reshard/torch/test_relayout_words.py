"""A live move into modules that take their state by code of their own: as their load would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import CkptdError

ONE = "mesh M = dp:1\nspace s { A[a b] }\nlayout one of s on M { lin.weight = A[a b] }\n"


class Plain(nn.Module):
    def __init__(self, lin: nn.Module | None = None) -> None:
        super().__init__()
        self.lin = lin or nn.Linear(3, 3, bias=False)


class Derived(Plain):
    """Has something that follows from its weight."""

    def __init__(self) -> None:
        super().__init__()
        hook: Any = Derived.derive
        self.register_load_state_dict_post_hook(hook)
        self.derive()

    def derive(self, *_: Any) -> None:
        weight: Any = self.lin.weight
        self.twice = weight.detach() * 2


class Turned(nn.Linear):
    """Keeps its weight turned in files."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)

    def _save_to_state_dict(self, said: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(said, prefix, keep_vars)
        said[prefix + "weight"] = said[prefix + "weight"].t()

    def _load_from_state_dict(self, given: Any, prefix: str, *rest: Any) -> None:
        given[prefix + "weight"] = given[prefix + "weight"].t()
        super()._load_from_state_dict(given, prefix, *rest)


class Newer(nn.Linear):
    """Converts what its first version saved."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)

    def _load_from_state_dict(self, given: Any, prefix: str, meta: Any, *rest: Any) -> None:
        if meta.get("version", 1) < 2:
            given[prefix + "weight"] = given[prefix + "weight"] * 10
        super()._load_from_state_dict(given, prefix, meta, *rest)


class Guarded(nn.Linear):
    """Counts the loads that bring it something new."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)
        self.news = 0

    def _load_from_state_dict(self, given: Any, prefix: str, *rest: Any) -> None:
        self.news += not torch.equal(given[prefix + "weight"], self.weight)
        super()._load_from_state_dict(given, prefix, *rest)


class Beside(Plain):
    """Has modules beside the weight that make something else of what lies in their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.newer = Turned(), Newer()


class Expanded(Plain):
    """Has a weight whose memory cannot be filled as it is."""

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.lin.weight = nn.Parameter(torch.rand(1, 3).expand(3, 3))


class Counted(Plain):
    """Has extra state."""

    count: int | None = None

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


class Engine:
    """No module: gives copies, and takes what it is given."""

    def __init__(self) -> None:
        self.weights = {"lin.weight": torch.rand(3, 3)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in self.weights.items()}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        self.weights = {n: t.clone() for n, t in saved.items()}


MAKE: dict[str, Callable[[], Any]] = {
    "derived": Derived,
    "turned": lambda: Plain(Turned()),
    "newer": lambda: Plain(Newer()),
    "guarded": lambda: Plain(Guarded()),
    "beside": Beside,
    "expanded": Expanded,
    "empty extra state": Counted,
    "engine": Engine,
}


def pair(name: str) -> tuple[Any, Any]:
    """Return two of a kind that have other values."""
    torch.manual_seed(1)
    return MAKE[name](), MAKE[name]()


def contents(of: Any) -> dict[str, Any]:
    """Return all that a load may change."""
    if isinstance(of, Engine):
        return of.state_dict()
    found = {n: p.detach().clone() for n, p in of.named_parameters()}
    return found | {n: getattr(of, n) for n in ("twice", "count") if hasattr(of, n)} | {
        "news": getattr(of.lin, "news", None)
    }  # fmt: skip


def wanted(source: Any, into: Any) -> dict[str, Any]:
    """Return what `into` is to hold: its own load of the weight, and what it had beside it."""
    said = {n: v for n, v in source.state_dict().items() if n == "lin.weight"}
    if isinstance(into, Engine):
        into.load_state_dict(said)
    else:
        for parameter in into.parameters():
            parameter.data = parameter.data.contiguous()  # torch's load fills no expanded one
        given = into.state_dict()
        given["lin.weight"] = said["lin.weight"].clone()
        into.load_state_dict(given)
    return contents(into)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(v, other[n]) if isinstance(v, torch.Tensor) else v == other[n]
        for n, v in one.items()
    )


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("name", [n for n in MAKE if n != "turned"])
def test_a_module_has_what_its_own_load_would_bring(name: str, states: bool) -> None:
    source, into = pair(name)
    want = wanted(source, pair(name)[1])
    ckptd.relayout({"model": source}, ONE, {"model": into}, ONE, states=states)
    assert same(contents(into), want)


def refused(source: Any, into: Any) -> CkptdError:
    with pytest.raises(CkptdError) as caught:
        ckptd.relayout({"model": source}, ONE, {"model": into}, ONE)
    return caught.value


def test_what_no_move_brings_is_refused_by_name() -> None:
    source, into = pair("turned")
    before = contents(into)
    error = refused(source, into)
    assert (error.message, error.where) == (
        "a module's state_dict() returns another value than a tensor's memory holds",
        "model.lin.weight",
    )
    assert same(contents(into), before)
    # The weight itself, as it lies in memory, is had by asking for it.
    ckptd.relayout(
        {"model": dict(source.named_parameters())},
        ONE,
        {"model": dict(into.named_parameters())},
        ONE,
    )
    assert torch.equal(into.lin.weight, source.lin.weight)

    counted = Counted()
    counted.count = 3
    error = refused(Plain(), counted)
    assert (error.message, error.where) == (
        "a module has extra state, which a live move cannot fill",
        "model._extra_state",
    )
    ckptd.relayout({"model": counted}, ONE, {"model": Plain()}, ONE)


@pytest.mark.parametrize(("strides", "second", "fits"), [((3, 1), 8, False), ((6, 1), 3, True)])
def test_what_lies_over_one_another_is_refused(
    strides: tuple[int, int], second: int, fits: bool
) -> None:
    text = "mesh M = dp:1\nspace s { A[a b] B[a b] }\n"
    layout = text + "layout two of s on M { a = A[a b]\nb = B[a b] }\n"
    memory = torch.zeros(24)
    a, b = (memory[at:].as_strided((3, 3), strides) for at in (0, second))
    source = {"model": {"a": torch.ones(3, 3), "b": torch.full((3, 3), 2.0)}}
    with pytest.raises(CkptdError) as caught:
        ckptd.relayout(source, layout, {"model": {"a": a, "b": b}}, layout)
    # Columns are apart, and not contiguous.
    assert ("not contiguous" if fits else "share memory") in caught.value.message
    assert not memory.any()
