"""Writes down every collective of this rank in its ring; public names."""

from __future__ import annotations
