"""Objects as tagged JSON, without pickle: savable types, `register`, limits of depth and size.

In it: hints for a value that cannot be saved; shared parts; limit of metadata.

JSON values stay as they are. Everything else is ``{"$": tag, ...}``: tuples, bytes, sets,
numpy arrays and scalars, complex numbers, huge integers, non-finite floats, dicts with keys that
JSON lacks, dates, paths and other values of the standard library, enums and dataclasses that were
registered. Anything else is an error that says how to register it.

Decoding imports nothing that a file names and runs no code that was not registered. Enums and
named tuples that are not registered are made again where their class is loaded already; elsewhere
they come back as their plain value.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import io
import json
import logging
import math
import pathlib
import re
import sys
import threading
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from ckptd.errors import CkptdError, CorruptError, UsageError, one_line
from ckptd.types import DTYPES, dtype_of

MAX_DEPTH = 64
MAX_ALIKE = 32
"""Most members of a set, or keys, with one hash."""
MAX_AGAIN = 1 << 24
"""Most parts that the repeated parts of a value may expand to; fewer in a small one (`_Met`)."""
_FEW = 16
"""Parts of a value that may be written any number of times."""
MAX_DIMS = 32
"""Most dimensions of an array before numpy 2.0."""
_ENUM, _NAMED = "ckptd.Enum", "ckptd.NamedTuple"
_SHARING = re.compile(rb'"\$":"shared"|"ckptd\.(Value"|TensorRef","v":\[)|"v":\["state_dict",')
"""In JSON, whose texts have a backslash before each quote."""
_log = logging.getLogger("ckptd")
_PLAIN = (bool, int, float, str, type(None))
_by_type: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_by_tag: dict[str, Callable[[Any], Any]] = {}
_LATE = frozenset({"fractions", "zoneinfo"})
_used: set[str] = set()
_lock = threading.RLock()
identified: set[type] = set()
"""Registered types with their own hash: two equal values of them stay two values."""


def register(
    cls: type,
    *,
    name: str | None = None,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> type:
    """Make values of `cls` savable; usable as a decorator on dataclasses and enums.

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
    _need(name)
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
        raise UsageError("name is registered for another type", where=name)
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


class _TooOften(ValueError):
    """Repeated parts expand to too many."""


class _Met(msgspec.Struct):
    """Parts of a value that were visited so far: by id, or by number when it is decoded.

    `numbers` holds the number of each repeated part, by id; without `shared` nothing is numbered.
    `parts` counts all parts of the value, `more` those that are repeated, and `twice` the repeated
    ones that are written again.
    """

    shared: bool = True
    numbers: dict[int, int] = msgspec.field(default_factory=dict)
    seen: dict[int, Any] = msgspec.field(default_factory=dict)
    sizes: dict[int, int] = msgspec.field(default_factory=dict)
    parts: int = 0
    more: int = 0
    twice: int = 0

    def again(self, key: int) -> Any:
        """Return what came before, and count its parts again; raises `_TooOften`."""
        size = self.sizes.get(key, 0)
        self.parts += size
        self.more += size
        if self.more > min(MAX_AGAIN, (1 << 20) + 256 * (self.parts - self.more)):
            raise _TooOften(f"{self.more} parts that come again")
        return self.seen[key]


def encode(value: Any, where: str = "value", *, shared: bool = False) -> Any:
    """Return JSON data that represents `value`.

    Parameters
    ----------
    shared
        What the value holds several times is one object again when it is decoded.

    Raises
    ------
    UsageError
        kind ``unsavable``: a type that is not registered, or nesting beyond 64 levels.
    """
    met = _Met(shared)
    try:
        raw = _encode(value, where, 0, met)
        return _encode(value, where, 0, _Met(numbers=met.numbers)) if met.numbers else raw
    except _TooOften as error:
        message = "what a value holds again and again is too large"
        raise UsageError(message, kind="unsavable", where=where, found=str(error)) from None


def shares(encoded: bytes) -> bool:
    """Tell whether the JSON of values holds what a reader must know ``sharing`` for."""
    return _SHARING.search(encoded) is not None


def _encode(value: Any, where: str, depth: int, met: _Met) -> Any:
    if depth > MAX_DEPTH:
        raise UsageError("nested too deeply", kind="unsavable", where=where)
    kind = type(value)
    if kind in _PLAIN:
        return _encode_plain(value)
    hashed: Any = kind.__hash__
    same = met.shared and (hashed in (None, object.__hash__) or kind in identified)
    if same and id(value) in met.seen:
        met.again(id(value))
        return {"$": "again", "v": met.numbers.setdefault(id(value), len(met.numbers))}
    met.twice += met.sizes.get(id(value), 0)
    if met.twice > MAX_AGAIN:
        raise _TooOften(f"{met.twice} parts that come again")
    before = met.parts
    raw = _encode_new(value, where, depth, met)
    number, size = met.numbers.get(id(value)), met.parts - before
    if same or size > _FEW:
        met.seen[id(value)] = value  # and so its id is nothing else's
    if size > _FEW or number is not None:
        met.sizes[id(value)] = size
    return raw if number is None else {"$": "shared", "id": number, "v": raw}


def _encode_new(value: Any, where: str, depth: int, met: _Met) -> Any:
    kind = type(value)
    if kind.__module__ in _LATE:
        _need(kind.__module__)
    if kind in _by_type:
        name, function = _by_type[kind]
        met.parts += 1
        return {"$": "type", "name": name, "v": _encode(function(value), where, depth + 1, met)}
    if kind is list:
        met.parts += len(value)
        return [_encode(v, f"{where}[{i}]", depth + 1, met) for i, v in enumerate(value)]
    if isinstance(value, enum.Enum):
        return {"$": "type", "name": _ENUM, "v": _encode_enum(value, where, depth, met)}
    if isinstance(value, tuple) and is_named_tuple(kind) and not getattr(value, "__dict__", None):
        content = [class_name(kind), list(kind._fields), tuple(value)]
        met.parts += 1
        return {"$": "type", "name": _NAMED, "v": _encode(content, where, depth + 1, met)}
    if kind in (tuple, set, frozenset):
        items = sorted(value, key=repr) if kind is not tuple else value
        met.parts += len(items)
        return {"$": kind.__name__, "v": [_encode(v, where, depth + 1, met) for v in items]}
    if kind is dict:
        return _encode_dict(value, where, depth, met)
    return _encode_bytes_and_numbers(value, where)


def is_named_tuple(kind: type) -> bool:
    """Return whether `kind` is a class as `collections.namedtuple` makes them."""
    fields = getattr(kind, "_fields", None)
    plain = isinstance(fields, tuple) and all(type(f) is str for f in fields)
    return plain and issubclass(kind, tuple) and hasattr(kind, "_make")


def class_name(kind: type) -> str:
    """Return ``MODULE:NAME`` of a class, by which `loaded_class` finds it."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _encode_enum(value: enum.Enum, where: str, depth: int, met: _Met) -> Any:
    apart = _Met(shared=False)
    try:
        plain = _encode(value.value, where, depth + 2, apart)
    except UsageError:
        plain, apart = None, _Met()  # only what loads it without its class needs the value
    met.parts += 4 + apart.parts
    return [class_name(type(value)), value.name, plain]


def loaded_class(name: str, base: type) -> Any:
    """Return the class ``MODULE:NAME`` that is loaded already, or None.

    Nothing is imported, and no module's code is asked.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        try:
            found = vars(found).get(part)
        except TypeError:
            return None
    return found if isinstance(found, type) and issubclass(found, base) else None


def _decode_enum(raw: Any) -> Any:
    name, member, plain = raw
    known = _by_name(str(name)) or loaded_class(str(name), enum.Enum)
    if known is None:
        _log.warning("%s is not loaded here: a member of it is loaded as its value", one_line(name))
        return plain
    if member in known.__members__:
        return known.__members__[member]
    if issubclass(known, enum.Flag):
        return known(plain)
    raise ValueError(f"{name} has no member {member!r}")


def _decode_named(raw: Any) -> Any:
    name, fields, values = raw
    known = _by_name(str(name)) or loaded_class(str(name), tuple)
    if not isinstance(values, tuple) or len(fields) != len(values):
        raise ValueError("invalid named tuple")
    if known is None or not is_named_tuple(known) or list(known._fields) != list(fields):
        _log.warning(
            "%s is not loaded here with these fields: loaded as a plain tuple", one_line(name)
        )
        return values
    return tuple.__new__(known, values)


def _by_name(name: str) -> Any:
    """Return a registered type, also where it was not yet registered when it was saved."""
    return next((t for t in _by_type if class_name(t) == name), None)


_by_tag[_ENUM] = _decode_enum
_by_tag[_NAMED] = _decode_named


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


def _encode_dict(value: dict[Any, Any], where: str, depth: int, met: _Met) -> Any:
    met.parts += len(value)
    if all(type(k) is str and _is_text(k) for k in value) and "$" not in value:
        return {k: _encode(v, f"{where}.{k}", depth + 1, met) for k, v in value.items()}
    met.parts += len(value)
    pairs = [
        [_encode(k, where, depth + 1, met), _encode(v, f"{where}.{k}", depth + 1, met)]
        for k, v in value.items()
    ]
    return {"$": "dict", "v": pairs}


def _encode_bytes_and_numbers(value: Any, where: str) -> Any:
    if type(value) is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}
    if isinstance(value, np.ndarray | np.generic):
        name = value.dtype.name
        if isinstance(value, np.ndarray) and not is_plain_array(value):
            raise _unsavable(value, where, f"{type(value).__module__}.{type(value).__qualname__}")
        if name not in DTYPES:
            raise _unsavable(value, where, f"numpy dtype {value.dtype}")
        raw = np.asarray(value, dtype=value.dtype.newbyteorder("<")).tobytes()
        tag = "array" if isinstance(value, np.ndarray) else "scalar"
        text = base64.b64encode(raw).decode()
        return {"$": tag, "dtype": name, "shape": list(np.shape(value)), "v": text}
    raise _unsavable(value, where, f"{type(value).__module__}.{type(value).__qualname__}")


def is_plain_array(value: object) -> bool:
    """Return whether an array is no more than its elements: a masked one would lose its mask."""
    return type(value) in (np.ndarray, np.memmap)


def _unsavable(value: object, where: str, found: str) -> UsageError:
    return UsageError(
        "a value of this type cannot be saved",
        kind="unsavable",
        where=where,
        wanted="JSON values, bytes, numpy arrays, tensors, tuples, sets, registered types",
        found=found,
        hint=_way_out(value),
    )


def _way_out(value: object) -> str:
    """Say what to do with a value that cannot be saved."""
    code = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial, type)
    if isinstance(value, code):
        return (
            "functions and classes are code, which a checkpoint does not hold: take it out of the "
            "state, create it in the program, and save the values that it is made of"
        )
    if isinstance(value, Iterator):
        return (
            "an iterator has a position that cannot be read: take it out of the state, and save "
            "how far it is; a loader with state_dict() can stand in the state itself"
        )
    name = type(value).__name__
    return (
        f"ckptd.register({name}), with encode= and decode= unless it is an enum or a dataclass; "
        "or take the value out of the state"
    )


def decode(raw: Any, where: str = "value") -> Any:
    """Return the value that `encode` was given.

    Raises
    ------
    CorruptError
        Unknown tag, wrong lengths, nesting beyond 64 levels.
    UsageError
        The type's name is not registered in this process.
    """
    return _decode(raw, where, 0, _Met())


def _decode(raw: Any, where: str, depth: int, met: _Met) -> Any:
    if depth > MAX_DEPTH + 2:
        raise CorruptError("object nested too deeply", where=where)
    if isinstance(raw, list):
        met.parts += len(raw)
        return [_decode(v, where, depth + 1, met) for v in raw]
    if not isinstance(raw, dict):
        return raw
    if "$" not in raw:
        met.parts += len(raw)
        return {k: _decode(v, where, depth + 1, met) for k, v in raw.items()}
    try:
        return _decode_tagged(raw, where, depth, met)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CorruptError("object does not decode", where=where, found=repr(error)[:200]) from None


def _decode_tagged(raw: dict[str, Any], where: str, depth: int, met: _Met) -> Any:
    tag, v, before = raw["$"], raw["v"], met.parts

    def inner(value: Any) -> Any:
        met.parts += 1
        return _decode(value, where, depth + 1, met)

    simple: dict[str, Callable[[], Any]] = {
        "tuple": lambda: tuple(map(inner, v)),
        "set": lambda: set(_apart([*map(inner, v)])),
        "frozenset": lambda: frozenset(_apart([*map(inner, v)])),
        "dict": lambda: _pairs([(inner(k), inner(x)) for k, x in v]),
        "shared": lambda: _share(raw["id"], _decode(v, where, depth, met), before, met),
        "again": lambda: met.again(v),
        "str": lambda: base64.b64decode(v, validate=True).decode("utf-8", "surrogatepass"),
        "bytes": lambda: base64.b64decode(v, validate=True),
        "float": lambda: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[v],
        "int": lambda: int(v, 16),
        "complex": lambda: complex(float(v[0]), float(v[1])),
        "array": lambda: _decode_array(raw, where),
        "scalar": lambda: _decode_array(raw, where)[()],
        "type": lambda: _decode_type(raw["name"], v, where, inner),
    }
    return simple[tag]()


def _share(number: int, value: Any, before: int, met: _Met) -> Any:
    if number in met.seen:
        raise ValueError(f"two values have the number {number}")
    met.seen[number], met.sizes[number] = value, met.parts - before
    return value


def _pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    _apart([k for k, _ in pairs])
    return unique_keys(pairs)


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
        raise ValueError("invalid shape")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("array length and shape disagree")
    return np.frombuffer(data, dtype=dtype.numpy).reshape(shape).copy()


def _decode_type(name: str, v: Any, where: str, inner: Callable[[Any], Any]) -> Any:
    _need(str(name))
    function = _by_tag.get(name)
    if function is None:
        raise UsageError(
            "the checkpoint holds a value of a type that this program did not register",
            where=where,
            found=str(name)[:200],
            hint="import the module that defines it and call ckptd.register(cls) before load",
        )
    value = inner(v)
    try:
        return function(value)
    except CkptdError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's code, given data from a file
        raise ValueError(f"{name} could not be created: {error!r}") from None


# --- values of the standard library ---------------------------------------------------------------


def _delta(value: dt.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _zone(value: dt.timezone) -> list[Any]:
    offset = _delta(value.utcoffset(None))
    # A name that was given is part of the value; the one that follows from the offset is not.
    named = value.tzname(None) != dt.timezone(value.utcoffset(None)).tzname(None)
    return [offset, value.tzname(None) if named else None]


def _made_zone(raw: list[Any]) -> dt.timezone:
    offset = dt.timedelta(*raw[0])
    return dt.timezone(offset) if raw[1] is None else dt.timezone(offset, raw[1])


def _key(value: Any) -> str:
    if value.key is None:
        raise UsageError(
            "a time zone without a name cannot be saved",
            kind="unsavable",
            hint="ZoneInfo(key), or the time in UTC",
        )
    return str(value.key)


def _moment(value: dt.datetime | dt.time) -> list[Any]:
    return [value.replace(tzinfo=None).isoformat(), value.tzinfo, value.fold]


def _made_moment(kind: Any, raw: list[Any]) -> Any:
    if not isinstance(raw[1], dt.tzinfo | None):
        raise TypeError("not a time zone")
    return kind.fromisoformat(raw[0]).replace(tzinfo=raw[1], fold=int(raw[2]))


def _bounds(value: range | slice) -> list[Any]:
    return [value.start, value.stop, value.step]


def attributes(value: Any) -> list[str]:
    """Return what was set on a container besides the versions that a module's state dict has."""
    own = {*getattr(value, "__dict__", ())}
    return sorted(own - {"_metadata"} if type(value) is OrderedDict else own)


def _items(value: Any) -> dict[Any, Any]:
    if more := attributes(value):
        found = f"{type(value).__name__} with {', '.join(more)}"[:200]
        raise UsageError("a container has attributes of its own", kind="unsavable", found=found)
    return dict(value)


def _encode_ordered(value: Any) -> Any:
    said = getattr(value, "_metadata", None)
    # Readers that do not know this fail at the first item, which is no pair.
    return _items(value) if said is None else ["state_dict", _items(value), dict(said)]


def _decode_ordered(raw: Any) -> Any:
    if isinstance(raw, dict):
        return OrderedDict(raw)
    _, items, said = raw
    new: Any = OrderedDict(items)
    new._metadata = OrderedDict(said)
    return new


_FACTORIES: dict[str, Any] = {
    **{k.__name__: k for k in (bool, bytes, dict, float, int, list, set, str, tuple)},
    **{k.__name__: k for k in (Counter, OrderedDict, deque)},
}


def _encode_default(value: Any) -> Any:
    factory = value.default_factory
    name: Any = getattr(factory, "__name__", None)
    if factory is not _FACTORIES.get(name):
        message = "a defaultdict with this factory cannot be saved: checkpoints hold no code"
        hint = f"save dict(value); or use as its factory {', '.join(_FACTORIES)}"
        raise UsageError(message, kind="unsavable", found=repr(factory)[:200], hint=hint)
    return [name, _items(value)]


def _decode_default(raw: Any) -> Any:
    name, items = raw
    return defaultdict(None if name is None else _FACTORIES[name], items)


def _decode_buffer(raw: Any) -> Any:
    buffer: Any = io.BytesIO()
    buffer.__setstate__((raw, 0, None) if isinstance(raw, bytes) else raw)
    return buffer


def _register() -> None:
    for moment in (dt.datetime, dt.time):
        made = partial(_made_moment, moment)
        register(moment, name=f"datetime.{moment.__name__}", encode=_moment, decode=made)
    register(dt.date, name="datetime.date", encode=dt.date.isoformat, decode=dt.date.fromisoformat)
    delta = "datetime.timedelta"
    register(dt.timedelta, name=delta, encode=_delta, decode=lambda raw: dt.timedelta(*raw))
    register(dt.timezone, name="datetime.timezone", encode=_zone, decode=_made_zone)
    # A path of this system is one of the system that loads it.
    register(type(pathlib.Path()), name="pathlib.Path", encode=str, decode=pathlib.Path)
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath):
        register(kind, name=f"pathlib.{kind.__name__}", encode=str, decode=kind)
    register(uuid.UUID, name="uuid.UUID", encode=str, decode=uuid.UUID)
    register(Decimal, name="decimal.Decimal", encode=str, decode=Decimal)
    register(bytearray, name="bytearray", encode=bytes, decode=bytearray)
    register(range, name="range", encode=_bounds, decode=lambda raw: range(*raw))
    register(slice, name="slice", encode=_bounds, decode=lambda raw: slice(*raw))
    containers: list[tuple[Any, Any, Any]] = [
        (Counter, _items, Counter),
        (defaultdict, _encode_default, _decode_default),
        (OrderedDict, _encode_ordered, _decode_ordered),
        (deque, lambda d: [list(d), d.maxlen], lambda raw: deque(*raw)),
    ]
    for kind, made, decode in containers:
        register(kind, name=f"collections.{kind.__name__}", encode=made, decode=decode)
    register(io.BytesIO, name="io.BytesIO", encode=io.BytesIO.__getstate__, decode=_decode_buffer)


def _need(name: str) -> None:
    """Register a type of a module that few programs have, when it is used."""
    module = name.partition(".")[0]
    if module not in _LATE:
        return
    with _lock:
        if module in _used:
            return
        _used.add(module)
        if module == "zoneinfo":
            from zoneinfo import ZoneInfo

            register(ZoneInfo, name="zoneinfo.ZoneInfo", encode=_key, decode=ZoneInfo)
        else:
            from fractions import Fraction

            register(
                Fraction,
                name="fractions.Fraction",
                encode=lambda f: [f.numerator, f.denominator],
                decode=lambda raw: Fraction(*raw),
            )


_register()


# -- JSON with one meaning for every reader (spec section 1.3) -------------------------------------

K = TypeVar("K")
V = TypeVar("V")

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes) -> Any:
    """Parse UTF-8 JSON.

    Raises
    ------
    ValueError
        Not JSON, a repeated key, NaN, infinity, a lone surrogate.
    RecursionError
        Nesting without end.
    """
    document = json.loads(
        str(raw, "utf-8"),
        object_pairs_hook=unique_keys,
        parse_constant=_no_constant,
        parse_float=_finite,
    )
    if _ESCAPED_SURROGATE.search(raw):  # alone it is no character, and it cannot be encoded
        json.dumps(document, ensure_ascii=False).encode()
    return document


def parse_object(raw: np.ndarray[Any, Any], where: str) -> Any:
    """Parse an encoded object that lies in a tensor."""
    try:
        return parse_json(raw.tobytes())
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            "an encoded object is not JSON", where=where, found=str(error)[:200]
        ) from None


def unique_keys(pairs: list[tuple[K, V]]) -> dict[K, V]:
    """Refuse duplicate keys, which readers of one file could otherwise resolve differently."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("duplicate key")
    return table


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"invalid number {text[:40]}")
    return value


# -- the user's metadata: JSON values, checked before anything is written --------------------------

MAX_METADATA_BYTES = 1 << 18
"""Of its JSON. Listings read it with every commit record."""


def checked_metadata(metadata: Mapping[str, Any], *, numbers: bool = True) -> dict[str, Any]:
    """Return metadata as a reader will get it: tuples are lists, numbers that are none are None.

    Tensors, arrays and scalars of one number are that number.

    Parameters
    ----------
    numbers
        False: they are not asked for it, for which a device would have to end what it does.

    Raises
    ------
    UsageError
        Names the key whose value is no JSON, or the largest when all of it is too large.
    """
    if not isinstance(metadata, Mapping):
        raise UsageError(
            "metadata must be a dict",
            where="metadata",
            wanted="a dict with text as keys",
            found=type(metadata).__name__,
        )
    texts = {key: _encoded(key, value, numbers) for key, value in metadata.items()}
    total = sum(len(key.encode()) + len(text) + 4 for key, text in texts.items())
    if total > MAX_METADATA_BYTES:
        largest = max(texts, key=lambda key: len(texts[key]))
        raise _bad(
            "the metadata is too large",
            largest,
            f"at most {MAX_METADATA_BYTES} bytes of JSON in all",
            f"{total} bytes, of which {len(texts[largest])} are this key's",
            "put large values into the state",
        )
    return {key: parse_json(text) for key, text in texts.items()}


def _encoded(key: object, value: object, numbers: bool) -> bytes:
    wanted = f"JSON: numbers, text, lists, dicts with text as keys; at most {MAX_DEPTH} deep"
    hint = "a tensor or an array must have one element here; put larger ones into the state"
    if not isinstance(key, str):
        raise _bad("a key of the metadata is not a string", key, "str", type(key).__name__, None)
    try:
        key.encode()
        text = msgspec.json.encode(_plain(value, MAX_DEPTH, numbers))
        parse_json(text)
    except (TypeError, ValueError, OverflowError, RuntimeError, msgspec.MsgspecError) as error:
        found = f"{type(value).__name__}: {error}"[:200]
        raise _bad("a value of the metadata is not JSON", key, wanted, found, hint) from error
    return text


def _plain(value: object, left: int, numbers: bool) -> object:
    """Return a value without tensors, arrays and scalars; raises where it is none that JSON has."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ValueError("an integer of more than 64 bits")
    if isinstance(value, Mapping | list | tuple):
        if left == 0:
            raise ValueError(f"nested more than {MAX_DEPTH} deep, or within itself")
        if isinstance(value, Mapping):
            return {key: _plain(inner, left - 1, numbers) for key, inner in value.items()}
        return [_plain(inner, left - 1, numbers) for inner in value]
    return _number(value, numbers) if callable(getattr(value, "item", None)) else value


def _number(value: Any, numbers: bool) -> object:
    """Return the number of a tensor, an array or a scalar."""
    if hasattr(value, "full_tensor"):
        # It may be in parts, and one rank alone would wait for the others for ever.
        raise TypeError("a DTensor: value.full_tensor().item() on every rank is its number")
    count = (
        value.numel() if callable(getattr(value, "numel", None)) else getattr(value, "size", None)
    )
    if count != 1:
        raise TypeError(f"it has {count} numbers")
    if not numbers and getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        if value.device.type == "meta" or value.is_complex():
            raise TypeError(f"not a number: {value.dtype} on {value.device}")
        return 0
    return _plain(value.item(), 0, numbers)


def _bad(what: str, key: object, wanted: str, found: str, hint: str | None) -> UsageError:
    where = f"metadata[{str(key)[:80]!r}]" if isinstance(key, str) else f"metadata[{key!r}]"[:100]
    return UsageError(what, where=where, wanted=wanted, found=found, hint=hint)
