"""Tools for checkpoints: verify, diff, inspect, copy, export, and the doctor of stores."""

from __future__ import annotations
