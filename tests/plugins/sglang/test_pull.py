"""What SGLang's ranks call, with a stand-in for SGLang's modules and a publisher beside it."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import ckptd
import ckptd_sglang
from ckptd.errors import DeadlineError, UsageError
from ckptd_sglang import Wanted, pull
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.timeout(120)

LAYOUT = """\
space s { weight[a b] bias[a] }
mesh O = x:1
layout one of s on O {
  weight = weight[a b]
  bias = bias[a]
}
"""


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """The models of which SGLang was to compute again what it derives."""
    found: list[torch.nn.Module] = []
    group = SimpleNamespace(world_size=1)
    names: dict[str, dict[str, Any]] = {
        "model_loader.loader": {"post_load_weights": found.append},
        "distributed.parallel_state": {
            "get_tp_group": lambda: group,
            "get_world_group": lambda: group,
        },
    }
    for name, what in names.items():
        module = ModuleType(name)
        vars(module).update(what)
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
    for name in ("sglang", "sglang.srt", "sglang.srt.model_loader", "sglang.srt.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return found


def linear(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_model_has_the_version_that_is_named(
    tmp_path: Path, derived: list[torch.nn.Module]
) -> None:
    model = linear(0)
    addresses = [p.data_ptr() for p in model.parameters()]
    for place in ("at", "other"):  # another publisher takes the place of the first one
        with ckptd.Publisher(LAYOUT, tmp_path / place) as publisher:
            for step in (1, 2):
                publication = publisher.publish(step, {"model": linear(step)})
                assert publication.wait(PATIENCE_S)
                wanted = Wanted(LAYOUT, str(tmp_path / place), step, publisher.epoch)
                pull(model, wanted.tensors())
                assert same(model, linear(step))
    assert derived == [model] * 4
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_the_end_of_a_model_is_that_of_its_connections(
    tmp_path: Path, derived: list[torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[ckptd.Subscriber] = []
    close = ckptd.Subscriber.close
    monkeypatch.setattr(ckptd.Subscriber, "close", lambda one: (closed.append(one), close(one)))
    model = linear(0)
    with ckptd.Publisher(LAYOUT, tmp_path / "at") as publisher:
        assert publisher.publish(1, {"model": linear(1)}).wait(PATIENCE_S)
        pull(model, Wanted(LAYOUT, str(tmp_path / "at"), 1, publisher.epoch).tensors())
        subscriber = ckptd_sglang._followed[model][1]
        assert not closed
        derived.clear()
        del model
        gc.collect()
        assert closed == [subscriber]


def test_a_version_that_does_not_come_changes_nothing(
    tmp_path: Path, derived: list[torch.nn.Module]
) -> None:
    model = linear(0)
    with ckptd.Publisher(LAYOUT, tmp_path / "at") as publisher:
        wanted = Wanted(LAYOUT, str(tmp_path / "at"), 1, publisher.epoch, wait_s=0.5)
        with pytest.raises(DeadlineError, match="did not arrive"):
            pull(model, wanted.tensors())
        good, message = ckptd_sglang._answered(pull, model, wanted.tensors())
        assert (good, "did not arrive" in message) == (False, True)
    assert same(model, linear(0))
    assert not derived


def test_tensors_that_name_no_version_are_refused(derived: list[torch.nn.Module]) -> None:
    model, text = linear(0), torch.tensor([123, 125], dtype=torch.uint8)
    bad = [
        text,
        text[:1],
        text.float(),
        text.long(),
        torch.empty(1 << 40, dtype=torch.uint8, device="meta"),
    ]
    for given in ([], [("weight", torch.ones(2, 3))], *([("ckptd", each)] for each in bad)):
        with pytest.raises(UsageError, match="names a version"):
            pull(model, given)
    assert same(model, linear(0))
    assert not derived


@pytest.mark.parametrize("bad", [torch.zeros(2, 2, 2), torch.zeros(2, dtype=torch.float8_e4m3fn)])
def test_what_sglang_may_keep_in_another_order_is_refused(
    tmp_path: Path, derived: list[torch.nn.Module], bad: torch.Tensor
) -> None:
    model = linear(0)
    model.register_parameter("experts", torch.nn.Parameter(bad, requires_grad=False))
    with pytest.raises(UsageError, match="another order") as caught:
        pull(model, Wanted(LAYOUT, str(tmp_path / "at"), 1, "e").tensors())
    assert caught.value.where == "experts"
    assert not derived
