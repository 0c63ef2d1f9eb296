"""`Values`: casts, scales, averages, quantization between two rules; how optimizer states scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ckptd.errors import UsageError
from ckptd.lay.resolve import Equation
from ckptd.lay.syntax import show
from ckptd.lay.syntax.tree import Affine, Average, Cast, Modifier, Quantized

_POWERS = {
    1: ("master", "master_param", "master_weight", "fp32", "fp32_param"),
    -1: ("exp_avg", "momentum_buffer"),
    -2: ("exp_avg_sq", "max_exp_avg_sq"),
}
_BY_STORED = {name: power for power, names in _POWERS.items() for name in names}
_BY_SHORT = {"w": 1, "m": -1, "s": -2}


def state_power(short: str, stored: Iterable[str]) -> int | None:
    """Return with which power of a parameter's scale a state scales; None: it is not known.

    A copy of the parameter scales as it does, the mean of gradients with the inverse, the mean of
    their squares with the inverse square.

    Parameters
    ----------
    short
        The state's short name.
    stored
        Its names in checkpoints, which count before the short one.
    """
    return next((_BY_STORED[s] for s in stored if s in _BY_STORED), _BY_SHORT.get(short))


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


def values(
    source: Equation, target: Equation, state: str, *, power: int | None, live: bool
) -> Values | None:
    """Return what happens to the values of a state; None: nothing.

    Types and quantization are those of the parameter. Shifts and scales are also those of its
    copies; gradients, and so moments, scale the other way, and a shift does not change them.
    Replicas are combined alike.

    Parameters
    ----------
    source, target
        The rules.
    state
        Short name of the state, or empty.
    power
        See `state_power`.
    live
        Whether the source is ranks: a stored tensor's replicas are combined already.

    Raises
    ------
    UsageError
        ``lay-rule``: a rule shifts or scales, and nothing says how the state follows.
    """
    kinds: tuple[type[Modifier], ...] = (Affine,) if state else (Cast, Affine, Quantized)
    combined = (Average, *kinds) if live else kinds
    read = tuple(m for m in source.modifiers if isinstance(m, combined))
    written = tuple(m for m in target.modifiers if isinstance(m, kinds))
    if state:
        read, written = (_following(m, state, power) for m in (read, written))
    return Values(read, written) if read or written else None


def _following(
    modifiers: tuple[Modifier, ...], state: str, power: int | None
) -> tuple[Modifier, ...]:
    """Return what is done to a state where modifiers say what is done to its parameter."""
    out: list[Modifier] = []
    for m in modifiers:
        if isinstance(m, Affine):
            if power is None:
                raise UsageError(
                    "a rule shifts or scales a parameter, but how its state changes with it is "
                    "unknown",
                    kind="lay-rule",
                    where=f"state {state}",
                    wanted="m (mean of gradients), s (mean of their squares) or w (copy of the"
                    " parameter)",
                    found=show(m),
                    hint=f"declare it in the space: `follow m={state}` saves m as {state}",
                )
            if power < 0:
                m = replace(m, scale=m.scale**power if m.scale else 0.0, shift=0.0)
                if m.scale == 1.0:
                    continue
        out.append(m)
    return tuple(out)
