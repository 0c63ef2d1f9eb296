"""Communication hooks of DDP: canonical sums, robust aggregation."""

from __future__ import annotations
