"""What is wrong with which rank, node or link: pure functions from a job's columns to verdicts."""

from __future__ import annotations
