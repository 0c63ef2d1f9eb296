"""Decoders of typed JSON and msgpack, made once at import; filter of unprintable text in logs.

msgspec collects what it knows of a Struct when that is decoded for the first time, and puts it
where all threads find it before it is complete: a second thread that decodes the same type
meanwhile reads a null pointer and takes the process along (SIGSEGV, msgspec 0.22.0). So no module
decodes by a bare type: each gets its decoder from here. One is made at a time, also where
two threads import modules, and no process is forked while one is half made.

Bytes that are no text, and nesting without end, are bytes of a wrong form like any others: a
decoder from here raises `msgspec.MsgspecError` for them and nothing else.

What is decoded comes from elsewhere, and some of it is logged: text that a logger of ckptd is given
passes `printable`, and a further line of it is indented, so that it begins no line of a log.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, overload

import msgspec

from ckptd.errors import CkptdError, printable

__all__ = ["ANYTHING", "Decoder", "converter", "json_decoder", "msgpack_decoder"]

T = TypeVar("T")
D = TypeVar("D")

_making = threading.RLock()
# A child of a fork has only the thread that forked: what another was at would stay half made.
os.register_at_fork(
    before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release
)


def _filtered(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(_plain(each) for each in record.args)
    return True


def _plain(given: object) -> object:
    if not isinstance(given, str | os.PathLike | Exception) or isinstance(given, CkptdError):
        return given  # those errors have passed it
    plain = printable(str(given)).replace("\n", "\n    ")
    return given if plain == str(given) else plain


for _name in ("ckptd", "ckptd.elastic", "ckptd.monitor"):
    logging.getLogger(_name).addFilter(_filtered)


class Decoder(Generic[T]):
    """Decodes one type, `type`; made by `json_decoder` and `msgpack_decoder`."""

    __slots__ = ("_decode", "type")

    def __init__(self, made: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]) -> None:
        self._decode: Callable[[Any], T] = made.decode
        self.type = made.type

    def decode(self, raw: bytes | bytearray | memoryview | str) -> T:
        """Return the value that `raw` holds; `msgspec.MsgspecError`, if it holds none."""
        try:
            return self._decode(raw)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from error


_made: dict[tuple[str, Any, bool], Any] = {}


@overload
def json_decoder(kind: type[T], *, strict: bool = True) -> Decoder[T]: ...
@overload
def json_decoder(kind: Any, *, strict: bool = True) -> Decoder[Any]: ...
def json_decoder(kind: Any, *, strict: bool = True) -> Decoder[Any]:
    """Return what decodes JSON as `kind`, in any number of threads; the same one each time.

    Call it at the top level of a module, so that no first message waits for it.

    Parameters
    ----------
    strict
        False: texts that say a number count as one.
    """
    return _once("json", kind, strict, lambda: Decoder(msgspec.json.Decoder(kind, strict=strict)))


@overload
def msgpack_decoder(kind: type[T]) -> Decoder[T]: ...
@overload
def msgpack_decoder(kind: Any) -> Decoder[Any]: ...
def msgpack_decoder(kind: Any) -> Decoder[Any]:
    """Return what decodes msgpack as `kind`; as `json_decoder`."""
    return _once("msgpack", kind, True, lambda: Decoder(msgspec.msgpack.Decoder(kind)))


@overload
def converter(kind: type[T], *, strict: bool = True) -> Callable[[Any], T]: ...
@overload
def converter(kind: Any, *, strict: bool = True) -> Callable[[Any], Any]: ...
def converter(kind: Any, *, strict: bool = True) -> Callable[[Any], Any]:
    """Return what makes a `kind` of plain values (`msgspec.convert`); as `json_decoder`."""
    msgpack_decoder(kind)  # `convert` finds complete what this has collected
    return partial(msgspec.convert, type=kind, strict=strict)


def _once(form: str, kind: Any, strict: bool, make: Callable[[], D]) -> D:
    with _making:
        decoder: D | None = _made.get((form, kind, strict))
        if decoder is None:
            decoder = _made[form, kind, strict] = make()
        return decoder


ANYTHING: Decoder[Any] = json_decoder(Any)
"""Decodes JSON of any form."""
