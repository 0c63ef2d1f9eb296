"""Decisions of a job: its state machine, the controller around it, and what it remembers."""

from __future__ import annotations

__all__: list[str] = []
