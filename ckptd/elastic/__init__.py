"""Going on with other ranks: what to train on, in which layout, and who decides.

The names of the consistency kit that belong to a training loop need torch, and are imported on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckptd.elastic.schedule import Schedule

if TYPE_CHECKING:
    from ckptd.train.data.keyed import keyed_generator, keyed_rng, keyed_seed
    from ckptd.train.data.sampler import ElasticSampler
    from ckptd.train.data.tokens import global_tokens, scale_gradients
    from ckptd.train.hooks.canonical import CanonicalGradients
    from ckptd.train.hooks.kept import KeptGradients
    from ckptd.train.session.session import session
    from ckptd.train.session.world import World

__all__ = [
    "CanonicalGradients",
    "ElasticSampler",
    "KeptGradients",
    "Schedule",
    "World",
    "global_tokens",
    "keyed_generator",
    "keyed_rng",
    "keyed_seed",
    "scale_gradients",
    "session",
]

_MODULES = {
    "CanonicalGradients": "hooks.canonical",
    "ElasticSampler": "data.sampler",
    "KeptGradients": "hooks.kept",
    "World": "session.world",
    "global_tokens": "data.tokens",
    "keyed_generator": "data.keyed",
    "keyed_rng": "data.keyed",
    "keyed_seed": "data.keyed",
    "scale_gradients": "data.tokens",
    "session": "session.session",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"ckptd.train.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
