"""Values come back as what they were, or are refused by name."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptd
from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.errors import UsageError
from tests.checkpoint.torch.bridge import give, take
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("writing_thread")

_roots = itertools.count()
MASKED = np.ma.array([1.0, 2.0], mask=[True, False])


class Units(np.ndarray[Any, Any]):
    """An array that would carry more than its elements."""


@pytest.mark.parametrize(
    "value",
    [MASKED, np.ma.masked, np.ones(2).view(Units)],
    ids=["masked", "mask", "class"],
)
@pytest.mark.parametrize("around", [lambda v: v, lambda v: [v], lambda v: {"k": (v,)}])
def test_arrays_that_are_more_than_their_elements_are_refused(value: Any, around: Any) -> None:
    # Of a masked array the mask was lost.
    with pytest.raises(UsageError) as caught:
        flatten({"v": around(value)})
    assert caught.value.kind == "unsavable"
    assert str(caught.value.where).startswith("v")


def test_a_mapped_array_is_filled_in_its_file(tmp_path: Path) -> None:
    live = np.memmap(tmp_path / "file", np.float32, "w+", shape=(3,))
    give(take({"v": np.arange(3, dtype=np.float32)}), {"v": live})
    assert np.fromfile(tmp_path / "file", np.float32).tolist() == [0.0, 1.0, 2.0]


def test_a_bytearray_comes_back_as_one() -> None:
    # It came back as bytes.
    saved = {"v": bytearray(b"\0a"), "l": [bytearray(b"b"), b"c"], "n": {"k": bytearray()}}
    live: dict[str, Any] = {"v": None, "l": None, "n": {"k": None}}
    give(take(saved), live)
    assert live == saved
    assert [type(live["v"]), type(live["l"][0]), type(live["l"][1])] == [bytearray] * 2 + [bytes]
    assert type(live["n"]["k"]) is bytearray


@pytest.mark.parametrize("value", [memoryview(b"a"), np.bytes_(b"a"), type("B", (bytes,), {})()])
def test_other_bytes_are_refused(value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        flatten({"v": [value]})
    assert caught.value.kind == "unsavable"


@pytest.mark.parametrize("live", [[], None, [torch.zeros(1)], "same"])
def test_a_tensor_of_a_type_of_which_torch_makes_no_zeros(live: Any) -> None:
    # It saved, and no load of it worked where the list did not have it already.
    def make(value: int) -> torch.Tensor:
        return torch.full((6,), value, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)

    state = {"l": [make(0)] if live == "same" else live}
    with ckptd.Checkpointer(f"memory://kinds{next(_roots)}") as ck:
        ck.save(1, {"l": [make(35)]}).durable(PATIENCE_S)
        ck.load(state)
    assert state["l"][0].dtype == torch.float4_e2m1fn_x2
    assert state["l"][0].view(torch.uint8).tolist() == [35] * 6


def test_a_state_without_tensors_loads_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A data file was called missing that is not written where there is nothing for it.
    state = {"v": [0]}
    with caplog.at_level(logging.WARNING), ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.save(1, {"v": [1, 2]}).durable(PATIENCE_S)
        ck.load(state)
    assert state == {"v": [1, 2]}
    assert not [r for r in caplog.records if r.name == "ckptd"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.uint8])
def test_a_tensor_without_elements_inside_of_a_value(dtype: torch.dtype) -> None:
    saved, loaded = (ckptd.PerRank({"t": torch.zeros(n, 3, dtype=dtype)}) for n in (0, 1))
    with ckptd.Checkpointer(f"memory://empty-{dtype}") as ck:
        ck.save(1, {"p": saved}).durable()
        ck.load({"p": loaded})
    assert loaded.value["t"].shape == (0, 3)
    assert loaded.value["t"].dtype == dtype
