"""verl's own manager and workers in Ray: two FSDP2 actors, a replica of two ranks, a late one.

``verl`` is in no extra: ``pip install verl==0.9.1`` beside vLLM, see `tests.plugins.vllm`.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.trainers.packages import needs

pytestmark = [
    pytest.mark.plugins,
    pytest.mark.dist,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),  # of verl, Ray and vLLM: many, in each version others
]

STEPS = 2


def test_rollouts_have_what_the_actors_have(tmp_path: Path) -> None:
    ray = needs("ray", "verl==0.9.1")
    base = needs("verl.checkpoint_engine.base", "verl==0.9.1")
    made = needs("verl.single_controller.ray", "verl==0.9.1")
    config = base.CheckpointEngineConfig(
        backend="ckptd",
        custom_backend_module="ckptd_verl",
        engine_kwargs={"ckptd": {"at": str(tmp_path / "at"), "wait_s": 120.0}},
    )
    workers = importlib.import_module("tests.plugins.verl.workers")
    rollout_config = base.RolloutConfig(name="vllm", checkpoint_engine=config)
    # Ray's processes find modules as this one does.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    # Its own folder, so that nothing is left behind; of a short name, for it has sockets.
    place = TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
    ray.init(
        _temp_dir=place.name,
        num_cpus=5,  # one for each worker; it starts as many processes at once
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )

    def group(kind: Any, ranks: int, *arguments: Any) -> Any:
        pool = made.RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
        cls = made.RayClassWithInitArgs(ray.remote(kind), *arguments)
        return made.RayWorkerGroup(pool, cls, device_name="cpu")

    def replica(ranks: int) -> Any:
        arguments = (rollout_config, None, workers.Filled())
        return workers.Replica(group(workers.Rollout, ranks, *arguments).workers)

    try:
        actors, first = group(workers.Actor, 2, config), replica(2)
        manager = base.CheckpointEngineManager(config, actors, [first])
        for step in range(1, STEPS + 1):
            actors.train(step)
            if step == STEPS:
                manager.add_replicas([replica(1)])
            manager.update_weights(global_steps=step)
            wanted = actors.whole()[0]
            held = ray.get([w.held.remote() for r in manager.replicas for w in r.workers])
            assert len(held) == (2 if step < STEPS else 3)
            for of_step, tensors in held:
                assert of_step == step
                assert list(tensors) == list(wanted)
                assert all(torch.equal(tensors[n], wanted[n]) for n in wanted)
        assert first.calls == ["abort", "release", "resume", "generate"] * STEPS
        assert all(share < 0.6 for share in actors.kept())  # no actor keeps the model whole
    finally:
        ray.shutdown()
        place.cleanup()
