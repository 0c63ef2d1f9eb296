"""Checkpoints for distributed training.

The names below are the whole public Python API of the package root. Those that need torch or
zarr are imported on first use: ``import ckptd`` stays fast, and works on a machine without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckptd.errors import (
    CkptdError,
    ConflictError,
    CorruptError,
    DeadlineError,
    MismatchError,
    NotFoundError,
    RefusedError,
    SaveError,
    StoreError,
    TransientStoreError,
    UsageError,
    WorkerError,
)
from ckptd.version import __version__

if TYPE_CHECKING:
    from ckptd.format.codec import register
    from ckptd.save.tiers import Local, Memory, Peer
    from ckptd.tools.zarrview import zarr_store
    from ckptd.train import (
        Auto,
        Batches,
        Checkpointer,
        Every,
        Keep,
        LoadReport,
        PerRank,
        Rng,
        SaveHandle,
    )
    from ckptd.train.experts import ExpertMove, ExpertPrice, move_experts, placed
    from ckptd.train.publisher import Publisher
    from ckptd.train.relayout import relayout
    from ckptd.train.subscriber import Subscriber


__all__ = [
    "Auto",
    "Batches",
    "Checkpointer",
    "CkptdError",
    "ConflictError",
    "CorruptError",
    "DeadlineError",
    "Every",
    "ExpertMove",
    "ExpertPrice",
    "Keep",
    "LoadReport",
    "Local",
    "Memory",
    "MismatchError",
    "NotFoundError",
    "Peer",
    "PerRank",
    "Publisher",
    "RefusedError",
    "Rng",
    "SaveError",
    "SaveHandle",
    "StoreError",
    "Subscriber",
    "TransientStoreError",
    "UsageError",
    "WorkerError",
    "__version__",
    "move_experts",
    "placed",
    "register",
    "relayout",
    "zarr_store",
]

_TRAIN = frozenset(
    {
        "Auto",
        "Batches",
        "Checkpointer",
        "Every",
        "Keep",
        "LoadReport",
        "PerRank",
        "Rng",
        "SaveHandle",
    },
)
# numpy comes with this one, so it too is imported on first use.
_HOMES = dict.fromkeys(_TRAIN, "ckptd.train") | {
    "ExpertMove": "ckptd.train.experts",
    "ExpertPrice": "ckptd.train.experts",
    "Local": "ckptd.save.tiers",
    "Memory": "ckptd.save.tiers",
    "Peer": "ckptd.save.tiers",
    "Publisher": "ckptd.train.publisher",
    "Subscriber": "ckptd.train.subscriber",
    "move_experts": "ckptd.train.experts",
    "placed": "ckptd.train.experts",
    "register": "ckptd.format.codec",
    "relayout": "ckptd.train.relayout",
    "zarr_store": "ckptd.tools.zarrview",
}
_EXTRAS = {"torch": ("PyTorch", "train"), "zarr": ("zarr", "zarr")}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        called, extra = _EXTRAS[missing]
        raise ImportError(
            f"ckptd.{name} needs {called}, which is not installed: pip install 'ckptd[{extra}]'",
            name=missing,
        ) from error
    value: object = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
