"""What a sharded state may hold, on one rank."""

from __future__ import annotations

import argparse
import copy
import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ckptd.errors import CkptdError, UsageError
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S

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


def changed_meanwhile(root: str) -> None:
    """Change everything between the return of a save and its writing."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    import ckptd_megatron
    from ckptd_dcp import CkptdWriter

    begun, writer = threading.Event(), CkptdWriter
    plain: Any = writer.write_data

    def write(self: Any, *args: Any) -> Any:
        assert begun.wait(PATIENCE_S)
        return plain(self, *args)

    weight, rng, step, array = torch.ones(3), torch.zeros(4), torch.tensor(7.0), np.zeros(2)
    values: dict[str, Any] = {"step": step, "array": array, "list": [1], "args": [{"lr": 0.5}]}
    values["namespace"] = argparse.Namespace(at=torch.zeros(1))

    def whole() -> dict[str, Any]:
        rngs = ShardedObject("rng", {"s": rng, "a": [array]}, (1,), (0,))
        return {"w": ShardedTensor.from_rank_offsets("w", weight), "rng": rngs}

    wanted = copy.deepcopy((weight, {"s": rng, "a": [array]}, values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "write_data", write)
        future = ckptd_megatron.async_save(root, 1, whole() | {"common": values})
        for tensor in (weight, rng, step, values["namespace"].at):
            tensor += 1
        array += 1
        values["list"].append(2)
        values["args"][0]["lr"] = 0.1
        begun.set()
        future.result()
    found = ckptd_megatron.load(root, whole())
    for mine, name in zip(wanted, ("w", "rng", "common"), strict=True):
        assert repr(found[name]) == repr(mine)


def test_an_async_save_is_of_one_moment(tmp_path: Path) -> None:
    run_ranks(1, changed_meanwhile, str(tmp_path / "root"), deadline_s=120.0)


def refused(call: Callable[[], Any]) -> str:
    """Return how a call of all ranks failed."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        call()
    except CheckpointException as failed:
        (cause, _), *_ = failed.failures.values()
        return getattr(cause, "kind", type(cause).__name__)
    return "done"


def alone(root: str) -> dict[str, str]:
    """Fail on one rank of two, in every way; return how the saves ended."""
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )

    import ckptd_megatron

    rank = dist.get_rank()
    whole = ShardedTensor.from_rank_offsets

    def broken(*args: Any) -> Any:
        raise LookupError(rank) if rank else ArithmeticError

    def built(*args: Any) -> Any:
        return broken() if rank else [whole("f", torch.ones(2))]

    large = torch.zeros(257 << 20, dtype=torch.uint8, device="meta") if rank else torch.ones(1)
    made = ShardedTensorFactory("f", torch.ones(2), built, torch.cat)
    cases: dict[str, dict[str, Any]] = {
        "large": {"o": ShardedObject("o", large, (2,), (rank,))},
        "factory": {"f": made},
        "no main": {"x": whole("x", torch.ones(4), replica_id=1)},
        "same name": {"w": 5},
        "number": {7: {"a": 1}},
        "shard": {"x/shard_0_1": 5},
    }
    ends = {}
    for name, case in cases.items():
        mine = {"a": whole("w", torch.ones(4) + rank, (0, rank, 2))} | case
        for save in (ckptd_megatron.save, ckptd_megatron.async_save):

            def call(save: Any = save, mine: Any = mine) -> None:
                future = save(root, 1, mine)
                if future is not None:
                    future.result()

            ends[f"{name} {save.__name__}"] = refused(call)
    load = {"f": ShardedTensorFactory("f", torch.ones(2), built, torch.cat)}
    ends["load"] = refused(lambda: ckptd_megatron.load(root, load))
    assert ckptd_megatron.latest(root) is None
    # Of replicas that differ the main one is saved, whichever rank has it, and of what place.
    for step, main in ((1, 0), (2, 1)):
        mine = {"x": whole("x", torch.ones(4) + rank, replica_id=2 * abs(main - rank))}
        mine["other"] = whole("x", torch.zeros(4), replica_id=2 * rank + 1)
        items = mine.items()
        ckptd_megatron.save(root, step, dict(items if main else reversed(items)))
        found = ckptd_megatron.load(root, {"x": whole("x", torch.zeros(4))})
        assert found["x"].tolist() == [1.0 + main] * 4
    return ends


def test_what_one_rank_cannot_save_ends_the_save_of_all(tmp_path: Path) -> None:
    kinds = {
        "large": "unsavable",
        "factory": "LookupError",
        "no main": "CheckpointingException",
        "same name": "structure",
        "number": "unsavable",
        "shard": "unsavable",
    }
    saves = ("save", "async_save")
    wanted = {f"{name} {save}": kind for name, kind in kinds.items() for save in saves}
    found = run_ranks(2, alone, str(tmp_path / "root"), deadline_s=120.0)
    assert found == [wanted | {"load": "LookupError"}] * 2


def lacking(root: str) -> list[str]:
    """Load states that the checkpoint has in part or in other types; return what is logged."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    import ckptd_megatron

    whole = ShardedTensor.from_rank_offsets

    def built(key: str, data: Any, *rest: Any) -> dict[str, Any]:
        return {name: whole(name, half) for name, half in zip("ab", data.chunk(2), strict=True)}

    def joined(parts: dict[str, Any]) -> Any:
        return torch.cat([parts["a"], parts["b"]])

    def state(dtype: torch.dtype, lacks: bool) -> dict[str, Any]:
        made = ShardedTensorFactory("ab", torch.zeros(4), built, joined)
        return {"w": whole("w", torch.zeros(2, dtype=dtype))} | (
            {"in": {"f": made}} if lacks else {}
        )

    ckptd_megatron.save(root, 1, {"w": whole("w", torch.ones(2)), "a": whole("a", torch.ones(2))})
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckptd_megatron.loading").addHandler(handler)
    found = ckptd_megatron.load(root, state(torch.float32, lacks=True), strict=False)
    assert list(found) == ["w"]
    assert ckptd_megatron.load(root, state(torch.float64, lacks=False))["w"].tolist() == [1.0, 1.0]
    assert ckptd_megatron.load(root, state(torch.float16, lacks=False))["w"].tolist() == [1.0, 1.0]
    assert refused(lambda: ckptd_megatron.load(root, state(torch.int32, lacks=False))) == "mismatch"
    return logged


def test_a_state_that_a_checkpoint_has_in_part(tmp_path: Path) -> None:
    ((first, second),) = run_ranks(1, lacking, str(tmp_path / "root"), deadline_s=120.0)
    assert first == "the checkpoint lacks b"
    assert second.endswith("w (torch.float32 to torch.float16)")


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

    with pytest.raises(UsageError, match="non-tensor") as caught:
        storable({"a": [torch.empty(1 << 26, dtype=torch.float64, device="meta")]}, "x")
    assert caught.value.where == "x.a[0]"
