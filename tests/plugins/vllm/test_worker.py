"""The loop of a worker that waits for a version, with a stand-in for vLLM's modules."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ckptd.errors import DeadlineError, UsageError

_NAMES = {
    "vllm.distributed": ("get_tp_group", "get_world_group"),
    "vllm.distributed.weight_transfer.base": (
        "WeightTransferEngine",
        "WeightTransferInitInfo",
        "WeightTransferUpdateInfo",
    ),
    "vllm.model_executor.model_loader.reload": (
        "finalize_layerwise_reload",
        "initialize_layerwise_reload",
    ),
    "vllm.model_executor.model_loader.reload.layerwise": (
        "get_layerwise_info",
        "make_online_process_loader",
    ),
    "vllm.model_executor.model_loader.weight_utils": ("default_weight_loader",),
}


class Answers:
    """A subscriber whose updates are given; an update without one finds nothing."""

    last_error = None
    version: Any = None

    def __init__(self, *versions: Any) -> None:
        self.versions = list(versions)
        self.waits: list[float] = []

    def update(self, wait_s: float) -> Any:
        self.waits.append(wait_s)
        found = self.versions.pop(0) if self.versions else None
        self.version = found or self.version
        return found


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The worker's module over the stand-in."""
    for name in ("vllm", *_NAMES):
        module = ModuleType(name)
        for found in _NAMES.get(name, ()):
            setattr(module, found, type(found, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "ckptd_vllm.worker", raising=False)
    found_worker = importlib.import_module("ckptd_vllm.worker")
    monkeypatch.delitem(sys.modules, "ckptd_vllm.worker")
    return found_worker


def test_ranks_give_up_after_the_same_looks_whatever_their_clocks_say(
    worker: Any,
) -> None:
    version = importlib.import_module("ckptd.publish.torch.subscriber").WeightVersion
    wanted = worker.CkptdUpdateInfo(number=3, epoch="e")

    engine = worker.CkptdWeightTransferEngine()
    engine._info = worker.CkptdInitInfo(layout="", at="", wait_s=12.0)
    engine._subscriber = none = Answers(version(1, 2, "e"), version(9, 9, "another"))
    with pytest.raises(DeadlineError, match="did not arrive"):
        engine.receive_weights(wanted)
    assert none.waits[2:] == [4.0] * 3  # all of the 12 s, in looks that a slow publisher bears
    engine._subscriber = late = Answers(None, version(1, 2, "e"), None, version(2, 3, "e"))
    engine.receive_weights(wanted)
    assert len(late.waits) == 4


def test_what_was_pulled_is_loaded_by_the_next_finish_though_its_own_never_came(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.import_module("ckptd.publish.torch.subscriber").WeightVersion
    processed: list[Any] = []
    answers = Answers(version(1, 1, "e"))
    engine = worker.CkptdWeightTransferEngine()
    monkeypatch.setattr(engine, "_process", lambda: processed.append(answers.version))
    engine._info = worker.CkptdInitInfo(layout="", at="", wait_s=1.0)
    engine._subscriber = answers
    engine.start_weight_update()
    with pytest.raises(DeadlineError):
        engine.receive_weights(worker.CkptdUpdateInfo(number=2, epoch="e"))
    for _ in range(2):  # the program that leads vLLM had died, and begins again
        engine.start_weight_update()
        engine.receive_weights(worker.CkptdUpdateInfo(number=1, epoch="e"))
        engine.finish_weight_update()
    assert processed == [version(1, 1, "e")]


@pytest.mark.parametrize("inside", [False, True])
def test_what_vllm_computes_of_weights_forbids_to_write_them_in_place(
    worker: Any, inside: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert set(worker._unprocessed(model, {})) == {"0.weight", "0.bias"}
    part: Any = SimpleNamespace() if inside else model[0]
    if inside:
        model[0].impl = part
    part.W_UV = torch.zeros(2)
    with pytest.raises(UsageError, match="vLLM has computed others of them") as caught:
        worker._unprocessed(model, {})
    assert caught.value.where == "0.W_UV"
