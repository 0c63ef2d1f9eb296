"""Appends to the membership log from the controller's event loop; repeats after store errors.

In it: pauses between tries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ckptd.elastic.log import MembershipLog
from ckptd.elastic.membership import Record
from ckptd.errors import ConflictError, StoreError

_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 2.0


class Appender:
    """Appends records in a thread, and repeats what the store did not take.

    Parameters
    ----------
    log
        The log.
    number
        Records that it holds.
    tell
        Is given a sentence when the log does not take a record.
    seated
        Raises `ConflictError` where another controller has the seat by now.
    patience_s
        How long a record is tried for; nothing can change meanwhile, and training goes on.
    """

    def __init__(
        self,
        log: MembershipLog,
        number: int,
        tell: Callable[[str], None],
        seated: Callable[[], None],
        patience_s: float = 600.0,
    ) -> None:
        self.number = number
        self._log, self._tell, self._seated, self._patience_s = log, tell, seated, patience_s
        self._thread = ThreadPoolExecutor(1, "ckptd-membership-log")

    async def check(self) -> None:
        """Look whether this controller still decides.

        Raises
        ------
        ConflictError
            Another controller has appended a record, or taken the seat.
        StoreError
            The log could not be read in time.
        """
        await self._patiently(self._check)

    async def append(self, record: Record) -> None:
        """Write the next record; it is durable on return.

        Raises
        ------
        ConflictError
            Another controller has written that record.
        StoreError
            The log could not be written in time.
        """
        await self._patiently(lambda: self._append(record))
        self.number += 1

    async def _patiently(self, call: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._patience_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                await loop.run_in_executor(self._thread, call)
            except StoreError as error:
                if loop.time() + pause > end:
                    raise
                self._tell(f"the membership log fails: {error.message}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)
            else:
                return

    def _check(self) -> None:
        # One that has the seat need not have appended yet, and goes on whatever this one ends.
        self._seated()
        if len(self._log.read()) > self.number:
            raise ConflictError(
                "another controller wrote to the log first",
                hint="this controller ends; the other one goes on",
            )

    def _append(self, record: Record) -> None:
        try:
            self._log.append(record, self.number)
        except ConflictError:
            # An attempt that failed, or whose answer was lost, may have written it all the same.
            records = self._log.read()
            if len(records) <= self.number or records[self.number] != record:
                raise

    def close(self) -> None:
        """Release the thread; a write under way is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)
