"""Stores as plain data: what another process needs to open the same one.

The process that writes a checkpoint is not the process that trains, so a store with its wrappers
travels as a `StoreSpec`. It may hold keys and tokens: send it over a private pipe, and print
`StoreSpec.redacted` (its ``repr`` is redacted already).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ckptd.decoding import json_decoder
from ckptd.errors import UsageError

if TYPE_CHECKING:
    from ckptd.store.base import Store

__all__ = [
    "FaultRule",
    "FaultSpec",
    "MeterSpec",
    "PackSpec",
    "RetrySpec",
    "StoreSpec",
    "ThrottleSpec",
    "WrapperSpec",
]


class RetrySpec(msgspec.Struct, frozen=True, tag="retry", forbid_unknown_fields=True):
    """Try again after a `TransientStoreError`.

    Attributes
    ----------
    deadline_s
        No new try begins later than this after the first failure, in seconds.
    first_s
        Longest wait before the second try, in seconds.
    factor
        Growth of the longest wait from one try to the next.
    longest_s
        Upper bound of the longest wait, in seconds.
    """

    deadline_s: float = 120.0
    first_s: float = 0.1
    factor: float = 2.0
    longest_s: float = 10.0


class ThrottleSpec(msgspec.Struct, frozen=True, tag="throttle", forbid_unknown_fields=True):
    """Bound the rate, in bytes per second, of what is read and written; None is no bound."""

    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None


class PackSpec(msgspec.Struct, frozen=True, tag="pack", forbid_unknown_fields=True):
    """Store large objects as byte planes under zstd; `RetrySpec` belongs outside of it.

    Attributes
    ----------
    level
        Of zstd, 1 to 22; 1 is set up for planes of numbers, and nearly always right. None packs
        nothing and reads what is packed.
    suffix
        Only objects whose names end in it have a packed form.
    """

    level: int | None = 1
    suffix: str = ".safetensors"


class MeterSpec(msgspec.Struct, frozen=True, tag="meter", forbid_unknown_fields=True):
    """Count calls, bytes, seconds and errors."""


FaultAction = Literal[
    "error", "lost", "torn", "short", "flip", "delay", "kill", "kill-after", "die", "die-after"
]


def _transient() -> dict[str, str | None]:
    return {"class": "TransientStoreError", "message": "injected fault", "kind": "injected"}


class FaultRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault and when it strikes.

    A rule matches an operation when every condition that is set holds. It strikes at matches
    ``skip < n <= skip + times`` (all later ones when `times` is 0).

    Attributes
    ----------
    action
        ``error``: raise before the operation, which has no effect. ``lost``: do it, then raise, as
        when the answer is lost. ``torn``: write half of the bytes, then raise (writers only;
        ``error`` elsewhere). ``short``: give back fewer bytes than asked, silently. ``flip``: flip
        one bit of what is read. ``delay``: wait `delay_s` first. ``kill``, ``kill-after``: SIGKILL
        this process before or after. ``die``, ``die-after``: the same for a store that lives in
        this process: this and every later operation raises, and has no effect.
    number
        Number of the operation, counted from 1 by this wrapper in this process.
    op, key
        Shell patterns for the operation's name and its key.
    error
        What to raise, as `CkptdError.to_dict` gives it.
    errno
        Raise an ``OSError`` with this number instead (inner steps only, where the store turns it
        into one of its own errors).
    delay_s
        Seconds of the delay.
    """

    action: FaultAction
    number: int | None = None
    op: str | None = None
    key: str | None = None
    skip: int = 0
    times: int = 1
    error: dict[str, str | None] = msgspec.field(default_factory=_transient)
    errno: int | None = None
    delay_s: float = 0.0


class FaultSpec(msgspec.Struct, frozen=True, tag="fault", forbid_unknown_fields=True):
    """Faults by schedule.

    Attributes
    ----------
    rules
        Looked at in order; the first that strikes decides.
    inner
        Also count, and strike at, the steps inside a call (``os.link``, ``s3.put_object``).
    log
        Path of a file to which each operation is appended as one JSON line before it begins, so
        that a campaign knows what a killed process was about to do. None: no file.
    """

    rules: tuple[FaultRule, ...] = ()
    inner: bool = False
    log: str | None = None


WrapperSpec = RetrySpec | ThrottleSpec | MeterSpec | FaultSpec | PackSpec

_SECRET = re.compile(r"key|secret|token|password|credential|sas", re.IGNORECASE)


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "***" if _SECRET.search(str(k)) else _hide(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hide(v) for v in value]
    return value


class StoreSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A store as plain, JSON-able data.

    Attributes
    ----------
    url, options
        Arguments of `ckptd.store.open_store`.
    wrappers
        Innermost first.
    """

    url: str
    options: dict[str, Any] = {}
    wrappers: tuple[WrapperSpec, ...] = ()

    def open(self) -> Store:
        """Open the store with its wrappers; errors as `ckptd.store.open_store`."""
        from ckptd.store.url import open_store
        from ckptd.store.wrap import wrap

        store = open_store(self.url, **self.options)
        for wrapper in self.wrappers:
            store = wrap(store, wrapper)
        return store

    def wrapped(self, *wrappers: WrapperSpec) -> StoreSpec:
        """Return this store with more wrappers around it."""
        return msgspec.structs.replace(self, wrappers=(*self.wrappers, *wrappers))

    def redacted(self) -> dict[str, Any]:
        """Return the fields as plain data, without secrets; for logs and messages."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        data["options"] = _hide(data["options"])
        data["url"] = re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", self.url)
        return data

    def to_json(self) -> bytes:
        """Return the description as JSON, secrets included."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes | str) -> StoreSpec:
        """Return the description that `to_json` encoded; `UsageError` when it is none."""
        try:
            return _specs.decode(data)
        except msgspec.MsgspecError as error:
            raise UsageError(
                "not a description of a store", kind="bad-store-spec", found=error
            ) from None

    def __repr__(self) -> str:
        return f"StoreSpec({self.redacted()})"


_specs = json_decoder(StoreSpec)
