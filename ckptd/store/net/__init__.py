"""Stores over a connection: `StoreServer` gives one, `NetStore` uses it from another process."""

from __future__ import annotations

from ckptd.base.net.door import Counts
from ckptd.base.net.signing import new_secret
from ckptd.store.net.client import NetOptions, NetStore, open_net
from ckptd.store.net.server import StoreServer
from ckptd.store.net.session import Limits

__all__ = ["Counts", "Limits", "NetOptions", "NetStore", "StoreServer", "new_secret", "open_net"]
