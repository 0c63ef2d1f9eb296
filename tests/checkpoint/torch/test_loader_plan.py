"""What a load plans: few calls a tensor, and nothing that is of another state or checkpoint."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import ckptd
from ckptd.checkpoint.load.files import LocalFiles
from ckptd.errors import CorruptError, MismatchError
from ckptd.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("writing_thread")

PARAMETERS = 250


def _trained(seed: int = 0, parameters: int = PARAMETERS) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.ParameterList([nn.Parameter(torch.rand(4, 1 + i % 9)) for i in range(parameters)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return {"model": model, "optim": optimizer}


def _words(state: dict[str, Any]) -> bytes:
    """Return what `torch.save` writes of a state."""
    out = io.BytesIO()
    torch.save({k: v.state_dict() for k, v in state.items()}, out)
    return out.getvalue()


def _calls(function: Callable[[], object]) -> int:
    calls = [0]

    def note(frame: FrameType, event: str, _: object) -> None:
        calls[0] += event == "call"

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls[0]


def test_a_load_makes_few_calls_for_each_tensor(tmp_path: Path) -> None:
    found = []
    for number in (PARAMETERS, 2 * PARAMETERS):
        live = _trained(parameters=number)
        with ckptd.Checkpointer(str(tmp_path / str(number))) as ck:
            ck.save(1, live).durable()
            found.append(_calls(lambda ck=ck, live=live: ck.load(live)))
    # What a load costs besides, whatever there is in it, is left out.
    assert (found[1] - found[0]) / (4 * PARAMETERS) <= 20


def test_small_tensors_of_one_file_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, other = _trained(1), _trained(2)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, live).durable()
    reads: list[int] = []
    plain = LocalFiles.read_exact

    def read(files: LocalFiles, fd: int, file: int, start: int, view: memoryview) -> None:
        reads.append(len(view))
        plain(files, fd, file, start, view)

    monkeypatch.setattr(LocalFiles, "read_exact", read)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.load(other)
    assert _words(other) == _words(live)
    assert len(reads) <= 10  # 1,000 tensors: once to compare digests, and once to copy


def _values() -> Iterator[dict[str, torch.Tensor]]:
    """Yield states of the same names that differ in one thing from the one before."""
    a, b = torch.arange(16.0).view(4, 4), torch.arange(8.0)
    yield {"a": a, "b": b}
    yield {"a": a + 1, "b": b + 1}  # other values only
    yield {"a": a.view(2, 8) + 2, "b": b}
    yield {"a": (a + 3).view(2, 8).to(torch.float64), "b": b}
    yield {"a": (a + 4).view(2, 8).to(torch.int32), "b": b}
    yield {"a": b + 5, "b": a}
    yield {"a": a[:, 1:3] + 6, "b": torch.empty(0, 3)}
    yield {"b": a[:, 1:3] + 7, "a": torch.empty(0, 3)}
    yield {"a": torch.tensor(5.0), "b": torch.empty(3, 0)}


def _places(values: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield live states of that form, in memory of several kinds."""
    yield {n: torch.full_like(v, 99) for n, v in values.items()}
    whole = {n: torch.full((*v.shape, 3), 99).to(v.dtype) for n, v in values.items()}
    yield {n: v[..., 1] for n, v in whole.items()}
    yield {n: torch.full_like(v.mT if v.dim() == 2 else v, 99) for n, v in values.items()}
    yield {n: torch.full_like(v, 98) for n, v in values.items()}


def test_each_load_is_of_the_checkpoint_and_the_memory_that_are_there_now(tmp_path: Path) -> None:
    saved = [{n: t.clone() for n, t in values.items()} for values in _values()]
    with ckptd.Checkpointer(str(tmp_path / "saved")) as ck:
        for step, values in enumerate(saved, 1):
            ck.save(step, values).durable()
    with ckptd.Checkpointer(str(tmp_path / "own")) as own:
        load = partial(own.load, source=tmp_path / "saved")
        for wanted in saved:
            for place, live in enumerate(_places(wanted)):
                form = {n: (t.dtype, t.shape) for n, t in live.items()}
                before = {n: t.clone() for n, t in live.items()}
                for step, values in enumerate(saved, 1):
                    if form == {n: (t.dtype, t.shape) for n, t in values.items()}:
                        load(live, step)
                        assert all(torch.equal(live[n], values[n]) for n in values), step
                        before = {n: t.clone() for n, t in live.items()}
                        continue
                    if not place:
                        with pytest.raises(MismatchError):
                            load(live, step)
                        assert all(torch.equal(live[n], before[n]) for n in before), step


def _two_saved(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Save two states as steps 1 and 2; return them, and a third one that is live."""
    one, other = _trained(1), _trained(2)
    with ckptd.Checkpointer(str(folder / "saved")) as ck:
        ck.save(1, one).durable()
        ck.save(2, other).durable()
    return one, other, _trained(3)


def test_what_changed_between_two_loads_is_seen(tmp_path: Path) -> None:
    one, other, live = _two_saved(tmp_path)
    with ckptd.Checkpointer(str(tmp_path / "own")) as own:
        load = partial(own.load, source=tmp_path / "saved")
        for step, state in ((1, one), (2, other), (1, one)):
            load(live, step)
            assert _words(live) == _words(state)
        model, optimizer = live["model"], live["optim"]
        # A parameter in other memory, a moment that is another object, one that is gone.
        model[3].data = torch.full_like(model[3], 7.0)
        optimizer.state[model[4]]["exp_avg"] = torch.full_like(model[4], 7.0)
        del optimizer.state[model[5]]
        old = optimizer.state[model[6]]["exp_avg"]
        optimizer.state[model[6]]["exp_avg"] = old.new_empty(old.shape[::-1]).t()
        load(live, 2)
        assert _equal(live, other)
        # Another parameter under the same name; the optimizer does not know it.
        kept = model[7]
        model[7] = nn.Parameter(torch.full_like(kept, 7.0))
        load({"model": model}, 1, only="model.*")
        assert torch.equal(model[7], one["model"][7])
        assert torch.equal(kept, other["model"][7])
        model[7] = kept
        load(live, 1)
        assert _equal(live, one)
        # One that is of another shape is named, and nothing is written.
        model[8] = nn.Parameter(torch.zeros(2, 2))
        before = [p.clone() for p in model]
        with pytest.raises(MismatchError, match=r"model\.8"):
            load({"model": model}, 2, only="model.*")
        assert all(map(torch.equal, model, before))


def test_a_load_of_a_part_leaves_the_rest_and_the_next_one_takes_all(tmp_path: Path) -> None:
    one, other, live = _two_saved(tmp_path)
    with ckptd.Checkpointer(str(tmp_path / "own")) as own:
        load = partial(own.load, source=tmp_path / "saved")
        load(live, 1)
        load(live, 2, weights_only=True)
        assert _words({"model": live["model"]}) == _words({"model": other["model"]})
        assert _words({"optim": live["optim"]}) == _words({"optim": one["optim"]})
        load(live, 1, only=lambda name: name == "model.3")
        assert torch.equal(live["model"][3], one["model"][3])
        assert torch.equal(live["model"][4], other["model"][4])
        more = {**live, "extra": torch.zeros(3)}
        load(more, 1, strict=False)
        assert _words(live) == _words(one)
        with pytest.raises(MismatchError, match="extra"):
            load(more, 2)
        assert _words(live) == _words(one)
        load(live, 2, rename={})
        assert _words(live) == _words(other)


def _equal(live: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Compare by names and values: what was made again may stand in another order."""
    a, b = live["optim"].state_dict()["state"], saved["optim"].state_dict()["state"]
    same = a.keys() == b.keys() and all(
        a[k].keys() == b[k].keys() and all(torch.equal(a[k][n], b[k][n]) for n in a[k]) for k in a
    )
    return same and all(map(torch.equal, live["model"], saved["model"]))


@pytest.mark.parametrize("what", ["manifest.json*", "*.safetensors", "*.digests*", "witness*"])
def test_a_file_that_changes_after_a_load_is_found_by_the_next(tmp_path: Path, what: str) -> None:
    # The manifest of a small checkpoint has digests and witness.
    live = {**_trained(1), "more": nn.Linear(1024, 1100)}
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, live).durable()
    # What this process saved it would have in memory.
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.load(live)
        found = [f for f in tmp_path.rglob(what) if f.is_file()]
        assert found
        for file in found:
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 4
            file.write_bytes(raw)
            before = _words(live)
            with pytest.raises(CorruptError):
                ck.load(live)
            assert _words(live) == before
            raw[-1] ^= 4
            file.write_bytes(raw)
            ck.load(live)


def _load_other_cuts(root: str) -> list[bool]:
    rows, square = torch.arange(21.0).view(7, 3), torch.arange(16.0).view(4, 4)
    one, other = (init_device_mesh("cpu", (2,), mesh_dim_names=(n,)) for n in ("dp", "tp"))
    tall = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    cuts = [
        (rows, one, [Shard(0)]),
        (rows, other, [Shard(1)]),
        (rows, one, [Replicate()]),
        (square, one, [Shard(0)]),
        (square, tall, [Shard(0), Shard(1)]),
        (square, tall, [Shard(1), Replicate()]),
    ]
    right = []
    with ckptd.Checkpointer(f"{root}/saved") as ck:
        for step, (whole, mesh, placements) in enumerate(cuts, 1):
            live = {n: distribute_tensor(whole + i, mesh, placements) for i, n in enumerate("ab")}
            ck.save(step, live).durable()
    with ckptd.Checkpointer(f"{root}/own") as own:
        for step, (saved, _, _) in enumerate(cuts, 1):
            for whole, mesh, placements in cuts:
                if whole.shape != saved.shape:
                    continue
                zeros = {n: torch.zeros_like(whole) for n in "ab"}
                live = {n: distribute_tensor(t, mesh, placements) for n, t in zeros.items()}
                own.load(live, step, source=f"{root}/saved")
                full = [t.full_tensor() for t in live.values()]
                right.append(all(torch.equal(t, saved + i) for i, t in enumerate(full)))
    return right


@pytest.mark.dist
def test_each_load_is_of_the_cuts_that_are_there_now(tmp_path: Path) -> None:
    for right in run_ranks(2, _load_other_cuts, str(tmp_path)):
        assert right == [True] * 18
