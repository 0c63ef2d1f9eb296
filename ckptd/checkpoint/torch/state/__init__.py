"""A training state as named leaves: tensors, objects and per-rank values, both ways."""

from __future__ import annotations
