"""Decisions of a job: state machine, the controller around it, history, status."""

from __future__ import annotations

__all__: list[str] = []
