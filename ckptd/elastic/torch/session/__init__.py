"""A process that outlives generations: its lease, interrupts, forked workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.elastic.torch.session.zygote_store import host_store

__all__ = ["host_store"]


def __getattr__(name: str) -> object:
    # Not at once: the zygote imports modules of this package before it may import torch.
    if name == "host_store":
        from ckptd.elastic.torch.session.zygote_store import host_store

        return host_store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
