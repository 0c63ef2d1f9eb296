"""Who decides: the state machine of a job, the controller around it, and what it remembers."""

from __future__ import annotations

__all__: list[str] = []
