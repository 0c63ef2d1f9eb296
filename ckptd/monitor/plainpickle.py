"""Pickled plain data, read without pickle: no code runs, and nothing is made that the file is not.

PyTorch writes its flight recorder's dumps with the pickler of TorchScript: dicts, lists, tuples,
texts, numbers. Every other instruction is refused, those that name a class or call one first of
all. Marks and memory are Python objects here, so that a number in the file allocates nothing.
"""

from __future__ import annotations

import pickletools
from typing import Any

from ckptd.errors import CorruptError

__all__ = ["loads"]

_MARK = object()
_MAKE: dict[str, Any] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_PUSH = {
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def loads(data: bytes, where: str) -> Any:
    """Return the plain data that `data` is.

    Raises
    ------
    CorruptError
        kind ``bad-flight-record``: it is no pickle, or holds anything but plain data.
    """
    machine = _Machine()
    try:
        for code, argument, _ in pickletools.genops(data):
            if machine.step(code.name, argument):
                return machine.stack[-1]
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise _bad(where, f"{type(error).__name__}: {error}"[:200]) from error
    raise _bad(where, "no end")


def _bad(where: str, found: str) -> CorruptError:
    return CorruptError(
        "this is not a dump of a flight recorder",
        kind="bad-flight-record",
        where=where,
        wanted="pickled dicts, lists, tuples, texts and numbers",
        found=found,
    )


class _Machine:
    """The instructions of a pickle that make plain data."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> bool:
        """Follow one instruction; return whether it was the last."""
        if name in _PUSH:
            self.stack.append(argument)
        elif name in _MAKE:
            self.stack.append(_MAKE[name]())
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name == "MARK":
            self.stack.append(_MARK)
        elif name in _TUPLES:
            count = _TUPLES[name]
            if len(self.stack) < count:
                raise ValueError("too little for a tuple")
            self.stack[-count:] = [tuple(self.stack[-count:])]
        elif name == "TUPLE":
            items = self._since_mark()
            self.stack.append(tuple(items))
        elif name in ("APPEND", "APPENDS"):
            items = [self.stack.pop()] if name == "APPEND" else self._since_mark()
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._two() if name == "SETITEM" else self._since_mark()
            # The hash of tuples within tuples takes as long as whoever made them likes.
            if not all(isinstance(key, str | int) for key in items[::2]):
                raise TypeError("a key that is no text or number")
            self._top(dict).update(zip(items[::2], items[1::2], strict=True))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"instruction {name}")
        return name == "STOP"

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError(f"no {kind.__name__}")
        return self.stack[-1]

    def _two(self) -> list[Any]:
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]

    def _since_mark(self) -> list[Any]:
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                items = self.stack[at + 1 :]
                del self.stack[at:]
                return items
        raise ValueError("no mark")
