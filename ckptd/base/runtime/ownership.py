"""Objects of one process (after a fork), calls that may not overlap: refusals and their errors.

A forked child has a copy of every object of its parent: the same descriptors, the same shared
memory, and none of the threads. Bytes that the child sends over an inherited socket arrive as a
message of the parent, and answers never come, as the receiving thread is not there. So an object
that has a thread, a socket, memory that others read, or a lease belongs to the process that made
it, and becomes a shell in each child: its methods refuse, and those that release do nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, ClassVar, Concatenate, NoReturn, ParamSpec, Self, TypeVar

from ckptd.errors import UsageError

_log = logging.getLogger("ckptd")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

# -- in a forked child -----------------------------------------------------------------------------

_hooks: dict[int, tuple[weakref.ref[Any], Callable[[Any], None]]] = {}
"""Objects and their functions, by numbers that rise.

Not `weakref.WeakMethod`: at the end of a process, Python 3.14 writes of an error in its callback.
"""
_number = 0


def in_child(hook: Callable[[], None]) -> None:
    """Have `hook`, a method, called in each child that is forked while its object lives.

    Later ones come first. It runs before the child's program goes on, in its only thread: it must
    take no lock that another thread of the parent may have held.
    """
    global _number
    _number += 1
    number, hooks = _number, _hooks  # at the end of a process the module's names are gone
    method: Any = hook
    hooks[number] = weakref.ref(method.__self__, lambda _: hooks.pop(number)), method.__func__


def _after_fork() -> None:
    for reference, hook in reversed(tuple(_hooks.values())):
        owner = reference()
        if owner is None:
            continue
        try:
            hook(owner)
        except Exception:  # noqa: BLE001 - the others must be called as well
            _log.warning("a child process could not drop resources of its parent", exc_info=True)


os.register_at_fork(after_in_child=_after_fork)


class OfOneProcess:
    """Base of what belongs to the process that made it.

    In a forked child its methods raise `UsageError`, kind ``forked``. Attributes and properties
    are as they were at the fork.

    Attributes
    ----------
    inert
        Methods that do nothing in a child: what ends it, lets go of it, or waits for what the child
        does not have.
    """

    inert: ClassVar[frozenset[str]] = frozenset({"close", "__exit__"})

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name in cls.inert & vars(cls).keys():
            setattr(cls, name, _letting_go(vars(cls)[name]))

    def __new__(cls, *args: object, **more: object) -> Self:
        """Return a new object, of this process."""
        made = super().__new__(cls)
        in_child(made._leave_to_parent)
        return made

    def _leave_to_parent(self) -> None:
        """Become a shell, in a child of the process that it belongs to.

        Its class is changed, so that nothing has to be looked at in that process.
        """
        cls: Any = type(self)
        self.__class__ = _shell_of(cls)


_shells: set[type] = set()


def _letting_go(method: Callable[..., _R]) -> Callable[..., _R | None]:
    """Return a method that does nothing in a child, also where it was bound before the fork.

    ``with`` and ``atexit`` keep a bound method, which the class of a shell does not change.
    """

    @functools.wraps(method)
    def letting_go(self: Any, *args: Any, **more: Any) -> _R | None:
        return None if type(self) in _shells else method(self, *args, **more)

    return letting_go


_KEPT = frozenset({"__iter__", "__next__", "__enter__", "__exit__", "__call__"})


@functools.cache
def _shell_of(cls: Any) -> Any:
    """Return the class of an object of `cls` in a child."""
    methods: dict[str, Any] = {}
    for base in reversed([b for b in cls.__mro__ if b not in (OfOneProcess, object)]):
        for name, value in vars(base).items():
            special = name.startswith("__") and name not in _KEPT
            if isinstance(value, FunctionType) and not special:
                inert = name in cls.inert
                methods[name] = _nothing if inert else _refusal(cls.__name__, name)
    methods["_leave_to_parent"] = _nothing  # of a child of the child
    methods["__module__"] = cls.__module__
    methods["inert"] = frozenset()
    shell = type(cls)(cls.__name__, (cls,), methods)
    _shells.add(shell)
    return shell


def _nothing(*_: object, **__: object) -> None:
    return None


def _refusal(owner: str, name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise UsageError(
            f"a {owner} cannot be used in a forked process",
            kind="forked",
            where=f"{owner}.{name} in process {os.getpid()}",
            hint=f"use it in the process that created it, or create another {owner} here",
        )

    return refuse


# -- one call at a time ----------------------------------------------------------------------------

_CALL = "_call_under_way"


def one_at_a_time(
    method: Callable[Concatenate[_T, _P], _R],
) -> Callable[Concatenate[_T, _P], _R]:
    """Refuse calls that begin while another one of the same object is under way.

    That is one by a signal handler, a destructor or a callback, which would wait for what the
    frame below it holds, or one of another thread. Of all methods that are decorated only one
    runs at a time.

    Raises
    ------
    UsageError
        Kind ``under-way``.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: _T, /, *args: _P.args, **more: _P.kwargs) -> _R:
        held = vars(self)
        mine = (name, threading.get_ident(), object())
        try:
            # Within the block: an interrupt between the two would leave it taken for ever.
            found = held.setdefault(_CALL, mine)
            if found is not mine:
                if _runs(found):
                    raise _under_way(self, name, found)
                held[_CALL] = mine
            return method(self, *args, **more)
        finally:
            if held.get(_CALL) is mine:
                del held[_CALL]

    return call


def not_within(self: object, name: str, call: str) -> None:
    """Refuse `call` while `name` of the same object is under way; see `one_at_a_time`."""
    found = vars(self).get(_CALL)
    if found is not None and found[0] == name and _runs(found):
        raise _under_way(self, call, found)


def not_at_exit(call: str) -> None:
    """Refuse `call`, which needs new threads, where the main one has ended: Python starts none."""
    if not threading.main_thread().is_alive():
        raise UsageError(
            f"{call}() needs threads, and the program is ending",
            kind="closed",
            where="a function of atexit, a destructor, or a thread after the main one",
            hint=f"call {call}() before the main thread ends",
        )


def not_below(owner: str, call: str) -> None:
    """Refuse `call`, which waits, within a call of an object of class `owner` in this thread.

    What it waits for may need a lock that the frame below a signal handler holds.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == __file__ and frame.f_code.co_name == "call":
            held = frame.f_locals
            named = any(base.__name__ == owner for base in type(held["self"]).__mro__)
            if named and "mine" in held:
                raise _under_way(held["self"], call, held["mine"])
        frame = frame.f_back


def _runs(found: tuple[str, int, object]) -> bool:
    """Whether that call is under way; interrupts may have kept one from saying that it ended."""
    frame = sys._current_frames().get(found[1])
    while frame is not None:
        if frame.f_code.co_filename == __file__ and frame.f_locals.get("mine") is found:
            return True
        frame = frame.f_back
    return False


def _under_way(self: object, call: str, found: tuple[str, int, object]) -> UsageError:
    owner, (name, thread, _) = type(self).__name__, found
    if thread == threading.get_ident():
        where = f"{call}() within {name}(): in a signal handler, a destructor or a callback"
        hint = f"set a flag there, and call {call}() when {name}() has returned"
    else:
        where = f"{call}() in {threading.current_thread().name}, {name}() in another thread"
        hint = f"make the calls of one {owner} in one thread"
    return UsageError(
        f"another call of this {owner} is under way", kind="under-way", where=where, hint=hint
    )
