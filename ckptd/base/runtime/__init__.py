"""What a job runs on: agreement of ranks, channels, threads, memory of the machine."""

from __future__ import annotations
