"""A record that is lost in flight, written though it seemed not so, or taken by another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckptd.elastic.control.appending import Appender
from ckptd.elastic.log import MembershipLog
from ckptd.elastic.membership import Record
from ckptd.elastic.policy import Shape
from ckptd.errors import ConflictError, TransientStoreError
from ckptd.store import open_store
from tests.elastic.test_membership import record

ONE = Shape()


class ShakyLog(MembershipLog):
    """A log whose next appends fail, before or after they were written."""

    def __init__(self, folder: Path, failures: list[str]) -> None:
        super().__init__(open_store(folder))
        self.failures = failures

    def append(self, record: Record, number: int) -> None:
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "lost":
            raise TransientStoreError("the request was lost")
        super().append(record, number)
        if failure == "answer":
            raise TransientStoreError("the answer was lost")


def run(log: ShakyLog, what: Callable[[Appender], object], patience_s: float = 60.0) -> list[str]:
    told: list[str] = []

    async def main() -> None:
        appender = Appender(log, len(log.read()), told.append, lambda: None, patience_s)
        try:
            await what(appender)  # type: ignore[misc]
        finally:
            appender.close()

    asyncio.run(main())
    return told


@pytest.mark.parametrize("failures", [["lost"], ["answer"], ["lost", "answer"]])
def test_what_fails_is_repeated_until_it_is_there_once(tmp_path: Path, failures: list[str]) -> None:
    log, wanted = ShakyLog(tmp_path, list(failures)), record(ONE, 1)
    told = run(log, lambda appender: appender.append(wanted))
    assert log.read() == [wanted]
    assert len(told) == len(failures)


def test_another_ones_record_ends_it(tmp_path: Path) -> None:
    log, other = ShakyLog(tmp_path, []), ShakyLog(tmp_path, [])

    async def taken(appender: Appender) -> None:
        other.append(msgspec.structs.replace(record(ONE, 1), by="other"), 0)
        await appender.append(record(ONE, 1))

    with pytest.raises(ConflictError) as caught:
        run(log, taken)
    assert "another controller wrote to the log first" in caught.value.message
    assert [r.by for r in log.read()] == ["other"]


def test_who_was_followed_does_not_end_the_job(tmp_path: Path) -> None:
    log, other = ShakyLog(tmp_path, []), ShakyLog(tmp_path, [])

    async def followed(appender: Appender) -> None:
        await appender.append(record(ONE, 1))
        await appender.check()
        other.append(record(ONE, 2), 1)
        await appender.check()

    with pytest.raises(ConflictError):
        run(log, followed)


def test_a_log_that_stays_away_ends_it(tmp_path: Path) -> None:
    log = ShakyLog(tmp_path, ["lost"] * 1000)
    with pytest.raises(TransientStoreError):
        run(log, lambda appender: appender.append(record(ONE, 1)), 0.3)
