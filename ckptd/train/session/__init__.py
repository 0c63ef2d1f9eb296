"""A process that outlives generations: its lease, interrupts, forked workers."""

from __future__ import annotations
