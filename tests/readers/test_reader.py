"""What a format must implement is enough for the tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.runtime.pool import batches
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.format.words import TensorLayout
from ckptd.checkpoint.load.source import Array, CheckpointReader, TensorInfo
from ckptd.checkpoint.tools.diff import diff
from ckptd.errors import NotFoundError
from ckptd.reshard.export import plan_export, run_export
from ckptd.types import DTYPES, Box


class ArrayReader(CheckpointReader):
    """A checkpoint of a format that is nothing but arrays and values."""

    def __init__(self, arrays: Mapping[str, Array], values: Mapping[str, Any]) -> None:
        self.url, self.title, self.program = "arrays://", "the arrays", ""
        self._arrays = arrays
        self.entries = [ObjectEntry(name, value=value) for name, value in values.items()]

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(name, DTYPES[str(a.dtype)], a.shape, (f"{name}.tied",))
            for name, a in self._arrays.items()
        }

    def read(
        self, wanted: Sequence[tuple[str, Box]], *, allow_absent: bool = False
    ) -> Sequence[Array]:
        return [
            np.ascontiguousarray(
                self._arrays[self.find(name)][
                    tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                ]
            )
            for name, box in wanted
        ]

    def raw_object(self, entry: ObjectEntry) -> Any:
        return entry.value

    def grid(self, name: str) -> Grid:
        return Grid(tuple(Axis(((n, 1),)) for n in self.info(name).shape))

    def layout(self, name: str) -> TensorLayout:
        return TensorLayout("whole", (1,), False, 1, 0, "0")

    def absent_elements(self, name: str) -> int:
        return 0


def arrays() -> dict[str, Array]:
    rng = np.random.default_rng(3)
    return {
        "model.w": rng.normal(size=(5, 7)).astype(np.float32),
        "model.b": rng.normal(size=4).astype(ml_dtypes.bfloat16),
        "optim.s": np.arange(3),
    }


def test_a_tensor_is_found_by_each_of_its_names() -> None:
    reader = ArrayReader(arrays(), {"step": 3})
    assert reader.names == ["model.w", "model.b", "optim.s"]
    assert reader.find("nope", "model.w.tied") == "model.w"
    assert reader.find("nope") == ""
    assert reader.info("model.b.tied").nbytes == 8
    assert reader.tensor("model.w.tied").tobytes() == arrays()["model.w"].tobytes()
    assert reader.objects() == {"step": 3}
    with pytest.raises(NotFoundError, match="no such tensor"):
        reader.tensors(["model.w", "nope"])


@pytest.mark.parametrize("most", [1, 13, 28, 100, 1000])
def test_slabs_are_the_tensor(most: int) -> None:
    reader, found = ArrayReader(arrays(), {}), np.zeros((5, 7), dtype=np.float32)
    for box, values in reader.slabs("model.w", most):
        assert values.nbytes <= max(most, 4)
        found[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] = values
    assert found.tobytes() == arrays()["model.w"].tobytes()


def test_formats_are_compared() -> None:
    other = arrays()
    other["model.w"][2, 3] += 1
    left, right = ArrayReader(arrays(), {"step": 3}), ArrayReader(other, {"step": 4})
    assert diff(left, left).same
    for budget in (8, 1 << 20):
        report = diff(left, right, budget_bytes=budget)
        assert [t.name for t in report.tensors if not t.same] == ["model.w"]
        assert [t.differing for t in report.tensors] == [1, 0, 0]
        assert [o.name for o in report.objects] == ["step"]


def test_formats_are_exported(tmp_path: Path) -> None:
    reader = ArrayReader(arrays(), {"step": 3})
    plan = plan_export(reader, untie=False)
    assert plan.objects == ("step",)
    run_export(reader, plan, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert set(file.keys()) == {"w", "b"}
        assert file.get_tensor("w").tobytes() == arrays()["model.w"].tobytes()


def test_batches() -> None:
    assert list(batches([3, 3, 9, 1, 1], lambda n: n, 6)) == [[3, 3], [9], [1, 1]]
    assert list(batches([], lambda n: n, 6)) == []
