"""Objects in etcd: ``etcd://HOST:PORT[,HOST:PORT]/PREFIX``, above all for membership logs."""

from __future__ import annotations

from ckptd_etcd.store import EtcdOptions, EtcdStore, open_etcd

__all__ = ["EtcdOptions", "EtcdStore", "open_etcd"]
