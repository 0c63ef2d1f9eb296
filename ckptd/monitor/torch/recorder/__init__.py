"""Writes down every collective of this rank in its ring, for others to judge its health."""

from __future__ import annotations
