"""Where bytes live: the store contract and its implementations."""

from __future__ import annotations

from ckptd.store.base import Capabilities, ObjectInfo, Store, Writer
from ckptd.store.registry import register_store, registry_problems
from ckptd.store.spec import (
    FaultRule,
    FaultSpec,
    MeterSpec,
    PackSpec,
    RetrySpec,
    StoreSpec,
    ThrottleSpec,
    WrapperSpec,
)
from ckptd.store.url import open_store

__all__ = [
    "Capabilities",
    "FaultRule",
    "FaultSpec",
    "MeterSpec",
    "ObjectInfo",
    "PackSpec",
    "RetrySpec",
    "Store",
    "StoreSpec",
    "ThrottleSpec",
    "WrapperSpec",
    "Writer",
    "open_store",
    "register_store",
    "registry_problems",
]
