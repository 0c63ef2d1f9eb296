"""What a sharded state may hold, on one rank."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.errors import CkptdError, UsageError
from ckptd.testing.ranks import run_ranks

# Importing Megatron warns of what it lacks.
pytestmark = [pytest.mark.plugins, pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

COMMON = {
    "args": argparse.Namespace(hidden=16, dtype=torch.bfloat16, shape=torch.Size([2, 3])),
    "step": 7,
    "nested": {0: [torch.arange(3), (1, None)], "extra": io.BytesIO(b"raw")},
}


def state(shift: float = 0.0, rows: int = 6) -> dict[str, Any]:
    """Return a state with a factory, an object, a flat range and something that is not saved."""
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )

    def built(key: str, data: Any, replica: Any, flat: Any) -> list[Any]:
        halves = data.chunk(2)
        return [
            ShardedTensor.from_rank_offsets(key, half, (0, i, 2), replica_id=replica)
            for i, half in enumerate(halves)
        ]

    padded = torch.arange(rows * 2.0).reshape(rows, 2) + shift
    return {
        "layer": ShardedTensor.from_rank_offsets(
            "layers.weight", torch.arange(6.0).reshape(2, 3) + shift, (0, 1, 2), prepend_axis_num=1
        ),
        "other": ShardedTensor.from_rank_offsets(
            "layers.weight", torch.arange(6.0).reshape(2, 3) - shift, (0, 0, 2), prepend_axis_num=1
        ),
        "gated": ShardedTensorFactory("fc1", torch.arange(8.0) + shift, built, torch.cat),
        "padded": ShardedTensor.from_rank_offsets("vocab", padded, allow_shape_mismatch=True),
        "rng": ShardedObject("rng", [{"cpu": torch.arange(5, dtype=torch.uint8)}], (1,), (0,)),
        "here": LocalNonpersistentObject(shift),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, argparse.Namespace):
        return same(vars(a), vars(b))
    if isinstance(a, io.BytesIO):
        return a.getvalue() == bytes(b.getvalue())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def there_and_back(root: str) -> None:
    from torch.distributed.checkpoint import CheckpointException

    import ckptd_megatron

    assert ckptd_megatron.latest(root) is None
    content = {"kind": "test"}
    future = ckptd_megatron.async_save(root, 1, state() | COMMON, content_metadata=content)
    future.result()
    ckptd_megatron.save(root, 2, state(5.0) | COMMON)
    common = ckptd_megatron.load_common_state_dict(root, 1)
    assert common.pop("content_metadata") == content
    assert same(common, COMMON)
    for step, shift in ((1, 0.0), (2, 5.0), (None, 5.0)):
        found = ckptd_megatron.load(root, state(100.0), step)
        assert same({k: v for k, v in found.items() if k in COMMON}, COMMON)
        assert torch.equal(found["layer"], torch.arange(6.0).reshape(2, 3) + shift)
        assert torch.equal(found["other"], torch.arange(6.0).reshape(2, 3) - shift)
        assert torch.equal(found["gated"], torch.arange(8.0) + shift)
        assert same(found["rng"], [{"cpu": torch.arange(5, dtype=torch.uint8)}])
        assert found["here"] == 100.0
    # Rows of padding come and go; what the checkpoint lacks stays as it is.
    for rows in (4, 9):
        found = ckptd_megatron.load(root, state(100.0, rows), 1)["padded"]
        held = min(rows, 6)
        assert torch.equal(found[:held], torch.arange(12.0).reshape(6, 2)[:held])
        assert torch.equal(found[held:], state(100.0, rows)["padded"].data[held:])
    lacking = state()
    lacking["new"] = lacking["padded"].__class__.from_rank_offsets("new", torch.ones(2))
    with pytest.raises(CheckpointException, match="lacks a part of the state"):
        ckptd_megatron.load(root, lacking)
    found = ckptd_megatron.load(root, lacking, strict=False)
    assert "new" not in found
    assert "layer" in found
    other = {"gated": lacking["padded"].__class__.from_rank_offsets("fc1", torch.ones(3))}
    with pytest.raises(CheckpointException, match="another shape"):
        ckptd_megatron.load(root, other)
    with pytest.raises(CheckpointException, match="not later"):
        ckptd_megatron.save(root, 2, state() | COMMON)


def test_there_and_back(tmp_path: Path) -> None:
    run_ranks(1, there_and_back, str(tmp_path / "root"), deadline_s=120.0)


def other_line(root: str, continues: bool) -> str:
    """Load a part and save; return how the save ended."""
    from torch.distributed.checkpoint import CheckpointException

    import ckptd_megatron

    part = {"gated": state(1.0)["gated"]}
    ckptd_megatron.load(root, part, continues=continues)
    try:
        ckptd_megatron.save(root, 9, state() | COMMON)
    except CheckpointException as failed:
        (cause, _), *_ = failed.failures.values()
        assert isinstance(cause, CkptdError)
        return cause.kind
    return "saved"


def test_a_part_is_gone_on_from_or_not(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run_ranks(1, there_and_back, root, deadline_s=120.0)
    assert run_ranks(1, other_line, root, False, deadline_s=120.0) == ["not-loaded"]
    assert run_ranks(1, other_line, root, True, deadline_s=120.0) == ["saved"]


def test_a_flat_range_is_boxes() -> None:
    """As the distributed optimizer of Megatron-core before 0.16 gives them."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from ckptd_megatron.parts import parts_of

    whole = np.zeros((2, 4, 6), dtype=np.float32)
    cell = torch.arange(24.0)
    for start, stop in ((0, 5), (5, 13), (13, 13), (13, 24)):
        tensor = ShardedTensor.from_rank_offsets(
            "t", cell.reshape(4, 6), (0, 1, 2), prepend_axis_num=1
        )
        tensor.data, tensor.flattened_range = cell[start:stop], slice(start, stop)
        for part in parts_of([tensor]):
            at = tuple(slice(o, e) for o, e in zip(part.box.offset, part.box.end, strict=True))
            assert not whole[at].any()
            whole[at] = part.values.numpy()
    assert np.array_equal(whole[1].reshape(-1), cell.numpy())
    assert not whole[0].any()


def test_what_is_past_the_end_is_no_part() -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from ckptd_megatron.parts import parts_of

    bucket = ShardedTensor("b", torch.arange(4.0), torch.float32, (4,), (10,), (8,), None)
    (part,) = parts_of([bucket])
    assert (part.box.offset, part.box.shape, part.values.tolist()) == ((8,), (2,), [0.0, 1.0])


def test_a_large_tensor_among_values() -> None:
    from ckptd_megatron.parts import storable

    with pytest.raises(UsageError, match="no tensors") as caught:
        storable({"a": [torch.empty(1 << 26, dtype=torch.float64, device="meta")]}, "x")
    assert caught.value.where == "x.a[0]"
