"""No trainer publishes: a rollout loads the newest checkpoint of a root, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.errors import MismatchError, RefusedError
from ckptd.publish.torch.subscriber import WeightVersion
from ckptd.testing.ranks import run_ranks
from tests.keys import key_pair
from tests.processes import PATIENCE_S
from tests.publish.jobs import TRAINER, WORKER, worker_part
from tests.reshard.torch.layout.jobs import PROGRAM, Tree, chunks, differing, whole

pytestmark = pytest.mark.usefixtures("writing_thread")

ALONE = WORKER.replace("mesh T = tp:2", "mesh T = tp:1")
WHOLE = f"# layout hf\n{PROGRAM}"

Save = Callable[..., str]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Save whole models, with an optimizer's state, without a layout or with one."""

    def saved(*steps: int, **options: Any) -> str:
        root = str(tmp_path / "root")
        with ckptd.Checkpointer(root, new_run=False, **options) as ck:
            for step in steps:
                module = Tree(whole(step))
                optim = torch.optim.AdamW(module.parameters())
                torch.stack([p.sum() for p in module.parameters()]).sum().backward()
                optim.step()
                for name, tensor in whole(step).items():
                    module.get_parameter(name).data.copy_(tensor)
                ck.save(step, {"model": module, "optim": optim, "n": step})
        return root

    return saved


def rollout(root: str, place: Path, **options: Any) -> tuple[Tree, ckptd.Subscriber]:
    part = Tree(worker_part(whole(99), 0, 1))
    return part, ckptd.Subscriber(ALONE, part, str(place), root=root, **options)


def holds(part: Tree, seed: int) -> bool:
    return not differing(dict(part.state_dict()), worker_part(whole(seed), 0, 1))


@pytest.mark.parametrize("kept", [True, False])
def test_the_newest_checkpoint_is_loaded_through_both_layouts(
    save: Save, tmp_path: Path, kept: bool
) -> None:
    """Saved with its layout, which the checkpoint keeps; or without, and it is given here."""
    root = save(1, 2, **({"layout": WHOLE} if kept else {}))
    part, subscriber = rollout(root, tmp_path / "at", **({} if kept else {"root_layout": WHOLE}))
    with subscriber:
        report = subscriber.update()
        assert report is not None
        assert report.version == subscriber.version == (2, 0, "")
        assert holds(part, 2)
        assert subscriber.update() is None


def test_only_what_a_trusted_key_has_signed_is_loaded(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("blake3")
    private, public = key_pair(tmp_path, "release")
    root = save(1, layout=WHOLE, sign=private)
    monkeypatch.setenv("CKPTD_TRUST", public)
    part, subscriber = rollout(root, tmp_path / "at")
    with subscriber:
        assert subscriber.update() is not None
        monkeypatch.delenv("CKPTD_TRUST")
        save(2, layout=WHOLE)
        with pytest.raises(RefusedError, match="no trusted key has signed"):
            subscriber.update()
        assert holds(part, 1)


def test_it_never_goes_back_without_being_told(save: Save, tmp_path: Path) -> None:
    root = save(3, layout=WHOLE)
    part, subscriber = rollout(root, tmp_path / "at")
    with subscriber:
        assert subscriber.update() is not None
        subscriber._version = WeightVersion(4, 9, "of a trainer")
        part.get_parameter("norm.weight").data.fill_(7.0)
        assert subscriber.update() is None
        assert not holds(part, 3)
        report = subscriber.update(older=True)
        assert report is not None
        assert report.version.step == 3
        assert holds(part, 3)


def test_a_corrupt_checkpoint_is_passed_over(save: Save, tmp_path: Path) -> None:
    root = save(1, 2, layout=WHOLE)
    for file in (p for p in Path(root).rglob("*") if p.is_file() and "0000000002" in str(p)):
        if file.stat().st_size > 4096:
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2 : len(raw) // 2 + 64] = bytes(64)
            file.write_bytes(raw)
    part, subscriber = rollout(root, tmp_path / "at")
    with subscriber:
        report = subscriber.update()
        assert report is not None
        assert report.version.step == 1
        assert holds(part, 1)


def test_another_model_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    other = {n: t for n, t in whole(1).items() if n != "layers.1.up.weight"}
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"model": Tree(other)})
    part, subscriber = rollout(root, tmp_path / "at", root_layout=WHOLE)
    with subscriber, pytest.raises(MismatchError, match=r"layers\.1\.gate_up"):
        subscriber.update()
    assert holds(part, 99)
    assert subscriber.version is None


def test_a_root_without_checkpoints_gives_nothing(tmp_path: Path) -> None:
    part, subscriber = rollout(str(tmp_path / "none"), tmp_path / "at")
    with subscriber:
        assert subscriber.update() is None
    assert holds(part, 99)


def world(place: str, root: str) -> list[str]:
    """Two ranks save a step and publish the next one; then they are a rollout without a trainer."""
    rank = dist.get_rank()
    module = Tree(chunks(whole(1), rank, 2))
    with ckptd.Checkpointer(root, layout=TRAINER) as ck:
        ck.save(1, {"model": module})
    part = Tree(worker_part(whole(99), rank))
    group = dist.new_group([0, 1])
    found = []
    with ckptd.Subscriber(WORKER, part, place, group=group, root=root) as subscriber:
        subscriber._timeout_s = 1.0  # of which each look of rank 0 takes a half
        assert subscriber.update(wait_s=1.2) is not None
        subscriber._timeout_s = 60.0
        found.append(differing(dict(part.state_dict()), worker_part(whole(1), rank)))
        for name, tensor in chunks(whole(2), rank, 2).items():
            module.get_parameter(name).data.copy_(tensor)
        with ckptd.Publisher(TRAINER, place) as publisher:
            assert publisher.publish(2, {"model": module}).wait(PATIENCE_S)
            report = subscriber.update(wait_s=60)
        assert report is not None
        assert report.version.number
        found.append(differing(dict(part.state_dict()), worker_part(whole(2), rank)))
        assert subscriber.update() is None
    return [name for names in found for name in names]


@pytest.mark.dist
@pytest.mark.timeout(400)
def test_a_trainer_that_comes_takes_over_from_the_root(tmp_path: Path) -> None:
    done = run_ranks(2, world, str(tmp_path / "at"), str(tmp_path / "root"), deadline_s=PATIENCE_S)
    assert done == [[], []]
