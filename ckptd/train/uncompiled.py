"""Calls that ``torch.compile`` leaves alone, though they stand in a function that it compiles.

`torch.compiler.disable` would import the compiler, which takes a second, in every program that
never compiles anything. So it is asked only where the compiler is there already.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, cast

import torch

__all__ = ["uncompiled"]

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function`, and what it calls, as it is; the graph around it breaks at the call."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return cast(R, disabled[0](*args, **kwargs))

    # What torch.compiler.disable puts there: the caller's graph breaks before this is looked into.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    with suppress(
        AttributeError, KeyError, TypeError
    ):  # private: without it this frame is compiled once
        skip: Callable[[object], None] = vars(torch._C._dynamo.eval_frame)["skip_code"]
        skip(vars(types.FunctionType)["__code__"].__get__(call))
    return call
