"""vLLM gets its weights from a trainer that publishes them: ``WeightTransferConfig("ckptd")``.

Installed together, vLLM finds the backend by itself, in every process. A trainer calls `register`
before it asks vLLM's factory for the trainer's side.
"""

from __future__ import annotations

__all__ = ["BACKEND", "register"]

BACKEND = "ckptd"
_registered = False


def register() -> None:
    """Give both sides of the backend to vLLM's factories. Idempotent; imports neither side."""
    global _registered
    if _registered:
        return
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    WeightTransferEngineFactory.register_engine(
        BACKEND, "ckptd_vllm.worker", "CkptdWeightTransferEngine"
    )
    WeightTransferTrainerFactory.register_engine(
        BACKEND, "ckptd_vllm.trainer", "CkptdTrainerWeightTransferEngine"
    )
    _registered = True
