"""Reading whole checkpoints back, whatever files they refer to."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptd.base.grids.block import box_region
from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.manifest import Manifest
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.load.plan import Want, read_plan
from ckptd.checkpoint.load.read import execute
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.tools.verify import verify
from ckptd.store.base import Store
from ckptd.types import Box

ROWS = 512
SHAPES: dict[str, tuple[int, ...]] = {f"frozen{i}": (ROWS, 512) for i in range(6)}
SHAPES |= {"hot": (ROWS, 512), "small": (16,)}
"""Six tensors and a hot one of 1 MiB, and one that is too small to be looked for."""
CHUNK = ROWS * 512 * 4


def read_back(store: Store, name: CommitName) -> dict[str, Any]:
    """Return every tensor of a checkpoint; digests are verified."""
    manifest = Catalogue(store).manifest(name)
    filemap = FileMap.of(manifest, "read_back")
    out, wants = {}, []
    for number, entry in enumerate(manifest.tensors):
        out[entry.name] = np.zeros(entry.shape, dtype=filemap.dtypes[number].numpy)
        region = box_region(Box((0,) * len(entry.shape), entry.shape))
        wants.append(Want(number, (region,), out[entry.name].reshape(-1)))
    execute(read_plan(manifest, filemap, wants, store=store), store, threads=1)
    return out


def assert_holds(store: Store, name: CommitName, arrays: dict[str, Any]) -> None:
    """Check that a checkpoint holds exactly these arrays, in files that are all there."""
    found = read_back(store, name)
    assert sorted(found) == sorted(arrays)
    for key, array in arrays.items():
        assert found[key].tobytes() == array.tobytes(), (name, key)


def assert_verified(store: Store, name: CommitName) -> None:
    """Check that a deep verification finds nothing."""
    report = verify(Catalogue(store), name)
    assert report.findings == ()


def own_bytes(manifest: Manifest) -> int:
    """Return the bytes that the checkpoint wrote itself."""
    return sum(f.data_bytes for f in manifest.files if f.path.startswith(manifest.folder))


def is_held(store: Store) -> bool:
    """Tell whether anything is leased."""
    return bool(store.children("leases/"))
