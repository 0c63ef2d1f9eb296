"""Enumerations: a part of the points in the short suite, all of them in the long one."""

from __future__ import annotations

import pytest

__all__ = ["sampled"]


def sampled(stride: int) -> pytest.MarkDecorator:
    """Give a test the argument `every`: `stride`, and 1 in its long form."""
    whole = pytest.param(1, marks=pytest.mark.long, id="all")
    return pytest.mark.parametrize("every", [pytest.param(stride, id="some"), whole])
