"""The ground of a job: agreement of ranks, channels, threads, memory of the machine."""

from __future__ import annotations
