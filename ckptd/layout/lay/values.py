"""What happens to values between two rules."""

from __future__ import annotations

from typing import NamedTuple

from ckptd.layout.lay.resolve import Equation
from ckptd.layout.lay.syntax import Affine, Average, Cast, Modifier, Quantized

__all__ = ["MASTER", "Values", "values"]

MASTER = "w"
"""Short name of the state that is a copy of the parameter in another type."""


class Values(NamedTuple):
    """Operations on values.

    Attributes
    ----------
    source
        To be undone: what the source rule says of its values, as written.
    target
        To be done, in this order, as the target rule says it.
    """

    source: tuple[Modifier, ...]
    target: tuple[Modifier, ...]


def values(source: Equation, target: Equation, state: str, *, live: bool) -> Values | None:
    """Return what happens to the values of a state; None: nothing.

    Types and quantization are those of the parameter, shifts and scales also those of its master
    copy; moments are of gradients, which a shift does not change. Replicas are combined alike.

    Parameters
    ----------
    source, target
        The rules.
    state
        Short name of the state, or empty.
    live
        Whether the source is ranks: a stored tensor's replicas are combined already.
    """
    kinds: tuple[type[Modifier], ...] = ()
    if state == "":
        kinds = (Cast, Affine, Quantized)
    elif state == MASTER:
        kinds = (Affine,)
    combined = (Average, *kinds) if live else kinds
    read = tuple(m for m in source.modifiers if isinstance(m, combined))
    written = tuple(m for m in target.modifiers if isinstance(m, kinds))
    return Values(read, written) if read or written else None
