"""Groups of options of `Checkpointer`: `Storage`, `CopyOptions`, `Preemption`; defaults, checks."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Literal, TypeAlias, TypeVar, get_args

import msgspec

from ckptd.checkpoint.root.policy import check_given, check_positive
from ckptd.errors import UsageError

T = TypeVar("T")
Lazy: TypeAlias = Literal["auto", "all", "off"]
WhenFull: TypeAlias = Literal["wait", "skip"]
GRACE_S = 30.0
"""Seconds that Slurm (KillWait), Kubernetes and torchrun wait between TERM and KILL."""


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """How a root stores what is saved.

    Parameters
    ----------
    throttle
        Upper bound of the bytes a second that each rank writes; None is no bound.
    compress
        Level of zstd, 1 to 22, at which data files are stored as byte planes; 1 is nearly always
        right. None stores plain safetensors. It pays where the store is slower than the cores: see
        ``docs/reference/stores.md``. What is packed is read without an option.
    dedup
        Refer to chunks that did not change since the last checkpoint, where an older one holds
        them, instead of writing them again. See ``docs/guide/training-loop.md``.
    """

    throttle: float | None = None
    compress: int | None = None
    dedup: bool = True


class CopyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a state is copied, and where to.

    Parameters
    ----------
    lazy
        What is copied after `save` returned, while training goes on. ``"auto"``: the state of
        the optimizers in the state and the parameters that they hold, on CPU and CUDA devices;
        their steps wait until it is copied. ``"all"``: every tensor; call `before_mutation` before
        whatever changes one. ``"off"``: nothing.
    slots
        Snapshots that may be under way at a time: one is copied while others are written. None
        takes two where the memory allows it.
    when_full
        What a save does that finds all slots taken: ``"wait"``, or ``"skip"``, counted in
        `Checkpointer.skipped`. Rank 0 decides for all.
    debug
        Digest what is copied late, when `save` is called and when it is copied: names whatever
        changed in between, however it did.

    Raises
    ------
    UsageError
        A value is none of those above.
    """

    lazy: Lazy = "auto"
    slots: int | None = None
    when_full: WhenFull = "wait"
    debug: bool = False

    def __post_init__(self) -> None:
        one_of("lazy", self.lazy, get_args(Lazy))
        one_of("when_full", self.when_full, get_args(WhenFull))
        check_given(self, (int,), "slots")


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """Signals by which a scheduler, or a person, asks for a save.

    Parameters
    ----------
    signals
        Each makes a coming call of `save` due on every rank, whichever rank it reached. Those that
        end a process (TERM, INT, HUP, QUIT, XCPU) set `Checkpointer.stop_requested` as well.
        Handlers are put back at `close`.
    grace_s
        How long the scheduler waits after such a signal, in seconds: as long does `close` wait.

    Raises
    ------
    UsageError
        `grace_s` is not positive. Signals are checked where they are handled.
    """

    signals: Iterable[int] | int = (signal.SIGTERM,)
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        check_positive("grace_s", self.grace_s, (int, float))


def given(name: str, value: object, kind: type[T]) -> T:
    """Return the group of options `value`; its defaults for None.

    Raises
    ------
    UsageError
        It is something else.
    """
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    raise UsageError(
        f"'{name} must be {kind.__name__}'",
        where=name,
        wanted=f"ckptd.{kind.__name__}(...)",
        found=repr(value),
    )


def preemption_of(value: object) -> Preemption:
    """Return what `Checkpointer` takes as `preemption`; without one, no signals.

    Raises
    ------
    UsageError
        As `given`.
    """
    if value is None or value is False:
        return Preemption(signals=())
    return given("preemption", None if value is True else value, Preemption)


def one_of(name: str, value: object, names: tuple[str, ...]) -> None:
    """Raise `UsageError` where an option is none of its values."""
    if value not in names:
        raise UsageError(
            f"invalid value of {name}", where=name, wanted=", ".join(names), found=repr(value)
        )
