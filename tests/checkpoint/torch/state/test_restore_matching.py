"""A strict load never picks one of several things that a name means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.checkpoint.format.manifest import Manifest, ObjectEntry, TensorEntry
from ckptd.checkpoint.torch.state.restore import (
    Matching,
    SavedState,
    match,
    prepare,
    refuse_misfit,
    saved_names,
)
from ckptd.errors import MismatchError


def matched(state: dict[str, object], *, strict: bool, per_rank: str = "") -> Matching:
    """Match a state with a checkpoint in which ``a`` is a tensor and a value."""
    manifest = Manifest(
        step=1,
        generation=1,
        attempt="0001",
        world_size=1,
        files=(),
        grids=(),
        owners=(),
        tensors=(TensorEntry("t", "float32", (2,), 0, 0, 0, ("a",)),),
        objects=(ObjectEntry("a", 3, per_rank=per_rank),),
    )
    saved = SavedState.of(manifest)
    names = saved_names(saved, lambda n: n, lambda n: True)
    leaves = prepare(state, names)
    found = match(leaves, saved, lambda n: True, lambda n: n, strict=strict)
    refuse_misfit(found, saved, leaves, strict=strict)
    return found


@pytest.mark.parametrize("live", [torch.zeros(2), 0], ids=["tensor", "value"])
@pytest.mark.parametrize("per_rank", ["", "drop"])
def test_a_name_that_is_a_tensor_and_a_value(live: object, per_rank: str) -> None:
    state = {"a": live, "t": torch.zeros(2)}
    with pytest.raises(MismatchError, match="a: both a tensor and a value"):
        matched(state, strict=True, per_rank=per_rank)
    assert "a" in matched(state, strict=False, per_rank=per_rank).unexpected


@pytest.mark.usefixtures("writing_thread")
@pytest.mark.parametrize(
    ("saved", "live", "words"),
    [
        (torch.ones(2), None, "wanted a value, found a tensor"),
        (0, torch.zeros(2), "wanted a tensor, found a value"),
        (0, ckptd.PerRank(1, on_change="drop"), "wanted a value of each rank, found a value"),
        (torch.ones(2), {}, "missing in the checkpoint"),
    ],
)
def test_a_name_that_is_of_another_kind_is_told_as_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: object, live: object, words: str
) -> None:
    kept = saved if live != {} else {"a": saved}
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, {"best": kept, "weight": torch.ones(1)})
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        with pytest.raises(MismatchError, match=f"(?m)^ *best: {words}"):
            ck.load({"best": live, "weight": torch.zeros(1)})
        ck.load({"best": live, "weight": torch.zeros(1)}, strict=False)
    assert "best not in the checkpoint, or as another kind: the live values stay" in caplog.text
