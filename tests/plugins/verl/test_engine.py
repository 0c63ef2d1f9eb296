"""verl's protocol, played: two actors send, a replica of two ranks and one of one rank receive."""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.errors import CkptdError, CorruptError
from ckptd.publish.torch.subscriber import UpdateReport
from ckptd.testing.ranks import run_ranks
from tests.plugins.verl.standin import base_module
from tests.processes import PATIENCE_S, until

ROUNDS = 3


def weights(number: int) -> dict[str, torch.Tensor]:
    """Return a policy's weights; the last round has a tensor more."""
    generator = torch.Generator().manual_seed(number)
    shapes: dict[str, tuple[int, ...]] = {f"model.layers.{i}.up.weight": (6, 4) for i in range(12)}
    shapes |= {f"model.layers.{i}.experts.{e}.w": (3, 2) for i in (1, 3) for e in range(4)}
    shapes |= {"model.embed.weight": (5, 4), "model.layers.2.odd{x}*,": (1,), "scale": ()}
    if number == ROUNDS:
        shapes["late.bias"] = (7,)
    out = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    out["model.embed.weight"] = out["model.embed.weight"].bfloat16()
    return out


def stream(number: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield from weights(number).items()


class Manager:
    """What verl's manager does between the sides, by files: it collects, and waits for both."""

    def __init__(self, folder: str, actor: bool, parties: int, **options: Any) -> None:
        self.folder, self.parties = Path(folder), parties
        self.name = f"{'actor' if actor else 'rollout'}.{id(self)}.{time.time_ns()}"
        base = base_module()
        importlib.import_module("ckptd_verl")
        options |= {"bucket_size": 1 << 20, "at": str(self.folder / "at")}
        if actor:
            options["is_master"] = dist.get_rank() == 0
        self.engine = base.CheckpointEngineRegistry.new("ckptd", **options)
        self.backend = base.CheckpointEngineRegistry.get("ckptd")

    def topology(self, number: int) -> None:
        """Prepare all, and give each what the engine makes of it."""
        found = self.folder / f"round.{number}.json"
        mine = self.engine.prepare()
        if mine:
            draft = self.folder / "draft"
            draft.write_text(json.dumps(mine))
            draft.rename(found)
        until(found.exists)
        of_actors, of_rollouts = self.backend.build_topology(2, 3, [json.loads(found.read_text())])
        assert {len(v) for v in of_actors.values()} == {2}
        assert {len(v) for v in of_rollouts.values()} == {3}
        self.engine.init_process_group(**{k: v[0] for k, v in of_actors.items()})

    def done(self, number: int) -> None:
        """Finalize, and wait until every party has."""
        self.engine.finalize()
        (self.folder / f"done.{number}.{self.name}").touch()
        until(lambda: len(list(self.folder.glob(f"done.{number}.*"))) == self.parties)


def actors(folder: str, parties: int) -> list[int]:
    """Send each round; return how many elements the rank keeps, of how many."""
    manager = Manager(folder, True, parties)
    for number in range(1, ROUNDS + 1):
        manager.topology(number)
        asyncio.run(manager.engine.send_weights(stream(number), global_steps=number))
        manager.done(number)
    kept = sum(t.numel() for t in manager.engine._shares.values())
    return [kept, sum(t.numel() for t in weights(ROUNDS).values())]


def rollouts(folder: str, parties: int, **options: Any) -> list[str]:
    """Receive each round; return what is not as the actors have it."""

    async def received() -> dict[str, torch.Tensor]:
        return {n: t.clone() async for n, t in manager.engine.receive_weights()}

    manager = Manager(folder, False, parties, **options)
    wrong = []
    for number in range(1, ROUNDS + 1):
        manager.topology(number)
        found, wanted = asyncio.run(received()), weights(number)
        assert list(found) == list(wanted)
        for name, tensor in wanted.items():
            if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
                wrong.append(f"{number}: {name}")
        manager.done(number)
    return wrong


@pytest.mark.dist
@pytest.mark.timeout(400)
def test_rollouts_get_what_actors_send(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with ThreadPoolExecutor(3) as pool:
        sent = pool.submit(run_ranks, 2, actors, folder, 5, deadline_s=PATIENCE_S)
        pair = pool.submit(run_ranks, 2, rollouts, folder, 5, deadline_s=PATIENCE_S)
        alone = pool.submit(run_ranks, 1, rollouts, folder, 5, deadline_s=PATIENCE_S)
        assert alone.result() == [[]]
        assert pair.result() == [[], []]
        kept = sent.result()
    assert all(mine < 0.65 * whole for mine, whole in kept)  # no actor keeps the model whole


def passed_on(folder: str) -> tuple[list[str], int]:
    """Receive each round; return what is wrong, and how many bytes came of another worker."""
    passed = 0
    with pytest.MonkeyPatch.context() as patch:
        update = ckptd.Subscriber.update

        def counted(subscriber: ckptd.Subscriber, wait_s: float) -> UpdateReport | None:
            nonlocal passed
            report = update(subscriber, wait_s)
            passed += 0 if report is None else report.bytes_passed
            return report

        patch.setattr(ckptd.Subscriber, "update", counted)
        return rollouts(folder, 4, pass_on=True), passed


@pytest.mark.dist
@pytest.mark.timeout(400)
def test_replicas_pass_on_what_actors_send(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with ThreadPoolExecutor(3) as pool:
        sent = pool.submit(run_ranks, 2, actors, folder, 4, deadline_s=PATIENCE_S)
        a, b = (
            pool.submit(run_ranks, 1, passed_on, folder, env={"CKPTD_NODE": host})
            for host in ("rollout-a", "rollout-b")
        )
        (wrong_a, passed_a), (wrong_b, passed_b) = *a.result(), *b.result()
        sent.result()
    assert not [*wrong_a, *wrong_b]
    assert passed_a + passed_b > 0


def alone(folder: str) -> list[str]:
    """Receive what nobody sends, from a list of tensors that is none too; ranks differ in time."""
    base = base_module()
    importlib.import_module("ckptd_verl")
    rank = dist.get_rank()
    engine = base.CheckpointEngineRegistry.new(
        "ckptd", bucket_size=1 << 20, at=folder, wait_s=0.5 + rank * PATIENCE_S
    )
    engine.init_process_group(step=1)
    kinds = []

    async def receive() -> None:
        async for _ in engine.receive_weights():
            raise AssertionError("nothing was sent")

    for text in ("", "no tensors"):
        if text and rank == 0:
            (Path(folder) / "verl-tensors.json").write_text(text)
        try:
            asyncio.run(receive())
        except CkptdError as error:
            kinds.append(error.kind)
    return kinds


@pytest.mark.dist
def test_ranks_of_a_replica_give_up_together(tmp_path: Path) -> None:
    done = run_ranks(2, alone, str(tmp_path), deadline_s=PATIENCE_S)
    assert done == [["no-version", "corrupt"]] * 2


def test_what_actors_have_is_read_back_or_refused(tmp_path: Path) -> None:
    base_module()
    shares = importlib.import_module("ckptd_verl.shares")
    tensors = {n: shares.WholeTensor.of(t) for n, t in weights(1).items()}
    path = tmp_path / "tensors.json"
    assert shares.read_published(path) is None
    published = shares.Published("17", tensors)
    shares.write_published(path, published)
    assert shares.read_published(path) == published
    good = path.read_text()
    places, shapes = ('"../x"', '"17\\n"', "17", '"17","more":1'), ('["x"]', "[-1]", "[true]", "3")
    bad = [('"17"', new) for new in places] + [("[6,4]", new) for new in shapes]
    for old, new in [*bad, ("{", "["), ('"float32"', "1")]:
        assert old in good
        path.write_text(good.replace(old, new))
        with pytest.raises(CorruptError, match="tensors"):
            shares.read_published(path)


def test_tensors_that_are_numbered_are_one_rule() -> None:
    base_module()
    shares = importlib.import_module("ckptd_verl.shares")
    text = shares.shares_layout({n: shares.WholeTensor.of(t) for n, t in weights(1).items()}, 2)
    assert '"model.layers.{i0}.up.weight"' in text
    assert text.count("@dp:ceil") == 1 + 2 + 3
