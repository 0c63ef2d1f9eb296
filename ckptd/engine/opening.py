"""From what a user gives to a store that the engine works on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptd.store import StoreSpec
from ckptd.store.spec import RetrySpec, ThrottleSpec, WrapperSpec

__all__ = ["root_spec"]


def root_spec(
    url: str, options: Mapping[str, Any] | None = None, throttle_bytes_s: float | None = None
) -> StoreSpec:
    """Return the store of a root: retried where that helps, throttled where that is wanted.

    Parameters
    ----------
    url, options
        As for `ckptd.store.open_store`.
    throttle_bytes_s
        Upper bound of the bytes a second that are written; None is no bound.
    """
    wrappers: tuple[WrapperSpec, ...] = (RetrySpec(),)
    if throttle_bytes_s is not None:
        wrappers = (*wrappers, ThrottleSpec(write_bytes_per_s=throttle_bytes_s))
    return StoreSpec(str(url), dict(options or {}), wrappers)
