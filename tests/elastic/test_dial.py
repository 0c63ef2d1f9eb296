"""Connections to addresses that no server can have."""

from __future__ import annotations

import pytest

from ckptd.elastic.dial import dial
from ckptd.elastic.operator import OperatorLink
from ckptd.errors import NotFoundError, TransientStoreError

NO_NAME = "a..b"


def test_a_name_that_cannot_be_is_an_address_where_nobody_answers() -> None:
    with pytest.raises(TransientStoreError, match=r"a\.\.b:9"):
        dial(
            f"{NO_NAME}:9",
            job="j",
            role="operator",
            name="o",
            secret=b"s" * 32,
            timeout_s=1.0,
        )
    with OperatorLink(lambda: f"{NO_NAME}:9", "j", b"s" * 32, timeout_s=0.0) as link:
        with pytest.raises(NotFoundError, match="no controller answers"):
            link.status()
