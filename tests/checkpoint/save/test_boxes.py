"""A root for frameworks that cut tensors by themselves: plan, shares, commit."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptd.checkpoint.format.names import CommitName, commit_key
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.leases import hold_or_read, leases
from ckptd.checkpoint.root.opening import root_spec
from ckptd.checkpoint.save import BoxRoot, BoxSave, BoxTensor
from ckptd.errors import CkptdError, StoreError, UsageError
from ckptd.store.base import innermost
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


ALL = Box.whole((4, 5))
WHOLE_W = {"w": tensor((0, ALL))}


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


def test_a_tensor_of_one_byte_is_written_after_another(tmp_path: Path) -> None:
    ones = {n: BoxTensor("uint8", (1,), [(0, Box((0,), (1,)))]) for n in "abc"}
    with BoxRoot(str(tmp_path)) as root:
        save = root.begin(1, 1, ones)
        part = root.write(save, 0, lambda name, _: np.frombuffer(name.encode(), np.uint8), {})
        root.commit(save, [part])
        with root.open() as reader:
            assert b"".join(reader.tensor(n).tobytes() for n in "abc") == b"abc"


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
        ([(0, ALL), (1, Box((0, 4), (4, -1)))], "Box"),
        ([(0, Box((0,), (4,)))], "Box"),
        ([(0, ALL), (0, Box((0, 0, 0), (4, 5, 1)))], "Box"),
        ([(0, ALL), (2, ALL)], "rank 2"),
        ([(-1, ALL)], "rank -1"),
    ],
    ids=[
        "overlap",
        "hole",
        "none",
        "outside",
        "negative",
        "flat",
        "deep",
        "beyond",
        "below",
    ],
)
def test_boxes_that_make_no_whole(boxes: list[tuple[int, Box]], found: str, tmp_path: Path) -> None:
    with BoxRoot(str(tmp_path)) as root:
        with pytest.raises(CkptdError) as caught:
            root.begin(1, 2, {"w": tensor(*boxes)})
        assert "the boxes of a tensor do not cover it exactly" in caught.value.message
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
        write(new, new.begin(2, 1, whole, new_run=False), 1)
    with root_spec(str(tmp_path)).open() as store:
        assert [n.step for n in Catalogue(store).line()] == [1, 2]
    with BoxRoot(str(tmp_path)) as fresh:
        write(fresh, fresh.begin(1, 1, whole, new_run=True), 1)
        assert fresh.latest() == 1


def test_a_root_that_hides_a_model_begins_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    file = len(header).to_bytes(8, "little") + header + b"\0"
    (tmp_path / "model.safetensors").write_bytes(file)
    with BoxRoot(str(tmp_path)) as root:
        write(root, root.begin(1, 1, WHOLE_W), 1)
    (said,) = [r.getMessage() for r in caplog.records if "hides" in r.message]
    assert said.startswith(f"{tmp_path} holds a checkpoint of the format hf")
    caplog.clear()
    with BoxRoot(str(tmp_path)) as root:
        write(root, root.begin(2, 1, WHOLE_W, new_run=False), 1)
    assert not caplog.records, "a root that is there hides nothing anew"


def test_what_is_read_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def keepers() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name == "ckptd-lease"]

    true, tries = hold_or_read, []

    def hold(catalogue: Any, name: CommitName, **options: Any) -> Any:
        tries.append(name.step)
        if len(tries) == 1:  # it is deleted meanwhile, because a newer one came
            write(root, root.begin(2, 1, WHOLE_W), 1)
            (tmp_path / commit_key(name)).unlink()
        return true(catalogue, name, **options)

    with BoxRoot(str(tmp_path)) as root:
        write(root, root.begin(1, 1, WHOLE_W), 1)
        monkeypatch.setattr("ckptd.checkpoint.root.leases.hold_or_read", hold)
        with root.open() as reader, root_spec(str(tmp_path)).open() as store:
            assert (tries, reader.commit.step) == ([1, 2], 2)
            assert [lease.step for lease in leases(Catalogue(store)).values()] == [2]
            assert keepers(), "nothing renews the lease"
        assert not keepers()
        assert not list(tmp_path.glob("leases/*"))
        assert not caplog.records
        (tmp_path / "leases").touch()  # no lease can be written
        for step in (None, 2):
            with root.open(step) as reader:
                assert (reader.tensor("w") == WHOLE).all()
            assert "without one" in caplog.records.pop().getMessage()


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    with BoxRoot(str(tmp_path)) as root:
        save = root.begin(1, 3, {"w": tensor(*PINWHEEL)})
        parts = [root.write(save, r, values, {"o": 1} if r else {}) for r in range(3)]
        for given, what in (
            (parts[:2], "one part of each rank"),
            ([*parts, parts[0]], "one part of each rank"),
            ([*parts[:2], parts[0]], "one part of each rank"),
            (parts, "the same object"),
        ):
            with pytest.raises(CkptdError, match=what) as caught:
                root.commit(save, given)
            assert caught.value.kind == "structure"
        with pytest.raises(CkptdError) as caught:
            root.write(save, 0, values, {"f": len})
        assert caught.value.kind == "unsavable"
        assert root.latest() is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"w": BoxTensor("float33", (4, 5), [(0, ALL)])}, "unknown dtype"),
        ({"": tensor((0, ALL))}, "invalid name"),
        ({"a\nb": tensor((0, ALL))}, "invalid name"),
        ({"x" * 5000: tensor((0, ALL))}, "invalid name"),
    ],
    ids=["dtype", "empty", "line", "long"],
)
def test_tensors_that_cannot_be_saved(
    given: dict[str, BoxTensor], words: str, tmp_path: Path
) -> None:
    with BoxRoot(str(tmp_path)) as root:
        with pytest.raises(UsageError) as caught:
            root.begin(1, 1, given)
        assert words in caught.value.message
        assert not list(tmp_path.iterdir())


def test_objects_that_cannot_be_saved(tmp_path: Path) -> None:
    with BoxRoot(str(tmp_path)) as root:
        save = root.begin(1, 2, WHOLE_W)
        with pytest.raises(UsageError) as caught:
            root.write(save, 0, values, {"a\nb": 1})
        assert "invalid name" in caught.value.message
        for value in (1, "y" * 40_000):
            parts = [root.write(save, r, values, {"w": value} if r else {}) for r in range(2)]
            with pytest.raises(CkptdError, match="a tensor's name") as failed:
                root.commit(save, parts)
            assert (failed.value.kind, failed.value.where) == ("structure", "w")
        assert root.latest() is None


def test_a_step_is_committed_once(tmp_path: Path) -> None:
    with BoxRoot(str(tmp_path)) as root:
        root.begin(1, 1, WHOLE_W)
        write(root, root.begin(1, 1, WHOLE_W), 1)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CkptdError) as caught:
            root.begin(1, 1, WHOLE_W)
        assert caught.value.kind == "behind"
        assert sorted(tmp_path.rglob("*")) == before
        # As of the checkpointer, what was loaded is behind as well.
        with root.open() as reader:
            root.loaded(reader)
        with pytest.raises(CkptdError) as caught:
            root.begin(1, 1, WHOLE_W)
        assert caught.value.kind == "behind"
        write(root, root.begin(2, 1, WHOLE_W), 1)


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@pytest.mark.parametrize("other", [False, True], ids=["gone", "other"])
@pytest.mark.parametrize("when", ["load", "begin", "write", "commit"])
def test_a_root_that_is_gone(when: str, other: bool, tmp_path: Path) -> None:
    """Nothing is written where the root was, and not into the one that is there instead."""
    place = tmp_path / "root"
    halves = {"w": tensor((0, Box((0, 0), (2, 5))), (1, Box((2, 0), (2, 5))))}
    with BoxRoot(str(place)) as one, BoxRoot(str(place)) as two, BoxRoot(str(place)) as new:
        write(one, one.begin(1, 2, halves), 2)
        with new.open() as reader:
            new.loaded(reader)
        save = one.begin(2, 2, halves)
        parts = [root.write(save, rank, values, {}) for rank, root in enumerate((one, two))]
        shutil.rmtree(place)
        if other:
            with BoxRoot(str(place)) as third:
                write(third, third.begin(1, 2, halves), 2)
        before = files(place)
        late = BoxRoot(str(place))
        calls: dict[str, list[Callable[[], Any]]] = {
            "load": [lambda: new.begin(2, 2, halves)],
            "begin": [lambda: one.begin(3, 2, halves)],
            "write": [
                lambda: one.write(save, 0, values, {}),
                lambda: two.write(save, 1, values, {}),
                lambda: late.write(save, 1, values, {}),
            ],
            "commit": [lambda: one.commit(save, parts), lambda: late.commit(save, parts)],
        }
        for call in calls[when]:
            with pytest.raises(CkptdError) as caught:
                call()
            assert caught.value.kind == ("other-root" if other else "root-gone")
            assert files(place) == before


@pytest.mark.parametrize("call", ["put", "sync"])
def test_a_file_that_is_not_whole_is_removed(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BoxRoot(str(tmp_path)) as root:
        save = root.begin(1, 1, WHOLE_W)
        before = files(tmp_path)

        def fail(*given: object, **options: object) -> None:
            raise StoreError("the disk is full", kind="no-space")

        with monkeypatch.context() as patch:
            patch.setattr(innermost(root._store), call, fail)
            with pytest.raises(StoreError, match="full"):
                root.write(save, 0, values, {})
        assert files(tmp_path) == before
        root.commit(save, [root.write(save, 0, values, {})])


def test_what_tensors_and_saves_have_in_common_is_planned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    owners = BoxTensor.owners

    def counted(given: BoxTensor, name: str) -> Any:
        made.append(name)
        return owners(given, name)

    monkeypatch.setattr(BoxTensor, "owners", counted)
    cuts = {"a": tensor(*PINWHEEL), "b": tensor(*PINWHEEL), "c": tensor((2, ALL))}
    with BoxRoot(str(tmp_path)) as root:
        first = root.begin(1, 3, cuts)
        again = root.begin(2, 3, {name: tensor(*cut.boxes) for name, cut in cuts.items()})
        assert again.plan is first.plan
        assert made == ["a", "c"]
        fewer = root.begin(3, 3, {"a": tensor(*PINWHEEL)})
        assert [t.name for t in fewer.plan.tensors] == ["a"]
        with pytest.raises(UsageError):
            root.begin(4, 2, cuts)
        assert root.begin(5, 4, cuts).plan.world == 4
