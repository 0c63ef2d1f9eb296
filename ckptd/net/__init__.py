"""How processes reach each other: addresses, one signed connection, the job's secret, HTTP."""

from __future__ import annotations

__all__: list[str] = []
