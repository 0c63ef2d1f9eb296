"""View of the launcher for code that knows none: interrupts and aborts of a generation.

A session ends a generation wherever the main thread is. What holds on to things says here what is
not to be cut short, and what waits or copies looks here whether the generation has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Protocol, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

LAUNCHER_VARIABLE = "CKPTD_LAUNCHER"
"""Path of the launcher's socket; without it no launcher of ckptd started this process."""
_uncut: set[CodeType] = set()


class Aborts(Protocol):
    """The aborts of the process groups of one generation."""

    @property
    def begun(self) -> bool:
        """Whether any group is aborted: what devices compute from then on is of no use."""


class SessionInterrupts(Protocol):
    """The interrupts that end the generations of the session in this process."""

    @property
    def wanted(self) -> bool:
        """Whether the generation is to end, or has."""

    @property
    def aborts(self) -> Aborts:
        """Those of this generation; others in the next one."""

    def check(self) -> None:
        """Raise in a generation that is to end."""


current: SessionInterrupts | None = None
"""Those of the session that runs in this process; set by the session."""


def whole(function: F) -> F:
    """Decorate a function that is not interrupted; the interrupt comes when it has returned.

    For what lets go of things, and is done only once. It is to be done in less than a second.
    """
    _uncut.add(cast("FunctionType", function).__code__)
    return function


def is_whole(code: CodeType) -> bool:
    """Tell whether it is the code of a function that is not interrupted."""
    return code in _uncut
