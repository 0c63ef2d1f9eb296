"""Objects without pickle: plain values as tagged JSON (spec section 7).

JSON values stand for themselves. Everything else is ``{"$": tag, ...}``: tuples, bytes, sets,
numpy arrays and scalars, complex numbers, huge integers, non-finite floats, dicts with keys that
JSON lacks, enums and dataclasses that were registered. Anything else is an error that says how
to register it. Decoding runs no code that was not registered.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ckptd.errors import CkptdError, CorruptError, UsageError
from ckptd.format.strictjson import unique_keys
from ckptd.types import DTYPES, dtype_of

__all__ = ["decode", "encode", "register"]

MAX_DEPTH = 64
MAX_ALIKE = 32
"""Most members of a set, or keys, with one hash."""
MAX_DIMS = 32
"""What numpy before 2.0 can hold."""
_PLAIN = (bool, int, float, str, type(None))
_by_type: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_by_tag: dict[str, Callable[[Any], Any]] = {}


def register(
    cls: type,
    *,
    name: str | None = None,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> type:
    """Let values of `cls` be saved; usable as a decorator on dataclasses and enums.

    Parameters
    ----------
    cls
        The type. Enums and dataclasses need no functions.
    name
        Name in checkpoints; the qualified class name when left out. It must not change later.
    encode, decode
        To and from values that are savable already.

    Raises
    ------
    UsageError
        The type needs functions, or the name is taken by another type.
    """
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    if encode is None or decode is None:
        if issubclass(cls, enum.Enum):
            encode, decode = (lambda v: v.name), (lambda raw: cls[raw])
        elif dataclasses.is_dataclass(cls):
            encode, decode = _dataclass_fields, partial(_make_dataclass, cls)
        else:
            raise UsageError(
                f"{name} is neither an enum nor a dataclass",
                kind="unsavable",
                hint="ckptd.register(cls, encode=..., decode=...)",
            )
    taken = next((t for t, (n, _) in _by_type.items() if n == name), None)
    if taken is not None and taken is not cls:
        raise UsageError("name is registered for another type", kind="registered", where=name)
    _by_type[cls] = (name, encode)
    _by_tag[name] = decode
    return cls


def _dataclass_fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _make_dataclass(cls: type, raw: dict[str, Any]) -> Any:
    """Make an instance; fields that ``__init__`` does not take are set afterwards."""
    late = {f.name for f in dataclasses.fields(cls) if not f.init}
    value = cls(**{k: v for k, v in raw.items() if k not in late})
    for name in late & raw.keys():
        object.__setattr__(value, name, raw[name])
    return value


def encode(value: Any, where: str = "value") -> Any:
    """Return JSON data that stands for `value`.

    Raises
    ------
    UsageError
        kind ``unsavable``: a type that nobody registered, or nesting beyond 64 levels.
    """
    return _encode(value, where, 0)


def _encode(value: Any, where: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise UsageError("nested too deeply", kind="unsavable", where=where)
    kind = type(value)
    if kind in _PLAIN:
        return _encode_plain(value)
    if kind in _by_type:
        name, function = _by_type[kind]
        return {"$": "type", "name": name, "v": _encode(function(value), where, depth + 1)}
    if kind is list:
        return [_encode(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if kind in (tuple, set, frozenset):
        items = sorted(value, key=repr) if kind is not tuple else value
        return {"$": kind.__name__, "v": [_encode(v, where, depth + 1) for v in items]}
    if isinstance(value, dict):
        return _encode_dict(value, where, depth)
    return _encode_bytes_and_numbers(value, where)


def _encode_plain(value: Any) -> Any:
    if type(value) is float and not math.isfinite(value):
        return {"$": "float", "v": repr(value)}
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        return {"$": "int", "v": hex(value)}
    if type(value) is str and not _is_text(value):
        raw = value.encode("utf-8", "surrogatepass")
        return {"$": "str", "v": base64.b64encode(raw).decode()}
    return value


def _is_text(value: str) -> bool:
    """Lone surrogates, as in undecodable file names, are no JSON."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_dict(value: dict[Any, Any], where: str, depth: int) -> Any:
    if all(type(k) is str and _is_text(k) for k in value) and "$" not in value:
        return {k: _encode(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    pairs = [
        [_encode(k, where, depth + 1), _encode(v, f"{where}.{k}", depth + 1)]
        for k, v in value.items()
    ]
    return {"$": "dict", "v": pairs}


def _encode_bytes_and_numbers(value: Any, where: str) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$": "bytes", "v": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}
    if isinstance(value, np.ndarray | np.generic):
        name = value.dtype.name
        if name not in DTYPES:
            raise _unsavable(value, where, f"numpy dtype {value.dtype}")
        raw = np.asarray(value, dtype=value.dtype.newbyteorder("<")).tobytes()
        tag = "array" if isinstance(value, np.ndarray) else "scalar"
        text = base64.b64encode(raw).decode()
        return {"$": tag, "dtype": name, "shape": list(np.shape(value)), "v": text}
    raise _unsavable(value, where, f"{type(value).__module__}.{type(value).__qualname__}")


def _unsavable(value: object, where: str, found: str) -> UsageError:
    return UsageError(
        "a value of this type cannot be saved",
        kind="unsavable",
        where=where,
        wanted="JSON values, bytes, numpy arrays, tensors, tuples, sets, registered types",
        found=found,
        hint=f"ckptd.register({type(value).__name__}), with encode= and decode= unless it is an "
        "enum or a dataclass; or take the value out of the state",
    )


def decode(raw: Any, where: str = "value") -> Any:
    """Return the value that `encode` was given.

    Raises
    ------
    CorruptError
        Unknown tag, wrong lengths, nesting beyond 64 levels.
    UsageError
        kind ``unregistered``: the type's name is not registered in this process.
    """
    return _decode(raw, where, 0)


def _decode(raw: Any, where: str, depth: int) -> Any:
    if depth > MAX_DEPTH + 2:
        raise CorruptError("object nested too deeply", kind="bad-object", where=where)
    if isinstance(raw, list):
        return [_decode(v, where, depth + 1) for v in raw]
    if not isinstance(raw, dict):
        return raw
    if "$" not in raw:
        return {k: _decode(v, where, depth + 1) for k, v in raw.items()}
    try:
        return _decode_tagged(raw, where, depth)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CorruptError(
            "object does not decode", kind="bad-object", where=where, found=repr(error)[:200]
        ) from None


def _decode_tagged(raw: dict[str, Any], where: str, depth: int) -> Any:
    tag, v = raw["$"], raw["v"]
    simple: dict[str, Callable[[], Any]] = {
        "tuple": lambda: tuple(_decode(x, where, depth + 1) for x in v),
        "set": lambda: set(_apart([_decode(x, where, depth + 1) for x in v])),
        "frozenset": lambda: frozenset(_apart([_decode(x, where, depth + 1) for x in v])),
        "dict": lambda: unique_keys(
            list(
                zip(
                    _apart([_decode(k, where, depth + 1) for k, _ in v]),
                    [_decode(x, where, depth + 1) for _, x in v],
                    strict=True,
                )
            )
        ),
        "str": lambda: base64.b64decode(v, validate=True).decode("utf-8", "surrogatepass"),
        "bytes": lambda: base64.b64decode(v, validate=True),
        "float": lambda: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[v],
        "int": lambda: int(v, 16),
        "complex": lambda: complex(float(v[0]), float(v[1])),
        "array": lambda: _decode_array(raw, where),
        "scalar": lambda: _decode_array(raw, where)[()],
        "type": lambda: _decode_type(raw["name"], v, where, depth),
    }
    return simple[tag]()


def _apart(values: list[Any]) -> list[Any]:
    """Return values that become a set or keys, unless they were chosen to have one hash.

    Of integers without bounds anybody can name as many with one hash as they like, and putting
    them into a set takes the square of their number.
    """
    alike = Counter(map(hash, values))
    if max(alike.values(), default=0) > MAX_ALIKE:
        raise ValueError(f"more than {MAX_ALIKE} values of one hash")
    return values


def _decode_array(raw: dict[str, Any], where: str) -> np.ndarray[Any, Any]:
    dtype = dtype_of(raw["dtype"], where)
    data = base64.b64decode(raw["v"], validate=True)
    shape = tuple(raw["shape"])
    if len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("not a shape")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("array length and shape disagree")
    return np.frombuffer(data, dtype=dtype.numpy).reshape(shape).copy()


def _decode_type(name: str, v: Any, where: str, depth: int) -> Any:
    function = _by_tag.get(name)
    if function is None:
        raise UsageError(
            "the checkpoint holds a value of a type that this program did not register",
            kind="unregistered",
            where=where,
            found=str(name)[:200],
            hint="import the module that defines it and call ckptd.register(cls) before load",
        )
    value = _decode(v, where, depth + 1)
    try:
        return function(value)
    except CkptdError:
        raise
    except Exception as error:  # noqa: BLE001 - somebody else's code, given data from a file
        raise ValueError(f"{name} was not made: {error!r}") from None
