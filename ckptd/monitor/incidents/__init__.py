"""Incidents: verdicts that hold, from the first round to the end."""

from __future__ import annotations
