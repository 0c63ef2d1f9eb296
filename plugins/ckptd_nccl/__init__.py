"""What NCCL and PyTorch know of a job that ran unwatched: RAS, and dumps of the flight recorder."""

from __future__ import annotations
