"""Real ranks publish, and real workers pull: other cuts, several versions, both transports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import ckptd
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S
from tests.publish.jobs import TRAINER, WORKER, worker_part
from tests.train.layout.jobs import Tree, chunks, differing, whole

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
                assert publication.wait(60)
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
            assert (report.bytes_received if far else report.bytes_mapped) == report.bytes_needed
            assert report.bytes_needed == sum(t.nbytes for t in part.state_dict().values())
            found.append(differing(dict(part.state_dict()), worker_part(whole(step), rank - 2)))
            assert subscriber.update() is None
            dist.barrier()
    return found


@pytest.mark.parametrize("far", [False, True])
def test_each_version_is_what_the_trainer_had(tmp_path: Path, far: bool) -> None:
    done = run_ranks(4, world, str(tmp_path / "at"), far, deadline_s=PATIENCE_S)
    assert done[2:] == [[[], [], []]] * 2
