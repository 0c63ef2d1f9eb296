"""Elastic jobs: which nodes train, in which layout, by whose decision; public names of the slice.

The names of the consistency kit that belong to a training loop need torch, and are imported on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.checkpoint.data.schedule import Schedule
    from ckptd.checkpoint.torch.data.keyed import keyed_generator, keyed_rng, keyed_seed
    from ckptd.checkpoint.torch.data.sampler import ElasticSampler
    from ckptd.elastic.torch.hooks import robust
    from ckptd.elastic.torch.hooks.canonical import CanonicalGradients
    from ckptd.elastic.torch.hooks.kept import KeptGradients
    from ckptd.elastic.torch.hooks.tokens import global_tokens, scale_gradients
    from ckptd.elastic.torch.session.interrupt import Interrupted
    from ckptd.elastic.torch.session.session import session
    from ckptd.elastic.torch.session.world import World

__all__ = [
    "CanonicalGradients",
    "ElasticSampler",
    "Interrupted",
    "KeptGradients",
    "Schedule",
    "World",
    "global_tokens",
    "keyed_generator",
    "keyed_rng",
    "keyed_seed",
    "robust",
    "scale_gradients",
    "session",
]

_MODULES = {
    "CanonicalGradients": "elastic.torch.hooks.canonical",
    "ElasticSampler": "checkpoint.torch.data.sampler",
    "Interrupted": "elastic.torch.session.interrupt",
    "KeptGradients": "elastic.torch.hooks.kept",
    "Schedule": "checkpoint.data.schedule",
    "World": "elastic.torch.session.world",
    "global_tokens": "elastic.torch.hooks.tokens",
    "keyed_generator": "checkpoint.torch.data.keyed",
    "keyed_rng": "checkpoint.torch.data.keyed",
    "keyed_seed": "checkpoint.torch.data.keyed",
    "robust": "elastic.torch.hooks.robust",
    "scale_gradients": "elastic.torch.hooks.tokens",
    "session": "elastic.torch.session.session",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"ckptd.{_MODULES[name]}")
    value: object = getattr(module, name, module)  # `robust` is the module itself
    globals()[name] = value
    return value
