"""Writing a checkpoint: slots, the writing process, tiers, the commit; no torch.

Plugins save with the names below. Each is imported on first use, so that an import of one module
here costs that module only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.parts import front

if TYPE_CHECKING:
    from ckptd.checkpoint.save.boxes import BoxRoot, BoxSave, BoxTensor

__all__ = ["BoxRoot", "BoxSave", "BoxTensor"]


__getattr__ = front(__name__, dict.fromkeys(__all__, "ckptd.checkpoint.save.boxes"))
