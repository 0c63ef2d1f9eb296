"""Safe unpickler: classes that are refused as unsafe, tensors of torch, limits of size and time.

In it: tensors of kinds that are not read, and hints; small arrays of numpy.

A pickle is a program that may call any function. Here every class that it names is an inert
`PickledObject`, a few constructors of torch make `PickledTensor`, and the rest is data. A pickle
that names what only an attack needs is refused. Steps, containers, nesting of keys and time are
bounded by the pickle's length.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptd.checkpoint.format.words import MODULE, MODULE_HINT, PLAIN_HINT
from ckptd.errors import CkptdError, CorruptError, MismatchError, RefusedError
from ckptd.types import DTYPES

MAX_PICKLE_BYTES = 1 << 28
MAX_VALUES = 1 << 20
"""Most values that `walk_values` visits: references can make a small pickle an endless tree."""
_MAX_PATH = 4096
_MAX_CHARS = 1 << 26
_MAX_NAMED = 1 << 14
_MAX_DEPTH = 64
_MOST_AGAIN = 1 << 14
_OFTEN = 8
"""Values that are reached again through references: so many, and for each of the file so many."""
_MOST_AXES = 32
_NUMBERS = re.compile("[<>=|]?[biufc][0-9]{1,2}")
_MAX_MARKS = 1 << 12
_FREE = 1 << 18
_TIME_S = 4.0
_BYTES_A_SECOND = 1 << 20
_TURN = 1 << 14

_ATTACKS = """
_posixsubprocess asyncio bdb cgi cloudpickle code codeop commands concurrent cProfile ctypes dill
ensurepip fileinput http imaplib importlib io joblib linecache marshal mmap multiprocessing nt
ntpath operator os pdb pickle pip pkgutil platform posix posixpath profile pty pydoc requests runpy
shelve shutil signal site smtplib socket socketserver ssl subprocess sys sysconfig tempfile
threading timeit trace traceback urllib webbrowser zipimport"""
_REFUSED = frozenset(_ATTACKS.split())
"""Modules that no checkpoint needs. Safety does not rest on the list: nothing is imported."""
_CONTAINERS = """
bool bytearray bytes complex dict float frozenset getattr int list object range set slice str
tuple type"""
_BUILTINS = frozenset(_CONTAINERS.split())
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "UntypedStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


class GlobalName(str):
    """The full name of a class, function or constant that a pickle speaks of."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """The memory below tensors: its key in the file, its type, its length in elements."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor: a storage, the first element, shape and strides in elements."""

    storage: PickledStorage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class PickledObject:
    """Stand-in for an object of a class that is not imported: its name, arguments and fields.

    Attributes
    ----------
    cls
        Full name of the class or function.
    args
        Arguments of the call.
    fields
        Its attributes. Items of a mapping or a list that it is besides are not kept.
    """

    __slots__ = ("args", "cls", "fields")

    def __init__(self, cls: str, args: tuple[Any, ...] = ()) -> None:
        self.cls = cls
        self.args = args
        self.fields: Mapping[str, Any] = _NO_FIELDS

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.fields.get(name, default)

    @property
    def short(self) -> str:
        """Name of the class without its module."""
        return self.cls.rpartition(".")[2]

    def __repr__(self) -> str:
        return f"<{self.cls}>"


class UnreadTensor(PickledObject):
    """A tensor, or its storage, of a kind that is not read: `cls` says which, `hint` what helps."""

    __slots__ = ("hint",)

    def __init__(self, cls: str, hint: str) -> None:
        super().__init__(cls)
        self.hint = hint


def read_pickle(raw: bytes, where: str, *, storages: bool = False) -> Any:
    """Return what a pickle holds.

    Parameters
    ----------
    raw
        The pickle, of any protocol.
    where
        Names it in errors.
    storages
        Whether it is part of a file of torch, and may refer to storages.

    Raises
    ------
    RefusedError
        kind ``unsafe-pickle``: names the global.
    CorruptError
        A pickle does not decode, or its values are not what the format has; or a file asks for
        more memory than its size justifies.
    """
    if len(raw) > MAX_PICKLE_BYTES:
        raise CorruptError("a pickle is too large", where=where, wanted=MAX_PICKLE_BYTES)
    machine = _Machine(raw, where, storages)
    try:
        return machine.run()
    except CkptdError:
        raise
    except (
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
        struct.error,
    ) as error:
        raise CorruptError(
            "invalid pickle",
            where=f"{where}, byte {machine.at}",
            found=f"{type(error).__name__}: {error}"[:200],
        ) from None


def named_values(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield what `walk_values` yields, of a file; a tensor that is the whole value is ``tensor``.

    Raises
    ------
    MismatchError
        Two values have one name, as ``{0: ...}`` and ``{"0": ...}`` have.
    CorruptError
        As of `walk_values`.
    """
    seen = set()
    for name, leaf in walk_values(value):
        if name in seen:
            raise MismatchError(
                "two values of one file have one name",
                where=f"{where}: {name}"[:400],
                hint="rename or drop one of the keys before saving the file",
            )
        seen.add(name)
        yield name or ("tensor" if leaf is value else name), leaf


def walk_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted path, leaf)`` of nested dicts, lists and tuples.

    A long list of plain values is one leaf.

    Raises
    ------
    CorruptError
        Nested too deeply, too many values, or names that are too long.
    """
    left, chars, again = MAX_VALUES, _MAX_CHARS, _MOST_AGAIN
    seen: set[int] = set()
    stack: list[tuple[str, Any, int]] = [("", value, 0)]
    while stack:
        path, value, depth = stack.pop()
        if isinstance(value, dict):
            lengths = [len(path) + _text_size(key) for key in value] if left >= len(value) else []
            items: Iterator[tuple[Any, Any]] = iter(value.items())
        elif isinstance(value, list | tuple) and not _is_flat(value):
            lengths, items = [len(path) + 8] * min(left, len(value)), enumerate(value)
        else:
            yield path, value
            continue
        left -= len(value)
        chars -= sum(lengths)
        # What is there once has bytes in the file; references to it hardly any.
        if id(value) in seen:
            again -= len(value)
        else:
            seen.add(id(value))
            again += _OFTEN * len(value)
        if depth > _MAX_DEPTH or min(left, chars, again) < 0 or max(lengths, default=0) > _MAX_PATH:
            raise CorruptError(
                "a pickle is nested too deeply, holds too many values, or names that are too long",
                where=path[:200],
                wanted=f"{_MAX_DEPTH} levels, {MAX_VALUES} values, {_MAX_PATH} characters of name",
            )
        inner = [(f"{path}.{k}" if path else str(k), v, depth + 1) for k, v in items]
        stack += reversed(inner)


def counts(values: Any, most: int = _MAX_DEPTH) -> tuple[int, ...]:
    """Return numbers such as the sizes or strides of a tensor; `ValueError` for anything else."""
    if not isinstance(values, list | tuple) or len(values) > most:
        raise ValueError("not a list of sizes, or too many")
    for n in values:
        if type(n) is not int or not 0 <= n < 1 << 62:
            raise ValueError("a size that is not a count")
    return tuple(values)


def short_text(value: Any) -> str:
    """Return a value of a pickle for an error: the text of nested tuples may have no end."""
    plain = isinstance(value, str | bool | float | None) or (
        isinstance(value, int) and value.bit_length() < _MAX_DEPTH
    )
    return str(value[:80] if isinstance(value, str) else value) if plain else _kind(value)


_EMPTY = ("UninitializedParameter", "UninitializedBuffer")
_ARRAYS = ("_reconstruct", "_frombuffer")
_MOST_ARRAY_BYTES = 1 << 15


def unread_kind(value: Any) -> tuple[str, str] | None:
    """Return what a tensor of a kind that is not read is, and what helps; None for all else.

    An object that is called with tensors counts as one: subclasses may say themselves how they are
    pickled. So does a module that has tensors; other objects with such attributes do not.
    """
    if isinstance(value, PickledStorage):
        return f"a storage of {value.dtype}", "save a tensor of it: torch.tensor(storage)"
    if isinstance(value, UnreadTensor):
        return value.cls, value.hint
    if not isinstance(value, PickledObject):
        return None
    if "_parameters" in value.fields and _has_tensor(value):
        return MODULE + value.cls, MODULE_HINT
    if value.cls.startswith("numpy."):
        if value.short not in _ARRAYS or numpy_value(value) is not None:
            return None
        return "a numpy array", "save torch.from_numpy(array)"
    made = _is_tensor(value) or value.cls == "torch.Tensor" or value.short in _EMPTY
    if not made and not any(_is_tensor(arg) for arg in value.args):
        return None
    of = next((a for a in value.args if isinstance(a, GlobalName)), "")
    return (str(of) if value.short == "_rebuild_wrapper_subclass" and of else value.cls), PLAIN_HINT


def _has_tensor(value: PickledObject) -> bool:
    """Whether a module has a tensor, or one below it has; as far as a bounded look shows."""
    left, stack = MAX_VALUES, [value]
    seen: set[int] = set()
    while stack and left > 0:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        fields = module.fields
        for table in (fields.get(n) for n in ("_parameters", "_buffers", "_modules")):
            for item in table.values() if isinstance(table, dict) else ():
                left -= 1
                if isinstance(item, PickledTensor) or _is_tensor(item):
                    return True
                if isinstance(item, PickledObject) and left > 0:
                    stack.append(item)
    return left <= 0


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, of any kind, without a look into what it is made of."""
    if isinstance(value, PickledTensor | PickledStorage | UnreadTensor):
        return True
    return isinstance(value, PickledObject) and value.short.startswith("_rebuild")


def check_read(value: Any, where: str) -> None:
    """Refuse a value that is a tensor of a kind that is not read; kind ``unreadable-format``."""
    found = unread_kind(value)
    if found is not None:
        raise RefusedError(
            "unsupported kind of tensor",
            kind="unreadable-format",
            where=where[:400],
            found=found[0][:200],
            hint=found[1],
        )


def numpy_value(value: Any) -> NDArray[Any] | np.generic | None:
    """Return a small array, or a number, of numpy; None for one that is large, or of objects."""
    if not isinstance(value, PickledObject) or not value.cls.startswith("numpy."):
        return None
    try:
        if value.short == "scalar":
            about, raw = value.args
            shape, is_column = counts(()), False
        elif value.short == "_frombuffer":
            raw, about, shape, order = value.args
            is_column = order == "F"
        elif value.short == "_reconstruct":
            _, shape, about, is_column, raw = value.fields["state"]
        else:
            return None
        dtype = _numpy_dtype(about)
        shape = counts(shape, _MOST_AXES)
        if not isinstance(raw, bytes) or len(raw) > _MOST_ARRAY_BYTES:
            return None
        flat = np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))
        array = flat.reshape(shape, order="F" if is_column else "C")
    except (KeyError, TypeError, ValueError):
        return None
    return flat[0] if value.short == "scalar" else array


def _numpy_dtype(about: Any) -> np.dtype[Any]:
    """Return the type of an array's numbers; `ValueError`, or another, for objects and texts."""
    name = about.args[0]
    state = about.fields.get("state", ())
    dtype = np.dtype(name) if _NUMBERS.fullmatch(name) else None
    if dtype is None or dtype.name not in DTYPES:
        raise ValueError("a dtype that is not numeric")
    is_big = len(state) > 1 and state[1] == ">"
    found: np.dtype[Any] = dtype.newbyteorder(">") if is_big else dtype
    return found


def _kind(value: Any) -> str:
    return value.cls[:80] if isinstance(value, PickledObject) else f"a {type(value).__name__}"


def _is_flat(value: Sequence[Any]) -> bool:
    """Whether a list is one of many plain values, which needs no name for each."""
    return len(value) > _MAX_NAMED and _PLAIN_TYPES.issuperset(map(type, value))


def _text_size(key: Any) -> int:
    """Return at least the length of a key's text, without making it."""
    if isinstance(key, str):
        return len(key)
    if isinstance(key, bytes):
        return 4 * len(key) + 3
    if isinstance(key, int):
        return key.bit_length() // 3 + 6
    if isinstance(key, PickledObject):
        return len(key.cls) + 2
    if isinstance(key, tuple):
        return sum(10 * _text_size(k) + 4 for k in key)
    return 32


# -- the machine -----------------------------------------------------------------------------------


def _dtype(name: object) -> str:
    if not isinstance(name, GlobalName):
        raise TypeError("a dtype that is not a global")
    return name.removeprefix("torch.")


def _layout(name: Any) -> GlobalName:
    if type(name) is not str:
        raise TypeError("a layout without a name")
    return GlobalName(name)


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: Any = None, bits: Any = None
) -> Any:
    """Do `torch._utils._rebuild_tensor_v3`; `bits` say that values are not those of the storage."""
    if bits is not None and not (isinstance(bits, dict) and not any(bits.values())):
        return UnreadTensor(
            "a view that conjugates or negates", "save tensor.resolve_conj().resolve_neg()"
        )
    shape, strides, (offset,) = counts(shape), counts(strides), counts((offset,))
    if len(shape) != len(strides):
        raise ValueError("shape and strides of a tensor disagree")
    dtype = None if dtype is None else _dtype(dtype)
    if dtype is not None and dtype not in DTYPES:
        return UnreadTensor(f"numbers of type {dtype[:80]}", "save it as another type")
    if not isinstance(storage, PickledStorage):
        return storage if isinstance(storage, UnreadTensor) else PickledObject("torch.Tensor")
    return PickledTensor(storage, offset, shape, strides, storage.dtype if dtype is None else dtype)


def _rebuild_type(function: Any, cls: Any, args: Any, state: Any) -> Any:
    """Do `torch._tensor._rebuild_from_type_v2`: a tensor of a subclass, with its attributes."""
    if not isinstance(function, GlobalName) or not isinstance(args, tuple):
        raise TypeError("a call of something that is not a global")
    if function in _CALLS and not function.startswith("torch._utils."):
        raise ValueError(f"a tensor of a subclass that {function[:80]} makes")
    known = _CALLS.get(function)
    if known is None and not function.startswith("torch._utils._rebuild"):
        return UnreadTensor(function[:200], PLAIN_HINT)
    made = PickledObject(function, args) if known is None else known(*args)
    if isinstance(made, PickledObject):
        _build(made, state)
    elif _holds_tensor(state):
        # The attributes are a part of the value: without them the data says something else.
        return UnreadTensor(short_text(cls), PLAIN_HINT)
    return made


def _holds_tensor(state: Any) -> bool:
    """Whether attributes of an object have a tensor among them."""
    parts = state if isinstance(state, tuple) else (state,)
    return any(_is_tensor(v) for part in parts if isinstance(part, dict) for v in part.values())


def _inner(owner: Any, name: Any) -> Any:
    """Return the name of a class or constant within a class of torch; nothing is looked up."""
    if not isinstance(owner, GlobalName) or type(name) is not str or not name.isidentifier():
        return PickledObject("builtins.getattr", (owner, name))
    if not owner.startswith("torch.") or "__" in name:
        return PickledObject("builtins.getattr", (owner, name))
    return GlobalName(f"{owner}.{name}"[:_MAX_PATH])


def _mapping(*args: Any) -> dict[Any, Any]:
    pairs = next((a for a in args if isinstance(a, list | tuple | dict)), ())
    items = list(pairs.items() if isinstance(pairs, dict) else pairs)
    for item in items:
        _check_key(item[0])
    return {k: v for k, v in items}  # noqa: C416 - each must be a pair


def _hashed(items: Any = ()) -> set[Any]:
    for item in items:
        _check_key(item)
    return set(items)


_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": lambda s, o, n, t: _tensor(s, o, n, t),
    "torch._utils._rebuild_tensor_v2": lambda s, o, n, t, g=0, h=0, b=None: _tensor(
        s, o, n, t, None, b
    ),
    "torch._utils._rebuild_tensor_v3": lambda s, o, n, t, g, h, d, b=None: _tensor(
        s, o, n, t, d, b
    ),
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _rebuild_type,
    "torch.serialization._get_layout": _layout,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _mapping,
    "collections.Counter": _mapping,
    "builtins.getattr": _inner,
    "builtins.dict": _mapping,
    "builtins.list": lambda items=(): list(items),
    "builtins.tuple": lambda items=(): tuple(items),
    "builtins.set": _hashed,
    "builtins.frozenset": _hashed,
    "builtins.bytes": lambda data=b"": data if isinstance(data, bytes) else b"",
    "builtins.bytearray": lambda data=b"", *_: data if isinstance(data, bytes) else b"",
    "_codecs.encode": lambda text, *_: text.encode("latin-1"),
}


def _build(made: Any, state: Any) -> None:
    """Set attributes: those of a dict, a list or a tensor are of no interest."""
    if isinstance(made, PickledObject):
        slots = isinstance(state, tuple) and len(state) == 2
        for part in state if slots else (state,):
            if isinstance(part, dict) and not made.fields:
                made.fields = part
            elif isinstance(part, dict):
                made.fields = {**made.fields, **part}
            elif part is not None:
                made.fields = {**made.fields, "state": state}
    elif not isinstance(made, dict | list | tuple | set | PickledTensor):
        raise TypeError(f"{type(made).__name__} has no attributes")


_SIMPLE = (str, int, float, bool, bytes, type(None), GlobalName, PickledObject)


_PLAIN_TYPES = frozenset(_SIMPLE) - {PickledObject}
_SPREAD = frozenset(
    {"torch.Size", "collections.OrderedDict", "collections.defaultdict", "collections.Counter"}
    | {f"builtins.{name}" for name in ("dict", "list", "tuple", "set", "frozenset")}
)
"""Types that make an object of each byte or character of an argument."""


def _check_key(key: Any) -> None:
    """Check that hashing a key costs little: references nest tuples without end."""
    if type(key) in _SIMPLE:
        return
    left, stack = _MAX_DEPTH, [key]
    while stack:
        item = stack.pop()
        left -= 1
        if left < 0 or not isinstance(item, (tuple, *_SIMPLE)):
            raise TypeError(f"a key of type {type(item).__name__}, or one nested too deeply")
        if isinstance(item, tuple):
            left -= len(item)
            stack += item[: _MAX_DEPTH + 1]


_MEMOIZE, _BINGET, _LONG_BINGET, _BININT1, _EMPTY_TUPLE = 0x94, 0x68, 0x6A, 0x4B, 0x29
_number4 = struct.Struct("<I").unpack_from

Op: TypeAlias = "Callable[[_Machine], None]"


class _Machine:
    """One pickle on its way through the stack."""

    def __init__(self, raw: bytes, where: str, storages: bool) -> None:
        self.raw = raw
        self.where = where
        self.storages = storages
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] | dict[int, Any] = []  # a dict once numbers do not follow each other
        self.left = self.most = _FREE + len(raw) // 4
        self.globals: dict[str, GlobalName] = {}
        self.done = False

    def run(self) -> Any:
        """Run to the end; what lies on the stack then is the value."""
        end = time.thread_time() + _TIME_S + len(self.raw) / _BYTES_A_SECOND
        while not self.done:
            self._turn(_TABLE)
            if time.thread_time() > end:
                raise self.limits("it takes too long")
        return self.stack.pop()

    def _turn(self, table: list[Op]) -> None:
        """Run some opcodes; the most frequent ones stand here, as a call each costs more."""
        raw, most, at, stack, memo = self.raw, self.most, self.at, self.stack, self.memo
        try:
            for _ in range(_TURN):
                op = raw[at]
                at += 1
                if op == _MEMOIZE and type(memo) is list and len(memo) <= most:
                    memo.append(stack[-1])
                elif op == _BINGET:
                    stack.append(memo[raw[at]])
                    at += 1
                elif op == _LONG_BINGET:
                    stack.append(memo[_number4(raw, at)[0]])
                    at += 4
                elif op == _BININT1:
                    stack.append(raw[at])
                    at += 1
                elif op == _EMPTY_TUPLE:
                    stack.append(())
                else:
                    self.at = at
                    table[op](self)
                    if self.done:
                        return
                    at, stack, memo = self.at, self.stack, self.memo
        finally:
            self.at = max(self.at, at)

    def limits(self, what: str) -> CorruptError:
        """Return the error for a pickle that costs more than its length justifies."""
        return CorruptError("a pickle needs too much time or memory", where=self.where, found=what)

    def spend(self, n: int) -> None:
        """Count elements that are copied, and containers that are made."""
        self.left -= n
        if self.left < 0:
            raise self.limits("too many containers or copies for its length")

    def take(self, n: int) -> bytes:
        """Return the next `n` bytes."""
        if n < 0 or n > len(self.raw) - self.at:
            raise ValueError(f"{n} bytes are wanted where {len(self.raw) - self.at} are left")
        self.at += n
        return self.raw[self.at - n : self.at]

    def count(self, width: int) -> int:
        """Return an unsigned number of `width` bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """Return the text up to the end of the line."""
        end = self.raw.index(b"\n", self.at)
        text = self.raw[self.at : end]
        self.at = end + 1
        return text.decode("latin-1")

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def pop_mark(self) -> list[Any]:
        """Return what lies above the newest mark, and go back below it."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def name(self, module: Any, name: Any) -> GlobalName:
        """Return a global, unless nothing but an attack needs it."""
        if type(module) is not str or type(name) is not str:
            raise TypeError("a global without a name")
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        full = f"{module}.{name}"
        root = module.partition(".")[0]
        first = name.partition(".")[0]
        if (
            root in _REFUSED
            or (root == "builtins" and (first not in _BUILTINS or "." in name))
            or "__" in name
        ):
            raise self.unsafe(full)
        return self.globals.setdefault(full, GlobalName(full))

    def unsafe(self, what: str) -> RefusedError:
        """Return the error for a pickle that wants to do something."""
        return RefusedError(
            "a pickle imports or calls code that no checkpoint needs",
            kind="unsafe-pickle",
            where=f"{self.where}, byte {self.at}",
            found=what[:200],
            hint="no code was run; do not open this file with torch.load(weights_only=False)",
        )

    def call(self, function: Any, args: Any) -> None:
        """Push what a constructor makes."""
        if not isinstance(args, tuple):
            raise TypeError("arguments that are not a tuple")
        if type(function) is not GlobalName:
            if isinstance(function, PickledObject):
                raise self.unsafe(f"a call of what {function.cls} returned")
            raise TypeError("a call of something that is not a global")
        known = _CALLS.get(function)
        copied = 1
        for arg in args:
            if isinstance(arg, str | bytes) and function not in _SPREAD:
                copied += len(arg) >> 3
            elif isinstance(arg, tuple | list | dict | str | bytes | set):
                copied += len(arg)
        self.spend(copied)
        self.stack.append(PickledObject(function, args) if known is None else known(*args))

    # -- numbers and text

    def op_int(self) -> None:
        text = self.line()
        self.push({"00": False, "01": True}.get(text) if text in ("00", "01") else int(text))

    def op_long(self) -> None:
        self.push(int(self.line().rstrip("L")))

    def op_float(self) -> None:
        self.push(float(self.line()))

    def op_binfloat(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])

    def op_binint1(self) -> None:
        self.stack.append(self.raw[self.at])
        self.at += 1

    def op_binint2(self) -> None:
        at = self.at
        self.stack.append(self.raw[at] | self.raw[at + 1] << 8)
        self.at = at + 2

    def op_binint(self) -> None:
        self.push(int.from_bytes(self.take(4), "little", signed=True))

    def op_string(self) -> None:
        text = self.line()
        if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
            raise ValueError("a string without quotes")
        self.push(text[1:-1].encode("latin-1").decode("unicode-escape", "replace"))

    def op_unicode(self) -> None:
        self.push(self.line().encode("latin-1").decode("raw-unicode-escape"))

    def text(self, width: int) -> None:
        """Push a counted text."""
        self.push(self.take(self.count(width)).decode("utf-8", "surrogatepass"))

    # -- containers

    def op_mark(self) -> None:
        if len(self.marks) > _MAX_MARKS:
            raise self.limits("marks without end")
        self.marks.append(self.stack)
        self.stack = []

    def made(self, value: Any) -> None:
        """Push a new container."""
        self.spend(2)
        self.stack.append(value)

    def tuple_of(self, n: int) -> None:
        """Push a tuple of the `n` values on top."""
        stack = self.stack
        if len(stack) < n:
            raise IndexError("the stack is empty")
        self.spend(1)
        items = tuple(stack[-n:])
        del stack[-n:]
        stack.append(items)

    def op_tuple(self) -> None:
        self.made(tuple(self.pop_mark()))

    def op_empty_dict(self) -> None:
        self.spend(2)
        self.stack.append({})

    def op_setitems(self) -> None:
        items, self.stack = self.stack, self.marks.pop()
        self.put(items)

    def op_dict(self) -> None:
        items = self.pop_mark()
        self.made({})
        self.put(items)

    def put(self, items: list[Any]) -> None:
        """Set items of the mapping on top, from keys and values in turn."""
        target, keys = self.stack[-1], items[::2]
        for key in keys:
            if type(key) is not str:
                _check_key(key)
        if type(target) is dict:
            target.update(zip(keys, items[1::2], strict=True))
        elif not isinstance(target, PickledObject):
            raise TypeError(f"{type(target).__name__} is not a mapping")

    def extend(self, items: list[Any]) -> None:
        """Append to the list on top."""
        target = self.stack[-1]
        if isinstance(target, list):
            target += items
        elif not isinstance(target, PickledObject):
            raise TypeError(f"{type(target).__name__} is not a list")

    def op_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.put([key, value])

    def op_append(self) -> None:
        item = self.stack.pop()
        self.extend([item])

    def op_additems(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        if not isinstance(target, PickledObject):
            target |= _hashed(items)

    # -- globals and objects

    def op_global(self) -> None:
        module, name = self.line(), self.line()
        self.push(self.name(module, name))

    def op_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.push(self.name(module, name))

    def op_reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.call(function, args)

    def op_newobj_ex(self) -> None:
        fields, args, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.call(cls, args)
        if fields:
            _build(self.stack[-1], fields)

    def op_inst(self) -> None:
        cls = self.name(self.line(), self.line())
        self.call(cls, tuple(self.pop_mark()))

    def op_obj(self) -> None:
        cls, *args = self.pop_mark()
        self.call(cls, tuple(args))

    def op_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if type(made) is PickledObject and not made.fields and type(state) is dict:
            made.fields = state
            return
        if isinstance(made, PickledObject) and made.fields:
            self.spend(len(made.fields) + len(state) if isinstance(state, dict | tuple) else 1)
        _build(made, state)

    def op_binpersid(self) -> None:
        pid = self.stack.pop()
        if not self.storages or not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise self.unsafe(f"persistent id {pid!r}"[:120] if isinstance(pid, str) else "an id")
        _, cls, key, _, numel = pid[:5]
        if not isinstance(cls, GlobalName) or not isinstance(key, str):
            raise TypeError("a storage without type or key")
        text = cls.removeprefix("torch.").removeprefix("storage.")
        (numel,) = counts((numel,))
        dtype = STORAGES.get(text)
        if dtype is None and text.endswith("Storage"):  # Float8_e4m3fnStorage and its kin
            dtype = text.removesuffix("Storage").replace("Float8", "float8")
        if dtype is None:
            raise ValueError(f"'unknown storage: {text[:80]}")
        if dtype in DTYPES:
            self.push(PickledStorage(key, dtype, numel))
        else:
            hint = "dequantize() or cast it first"
            self.push(UnreadTensor(f"a storage of type {text[:80]}", hint))

    def op_refuse(self) -> None:
        raise self.unsafe(f"opcode {self.raw[self.at - 1 : self.at]!r}")

    def op_unknown(self) -> None:
        raise ValueError(f"'unknown opcode: {self.raw[self.at - 1 : self.at]!r}")

    # -- the memo, and the rest

    def get(self, number: int) -> None:
        """Push what the memo has."""
        self.stack.append(self.memo[number])

    def keep(self, number: int) -> None:
        """Put what is on top into the memo."""
        if len(self.memo) > self.most:
            raise self.limits("too many memo entries for its length")
        if isinstance(self.memo, list):
            if number == len(self.memo):
                self.memo.append(self.stack[-1])
                return
            self.memo = dict(enumerate(self.memo))
        self.memo[number] = self.stack[-1]

    def op_pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def op_pop_mark(self) -> None:
        self.pop_mark()

    def op_stop(self) -> None:
        self.done = True

    def op_frame(self) -> None:
        if self.count(8) > len(self.raw) - self.at:
            raise ValueError("a frame longer than the pickle")

    def op_proto(self) -> None:
        if self.count(1) > 5:
            raise ValueError("a protocol of the future")


_OPS: dict[bytes, Op] = {
    b"(": _Machine.op_mark,
    b".": _Machine.op_stop,
    b"0": _Machine.op_pop,
    b"1": _Machine.op_pop_mark,
    b"2": lambda m: m.push(m.stack[-1]),
    b"F": _Machine.op_float,
    b"I": _Machine.op_int,
    b"J": _Machine.op_binint,
    b"K": _Machine.op_binint1,
    b"L": _Machine.op_long,
    b"M": _Machine.op_binint2,
    b"N": lambda m: m.stack.append(None),
    b"P": _Machine.op_refuse,
    b"Q": _Machine.op_binpersid,
    b"R": _Machine.op_reduce,
    b"S": _Machine.op_string,
    b"T": lambda m: m.push(m.take(m.count(4)).decode("latin-1")),
    b"U": lambda m: m.push(m.take(m.count(1)).decode("latin-1")),
    b"V": _Machine.op_unicode,
    b"X": lambda m: m.text(4),
    b"a": _Machine.op_append,
    b"b": _Machine.op_build,
    b"c": _Machine.op_global,
    b"d": _Machine.op_dict,
    b"e": lambda m: m.extend(m.pop_mark()),
    b"}": _Machine.op_empty_dict,
    b"g": lambda m: m.get(int(m.line())),
    b"h": lambda m: m.get(m.count(1)),
    b"i": _Machine.op_inst,
    b"j": lambda m: m.get(m.count(4)),
    b"l": lambda m: m.made(m.pop_mark()),
    b"]": lambda m: m.made([]),
    b"o": _Machine.op_obj,
    b"p": lambda m: m.keep(int(m.line())),
    b"q": lambda m: m.keep(m.count(1)),
    b"r": lambda m: m.keep(m.count(4)),
    b"s": _Machine.op_setitem,
    b"t": _Machine.op_tuple,
    b")": lambda m: m.stack.append(()),
    b"u": _Machine.op_setitems,
    b"G": _Machine.op_binfloat,
    b"B": lambda m: m.push(m.take(m.count(4))),
    b"C": lambda m: m.push(m.take(m.count(1))),
    b"\x80": _Machine.op_proto,
    b"\x81": _Machine.op_reduce,
    b"\x82": _Machine.op_refuse,
    b"\x83": _Machine.op_refuse,
    b"\x84": _Machine.op_refuse,
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"\x88": lambda m: m.stack.append(True),
    b"\x89": lambda m: m.stack.append(False),
    b"\x8a": lambda m: m.push(int.from_bytes(m.take(m.count(1)), "little", signed=True)),
    b"\x8b": lambda m: m.push(int.from_bytes(m.take(m.count(4)), "little", signed=True)),
    b"\x8c": lambda m: m.text(1),
    b"\x8d": lambda m: m.text(8),
    b"\x8e": lambda m: m.push(m.take(m.count(8))),
    b"\x8f": lambda m: m.made(set()),
    b"\x90": _Machine.op_additems,
    b"\x91": lambda m: m.made(_hashed(m.pop_mark())),
    b"\x92": _Machine.op_newobj_ex,
    b"\x93": _Machine.op_stack_global,
    b"\x94": lambda m: m.keep(len(m.memo)),
    b"\x95": _Machine.op_frame,
    b"\x96": lambda m: m.push(m.take(m.count(8))),
    b"\x97": _Machine.op_refuse,
    b"\x98": _Machine.op_refuse,
}
_TABLE: list[Op] = [_OPS.get(bytes([code]), _Machine.op_unknown) for code in range(256)]
