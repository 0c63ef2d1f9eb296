"""Everything that can be said of a layout without data."""

from __future__ import annotations

from ckptd.lay.check.flats import order_findings
from ckptd.lay.check.layouts import Observation, check, check_bound, check_program

__all__ = ["Observation", "check", "check_bound", "check_program", "order_findings"]
