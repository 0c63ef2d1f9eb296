"""How processes reach each other: addresses, connections, TLS, roles, the job's secret, HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.parts import front

if TYPE_CHECKING:
    from ckptd.base.net.address import Address
    from ckptd.base.net.http import HttpAnswer, HttpClient

__all__ = ["Address", "HttpAnswer", "HttpClient"]


_HOMES = dict.fromkeys(__all__, "ckptd.base.net.http") | {"Address": "ckptd.base.net.address"}

__getattr__ = front(__name__, _HOMES)
