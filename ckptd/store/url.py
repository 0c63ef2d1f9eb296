"""From a URL to a store."""

from __future__ import annotations

import os
import re
from typing import Any

from ckptd.errors import UsageError
from ckptd.store.base import Store
from ckptd.store.registry import Opener, find_opener

__all__ = ["open_store", "scheme_of"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(url: str) -> str:
    """Return the scheme of `url` in lower case; a plain path has ``file``."""
    head, separator, _ = url.partition("://")
    if separator and "::" in head:
        return "fsspec"  # fsspec's chained form, such as simplecache::gs://bucket
    found = _URL.match(url)
    return found.group(1).lower() if found else "file"


def open_store(url: str | os.PathLike[str], **options: Any) -> Store:
    """Open the place that `url` names. Nothing is created or contacted before the first call.

    Parameters
    ----------
    url
        A path or ``file:///path`` (`LocalStore`), ``memory://name`` (`MemoryStore`),
        ``s3://bucket/prefix`` (`S3Store`), a scheme that an installed package registers, or any
        other URL that fsspec knows (`FsspecStore`; ``fsspec+SCHEME://`` forces that one).
    options
        Passed to the store: plain, JSON-able values, listed in ``docs/reference/stores.md``.

    Raises
    ------
    UsageError
        Kind ``bad-url``: nothing opens it. Kind ``bad-option``: an option the store does not know.
        Kind ``broken-plugin``: the package that would open it does not load.
    """
    text = os.fspath(url)
    if not text:
        raise UsageError("an empty URL names no store", kind="bad-url", where=repr(url))
    return _opener(scheme_of(text))(text, options)


def _opener(scheme: str) -> Opener:
    if scheme == "fsspec" or scheme.startswith("fsspec+"):
        return _generic()
    return find_opener(scheme) or _generic()


def _generic() -> Opener:
    from ckptd.store.generic import open_generic

    return open_generic
