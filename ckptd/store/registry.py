"""Which code opens which URL scheme: built-in stores and installed ones, through one table.

A package adds a store with the entry-point group ``ckptd.stores``: the entry's name is the URL
scheme, its value a callable ``(url: str, options: dict) -> Store``. Entry points are looked up only
when a scheme is not built in, and loaded only when they are used, so a broken package neither slows
nor breaks start-up; `registry_problems` reports it.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ckptd.decoding import converter
from ckptd.errors import CkptdError, UsageError
from ckptd.plugins import entries, origin
from ckptd.store.base import Store

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "GROUP",
    "Opener",
    "RegistryProblem",
    "find_opener",
    "parse_options",
    "register_store",
    "registered_schemes",
    "registry_problems",
]

GROUP = "ckptd.stores"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")

Opener = Callable[[str, dict[str, Any]], Store]
_Options = TypeVar("_Options", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class RegistryProblem:
    """A store that was announced and cannot be used: its scheme, who announced it, and why."""

    scheme: str
    origin: str
    message: str


_lock = threading.Lock()
_openers: dict[str, Opener | str] = {}


def register_store(scheme: str, opener: Opener | str, *, replace: bool = False) -> None:
    """Let `opener` open URLs of `scheme`.

    Parameters
    ----------
    scheme
        Lower case, without ``://``.
    opener
        A callable ``(url, options) -> Store``, or ``"module:attribute"``, imported on first use.
    replace
        Take the scheme over when it is registered already; otherwise that is a `UsageError`.
    """
    if not _SCHEME.fullmatch(scheme):
        raise UsageError("not a URL scheme", kind="bad-url", where=scheme)
    with _lock:
        if scheme in _openers and not replace:
            raise UsageError("this URL scheme has a store already", kind="bad-url", where=scheme)
        _openers[scheme] = opener


def parse_options(url: str, options: dict[str, Any], form: type[_Options]) -> _Options:
    """Return `options` as `form`; an unknown name or a wrong type is a `UsageError`."""
    try:
        return converter(form)(options)
    except msgspec.ValidationError as error:
        raise UsageError(
            "the store does not take these options",
            kind="bad-option",
            where=url,
            wanted=", ".join(form.__struct_fields__),
            found=error,
        ) from None


def _load(target: str) -> Opener:
    module, _, name = target.partition(":")
    found: Opener = getattr(importlib.import_module(module), name)
    return found


def _installed() -> dict[str, EntryPoint]:
    """Return the first entry point of each scheme, in order of their distributions' names."""
    return {e.name: e for e in reversed(entries(GROUP))}


def find_opener(scheme: str) -> Opener | None:
    """Return what opens `scheme`, or None when nothing is registered for it.

    Raises
    ------
    UsageError
        Kind ``broken-plugin``: an installed package announced the scheme and does not load.
    """
    with _lock:
        opener = _openers.get(scheme)
    if opener is not None:
        return _load(opener) if isinstance(opener, str) else opener
    entry = _installed().get(scheme)
    if entry is None:
        return None
    try:
        found: Opener = entry.load()
    except Exception as error:
        raise UsageError(
            "the package that opens this URL scheme does not load",
            kind="broken-plugin",
            where=f"{scheme}:// from {origin(entry)}",
            found=f"{type(error).__name__}: {error}",
            hint="reinstall or remove that package; `ckptd doctor` lists such problems",
        ) from error
    return found


def registered_schemes() -> list[str]:
    """Return every scheme with a store of its own, sorted; other schemes go to fsspec."""
    with _lock:
        return sorted({*_openers, *_installed()})


def registry_problems() -> list[RegistryProblem]:
    """Load every installed store and return what is wrong with them; [] when all is well."""
    problems = []
    seen: set[str] = set()
    for entry in entries(GROUP):
        message = _check(entry, seen)
        seen.add(entry.name)
        if message is not None:
            problems.append(RegistryProblem(entry.name, origin(entry), message))
    return problems


def _check(entry: EntryPoint, seen: set[str]) -> str | None:
    with _lock:
        taken = entry.name in _openers
    if taken or entry.name in seen:
        return "another store has this URL scheme; this one is never used"
    if not _SCHEME.fullmatch(entry.name):
        return "the entry point's name is not a URL scheme"
    try:
        loaded = entry.load()
    except CkptdError as error:
        return error.message
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything; it is told
        return f"{type(error).__name__}: {error}"
    return None if callable(loaded) else "the entry point is not callable"


for _scheme, _target in {
    "ckptd": "ckptd.store.net:open_net",
    "ckptd+unix": "ckptd.store.net:open_net",
    "file": "ckptd.store.local:open_local",
    "memory": "ckptd.store.memory:open_memory",
    "s3": "ckptd.store.s3:open_s3",
}.items():
    register_store(_scheme, _target)
