"""What the API tells: plain data from the last round."""

from __future__ import annotations
