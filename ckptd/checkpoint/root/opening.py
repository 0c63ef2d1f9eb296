"""From what a user gives to a store that the engine works on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptd.store import StoreSpec
from ckptd.store.base import PackSpec, RetrySpec, ThrottleSpec, WrapperSpec, checked_url, scheme_of


def root_spec(
    url: str,
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
