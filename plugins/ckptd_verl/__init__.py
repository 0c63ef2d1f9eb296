"""verl's weights from actors to rollouts by ckptd: a `CheckpointEngine` of the name ``ckptd``.

Importing this registers it: name it as ``custom_backend_module: ckptd_verl``.
"""

from __future__ import annotations

from ckptd_verl.engine import CkptdCheckpointEngine

__all__ = ["CkptdCheckpointEngine"]
