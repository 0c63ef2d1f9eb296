"""Diagnosis of a job without a watch: RAS of NCCL, and dumps of PyTorch's flight recorder."""

from __future__ import annotations
