from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.monitor.daemon.daemons import Running, running


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("daemon") / "history") as it:
        yield it
