"""Reading a checkpoint into live state: verify everything first, then write. No torch."""

from __future__ import annotations
