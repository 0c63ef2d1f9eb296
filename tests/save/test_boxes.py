"""A root for frameworks that cut tensors by themselves: plan, shares, commit."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptd.errors import CkptdError
from ckptd.root.catalogue import Catalogue
from ckptd.root.opening import root_spec
from ckptd.save import BoxRoot, BoxSave, BoxTensor
from ckptd.types import Box

U8 = NDArray[np.uint8]
WHOLE = np.arange(20, dtype=np.float32).reshape(4, 5)
PINWHEEL = [
    (0, Box((0, 0), (1, 4))),
    (1, Box((0, 4), (3, 1))),
    (2, Box((3, 1), (1, 4))),
    (1, Box((1, 0), (3, 1))),
    (2, Box((1, 1), (2, 3))),
]
"""No grid has these as its cells."""


def values(name: str, box: Box) -> U8:
    part = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
    return np.ascontiguousarray(WHOLE[part]).reshape(-1).view(np.uint8)


def tensor(*boxes: tuple[int, Box]) -> BoxTensor:
    return BoxTensor("float32", (4, 5), boxes)


def write(root: BoxRoot, save: BoxSave, world: int, objects: object = None) -> None:
    given = [{"o": objects}, *[{}] * (world - 1)]
    root.commit(save, [root.write(save, r, values, given[r]) for r in range(world)])


def test_boxes_that_are_no_grid(tmp_path: Path) -> None:
    with BoxRoot(str(tmp_path)) as root:
        save = pickle.loads(pickle.dumps(root.begin(1, 3, {"w": tensor(*PINWHEEL)})))
        write(root, save, 3, ["x" * 100] * 1000)
        with root.open() as reader:
            assert (reader.tensor("w") == WHOLE).all()
            assert reader.objects() == {"o": ["x" * 100] * 1000}
            files = reader.filemap.owners[0].array()
    # Each element is where one of the boxes puts it.
    assert sorted(set(files.tolist())) == [0, 1, 2]


def test_of_equal_boxes_the_first_is_written(tmp_path: Path) -> None:
    whole = Box.whole((4, 5))
    with BoxRoot(str(tmp_path)) as root:
        write(root, root.begin(1, 2, {"w": tensor((1, whole), (0, whole))}), 2)
        with root.open() as reader:
            assert [f.data_bytes for f in reader.manifest.files] == [0, 80]


@pytest.mark.parametrize(
    ("boxes", "found"),
    [
        ([(0, Box((0, 0), (4, 3))), (1, Box((0, 2), (4, 3)))], "overlap"),
        ([(0, Box((0, 0), (4, 3)))], "hole"),
        ([], "hole"),
        ([(0, Box((0, 0), (4, 6)))], "outside"),
    ],
    ids=["overlap", "hole", "none", "outside"],
)
def test_boxes_that_make_no_whole(boxes: list[tuple[int, Box]], found: str, tmp_path: Path) -> None:
    with BoxRoot(str(tmp_path)) as root:
        with pytest.raises(CkptdError) as caught:
            root.begin(1, 2, {"w": tensor(*boxes)})
        assert caught.value.kind == "placement"
        assert found in str(caught.value.found)
        assert not list(tmp_path.iterdir())


def test_boxes_by_chance(tmp_path: Path) -> None:
    """Cut again and again at random places: any pieces that cover a tensor make it whole."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        boxes = [Box((0, 0), (4, 5))]
        for _ in range(rng.integers(1, 8)):
            box = boxes.pop(rng.integers(len(boxes)))
            dim = int(rng.integers(2))
            at = int(rng.integers(0, box.shape[dim] + 1))
            for lo, n in ((0, at), (at, box.shape[dim] - at)):
                offset, shape = list(box.offset), list(box.shape)
                offset[dim], shape[dim] = offset[dim] + lo, n
                boxes.append(Box(tuple(offset), tuple(shape)))
        grid, owners = tensor(*enumerate(boxes)).owners("w")
        for cell, rank in enumerate(owners.tolist()):
            inner, outer = grid.cell_box(cell), boxes[rank]
            for o, n, q, m in zip(
                inner.offset, inner.shape, outer.offset, outer.shape, strict=True
            ):
                assert q <= o
                assert o + n <= q + m


def test_a_new_life_continues_what_it_loaded(tmp_path: Path) -> None:
    whole = {"w": tensor((0, Box.whole((4, 5))))}
    with BoxRoot(str(tmp_path)) as old, BoxRoot(str(tmp_path)) as new:
        assert old.latest() is None
        for step in (1, 2, 3):
            write(old, old.begin(step, 1, whole), 1)
        with new.open(2) as reader:
            new.loaded(reader)
        with pytest.raises(CkptdError) as caught:
            new.begin(2, 1, whole)
        assert caught.value.kind == "behind"
        late = old.begin(4, 1, whole)
        write(new, new.begin(3, 1, whole), 1)
        with pytest.raises(CkptdError) as caught:
            write(old, late, 1)
        assert caught.value.kind == "superseded"
        assert new.latest() == 3
        with new.open() as reader:
            assert reader.manifest.generation == 2


def test_a_process_that_loaded_nothing_does_not_go_on(tmp_path: Path) -> None:
    whole = {"w": tensor((0, Box.whole((4, 5))))}
    with BoxRoot(str(tmp_path)) as old:
        write(old, old.begin(1, 1, whole), 1)
    with BoxRoot(str(tmp_path)) as new:
        with pytest.raises(CkptdError) as caught:
            new.begin(2, 1, whole)
        assert caught.value.kind == "not-loaded"
        write(new, new.begin(2, 1, whole, fresh_line=False), 1)
    with root_spec(str(tmp_path)).open() as store:
        assert [n.step for n in Catalogue(store).line()] == [1, 2]
    with BoxRoot(str(tmp_path)) as fresh:
        write(fresh, fresh.begin(1, 1, whole, fresh_line=True), 1)
        assert fresh.latest() == 1


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    with BoxRoot(str(tmp_path)) as root:
        save = root.begin(1, 3, {"w": tensor(*PINWHEEL)})
        parts = [root.write(save, r, values, {"o": 1} if r else {}) for r in range(3)]
        for given, what in (
            (parts[:2], "every rank"),
            ([*parts, parts[0]], "every rank"),
            (parts, "one object"),
        ):
            with pytest.raises(CkptdError, match=what) as caught:
                root.commit(save, given)
            assert caught.value.kind == "structure"
        with pytest.raises(CkptdError) as caught:
            root.write(save, 0, values, {"f": len})
        assert caught.value.kind == "unsavable"
        assert root.latest() is None
