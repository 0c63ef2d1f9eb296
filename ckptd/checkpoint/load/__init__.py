"""Reading a checkpoint into live state: verify everything first, then write; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.parts import front

if TYPE_CHECKING:
    from ckptd.checkpoint.load.direct import open_direct

__all__ = ["open_direct"]


__getattr__ = front(__name__, {"open_direct": "ckptd.checkpoint.load.direct"})
