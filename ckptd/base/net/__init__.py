"""How processes reach each other: addresses, connections, TLS, roles, the job's secret, HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.base.net.address import Address
    from ckptd.base.net.http import HttpAnswer, HttpClient

__all__ = ["Address", "HttpAnswer", "HttpClient"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ckptd.base.net import address, http

    value: object = getattr(address if name == "Address" else http, name)
    return value
