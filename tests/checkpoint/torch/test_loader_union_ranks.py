"""Real ranks, fewer than those that saved, load from what is left of two nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.base.torch.ranks import Agreement, board_of, global_ranks
from ckptd.checkpoint.format.names import digests_key, file_key, part_key
from ckptd.checkpoint.load.union import UnionSource
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.torch.loader import Loader
from ckptd.store.base import Store
from ckptd.store.local import LocalStore
from ckptd.testing.ranks import run_ranks
from tests.checkpoint.save.snapshotting import same
from tests.checkpoint.torch.test_loader_union import DAMAGE, Place, blank, flip, truth
from tests.processes import PATIENCE_S

pytestmark = [pytest.mark.usefixtures("writing_thread"), pytest.mark.dist, pytest.mark.timeout(400)]

Hurt = Callable[[Store, Store, str], None]


def hurt(kind: str) -> Hurt:
    """Damage one rank's file on the first node only."""
    return lambda a, b, folder: DAMAGE[kind](a, file_key(folder, 1))


def crosswise(a: Store, b: Store, folder: str) -> None:
    flip(a, file_key(folder, 2))
    flip(b, digests_key(file_key(folder, 2)))


def both(a: Store, b: Store, folder: str) -> None:
    flip(a, file_key(folder, 2))
    flip(b, file_key(folder, 2))


def apart(a: Store, b: Store, folder: str) -> None:
    """Each node has lost what the other has."""
    a.delete([file_key(folder, 0), part_key(folder, 2)])
    b.delete([file_key(folder, 1), digests_key(file_key(folder, 2)), part_key(folder, 0)])


def gone(a: Store, b: Store, folder: str) -> None:
    for node in (a, b):
        node.delete([part_key(folder, 1)])


SCENES: dict[str, tuple[Hurt, int]] = {
    "whole": (lambda a, b, folder: None, 12),
    "flipped": (hurt("flipped"), 12),
    "truncated": (hurt("truncated"), 12),
    "missing": (hurt("missing"), 12),
    "apart": (apart, 12),
    "crosswise": (crosswise, 12),
    "flipped everywhere": (both, 10),
    "not complete": (gone, 10),
}


def load_all(top: str) -> dict[str, tuple[int, bool, list[str]]]:
    out = {}
    board = board_of(None, 60.0)
    for number, scene in enumerate(SCENES):
        folder = Path(top) / str(number)
        nodes = [LocalStore(folder / n) for n in "ab"]
        own, other = nodes[board.rank % 2], nodes[(board.rank + 1) % 2]
        near = [UnionSource(own, "memory"), UnionSource(other, "peer")]
        loader = Loader(
            Catalogue(LocalStore(folder / "root")),
            Agreement(board_of(None, 60.0), 60.0),
            global_ranks(None),
            60.0,
            near=lambda found=near: found,  # type: ignore[misc]
        )
        state = blank()
        report = loader.load(
            state,
            None,
            strict=True,
            only=None,
            rename=None,
            weights_only=False,
            device=None,
            progress=None,
        )
        out[scene] = (report.step, same(state, truth(report.step)), sorted(report.sources))
    return out


def test_three_ranks_saved_and_two_load(tmp_path: Path) -> None:
    for number, (damage, _) in enumerate(SCENES.values()):
        folder = tmp_path / str(number)
        nodes = [LocalStore(folder / n) for n in "ab"]
        place = Place(LocalStore(folder / "root"), list(nodes))
        place.commit(10)
        for node in nodes:
            key = place.snapshot(12, [node])
        damage(*nodes, key)
    for loaded in run_ranks(2, load_all, str(tmp_path), deadline_s=PATIENCE_S):
        assert {s: (step, good) for s, (step, good, _) in loaded.items()} == {
            scene: (step, True) for scene, (_, step) in SCENES.items()
        }
        assert "memory" in loaded["whole"][2]
