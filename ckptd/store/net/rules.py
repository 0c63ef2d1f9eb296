"""`Rules`: what the clients of a store server may do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptd.errors import RefusedError, StoreError
from ckptd.store.base import check_key, check_prefix
from ckptd.store.net import messages

Allow = Callable[[str, str], bool]
"""``(operation, key or prefix) -> bool``. Operations: get, read, open, stat, list, children, put,
begin (a writer), delete, sync, sweep."""

_CHANGES = frozenset({"put", "begin", "delete", "sweep"})


@dataclass(frozen=True, slots=True)
class Rules:
    """Operations that a server allows.

    Attributes
    ----------
    read_only
        Nothing is written, deleted or swept.
    allow
        Asked for each operation with its key or prefix; None allows all.
    """

    read_only: bool = False
    allow: Allow | None = None

    def check(self, request: messages.Request) -> None:
        """Raise when `request` is not allowed; names are checked first.

        Raises
        ------
        UsageError
            Kind ``bad-key``.
        RefusedError
            The server of a store is read-only.
        StoreError
            Kind ``permission``.
        """
        operation = str(request.__struct_config__.tag)
        names = _names(request)
        if self.read_only and operation in _CHANGES:
            raise RefusedError(
                "the server offers this store read-only", where=names[0] if names else None
            )
        for name in names:
            if self.allow is not None and not self.allow(operation, name):
                raise StoreError(
                    "the server does not allow this", kind="permission", where=name, found=operation
                )


def _names(request: messages.Request) -> tuple[str, ...]:
    match request:
        case messages.Delete():
            return tuple(check_key(key) for key in request.keys)
        case messages.List() | messages.Children() | messages.Sync() | messages.Sweep():
            return (check_prefix(request.prefix),)
        case messages.AbortWriter():
            return ()
        case _:
            return (check_key(request.key),)
