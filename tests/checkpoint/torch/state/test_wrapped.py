"""Tensors that wrap others: saved as their parts, and back bit for bit."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import nn

import ckptd
from ckptd.checkpoint.format.manifest import INLINE
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.torch.copy import CopySources
from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.errors import MismatchError, UsageError
from ckptd.store import open_store
from ckptd.testing.ranks import run_ranks
from tests.cli.running import Cli

pytestmark = pytest.mark.usefixtures("writing_thread")


class Codes(torch.Tensor):
    """Numbers of 8 bits with a scale for each row, as low-bit optimizers keep their moments."""

    codes: Any
    scale: torch.Tensor
    note: Any

    @staticmethod
    def __new__(cls, codes: Any, scale: torch.Tensor, note: Any = None) -> Self:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        made.codes, made.scale, made.note = codes, scale, note
        found: Self = made
        return found

    @classmethod
    def of(cls, values: torch.Tensor, note: Any = None) -> Self:
        scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return cls((values / scale).round().to(torch.int8), scale, note)

    def dequantize(self) -> Any:
        return self.codes.to(torch.float32) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"note": self.note, "size": self.shape, "dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Self:
        return cls(inner["codes"], inner["scale"], context["note"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            new = args[1] if isinstance(args[1], Codes) else cls.of(args[1])
            args[0].codes.copy_(new.codes)
            args[0].scale.copy_(new.scale)
            return args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            made = args[0]
            return cls(func(made.codes), func(made.scale), made.note)
        if func is torch.ops.aten.view.default and list(args[1]) == list(args[0].shape):
            return cls(args[0].codes, args[0].scale, args[0].note)
        raise NotImplementedError(str(func))


class Other(Codes):
    """Another class of the same parts."""


class LowBit(torch.optim.Optimizer):
    """Momentum that is kept in 8 bits."""

    def __init__(self, params: Any, note: Any = None) -> None:
        super().__init__(params, {"lr": 0.1})
        self.note = note

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p]
                if not held:
                    held["momentum"] = Codes.of(torch.zeros_like(p), self.note)
                held["momentum"].copy_(0.9 * held["momentum"].dequantize() + p.grad)
                p -= group["lr"] * held["momentum"].dequantize()


class Asked(LowBit):
    """One that is asked for its state: it says it by a method of its own."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


class Training:
    def __init__(self, seed: int = 0, optimizer: type[LowBit] = LowBit, note: Any = None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        frozen = nn.Parameter(Codes.of(torch.randn(4, 8), note), requires_grad=False)
        self.model.register_parameter("base", frozen)
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad], note)
        self.state = {"model": self.model, "optim": self.optimizer}

    def step(self, number: int) -> None:
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        low: Any = self.model.base
        hidden = self.model[0](x) + x @ low.dequantize().T
        self.model[1](hidden).square().sum().backward()
        self.optimizer.step()


def inner(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, Codes):
        for name in ("codes", "scale"):
            yield from inner(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from inner(value[key])


def bits(*values: Any) -> list[bytes]:
    return [t.contiguous().numpy().tobytes() for v in values for t in inner(v)]


def all_bits(training: Training) -> list[bytes]:
    return bits(training.model.state_dict(), training.optimizer.state_dict()["state"])


@pytest.mark.parametrize("optimizer", [LowBit, Asked])
@pytest.mark.parametrize("stepped", [False, True])
def test_it_comes_back_as_torch_brings_it_back(
    tmp_path: Path, optimizer: type[LowBit], stepped: bool
) -> None:
    first = Training(0, optimizer)
    first.step(0)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, first.state)
        ck.wait()
        first.step(1)
        handle = ck.save(2, first.state)
        oracle = io.BytesIO()
        torch.save((first.model.state_dict(), first.optimizer.state_dict()), oracle)
        # It steps while what is inside of the moments may still have to be copied.
        first.step(2)
        handle.durable()
    ours, torchs = Training(5, optimizer), Training(6, optimizer)
    for one in (ours, torchs) if stepped else ():
        one.step(9)
    base = ours.model.base
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        assert ck.load(ours.state) == 2
    oracle.seek(0)
    model, optim = torch.load(oracle, weights_only=False)
    torchs.model.load_state_dict(model)
    torchs.optimizer.load_state_dict(optim)
    assert ours.model.base is base
    assert all_bits(ours) == all_bits(torchs)
    for one in (ours, torchs):
        one.step(2)
    assert all_bits(ours) == all_bits(torchs) == all_bits(first)


def test_names_and_what_a_reader_must_know(tmp_path: Path) -> None:
    training = Training()
    training.step(0)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, {"m": nn.Linear(2, 2)}).durable()
        assert manifest(tmp_path).requires == (INLINE,)
        ck.save(2, training.state).durable()
    found = manifest(tmp_path)
    assert found.requires == ("subclasses", INLINE)
    names = {t.name for t in found.tensors}
    assert {"model.base.codes", "model.base.scale", "optim.0.weight.momentum.codes"} <= names
    (record,) = [o.value for o in found.objects if o.name == "model.base"]
    assert record["class"] == f"{__name__}:Codes"
    assert record["parts"] == ["codes", "scale"]


def manifest(root: Path) -> Any:
    with open_store(root) as store:
        catalogue = Catalogue(store)
        catalogue.open()
        latest = catalogue.latest()
        assert latest is not None
        return catalogue.manifest(latest)


def test_one_inside_of_another_and_two_that_share(tmp_path: Path) -> None:
    def made(seed: int) -> nn.ParameterDict:
        torch.manual_seed(seed)
        low = Codes.of(torch.randn(4, 8))
        deep = Codes(Codes.of(torch.randn(4, 8)), torch.rand(4, 1))
        both = {"a": low, "b": Codes(torch.ones(4, 8, dtype=torch.int8), low.scale), "deep": deep}
        return nn.ParameterDict({k: nn.Parameter(v, requires_grad=False) for k, v in both.items()})

    saved, live = made(0), made(1)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, {"model": saved}).durable()
    tensors = {t.name: t.aliases for t in manifest(tmp_path).tensors}
    assert "model.deep.codes.codes" in tensors
    shared: Any = live["a"]
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.load({"model": live})
    assert bits(dict(live.items())) == bits(dict(saved.items()))
    assert shared.scale.data_ptr() == live["b"].scale.data_ptr()
    assert tensors["model.a.scale"] == ("model.b.scale",)


@pytest.mark.parametrize("note", [object(), torch.ones(1), float("nan"), print])
def test_a_context_that_is_not_plain_is_refused_by_name(tmp_path: Path, note: Any) -> None:
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        with pytest.raises(UsageError, match="context of a Codes") as caught:
            ck.save(1, {"w": Codes.of(torch.ones(2, 2), note)})
    assert (caught.value.kind, caught.value.where) == ("unsavable", "w")


@pytest.mark.parametrize("live", ["class", "context", "plain", "wrapped"])
def test_another_class_or_context_is_refused_with_both_said(tmp_path: Path, live: str) -> None:
    values = torch.rand(2, 2)
    saved: torch.Tensor = values if live == "wrapped" else Codes.of(values, "a")
    there: dict[str, torch.Tensor] = {
        "class": Other.of(torch.zeros(2, 2), "a"),
        "context": Codes.of(torch.zeros(2, 2), "b"),
        "plain": torch.zeros(2, 2),
        "wrapped": Codes.of(torch.zeros(2, 2), "a"),
    }
    state = {"w": there[live], "x": torch.zeros(1)}
    before = bits(state)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, {"w": saved, "x": torch.ones(1)}).durable()
        for strict in (True, False):
            with pytest.raises(MismatchError) as caught:
                ck.load(state, strict=strict)
            assert (caught.value.message, caught.value.where) == (
                "a tensor has another class than in the checkpoint",
                "w",
            )
    text = f"{caught.value.wanted} {caught.value.found}"
    said = {"class": ("Other", "Codes"), "context": ("'b'", "'a'")}
    assert all(word in text for word in said.get(live, ("a plain tensor", "Codes")))
    assert bits(state) == before


@pytest.mark.parametrize("only", ["w.codes", "w*"])
def test_a_part_that_is_loaded_alone_is_compared_too(tmp_path: Path, only: str) -> None:
    live = {"w": Codes.of(torch.zeros(2, 2), "b"), "x": torch.zeros(1)}
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, {"w": Codes.of(torch.ones(2, 2), "a"), "x": torch.ones(1)}).durable()
        ck.load(live, only="x")
        assert live["x"].tolist() == [1]
        with pytest.raises(MismatchError) as caught:
            ck.load(live, only=only)
    assert "a tensor has another class than in the checkpoint" in caught.value.message


_WORDS = {k: v for k, v in vars(Codes).items() if not k.startswith("__tensor_")}
Hollow: Any = type("Hollow", (torch.Tensor,), _WORDS)
"""A class that wraps tensors and does not say so, as some of TransformerEngine's."""


class Quantizer:
    """What TransformerEngine's tensors have in their context."""


@pytest.mark.parametrize("kind", ["Hollow", "Quantizer"])
def test_what_transformer_engine_may_have_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    values = torch.ones(2, 2)
    low = Hollow.of(values) if kind == "Hollow" else Codes.of(values, Quantizer())
    model = nn.ParameterDict({"w": nn.Parameter(low, requires_grad=False)})
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        with pytest.raises(UsageError) as caught:
            ck.save(1, {"model": model})
    assert (caught.value.kind, caught.value.where) == ("unsavable", "model.w")
    assert kind in str(caught.value)


def test_an_operation_on_the_whole_is_seen_though_torch_counts_none_inside() -> None:
    low = Codes.of(torch.ones(2, 2))
    leaves = flatten({"w": low})
    form: Any = SimpleNamespace(watched=["w.codes", "w.scale"])
    sources = CopySources(form, leaves.tensors)
    before, inside = sources.versions(), low.codes._version
    low.copy_(torch.zeros(2, 2))
    assert low.codes._version == inside
    after = sources.versions()
    assert after[2] != before[2]
    assert after[5] != before[5]


def test_what_takes_tensors_for_themselves_refuses_it(cli: Cli, tmp_path: Path) -> None:
    root, copy, training = str(tmp_path / "root"), str(tmp_path / "copy"), Training(3)
    training.step(0)
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, training.state).durable()
    error = cli("export", root, str(tmp_path / "hf"), "--json").error
    assert (error["kind"], "model.base (" in error["found"]) == ("unreadable-format", True)
    error = cli("reshard", root, str(tmp_path / "r"), "--to", "names.ckptd", "--json").error
    assert (error["kind"], "model.base (" in error["found"]) == ("unreadable-format", True)
    assert cli("verify", root).code == cli("cp", root, copy).code == 0
    again = Training(4)
    with ckptd.Checkpointer(copy) as ck:
        ck.load(again.state)
    assert all_bits(again) == all_bits(training)


WHOLE = torch.Size([3, 8])


def spreads(root: str) -> dict[str, Any]:
    """Save and load low-bit parts of DTensors, as FSDP2 and its optimizers have them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed + 10 * rank)
        cut: Any = DTensor.from_local(Codes.of(torch.randn(3, 8)), mesh, [Shard(0)])
        torch.manual_seed(seed)
        whole: Any = DTensor.from_local(Codes.of(torch.randn(2, 4)), mesh, [Replicate()])
        return {"cut": cut, "whole": whole}

    def own(state: dict[str, Any]) -> list[bytes]:
        return bits(*(state[k]._local_tensor for k in ("cut", "whole")))

    saved, live = made(1), made(2)
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, saved).durable()
        ck.load(live)
    found: dict[str, Any] = {"same": own(live) == own(saved)}
    columns: Any = DTensor.from_local(Codes.of(torch.randn(6, 4)), mesh, [Shard(1)])
    uneven: Any = DTensor.from_local(
        Codes.of(torch.randn(2 - rank, 8)),
        mesh,
        [Shard(0)],
        shape=torch.Size([3, 8]),
        stride=(8, 1),
    )
    acts: dict[str, Any] = {
        "columns": lambda ck: ck.load({"cut": columns}, only="cut*"),
        "plain": lambda ck: ck.load({"cut": Codes.of(torch.randn(6, 8))}, only="cut*"),
        "uneven": lambda ck: ck.save(9, {"x": uneven}),
    }
    for name, act in acts.items():
        with ckptd.Checkpointer(root) as ck:
            if name == "uneven":
                ck.load(live)
            try:
                act(ck)
            except ckptd.CkptdError as error:
                found[name] = error.kind
    return found


@pytest.mark.dist
def test_parts_of_dtensors_come_back_to_their_ranks(tmp_path: Path) -> None:
    found = run_ranks(2, spreads, str(tmp_path / "root"))
    wanted = {"same": True, "columns": "mismatch", "plain": "mismatch", "uneven": "unsavable"}
    assert list(found) == [wanted, wanted]


def test_a_layout_has_no_words_for_parts(tmp_path: Path) -> None:
    """Neither a save nor a load with `layout=` writes or fills anything."""
    whole = "layout l of s on M { w = w[o i]; b = b[i] }"
    parts = "layout l of s on M { w.codes = w[o i]; w.scale = v[o u]; b = b[i] }"

    def state(value: float) -> dict[str, Any]:
        return {"model": {"w": Codes.of(torch.full((4, 2), value)), "b": torch.full((2,), value)}}

    root = str(tmp_path / "r")
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, state(1.0)).durable()
    for text in (whole, parts):
        (tmp_path / "l.lay").write_text(
            f"mesh M = dp:1\nspace s {{ w[o i] v[o u] b[i] }}\n{text}\n"
        )
        text = str(tmp_path / "l.lay")
        other = str(tmp_path / "other")
        with pytest.raises(UsageError) as caught, ckptd.Checkpointer(other, layout=text) as ck:
            ck.save(2, state(2.0))
        assert (caught.value.kind, caught.value.where) == ("unsavable", "model.w")
        live = state(3.0)
        with pytest.raises(UsageError) as caught, ckptd.Checkpointer(root, layout=text) as ck:
            ck.load(live)
        assert caught.value.kind == "unsavable"
        assert torch.equal(live["model"]["b"], torch.full((2,), 3.0))
    with open_store(other) as store:
        assert not Catalogue(store).line()
