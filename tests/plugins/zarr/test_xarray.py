"""A checkpoint as a data set of xarray, which has to know the dimensions of each array by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptd
from ckptd_zarr import zarr_store

pytestmark = [pytest.mark.plugins, pytest.mark.usefixtures("writing_thread")]
xarray = pytest.importorskip("xarray")


@pytest.mark.parametrize("consolidated", [True, False])
def test_a_checkpoint_is_a_data_set(tmp_path: Path, consolidated: bool) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    tensors = {"w": torch.ones(3, 3), "0": torch.arange(5), "step": torch.tensor(3)}
    state = {"w": tensors, "a": tied, "b": tied}
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.save(1, state)
    with zarr_store(str(tmp_path / "root")) as store:
        found = xarray.open_zarr(store, consolidated=consolidated)
        assert found["w.w"].values.tolist() == tensors["w"].tolist()
        assert found["w.0"].values.tolist() == [0, 1, 2, 3, 4]
        assert found["w.step"].item() == 3
        assert found["a"].identical(found["b"].rename("a").assign_attrs(found["a"].attrs))
        assert found["a"].isel({"a/0": 1}).values.tolist() == [3, 4, 5]
        assert not found.coords
