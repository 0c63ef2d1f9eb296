"""Values come back as torch's own file brings them back: types, order, sharing and flags.

``python -m tests.checkpoint.torch.state.test_values_oracle SECONDS [SEED]`` is the campaign.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import itertools
import random
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckptd
from ckptd.checkpoint.format import codec
from ckptd.errors import CorruptError, UsageError
from ckptd.store.memory import forget_memory
from tests.processes import PATIENCE_S

_roots = itertools.count()
SEEDS = 25
CHANNELS = torch.channels_last


class Pair(NamedTuple):
    one: Any
    other: Any


class Colour(enum.Enum):
    RED = 1


class Config(dict[str, Any]):
    """A dict of somebody's own."""


class Words(list[Any]):
    """A list of somebody's own."""


class Scaled(torch.Tensor):
    """A tensor of somebody's own."""


@ckptd.register
@dataclasses.dataclass
class Record:
    """A type that is registered."""

    held: Any


class Speaks:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, said: dict[str, Any]) -> None:
        self.value = said["value"]


class Extra(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.held = [value]

    def get_extra_state(self) -> Any:
        return self.held[0]

    def set_extra_state(self, state: Any) -> None:
        self.held[0] = state


def _speaks(value: Any, name: str) -> tuple[Any, Callable[[], Any]]:
    found = Speaks(value)
    return found, lambda: found.value


def _extra(value: Any, name: str) -> tuple[Any, Callable[[], Any]]:
    found = Extra(value)
    return found, lambda: found.held[0]


def _per_rank(value: Any, name: str) -> tuple[Any, Callable[[], Any]]:
    found = ckptd.PerRank((value,))
    return found, lambda: found.value[0] if found.value else None


def _plain(value: Any, name: str) -> tuple[Any, Callable[[], Any]]:
    found = [] if name == "live" else [value]
    return found, lambda: found[0]


WAYS = [_speaks, _extra, _per_rank, _plain]


def torchs(value: Any) -> Any:
    """Return what torch's own save and load bring back."""
    file = io.BytesIO()
    torch.save({"v": value}, file)
    file.seek(0)
    return torch.load(file, weights_only=False)["v"]


def ours(way: Any, value: Any, there: Any = None) -> Any:
    """Return what a checkpoint brings back in a program that has `there` in its place."""
    saved, (live, get) = way(value, "saved")[0], way(there, "live")
    root = f"values-oracle{next(_roots)}"
    with ckptd.Checkpointer(f"memory://{root}") as ck:
        ck.save(1, {"s": saved}).durable(PATIENCE_S)
        ck.load({"s": live})
    forget_memory(root)
    return get()


# --- what can be seen of a value ------------------------------------------------------------------


def seen(value: Any) -> Any:
    """Return all that can be seen of a value, with numbers for what has an identity."""
    met: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    kept: list[Any] = []

    def look(x: Any) -> Any:
        kind = type(x)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(x, bool | int | float | complex | str | bytes | type(None)):
            return name, repr(x)
        if isinstance(x, enum.Enum | torch.dtype | torch.device | range | slice | np.generic):
            return name, repr(x)
        if isinstance(x, tuple):
            return name, [look(i) for i in x], sorted(getattr(x, "__dict__", ()))
        if isinstance(x, frozenset):
            return name, sorted(map(repr, x))
        if id(x) in met:
            return "again", met[id(x)]
        met[id(x)] = len(met)
        kept.append(x)
        more = [(k, look(v)) for k, v in getattr(x, "__dict__", {}).items()]
        if isinstance(x, torch.Tensor):
            tensors.extend([x] if x.layout is torch.strided else [])
            return name, more, _form(x)
        if isinstance(x, dict):
            factory = getattr(x, "default_factory", None)
            return name, more, str(factory), [(look(k), look(v)) for k, v in x.items()]
        if isinstance(x, list | collections.deque):
            return name, more, getattr(x, "maxlen", None), [look(i) for i in x]
        if isinstance(x, set):
            return name, sorted(map(repr, x))
        if isinstance(x, np.ndarray):
            return name, str(x.dtype), x.shape, x.tolist()
        if isinstance(x, io.BytesIO):
            return name, x.getvalue(), x.tell()
        return name, repr(x)

    return look(value), [
        (i, j, shared)
        for (i, a), (j, b) in itertools.combinations(enumerate(tensors), 2)
        if (shared := _distance(a, b)) is not None
    ]


def _form(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return repr(tensor)
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    raw = plain.view(torch.uint8).tolist() if plain.numel() else []
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    dense = tensor.numel() > 1 and reach == tensor.numel() and not tensor.is_contiguous()
    strides = tensor.stride() if dense else None
    return str(tensor.dtype), tuple(tensor.shape), strides, raw, tensor.requires_grad


def _distance(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """Return how far two tensors are apart that share some of their memory."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return None
    if a.is_conj() or b.is_conj():
        return None
    (a0, a1), (b0, b1) = _span(a), _span(b)
    return b0 - a0 if a0 < b1 and b0 < a1 else None


def _span(x: torch.Tensor) -> tuple[int, int]:
    if not x.numel():
        return 0, 0
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    first = x.storage_offset() * x.itemsize
    return first, first + reach * x.itemsize


# --- random values --------------------------------------------------------------------------------


class Maker:
    """Makes values, in which what was made before comes again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.made: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        torch.manual_seed(seed)

    def some(self) -> Any:
        return [self.value(0) for _ in range(5)]

    def value(self, depth: int) -> Any:
        rng = self.rng
        if self.made and rng.random() < 0.12:
            return rng.choice(self.made)
        if depth > 3 or rng.random() < 0.25:
            return self.scalar()
        if rng.random() < 0.35:
            new = self.tensor()
        else:
            new = getattr(self, rng.choice([n for n in dir(self) if n.startswith("make_")]))(depth)
        self.made.append(new)
        return new

    def scalar(self) -> Any:
        return self.rng.choice(
            [
                *(0, True, -1, 1 << 80, 0.1, -0.0, float("nan"), float("inf"), 1 + 2j, None),
                *("a", "\ud800", "$", b"", b"\0", Colour.RED, torch.float16, np.float32(0.1)),
                *(torch.device("cpu"), torch.Size([1, 2]), range(3), slice(1, None), np.int64(3)),
                *((), frozenset([1]), (1, "a")),
            ]
        )

    def items(self, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(self.rng.randrange(4))]

    def pairs(self, depth: int) -> dict[Any, Any]:
        keys = ["b", "a", 3, "x.y", (1, 2), None, True, "$", 2.5, b"k"]
        few = keys[:2] if self.rng.random() < 0.6 else keys
        return {self.rng.choice(few): v for v in self.items(depth)}

    def make_list(self, depth: int) -> Any:
        return self.items(depth)

    def make_tuple(self, depth: int) -> Any:
        return tuple(self.items(depth))

    def make_pair(self, depth: int) -> Any:
        return Pair(self.value(depth + 1), self.value(depth + 1))

    def make_deque(self, depth: int) -> Any:
        return collections.deque(self.items(depth), self.rng.choice([None, 2, 5]))

    def make_dict(self, depth: int) -> Any:
        return self.pairs(depth)

    def make_ordered(self, depth: int) -> Any:
        new: Any = collections.OrderedDict(self.pairs(depth))
        if self.rng.random() < 0.3:
            new._metadata = collections.OrderedDict({"": {"version": self.rng.randrange(3)}})
        return new

    def make_default(self, depth: int) -> Any:
        return collections.defaultdict(self.rng.choice([int, list, None, dict]), self.pairs(depth))

    def make_counter(self, depth: int) -> Any:
        return collections.Counter("abca"[: self.rng.randrange(5)])

    def make_set(self, depth: int) -> Any:
        return {1, "a", (2,)}

    def make_record(self, depth: int) -> Any:
        held = [self.scalar(), torch.randn(2, 3).t().requires_grad_()]
        return Record([held, held, *held])

    def make_bytes(self, depth: int) -> Any:
        return bytearray(b"ab")

    def make_buffer(self, depth: int) -> Any:
        new = io.BytesIO(b"abc")
        new.seek(self.rng.randrange(4))
        return new

    def make_array(self, depth: int) -> Any:
        kind = self.rng.choice([np.float32, np.int16, np.bool_])
        return np.arange(self.rng.randrange(4)).astype(kind)

    def make_module(self, depth: int) -> Any:
        return self.rng.choice([nn.Linear(1, 2), nn.BatchNorm1d(1)]).state_dict()

    def make_refused(self, depth: int) -> Any:
        """Return what torch brings back and a checkpoint does not, sometimes."""
        if self.rng.random() < 0.85:
            return None
        odd: Any = collections.OrderedDict(a=1)
        odd.more = 1
        return self.rng.choice(
            [
                Config(a=1),
                Words([1]),
                odd,
                torch.ones(2).as_subclass(Scaled),
                torch.eye(2).to_sparse(),
            ]
        )

    def tensor(self) -> torch.Tensor:
        rng = self.rng
        if self.tensors and rng.random() < 0.4:
            base = rng.choice(self.tensors)
            new = self.view(base)
        else:
            dtypes = [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]
            dtypes += [torch.complex64, torch.uint8, torch.float8_e4m3fn]
            shape = rng.choice([(), (0, 2), (3,), (2, 3), (2, 3, 2, 2)])
            new = torch.randn(shape).mul(9).abs().to(rng.choice(dtypes))
        if new.dtype.is_floating_point and new.itemsize > 1 and rng.random() < 0.3:
            if rng.random() < 0.5:
                new = nn.Parameter(new.detach(), requires_grad=rng.random() < 0.7)
            else:
                new = new.detach().requires_grad_()
        if rng.random() < 0.1:
            new.scale = rng.choice([1.5, [1, 2]])  # type: ignore[attr-defined]
        self.tensors.append(new)
        return new

    def view(self, base: torch.Tensor) -> torch.Tensor:
        base = base.detach()
        ways: list[Callable[[], torch.Tensor]] = [
            lambda: base,
            lambda: base.flatten(),
            lambda: base.transpose(0, -1) if base.dim() else base,
            lambda: base[1:] if base.dim() else base,
            lambda: base[..., ::2] if base.dim() else base,
            lambda: base.unsqueeze(0).expand(3, *base.shape),
            lambda: base.to(memory_format=torch.channels_last) if base.dim() == 4 else base,
            lambda: base.clone(),
        ]
        return self.rng.choice(ways)()


def differences(way: Any, value: Any, there: Any = None) -> str | None:
    """Return how a checkpoint differs from torch's file; None where it is refused by name."""
    wanted = seen(torchs(value))
    try:
        found = seen(ours(way, value, there))
    except UsageError as error:
        named = error.where and (error.kind == "unsavable" or "one name" in error.message)
        return None if named else repr(error)
    return "" if wanted == found else f"torch {wanted}\n ckptd {found}"


@pytest.mark.parametrize("way", WAYS)
def test_random_values_come_back_as_torch_brings_them_back(way: Any) -> None:
    # Types of containers, flags, strides and what was shared were lost.
    found = [differences(way, Maker(n).some(), Maker(n // 2 + 1).some()) for n in range(SEEDS)]
    assert [d for d in found if d] == []
    assert found.count("") > SEEDS / 2


# --- what is said in the guide --------------------------------------------------------------------


def _attributed() -> Any:
    odd: Any = collections.OrderedDict(a=1)
    odd.more = 1
    return odd


REFUSED = {
    "dict": lambda: Config(a=1),
    "list": lambda: Words([1]),
    "counter": lambda: type("Mine", (collections.Counter,), {})("a"),
    "attributes": _attributed,
    "factory": lambda: collections.defaultdict(lambda: 1, a=2),
    "tensor": lambda: torch.ones(2).as_subclass(Scaled),
    "tensor's attribute": lambda: _with_attribute(torch.ones(1), object()),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "rows": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.ones(1, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "wrapper": lambda: TwoTensor(torch.ones(1), torch.zeros(1)),
}


def _with_attribute(tensor: Any, value: Any) -> Any:
    tensor.scale = value
    return tensor


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_come_back_is_refused_by_name(way: Any, kind: str) -> None:
    # A dict of somebody's own came back as a plain one; a sparse tensor raised torch's error.
    with pytest.raises(UsageError) as caught:
        ours(way, [REFUSED[kind]()])
    assert caught.value.kind == "unsavable"
    assert str(caught.value.where).startswith("s")


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", [*REFUSED, "parameter"])
def test_what_an_object_has_before_is_in_the_way_of_nothing(kind: str) -> None:
    # A sparse tensor raised torch's error, a parameter of another shape a mismatch.
    there = REFUSED[kind]() if kind in REFUSED else nn.Parameter(torch.ones(5))
    assert differences(_speaks, [torch.eye(2)], [there]) == ""


def test_containers_of_the_state_stay_those_that_the_program_has() -> None:
    live: dict[str, Any] = {"a": Config(), "b": Config(x=0), "c": collections.defaultdict(list)}
    before = dict(live)
    live["d"] = {}
    saved = {"a": Config(), "b": Config(x=1), "c": collections.defaultdict(int, {(1, 2): 3})}
    saved["d"] = {"in": Config(y=2)}
    with ckptd.Checkpointer(f"memory://live{next(_roots)}") as ck:
        ck.save(1, saved).durable(PATIENCE_S)
        ck.load(live)
    assert [type(v) for v in before.values()] == [Config, Config, collections.defaultdict]
    assert (live["d"], type(live["d"]["in"])) == ({"in": {"y": 2}}, dict)
    assert all(live[k] is before[k] for k in before)
    assert live["b"] == {"x": 1}
    assert (live["c"], live["c"].default_factory) == ({(1, 2): 3}, list)


def test_gaps_and_lazy_views_are_left_out() -> None:
    base, pair = torch.arange(6.0).view(2, 3), torch.ones(2, dtype=torch.complex64) * 1j
    found = ours(_speaks, {"gaps": base[:, :2], "repeated": base[0, :1].expand(4)[:2]})
    assert found["gaps"].stride() == (3, 1)  # it shares memory with the other one
    alone = ours(_speaks, {"gaps": base[:, :2], "lazy": pair.conj(), "of": pair})
    assert alone["gaps"].is_contiguous()
    assert not alone["lazy"].is_conj()
    assert torch.equal(alone["lazy"], pair.conj())
    alone["of"].zero_()
    assert torch.equal(alone["lazy"], pair.conj())


def test_sharing_ends_at_registered_types() -> None:
    tensor, held = torch.ones(1), [1]
    found = ours(_speaks, [tensor, held, Record([tensor, held, held])])
    inner = found[2].held
    assert inner == [*found[:2], [1]]
    assert inner[0] is not found[0]
    assert inner[1] is not found[1]
    assert inner[1] is inner[2]


def test_a_row_in_another_order_and_a_lone_view_keep_their_strides() -> None:
    value = {"t": torch.randn(2, 3).t(), "c": torch.randn(2, 3, 4, 4).to(memory_format=CHANNELS)}
    for way in WAYS:
        assert differences(way, value) == ""


def test_an_array_is_in_order_and_of_this_machine() -> None:
    array = np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3))
    found = ours(_speaks, array)
    assert (found.dtype, found.flags.c_contiguous) == (np.dtype("float32"), True)
    assert np.array_equal(found, array)


class Fails:
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state")

    def load_state_dict(self, said: dict[str, Any]) -> None:
        raise NotImplementedError


class Empty(Extra):
    def get_extra_state(self) -> Any:
        raise ValueError("no state")


@pytest.mark.parametrize(
    "failing", [Fails, lambda: ckptd.PerRank(Fails()), lambda: nn.Sequential(Empty(0))]
)
def test_an_object_that_does_not_say_its_state_is_named(failing: Any) -> None:
    # Its own error came through, and nothing said whose it was.
    with ckptd.Checkpointer(f"memory://fails{next(_roots)}") as ck:
        with pytest.raises(UsageError) as caught:
            ck.save(1, {"metrics": {"one": failing()}})
    assert str(caught.value.where).startswith("metrics.one")
    assert isinstance(caught.value.__cause__, ValueError)


class Alike(nn.Module):
    """Is equal to all of its class, and has no hash."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), float(seed)))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    __hash__ = None  # type: ignore[assignment]


def test_modules_that_have_no_hash() -> None:
    # They raised a TypeError.
    def make(seed: int) -> dict[str, Any]:
        return {"m": nn.Sequential(Alike(seed), Alike(seed + 1)), "n": Alike(seed + 2)}

    saved, live = make(1), make(7)
    with ckptd.Checkpointer(f"memory://alike{next(_roots)}") as ck:
        for step in (1, 2):
            ck.save(step, saved).durable(PATIENCE_S)
        ck.load(live)
    found = [live["m"][0].w[0], live["m"][1].w[0], live["n"].w[0]]
    assert [x.item() for x in found] == [1.0, 2.0, 3.0]


class Bare(nn.Linear):
    """Says a plain dict, and looks what it is given."""

    def state_dict(self, *args: Any, **more: Any) -> Any:
        return dict(super().state_dict(*args, **more))

    def load_state_dict(self, state_dict: Any, *args: Any, **more: Any) -> Any:
        self.given = type(state_dict)
        return super().load_state_dict(state_dict, *args, **more)


def test_a_module_is_given_a_dict_of_the_class_that_it_says() -> None:
    # It was given an OrderedDict.
    live = Bare(1, 1)
    with ckptd.Checkpointer(f"memory://bare{next(_roots)}") as ck:
        ck.save(1, {"m": Bare(1, 1)}).durable(PATIENCE_S)
        ck.load({"m": live})
    assert live.given is dict


def test_a_form_that_is_none_is_damage() -> None:
    raw: Any = codec.encode(torch.arange(6.0).view(2, 3).t())
    good = raw["v"]["form"]["memory"]
    strides = [[1], [1, 1 << 60], [-1, 3], "ab"]
    for bad in ([0], "ab", [0, -9, [1, 3], 0], *([0, 0, s, 0] for s in strides)):
        raw["v"]["form"]["memory"] = bad
        with pytest.raises(CorruptError):
            codec.decode(raw)
    raw["v"]["form"]["memory"] = good
    assert torch.equal(codec.decode(raw), torch.arange(6.0).view(2, 3).t())


if __name__ == "__main__":
    end = time.time() + float(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    counts: collections.Counter[str] = collections.Counter()
    for number in itertools.count(first):
        if time.time() > end:
            break
        for one in WAYS:
            result = differences(one, Maker(number).some(), Maker(number // 2 + 1).some())
            counts["refused" if result is None else "alike" if not result else "other"] += 1
            if result:
                print(one.__name__, number, result)
    print(dict(counts))
