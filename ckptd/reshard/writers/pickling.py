"""Writes pickles that name classes of torch without importing it; limits of what is plain.

Protocol 2 alone, which is what ``torch.load(weights_only=True)`` takes. Plain values stay
as they are; `Made` is an object of a class that is named and not imported.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from ckptd.base.grids.grid import strides_of
from ckptd.errors import UsageError
from ckptd.types import DTYPES

_MAX_DEPTH = 64
_MAX_INT_BYTES = 255
_LEGACY = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
"""Types with a class of storages of their own; torch keeps the others in untyped ones."""


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function by its name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """An object; the same one is written once, where its state is no dict.

    Attributes
    ----------
    cls
        Called with `args`.
    state
        Set on the object; None: nothing. With a state no ``__init__`` is called.
    """

    cls: Global
    args: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class StorageTensor:
    """A tensor that is all of the storage called `key`."""

    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Persistent:
    value: tuple[Any, ...]


_ORDERED = Global("collections", "OrderedDict")


def _rebuilt(tensor: StorageTensor) -> Made:
    """Return the call that makes a tensor."""
    numel = math.prod(tensor.shape)
    legacy = _LEGACY.get(tensor.dtype)
    if legacy:
        storage = Global("torch", f"{legacy}Storage")
    else:
        storage = Global("torch.storage", "UntypedStorage")
        numel *= DTYPES[tensor.dtype].itemsize
    kept = _Persistent(("storage", storage, tensor.key, "cpu", numel))
    strides = strides_of(tensor.shape)
    args = (kept, 0, tensor.shape, strides, False, Made(_ORDERED))
    if legacy:
        return Made(Global("torch._utils", "_rebuild_tensor_v2"), args)
    return Made(
        Global("torch._utils", "_rebuild_tensor_v3"), (*args, Global("torch", tensor.dtype))
    )


class _Pickle:
    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self._known: dict[str | Global | Made, int] = {}

    def _again(self, value: str | Global | Made) -> bool:
        """Refer to what was written before, or tell that it was not."""
        number = self._known.get(value)
        if number is None:
            return False
        self.out += b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
        return True

    def _keep(self, value: str | Global | Made) -> None:
        number = self._known[value] = len(self._known)
        self.out += b"q%c" % number if number < 256 else b"r" + struct.pack("<I", number)

    def put(self, value: Any, depth: int = 0) -> None:
        """Append what puts a value on the stack."""
        if depth > _MAX_DEPTH:
            raise UsageError("nested too deeply", kind="unsavable")
        kind = type(value)
        if kind is str:
            if not self._again(value):
                raw = value.encode("utf-8", "surrogatepass")
                self.out += b"X" + struct.pack("<I", len(raw)) + raw
                self._keep(value)
        elif kind is int:
            self._int(value)
        elif kind is tuple:
            self._tuple(value, depth)
        elif value is None or kind is bool:
            self.out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif kind is float:
            self.out += b"G" + struct.pack(">d", value)
        elif kind is list:
            self.out += b"]("
            for item in value:
                self.put(item, depth + 1)
            self.out += b"e"
        elif kind is dict:
            self.out += b"}("
            for key, item in value.items():
                self.put(key, depth + 1)
                self.put(item, depth + 1)
            self.out += b"u"
        else:
            self._object(value, depth)

    def _object(self, value: Any, depth: int) -> None:
        if isinstance(value, Global):
            if not self._again(value):
                self.out += f"c{value.module}\n{value.name}\n".encode()
                self._keep(value)
        elif isinstance(value, StorageTensor):
            self.put(_rebuilt(value), depth)
        elif isinstance(value, _Persistent):
            self.put(value.value, depth + 1)
            self.out += b"Q"
        elif isinstance(value, Made):
            if not self._again(value):
                self._made(value, depth)
        elif isinstance(value, bytes):
            # As protocol 2 has it, which has no bytes of its own.
            call = Made(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))
            self.put(call, depth + 1)
        else:
            raise UsageError(
                "a value that cannot be written as a plain pickle",
                kind="unsavable",
                found=type(value).__name__,
            )

    def _made(self, value: Made, depth: int) -> None:
        self.put(value.cls, depth + 1)
        self.put(value.args, depth + 1)
        self.out += b"R" if value.state is None else b"\x81"
        if value.state is not None:
            self.put(value.state, depth + 1)
            self.out += b"b"
        if not isinstance(value.state, dict):  # sizes and types, which are often the same
            self._keep(value)

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K%c" % value
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            check_int(value)
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a%c" % len(raw) + raw

    def _tuple(self, value: tuple[Any, ...], depth: int) -> None:
        if len(value) > 3:
            self.out += b"("
        for item in value:
            self.put(item, depth + 1)
        self.out += (b")", b"\x85", b"\x86", b"\x87", b"t")[min(len(value), 4)]


def dump(value: Any) -> bytes:
    """Return the pickle of plain values, `Made` and `StorageTensor`.

    Raises
    ------
    UsageError
        kind ``unsavable``: it holds something else, or is nested beyond 64 levels.
    """
    pickle = _Pickle()
    pickle.put(value)
    pickle.out += b"."
    return bytes(pickle.out)


def is_plain(value: Any) -> bool:
    """Tell whether `as_plain` returns the value itself, and not one of another type."""
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


def check_int(value: int) -> None:
    """Refuse a number that torch does not read with ``weights_only``; kind ``unsavable``."""
    nbytes = value.bit_length() // 8 + 1
    if nbytes > _MAX_INT_BYTES:
        raise UsageError("a number is too large", kind="unsavable", found=f"{nbytes} bytes")


def _plain_key(key: Any) -> Any:
    plain = as_plain(key)
    try:
        hash(plain)
    except TypeError:
        raise UsageError(
            "a key that other programs' dicts cannot hold",
            kind="unsavable",
            found=type(key).__name__,
        ) from None
    return plain


def as_plain(value: Any) -> Any:
    """Return a value with sets, numbers of numpy and the like as plain ones, as far as they are.

    Raises
    ------
    UsageError
        kind ``unsavable``: it holds what is no number, text, sequence or dict, a number that is too
        large, or a key that is plain only as a list.
    """
    kind = type(value)
    if kind is int:
        check_int(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if isinstance(value, dict):
        return {_plain_key(k): as_plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(as_plain(v) for v in value)
    if isinstance(value, list):
        return [as_plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return [as_plain(v) for v in sorted(value, key=repr)]
    listed = getattr(value, "tolist", None)  # arrays and numbers of numpy
    if callable(listed):
        return as_plain(listed())
    raise UsageError(
        "a value that another program's checkpoint cannot hold",
        kind="unsavable",
        found=kind.__name__,
    )
