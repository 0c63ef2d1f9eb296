"""kill -9 at every step of the very first save: of the root's marker and the first claim too."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import NotFoundError
from ckptd.store.base import FaultRule, FaultSpec
from tests.checkpoint.crash.judge import assert_exact, assert_only_legal, clean
from tests.checkpoint.crash.life import End, Life
from tests.checkpoint.crash.places import LocalPlace
from tests.checkpoint.crash.zygote import Zygote

pytestmark = pytest.mark.timeout(600)


def count_steps(place: LocalPlace, zygote: Zygote, log: Path) -> int:
    faults = FaultSpec(inner=True, log=str(log))
    assert zygote.run(Life(place.spec, 1, 0, "0001", faults, first=True)) == [End()]
    return len([json.loads(line) for line in log.read_text().splitlines()])


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_first_save(every: int, ram: Path, zygote: Zygote, report: Callable[[str], None]) -> None:
    place = LocalPlace(ram)
    total = count_steps(place, zygote, ram / "log")
    committed = 0
    for number in range(1, total + 1, every):
        shutil.rmtree(place.root, ignore_errors=True)
        faults = FaultSpec((FaultRule("kill", number=number),), inner=True)
        [end] = zygote.run(Life(place.spec, 1, 0, "0001", faults, first=True))
        assert end.signal == signal.SIGKILL
        before = newest(place)
        committed += before is not None
        step = 1 if before is None else 2
        assert zygote.run(Life(place.spec, step, 0, "0002", first=True)) == [End()]
        after = newest(place)
        assert after is not None
        assert after.step == step
        for name in [after] if before is None else [before, after]:
            assert_exact(place.store, name, world=1, large=False)
        clean(place.store)
        # A temporary file of the marker stays beside it: gc looks into ckptd's folders only.
        names = [n for n in place.raw() if not (n.startswith("~") and "/" not in n)]
        assert_only_legal(place.store, names)
    report(f"{total} steps, {len(range(1, total + 1, every))} deaths: {committed} times committed")
    assert committed
    place.close()


def newest(place: LocalPlace) -> CommitName | None:
    try:
        Catalogue(place.store).open()
    except NotFoundError:
        return None
    return Catalogue(place.store).latest()
