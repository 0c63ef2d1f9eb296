"""Where bytes live: the store contract and its implementations."""

from __future__ import annotations

from ckptd.store.base import (
    Capabilities,
    FaultRule,
    FaultSpec,
    MeterSpec,
    ObjectInfo,
    PackSpec,
    RetrySpec,
    Store,
    StoreSpec,
    ThrottleSpec,
    WrapperSpec,
    Writer,
    open_store,
    register_store,
    registry_problems,
)

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
