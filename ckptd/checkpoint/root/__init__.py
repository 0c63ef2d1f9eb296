"""A root: its checkpoints, which of them count, who reads them, and which may go. No torch."""

from __future__ import annotations
