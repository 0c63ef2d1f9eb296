"""The files in which a rank writes what it does, and how others read them."""

from __future__ import annotations
