"""Public Python API of ``ckptd``: each name and its home, imported on first use.

The names below are the whole public Python API of the package root. Those that need torch are
imported on first use: ``import ckptd`` stays fast, and works on a machine without it.

Pages that docstrings and messages name, ``docs/guide/tiers.md`` for one, are in the folder of this
package; in a clone of the repository they are in the folder above.
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
    ProcessError,
    RefusedError,
    SaveError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from ckptd.version import __version__

if TYPE_CHECKING:
    from ckptd.checkpoint.format.codec import register
    from ckptd.checkpoint.root.auto import Auto
    from ckptd.checkpoint.root.policy import Every, Keep
    from ckptd.checkpoint.save.handle import SaveHandle
    from ckptd.checkpoint.save.tiers import Local, Memory, Peer
    from ckptd.checkpoint.torch.checkpointer import Checkpointer
    from ckptd.checkpoint.torch.data.batches import Batches
    from ckptd.checkpoint.torch.loader import LoadReport
    from ckptd.checkpoint.torch.options import CopyOptions, Preemption, Storage
    from ckptd.checkpoint.torch.state.leaves import PerRank
    from ckptd.checkpoint.torch.state.rng import Rng
    from ckptd.publish.torch.publisher import Publisher
    from ckptd.publish.torch.subscriber import Subscriber
    from ckptd.reshard.torch.experts import (
        ExpertMove,
        ExpertPrice,
        move_experts,
        with_expert_placement,
    )
    from ckptd.reshard.torch.relayout import relayout


__all__ = [
    "Auto",
    "Batches",
    "Checkpointer",
    "CkptdError",
    "ConflictError",
    "CopyOptions",
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
    "Preemption",
    "ProcessError",
    "Publisher",
    "RefusedError",
    "Rng",
    "SaveError",
    "SaveHandle",
    "Storage",
    "StoreError",
    "Subscriber",
    "TransientStoreError",
    "UsageError",
    "__version__",
    "move_experts",
    "register",
    "relayout",
    "with_expert_placement",
]

# numpy comes with the first of these, so it too is imported on first use.
_HOMES = {
    "Auto": "ckptd.checkpoint.root.auto",
    "Batches": "ckptd.checkpoint.torch.data.batches",
    "Checkpointer": "ckptd.checkpoint.torch.checkpointer",
    "CopyOptions": "ckptd.checkpoint.torch.options",
    "Every": "ckptd.checkpoint.root.policy",
    "ExpertMove": "ckptd.reshard.torch.experts",
    "ExpertPrice": "ckptd.reshard.torch.experts",
    "Keep": "ckptd.checkpoint.root.policy",
    "LoadReport": "ckptd.checkpoint.torch.loader",
    "Local": "ckptd.checkpoint.save.tiers",
    "Memory": "ckptd.checkpoint.save.tiers",
    "Peer": "ckptd.checkpoint.save.tiers",
    "PerRank": "ckptd.checkpoint.torch.state.leaves",
    "Preemption": "ckptd.checkpoint.torch.options",
    "Publisher": "ckptd.publish.torch.publisher",
    "Rng": "ckptd.checkpoint.torch.state.rng",
    "SaveHandle": "ckptd.checkpoint.save.handle",
    "Storage": "ckptd.checkpoint.torch.options",
    "Subscriber": "ckptd.publish.torch.subscriber",
    "move_experts": "ckptd.reshard.torch.experts",
    "with_expert_placement": "ckptd.reshard.torch.experts",
    "register": "ckptd.checkpoint.format.codec",
    "relayout": "ckptd.reshard.torch.relayout",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ckptd.base.runtime.pauses import no_collection  # of all that torch is

    try:
        with no_collection():
            home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ImportError(
            f"ckptd.{name} needs PyTorch, which is not installed: pip install 'ckptd[train]'",
            name="torch",
        ) from error
    value: object = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
