"""Megatron-core on roots of ckptd: what ``dist_checkpointing.save`` and ``load`` do, here."""

from __future__ import annotations

from ckptd_megatron.loading import latest, load, load_common_state_dict
from ckptd_megatron.saving import async_save, save

__all__ = ["async_save", "latest", "load", "load_common_state_dict", "save"]
