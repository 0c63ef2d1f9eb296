"""Pickled plain data, read without pickle: no code runs, and nothing is made that the file is not.

PyTorch writes its flight recorder's dumps with the pickler of TorchScript: dicts, lists, tuples,
texts, numbers. Every other instruction is refused, those that name a class or call one first of
all. Marks and memory are Python objects here, so that a number in the file allocates nothing.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
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
_MOST_VALUES = 4_000_000
"""Values of a dump, each counted as often as it is referred to: 20,000 calls with their stacks."""
_TEXT = 64
"""Letters of a text that count as one value."""
_MOST_KEY = 1 << 60
"""Integers below have hashes of their own: larger ones can be chosen to have all the same."""
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def loads(data: bytes, where: str) -> Any:
    """Return the plain data that `data` is.

    Raises
    ------
    CorruptError
        It is no pickle, or holds anything but plain data.
    """
    machine = _Machine()
    try:
        for code, argument, _ in pickletools.genops(data):
            if machine.step(code.name, argument):
                _weigh(machine.stack[-1])
                return machine.stack[-1]
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise _bad(where, f"{type(error).__name__}: {error}"[:200]) from error
    raise _bad(where, "no end")


def _bad(where: str, found: str) -> CorruptError:
    return CorruptError(
        "not a flight recorder dump",
        where=where,
        wanted="pickled dicts, lists, tuples, texts and numbers",
        found=found,
    )


def _is_key(key: Any) -> bool:
    return isinstance(key, str) or (isinstance(key, int) and abs(key) < _MOST_KEY)


def _weigh(value: Any) -> None:
    """Refuse a value that is much larger than its file, as parts of it are referred to again.

    A few lists that each hold the one before twice are short as a pickle, and endless when read.
    Nothing is followed twice here.
    """
    weights: dict[int, int] = {}
    open_: set[int] = set()
    todo: list[tuple[Any, bool]] = [(value, False)]
    while todo:
        node, done = todo.pop()
        if not isinstance(node, list | tuple | dict):
            continue
        if done:
            open_.discard(id(node))
            weight = 1 + sum(_weight(part, weights) for part in _parts(node))
            if weight > _MOST_VALUES:
                raise ValueError(f"more than {_MOST_VALUES} values, most of them the same ones")
            weights[id(node)] = weight
        elif id(node) in open_:
            raise ValueError("a value that holds itself")
        elif id(node) not in weights:
            open_.add(id(node))
            todo.append((node, True))
            todo += [(part, False) for part in _parts(node) if id(part) not in weights]


def _parts(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        yield from node
        yield from node.values()
    else:
        yield from node


def _weight(part: Any, weights: dict[int, int]) -> int:
    if isinstance(part, str):
        return 1 + len(part) // _TEXT
    return weights.get(id(part), 1)


class _Machine:
    """The instructions of a pickle that make plain data."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> bool:
        """Follow one instruction; return whether it was the last."""
        if name in _PUSH:
            if isinstance(argument, str):
                # Half a surrogate pair is a letter to pickle, and cannot be encoded as text.
                argument = argument.encode("utf-8", "replace").decode()
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
            # Nested tuples can be made so that their hash takes arbitrarily long.
            if not all(_is_key(key) for key in items[::2]):
                raise TypeError("a key that is not a string or number")
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
