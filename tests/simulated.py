"""Tests on simulated devices: skipped, and said so, where none can be made."""

from __future__ import annotations

import pytest

from ckptd.testing.simdevice import lacking

__all__ = ["ON_SIMULATED_DEVICES"]

_why = lacking()
ON_SIMULATED_DEVICES = [
    pytest.mark.skipif(_why is not None, reason=f"NO SIMULATED DEVICE: {_why}"),
    # One worker starts the process that has everything imported, and forks one for each test.
    pytest.mark.xdist_group("simdevice"),
]
"""Marks for modules whose tests call `ckptd.testing.simdevice.run`."""
