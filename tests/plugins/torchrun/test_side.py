"""What an agent of torchrun has beside it, without the agent."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.elastic.places import open_places
from ckptd_torchrun.side import Side, SideSettings
from tests.elastic.controlled import SECRET, ControllerProcess, controlled
from tests.processes import until


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with controlled(tmp_path, "--nodes", "2", "--set", "lease_s=50") as process:
        yield process


@pytest.fixture
def side(controller: ControllerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    """A side that starts no controller."""
    environ = os.environ | {"CKPTD_SECRET": SECRET}
    # Sockets lie there, whose paths are short ones.
    with tempfile.TemporaryDirectory(prefix="ckptd-", dir="/tmp") as folder:
        monkeypatch.setattr(os, "environ", environ | {"CKPTD_RUN_DIR": folder})
        monkeypatch.setattr(Side, "_keep_controller", lambda _: None)
        conf = {"log": controller.log, "is_host": "0"}
        made = Side(SideSettings.read(controller.address, "j", 1, 2, None, conf))
        made.start()
        yield made
        made.leave(0.0)


def test_the_lease_goes_on_without_a_controller_while_no_other_one_has_taken_over(
    side: Side, controller: ControllerProcess
) -> None:
    (path,) = Path(os.environ["CKPTD_RUN_DIR"]).glob("t-*/lease")

    def leased() -> float:
        return int.from_bytes(path.read_bytes(), sys.byteorder) / 1e9

    until(leased)
    controller.kill()
    until(lambda: not side._link.connected)
    for _ in range(3):
        before = leased()
        until(lambda before=before: leased() > before)
    assert leased() <= time.monotonic() + 45.0  # nine tenths of the controller's lease_s
    open_places("j", controller.log).leader.take(1, "127.0.0.1:9", "another")
    taken = time.monotonic()
    until(lambda: time.monotonic() > taken + 3.0)
    last = leased()
    assert last < taken + 45.0 + 1.0
    until(lambda: time.monotonic() > taken + 6.0)
    assert leased() == last
