"""Error classes, their kinds (`KINDS`), exit codes and text; printable text, sizes for people.

The tree is cut by what the caller can do next, not by where the error arose::

    CkptdError
    ├── UsageError        the call or its arguments are wrong; fix the program
    │   └── MismatchError the live state and the checkpoint do not fit each other
    ├── NotFoundError     what was named does not exist
    ├── CorruptError      bytes exist and are not what was written
    ├── ConflictError     somebody else won, or the name is taken
    ├── RefusedError      ckptd could do it and will not, to protect data
    ├── StoreError        the place where bytes live failed
    │   └── TransientStoreError   the same call may work later
    ├── SaveError         a save did not become durable
    │   └── ProcessError  a process beside the program died or stopped answering
    └── DeadlineError     a wait ended without its event

Each error carries a ``kind``, what was wanted, what was found, where, and a hint that names the
next command or call. The kind is the class's own unless programs or people do something else at
some of its errors: those have a kind of `KINDS` (append-only, see ``docs/reference/errors.md``).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import islice
from typing import ClassVar, Self

__all__ = [
    "KINDS",
    "CkptdError",
    "ConflictError",
    "CorruptError",
    "DeadlineError",
    "MismatchError",
    "NotFoundError",
    "ProcessError",
    "RefusedError",
    "SaveError",
    "StoreError",
    "TransientStoreError",
    "UsageError",
]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
UNPRINTABLE = re.compile(r"[^\n\x20-\x7e]")
"""Characters that may not print: a cheap first test of a whole text, non-ASCII included."""


def printable(text: str) -> str:
    """Return `text` with U+FFFD for what does not print and is neither a line end nor a tab."""
    return UNPRINTABLE.sub(_replaced, text)


def _replaced(found: re.Match[str]) -> str:
    character = found[0]
    return (
        character if character in "\n\t" or character.isprintable() else "\N{REPLACEMENT CHARACTER}"
    )


def size_text(nbytes: float) -> str:
    """Return a number of bytes for people: ``1.5 GiB``."""
    unit = 0
    while nbytes >= 1023.5 and unit < len(_UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{nbytes:.3g} {_UNITS[unit]}"


def first_few(items: Collection[object], most: int = 8) -> str:
    """Return the first of some things in one line, and how many more there are."""
    shown = ", ".join(map(str, islice(items, most)))
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


def one_line(text: str) -> str:
    """Return `text` in one line; see `printable`."""
    return printable(text).replace("\n", "\N{REPLACEMENT CHARACTER}").replace("\t", " ")


_DETAILS = ("where", "wanted", "found", "hint")


class CkptdError(Exception):
    """Base of all errors of ckptd.

    Parameters
    ----------
    message
        One sentence: what happened.
    kind
        Stable machine-readable code of `KINDS`; defaults to the class's own.
    where
        The object concerned: a path, a key, a tensor name.
    wanted, found
        The two sides of a failed check, as text.
    hint
        The next command or call to try.
    """

    default_kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    state_corrupted: bool = False
    """Whether live state was half written when this was raised; only a whole load mends it."""
    key: str | None = None
    """Object of a checkpoint that was found bad: set where it was, and not told to others."""

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        where: str | None = None,
        wanted: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.message = printable(message)
        self.kind = kind or self.default_kind
        self.where = where
        self.wanted = None if wanted is None else str(wanted)
        self.found = None if found is None else str(found)
        self.hint = hint
        super().__init__(self._render())

    def _render(self) -> str:
        """Return the text that is printed and logged.

        Files and servers have said some of it: it steers no terminal, and a second line of theirs
        cannot be taken for one of the log.
        """
        parts = [self.message]
        for name in _DETAILS:
            text = getattr(self, name)
            if text is not None:
                lines = printable(text).split("\n")
                parts.append(f"  {name + ':':7} " + "\n          ".join(lines))
        return "\n".join(parts)

    def to_dict(self) -> dict[str, str | None]:
        """Return the error as plain data, for ``--json`` and for messages between processes."""
        named = {"class": type(self).__name__, "kind": self.kind, "message": self.message}
        return named | {name: getattr(self, name) for name in _DETAILS}

    @staticmethod
    def from_dict(data: dict[str, str | None]) -> CkptdError:
        """Rebuild an error from `to_dict`; an unknown class becomes the base class."""
        cls = _BY_NAME.get(data.get("class") or "", CkptdError)
        message, details = data.get("message"), {name: data.get(name) for name in _DETAILS}
        return cls(message or "unknown error", kind=data.get("kind"), **details)

    def without_frames(self) -> Self:
        """Return an equal error to be kept: a traceback keeps all that its frames hold alive.

        It has no cause and no context either, since these have tracebacks.
        """
        made = type(self).__new__(type(self), *self.args)
        made.__dict__.update(self.__dict__)
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return (CkptdError.from_dict, (self.to_dict(),))


class UsageError(CkptdError):
    """The call or its arguments are wrong."""

    default_kind = "bad-argument"
    exit_code = 2


class MismatchError(UsageError):
    """The live state and the checkpoint do not fit: keys, shapes, dtypes or layouts."""

    default_kind = "mismatch"
    exit_code = 1


class NotFoundError(CkptdError):
    """The named object does not exist."""

    default_kind = "not-found"
    exit_code = 4


class CorruptError(CkptdError):
    """Bytes exist and are not what was written, or break a rule of the format."""

    default_kind = "corrupt"
    exit_code = 3


class ConflictError(CkptdError):
    """Somebody else won a create-only race, or the name is taken."""

    default_kind = "conflict"
    exit_code = 5


class RefusedError(CkptdError):
    """ckptd could do this and will not, because data would be at risk."""

    default_kind = "refused"
    exit_code = 5


class StoreError(CkptdError):
    """The store failed: permission, no space, protocol. Not expected to heal by itself."""

    default_kind = "store"


class TransientStoreError(StoreError):
    """The store failed in a way that the same call may survive: time-out, 5xx, throttling."""

    default_kind = "store-transient"


class SaveError(CkptdError):
    """A save did not become durable; the previous checkpoint is untouched."""

    default_kind = "save"


class ProcessError(SaveError):
    """A process of ckptd beside the program, the writer above all, died or stopped answering."""

    default_kind = "process"


class DeadlineError(CkptdError):
    """A wait reached its deadline without its event."""

    default_kind = "deadline"


KINDS: dict[type[CkptdError], frozenset[str]] = {
    cls: frozenset(kinds.split())
    for cls, kinds in {
        CkptdError: "board-lost crashed no-version rank-died",
        UsageError: "bad-key closed forked lay-rule lay-syntax lay-use missing-package size"
        " structure under-way unknown-node unsavable",
        MismatchError: "lay-cover lay-fit",
        NotFoundError: "no-root no-spare no-version",
        CorruptError: "bad-zip digest missing-record replaced replicas-differ truncated version",
        ConflictError: "busy exists other-root stale-plan superseded",
        RefusedError: "bad-host bad-mac behind exists name-taken no-create-only no-token"
        " not-loaded not-the-controller stale-mac too-large unreadable-format unsafe-pickle",
        StoreError: "listen no-peer no-space permission root-gone",
        TransientStoreError: "busy link-busy link-late link-lost link-protocol no-version stalled",
        SaveError: "aborted mutated no-memory replicas-differ structure",
        ProcessError: "",
        DeadlineError: "board grace no-version stalled",
    }.items()
}
"""Kinds that an error of a class may have besides the class's own: those that code, programs or
people branch on."""
_BY_NAME: dict[str, type[CkptdError]] = {cls.__name__: cls for cls in KINDS}
