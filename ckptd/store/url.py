"""From a URL to a store."""

from __future__ import annotations

import os
import re
from typing import Any

from ckptd.errors import UsageError
from ckptd.store.base import Store
from ckptd.store.registry import Opener, find_opener, registered_schemes

__all__ = ["checked_url", "open_store", "scheme_of"]

_NEARLY = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]+):(.*)", re.DOTALL)
_COMMON = ("abfs", "az", "gcs", "gs", "hdfs", "http", "https", "s3a", "sftp", "ssh", "webhdfs")
"""Schemes that fsspec's packages have, which need not be installed to be meant."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def checked_url(url: object) -> str:
    """Return a URL or path as text.

    Raises
    ------
    UsageError
        Kind ``bad-url``: it is neither, or it would name a folder where a store was meant.
    """
    text = url if isinstance(url, str) else None
    if isinstance(url, os.PathLike):
        text = os.fspath(url)
    if not isinstance(text, str) or not text.strip():
        raise UsageError(
            "this names no store",
            kind="bad-url",
            where=repr(url)[:200],
            wanted="a path, file:///path, s3://bucket/prefix, or another URL, as text",
            found=type(url).__name__,
        )
    found = _NEARLY.match(text)
    if found and not _URL.match(text.lstrip()) and found.group(1).lower() in _known():
        name, rest = found.group(1).lower(), found.group(2).lstrip("/")
        raise UsageError(
            f"a URL has two slashes after {name}:",
            kind="bad-url",
            where=text[:200],
            wanted=f"{name}:///{rest}" if name == "file" else f"{name}://{rest}",
            hint=f"a folder of that name is ./{text.strip()[:100]}; give URLs as text: a Path "
            "joins their slashes",
        )
    if text != text.strip() and _URL.match(text.strip()):
        raise UsageError("a URL has no blanks around it", kind="bad-url", where=repr(text)[:200])
    return text


def _known() -> set[str]:
    return {*registered_schemes(), *_COMMON}


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
    text = checked_url(url)
    return _opener(scheme_of(text))(text, options)


def _opener(scheme: str) -> Opener:
    if scheme == "fsspec" or scheme.startswith("fsspec+"):
        return _generic()
    return find_opener(scheme) or _generic()


def _generic() -> Opener:
    from ckptd.store.generic import open_generic

    return open_generic
