"""A job's layout, both ways: saves and loads of a state under a program in Lay."""

from __future__ import annotations
