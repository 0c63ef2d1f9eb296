"""Store of a root inside its wrappers: retry, throttle, packing, trusted keys (``CKPTD_TRUST``)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ckptd.store import StoreSpec
from ckptd.store.base import (
    PackSpec,
    RetrySpec,
    ThrottleSpec,
    TrustSpec,
    WrapperSpec,
    checked_url,
    scheme_of,
)

Trust: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""PEM files of public keys."""


def root_spec(
    url: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    throttle_bytes_s: float | None = None,
    compress: int | None = None,
) -> StoreSpec:
    """Return the store of a root: retried where that helps, throttled where that is wanted.

    It reads packed data files in any case, and packs what it writes where that is wanted.

    Parameters
    ----------
    url, options
        As for `ckptd.store.open_store`.
    throttle_bytes_s
        Upper bound of the bytes a second that are written; None is no bound. What is packed
        counts as it is stored.
    compress
        Level of zstd for data files, 1 to 22; None stores them plain.

    Raises
    ------
    UsageError
        This is no URL and no path.
    """
    url = checked_url(url)
    wrappers: tuple[WrapperSpec, ...] = (PackSpec(level=compress),)
    # Retries are outermost: they keep what they may have to write again, which is then the
    # caller's memory, and not packed copies of it. This process's own memory never needs one.
    if scheme_of(url) != "memory":
        wrappers = (*wrappers, RetrySpec())
    if throttle_bytes_s is not None:
        wrappers = (ThrottleSpec(write_bytes_per_s=throttle_bytes_s), *wrappers)
    return StoreSpec(url, dict(options or {}), wrappers)


def trusting(spec: StoreSpec, trust: Trust | None = None) -> StoreSpec:
    """Return a root of which only checkpoints are read that one of the trusted keys has signed.

    Parameters
    ----------
    trust
        None takes the keys that ``CKPTD_TRUST`` names. Without any, all is read.

    Raises
    ------
    UsageError
        A file holds no key, or the extra ``sign`` is not installed. NotFoundError: it is not there.
    """
    if trust is None:
        trust = [p for p in os.environ.get("CKPTD_TRUST", "").split(os.pathsep) if p]
    if not trust:
        return spec
    from ckptd.base.signatures import read_public

    return spec.wrapped(TrustSpec(read_public(trust)))


def signing_key(path: str | os.PathLike[str]) -> str:
    """Return where a private key is, for other processes; raises unless it signs here."""
    from ckptd.base.signatures import need_blake3, read_private

    need_blake3()
    read_private(os.fspath(path))
    return os.path.abspath(path)


def is_trusting(spec: StoreSpec) -> bool:
    """Tell whether `trusting` has found keys."""
    return any(isinstance(each, TrustSpec) for each in spec.wrappers)


def served_spec(url: str, secret: str = "", **options: Any) -> StoreSpec | None:
    """Return what another process serves at `url`; None where there is none.

    Parameters
    ----------
    secret
        What it asks for over TCP; a Unix socket asks for none.
    options
        Further ones of `ckptd.store.net.NetOptions`.
    """
    if not url:
        return None
    return StoreSpec(url, {"secret": secret, **options} if secret else options)
