"""Audit log: a line of each act of people at the daemon; size, rotation.

The file lies beside the history, as its name with ``.acts``: a JSON object a line, appended.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec

_MOST_BYTES = 16 << 20
_log = logging.getLogger("ckptd.monitor")


class Act(msgspec.Struct, frozen=True):
    """One act.

    Attributes
    ----------
    at
        Seconds since 1970.
    who
        ``token``, ``reader``, or ``session`` or ``reading session`` with a part of the cookie's
        value behind it.
    host
        Address that it came from.
    method, path, body
        The request, with as much of its body as there is room for; of a login, none.
    status
        Of the answer.
    """

    at: float
    who: str
    host: str
    method: str
    path: str
    body: str
    status: int


class ActsLog:
    """Appends acts to a file of mode 0600; the file before it is kept as ``.acts.1``."""

    def __init__(self, history: Path) -> None:
        self.path = history.with_name(f"{history.name}.acts")

    def add(self, who: str, host: str, method: str, path: str, body: str, status: int) -> None:
        """Append one, of this moment; a file that cannot be written is a warning."""
        act = Act(round(time.time(), 3), who, host, method, path, body, status)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self.path, flags, 0o600)
            try:
                if os.fstat(fd).st_size > _MOST_BYTES:
                    os.replace(self.path, f"{self.path}.1")
                os.write(fd, msgspec.json.encode(act) + b"\n")
            finally:
                os.close(fd)
        except OSError as error:
            _log.warning("an act is not written down: %s: %s", self.path, error)
