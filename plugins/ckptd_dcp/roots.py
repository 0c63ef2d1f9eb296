"""The roots of this process, and steps as checkpoint ids."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from typing import Any

from ckptd.errors import UsageError
from ckptd.save import BoxRoot

__all__ = ["RootId"]

_roots: dict[str, BoxRoot] = {}


class RootId:
    """What a writer and a reader have in common: where the root is, and which step.

    Parameters
    ----------
    url, step, options
        As for `ckptd_dcp.CkptdWriter`.
    """

    def __init__(self, url: str, step: int | None, options: Mapping[str, Any] | None) -> None:
        self.url = url
        self.step = step
        self._options = dict(options or {})

    @property
    def root(self) -> BoxRoot:
        """The root, opened once in this process.

        DCP's users make a writer a save: what those share is here, so that all saves of a process
        are one life of the job.
        """
        key = json.dumps([self.url, self._options], sort_keys=True, default=repr)
        if key not in _roots:
            _roots[key] = BoxRoot(self.url, self._options)
            atexit.register(_roots[key].close)
        return _roots[key]

    def take(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Take DCP's ``checkpoint_id`` for the step.

        Raises
        ------
        UsageError
            kind ``bad-argument``: it is no number.
        """
        if checkpoint_id is None:
            return
        if not str(checkpoint_id).isdecimal():
            raise UsageError(
                "a checkpoint_id is no step",
                kind="bad-argument",
                where="checkpoint_id",
                wanted="a number; the root's URL is the first argument of the writer or reader",
                found=repr(str(checkpoint_id)[:200]),
            )
        self.step = int(str(checkpoint_id))
