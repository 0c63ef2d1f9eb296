"""Unmodified torchrun as a launcher: ``torchrun --rdzv-backend=ckptd ...``."""

from __future__ import annotations

__all__: list[str] = []
