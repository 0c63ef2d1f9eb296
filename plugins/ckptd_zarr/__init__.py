"""A checkpoint as a read-only store of Zarr: `zarr_store`."""

from __future__ import annotations

try:
    from ckptd_zarr.store import zarr_store
except ModuleNotFoundError as error:
    if error.name != "zarr":
        raise
    raise ImportError(
        "ckptd_zarr needs zarr, which is not installed: pip install 'ckptd[zarr]'", name="zarr"
    ) from error

__all__ = ["zarr_store"]
