"""A root: its checkpoints, which of them count, are read, and may be deleted; no torch."""

from __future__ import annotations
