"""Placeholders of per-rank values after a reshard (reseed, reduce, drop); derived seeds.

A load finds one of these types (spec section 7.1) in place of the value, and applies the live
declaration, which the reshard did not have: draw a seed, reduce all values, keep the live value.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

RESEED = "ckptd.Reseed"
REDUCE = "ckptd.Reduce"
DROP = "ckptd.Drop"


def marked(name: str, value: Any) -> dict[str, Any]:
    """Return an encoded value of one of these types."""
    return {"$": "type", "name": name, "v": value}


def derive_seed(encoded: Any, rank: int, world: int) -> int:
    """Return a seed in ``[0, 2**63)`` for `rank` of `world`, from an encoded saved value.

    The same on every call: a load that is repeated gives the same streams. The value moves on with
    training, so that two resumes from different steps do not replay the same numbers.
    """
    return seed_of(json.dumps([encoded, rank, world], sort_keys=True).encode())


def seed_of(material: bytes) -> int:
    """Return a seed in ``[0, 2**63)`` for some bytes, the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "big") >> 1
