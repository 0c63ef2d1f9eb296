"""Gradients of an elastic job: canonical sums, robust aggregation, sums over tokens."""

from __future__ import annotations
