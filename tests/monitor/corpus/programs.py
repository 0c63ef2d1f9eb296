"""All programs of the corpus by name: each module adds its own when it is imported."""

from __future__ import annotations

from tests.monitor.corpus import (  # noqa: F401
    idioms,
    libraries,
    pipelines,
    roles,
    serving,
    sharded,
)
from tests.monitor.corpus.base import PROGRAMS

__all__ = ["PROGRAMS"]
