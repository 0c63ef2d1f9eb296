"""Rules that find what is at fault: pure functions from a job's columns to verdicts."""

from __future__ import annotations
