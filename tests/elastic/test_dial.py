"""Connections to addresses that no server can have."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ckptd.elastic.dial import await_greeting, dial
from ckptd.elastic.operator import OperatorLink
from ckptd.errors import NotFoundError, TransientStoreError
from tests.elastic.controlled import controlled

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


def test_a_process_that_is_stopped_does_not_greet(tmp_path: Path) -> None:
    with controlled(tmp_path) as controller:
        await_greeting(controller.address, 30.0)
        assert controller.process is not None
        controller.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransientStoreError) as caught:
            await_greeting(controller.address, 0.3)
        assert caught.value.kind == "link-late"
        controller.kill()
        with pytest.raises(TransientStoreError) as caught:
            await_greeting(controller.address, 0.3)
        assert caught.value.kind == "link-lost"
