"""Common base of writer and reader: the roots of this process, and steps as ids."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from typing import Any

from ckptd.checkpoint.save import BoxRoot
from ckptd.checkpoint.torch import LoadReport  # noqa: F401 - makes torch.Size and others savable
from ckptd.errors import UsageError
from ckptd.store import open_store

__all__ = ["AtRoot"]

_roots: dict[str, BoxRoot] = {}


class AtRoot:
    """Knows where the root is, and which step is meant; DCP's ``checkpoint_id`` may give it.

    Parameters
    ----------
    url, step, store_options
        As for `ckptd_dcp.CkptdWriter`.
    """

    def __init__(self, url: str, step: int | None, store_options: Mapping[str, Any] | None) -> None:
        self._url = _place(url)
        self._step = step
        self._options = dict(store_options or {})

    @property
    def root(self) -> BoxRoot:
        """The root, opened once in this process.

        DCP's users make a writer for each save. The writers share this root, so that all saves of
        a process are one life of the job.
        """
        key = json.dumps([self._url, self._options], sort_keys=True, default=repr)
        if key not in _roots:
            _roots[key] = BoxRoot(self._url, self._options)
            atexit.register(_roots[key].close)
        return _roots[key]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the step from DCP's ``checkpoint_id``, if there is one.

        Raises
        ------
        UsageError
            It is no number.
        """
        if checkpoint_id is not None and not self.validate_checkpoint_id(checkpoint_id):
            raise UsageError(
                "a checkpoint_id is not a step",
                where="checkpoint_id",
                wanted="a number; the root's URL is the first argument of the writer or reader",
                found=repr(str(checkpoint_id)[:200]),
            )
        self._step = self._step if checkpoint_id is None else int(str(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a ``checkpoint_id`` is a step."""
        return str(checkpoint_id).isdecimal()


def _place(url: str | os.PathLike[str]) -> str:
    """Return where a root is, the same for every spelling of its URL."""
    if isinstance(url, str) and "://" in url and not url.lower().startswith("file://"):
        return url.rstrip("/")
    return os.path.realpath(open_store(url).url)
