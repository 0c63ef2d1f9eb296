"""Real ranks publish, and real workers pull: other cuts, several versions, both transports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

import ckptd
from ckptd.errors import CkptdError
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S
from tests.publish.jobs import TRAINER, WORKER, worker_part
from tests.reshard.torch.layout.jobs import Tree, chunks, differing, whole

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]


def world(place: str, far: bool) -> list[list[str]]:
    """Two ranks publish three versions, two others have each of them."""
    rank = dist.get_rank()
    trainers, workers = dist.new_group([0, 1]), dist.new_group([2, 3])
    found: list[list[str]] = []
    if rank < 2:
        module = Tree(chunks(whole(1), rank, 2))
        with ckptd.Publisher(TRAINER, place, process_group=trainers) as publisher:
            for step in (1, 2, 3):
                for name, tensor in chunks(whole(step), rank, 2).items():
                    module.get_parameter(name).data.copy_(tensor)
                publication = publisher.publish(step, {"model": module})
                assert not publication.skipped
                assert publication.wait(PATIENCE_S)
                dist.barrier()
                dist.barrier()
        return found
    part = Tree(worker_part(whole(99), rank - 2))
    with ckptd.Subscriber(WORKER, part, place, group=workers) as subscriber:
        subscriber._far = far
        assert subscriber.version is None
        for step in (1, 2, 3):
            dist.barrier()
            report = subscriber.update(wait_s=60)
            assert report is not None
            assert subscriber.version == report.version
            assert report.version.step == step
            moved = report.bytes_received if far else report.bytes_mapped
            whole_too = step == 1 or not far  # after that what changed is enough
            assert moved == report.bytes_needed if whole_too else 0 < moved < report.bytes_needed
            assert report.bytes_needed == sum(t.nbytes for t in part.state_dict().values())
            found.append(differing(dict(part.state_dict()), worker_part(whole(step), rank - 2)))
            assert subscriber.update() is None
            dist.barrier()
    return found


def rollouts(place: str) -> list[tuple[list[str], int, int]]:
    """Two ranks publish three versions, three rollouts of two ranks take them of each other."""
    rank = dist.get_rank()
    groups = [dist.new_group([r, r + 1]) for r in (0, 2, 4, 6)]
    found = []
    os.environ["CKPTD_NODE"] = f"node-{rank // 2}"
    if rank < 2:
        module = Tree(chunks(whole(1), rank, 2))
        with ckptd.Publisher(TRAINER, place, process_group=groups[0]) as publisher:
            for step in (1, 2, 3):
                for name, tensor in chunks(whole(step), rank, 2).items():
                    module.get_parameter(name).data.copy_(tensor)
                assert publisher.publish(step, {"model": module}, wait_s=60).wait(PATIENCE_S)
                dist.barrier()
                dist.barrier()
        return []
    part = Tree(worker_part(whole(99), rank % 2))
    group = groups[rank // 2]
    with ckptd.Subscriber(WORKER, part, place, group=group, pass_on=True) as subscriber:
        for step in (1, 2, 3):
            dist.barrier()
            report = subscriber.update(wait_s=60)
            assert report is not None
            assert report.version.step == step
            differ = differing(dict(part.state_dict()), worker_part(whole(step), rank % 2))
            found.append((differ, report.bytes_received, report.bytes_passed))
            dist.barrier()
    return found


def test_rollouts_take_of_each_other_what_a_trainer_sends_once(tmp_path: Path) -> None:
    done = run_ranks(8, rollouts, str(tmp_path / "at"), deadline_s=PATIENCE_S)[2:]
    for step in range(3):
        assert [one[step][0] for one in done] == [[]] * 6
        for tp in (0, 1):  # each rank of a rollout needs other bytes
            alike = [one[step] for one in done[tp::2]]
            assert len({received for _, received, _ in alike}) == 1
            assert sum(r - passed for _, r, passed in alike) == alike[0][1]


def often(place: str) -> list[object]:
    """Publish and update many times; return how the keys of the job's store grow, and more."""
    rank = dist.get_rank()
    state = {"model": Tree(chunks(whole(1), rank, 2))}
    store = dist.distributed_c10d._get_default_store()
    workers = dist.new_group()
    part = Tree(worker_part(whole(99), rank))
    keys: list[int] = []
    ends: list[str] = []
    with (
        ckptd.Publisher(TRAINER, place) as publisher,
        ckptd.Subscriber(WORKER, part, place, group=workers) as subscriber,
    ):
        first = publisher.publish(0, state)
        for step in range(1, 211):
            bad = step % 70 == 35  # on one rank alone
            publication = None
            try:
                if bad and rank and step == 105:
                    publisher.publish(1.5, state)  # type: ignore[arg-type]
                publication = publisher.publish(step, {} if bad and rank else state)
                assert not publication.skipped
                publication.wait(PATIENCE_S)
            except CkptdError as error:
                ends.append(error.kind if error.kind == "aborted" else error.message)
            subscriber.update()
            if step % 70 == 0:
                dist.barrier()
                keys.append(store.num_keys())
                dist.barrier()
        assert publication is not None
        assert publication.wait(PATIENCE_S)
        assert first.wait(0.0)  # long ago
    assert differing(dict(part.state_dict()), worker_part(whole(1), rank)) == []
    return [keys, ends]


def test_many_versions_leave_nothing_in_the_jobs_store(tmp_path: Path) -> None:
    done = run_ranks(2, often, str(tmp_path / "at"), deadline_s=PATIENCE_S)
    keys = done[0][0]
    assert keys[-1] <= keys[0] + 2 * 64, keys
    other = "the state's tensors differ from those of the first publish"
    assert [ends for _, ends in done] == [["aborted"] * 3, [other, "invalid step", other]]


@pytest.mark.parametrize("far", [False, True])
def test_each_version_is_what_the_trainer_had(tmp_path: Path, far: bool) -> None:
    done = run_ranks(4, world, str(tmp_path / "at"), far, deadline_s=PATIENCE_S)
    assert done[2:] == [[[], [], []]] * 2
