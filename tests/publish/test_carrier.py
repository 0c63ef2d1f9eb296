"""The carrier over process groups keeps the contract."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ckptd.publish.carrier import WeightCarrier
from ckptd.testing.carrier import CarrierContract
from ckptd.train.carrier import GroupCarrier

pytestmark = pytest.mark.dist


def make(publishers: Sequence[int]) -> WeightCarrier:
    return GroupCarrier(None, publishers, timeout_s=20.0)


class TestGroupCarrier(CarrierContract):
    make = staticmethod(make)
