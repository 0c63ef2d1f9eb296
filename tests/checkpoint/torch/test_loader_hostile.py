"""A load of a manifest that lies in one number, or in two: refused by name, or the right bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import ckptd
from ckptd.base.digest import digest_hex
from ckptd.base.grids.grid import Axis, Grid
from ckptd.checkpoint.format.manifest import encode_manifest
from ckptd.checkpoint.format.records import encode_record
from ckptd.errors import CkptdError
from ckptd.store.local import LocalStore
from tests.checkpoint.load.builder import Saved, build

pytestmark = pytest.mark.usefixtures("writing_thread")

Where = tuple[str | int, ...]


def tensors() -> dict[str, Saved]:
    """Make tensors that are cut and stored alike, and others of the same and of other sizes."""
    rng = np.random.default_rng(1)

    def made(*shape: int) -> Any:
        return rng.integers(1, 255, shape).astype(np.float32)

    cells = Grid((Axis.from_sizes([2, 4]), Axis.from_sizes([3, 1])))
    runs = Grid((Axis.from_sizes([2]), Axis.from_sizes([5])), (Axis.from_sizes([4, 6]),))
    return {
        "a": Saved.rows(made(8, 3), 4),
        "b": Saved.rows(made(8, 3), 4),
        "c": Saved.whole(made(5), 1),
        "d": Saved.rows(made(9, 2), 3, 1),
        "e": Saved(made(6, 4), cells, [0, 1, 2, 0]),
        "f": Saved(made(2, 5), runs, [3, 0]),
        "g": Saved.whole(rng.integers(1, 99, 7), 0),
        "h": Saved.whole(np.array(3.5, np.float32), 2),
    }


def integers(tree: Any, path: Where = ()) -> Iterator[tuple[Where, int]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items if isinstance(tree, dict | list) else ():
        if type(value) is int:
            yield (*path, key), value
        else:
            yield from integers(value, (*path, key)) if isinstance(value, dict | list) else ()


def changed(tree: Any, changes: list[tuple[Where, int]]) -> bytes:
    tree = deepcopy(tree)
    for (*path, last), value in changes:
        at = tree
        for key in path:
            at = at[key]
        at[last] = value
    return json.dumps(tree).encode()


def lies(tree: Any, count: int) -> Iterator[list[tuple[Where, int]]]:
    """Yield lies in every number, and then in pairs of them."""
    rng, numbers = random.Random(1), list(integers(tree))
    ends = (0, -1, 1, 2**31, 2**32 + 1, 2**62, 2**63 - 1)

    def other(value: int) -> int:
        return rng.choice([*(value + d for d in (1, -1, 4, 4096, 2**32)), 2 * value, *ends])

    yield [(("owners", 0, 0, 0), 3), (("owners", 0, 0, 1), -1)]  # all lengths stay as they are
    for path, value in numbers:
        yield [(path, other(value))]
    for _ in range(count):
        (one, a), (two, b) = rng.sample(numbers, 2)
        step = rng.choice([1, -1, 2, 12])
        yield rng.choice([[(one, b), (two, a)], [(one, a + step), (two, b - step)]])


@pytest.mark.slow
def test_no_number_of_a_manifest_brings_wrong_bytes(tmp_path: Path) -> None:
    saved, store = tensors(), LocalStore(tmp_path / "root")
    built = build(store, saved)
    folder, commit = built.commit.folder, built.commit
    tree = json.loads(encode_manifest(built.manifest)[1])
    [record] = (tmp_path / "root" / "commits").iterdir()
    outcomes: list[str] = []
    with ckptd.Checkpointer(str(tmp_path / "other")) as ck:
        for lie in [[], *lies(tree, 100)]:
            raw = changed(tree, lie)
            (tmp_path / "root" / folder / commit.manifest).write_bytes(raw)
            stated = {"manifest_digest": digest_hex(raw), "manifest_bytes": len(raw)}
            record.write_bytes(encode_record(msgspec.structs.replace(commit, **stated)))
            live = {n: torch.zeros_like(torch.from_numpy(s.values)) for n, s in saved.items()}
            try:
                ck.load(live, source=str(tmp_path / "root"))
            except CkptdError as error:
                outcomes.append(error.kind)
                continue
            found = {n: t.numpy().tobytes() for n, t in live.items()}
            assert found == {n: s.values.tobytes() for n, s in saved.items()}, lie
            outcomes.append("right")
    assert outcomes[0] == "right"
    assert outcomes.count("corrupt") > 100
