"""Live weights to where they are used: a trainer's ranks publish versions, workers pull slices."""

from __future__ import annotations
