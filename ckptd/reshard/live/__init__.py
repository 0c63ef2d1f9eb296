"""Live ranks to live ranks: tensors of one layout become those of another, without a disk."""

from __future__ import annotations
