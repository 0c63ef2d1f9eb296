"""Delays between nodes: probed while a job runs, and before it."""

from __future__ import annotations
