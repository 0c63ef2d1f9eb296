"""Where a job is in its data: batches, samples and random streams of any world."""

from __future__ import annotations
