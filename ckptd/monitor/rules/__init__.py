"""What is wrong with whom: pure functions from a job's columns to verdicts."""

from __future__ import annotations
