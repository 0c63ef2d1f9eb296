"""Writing a checkpoint: slots, the writing process, tiers, the commit. No torch."""

from __future__ import annotations
