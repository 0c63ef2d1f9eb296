"""`Fault`: a store that fails on schedule: errors, lost answers, torn writes, kills.

A campaign runs the work once with no rules and reads `Fault.operations`; then once for each number
in it, with a rule such as ``FaultRule("kill", number=7)``. In a process that gets killed, the log
file of `FaultSpec` tells what it was about to do.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from ckptd.errors import CkptdError, StoreError
from ckptd.store import base
from ckptd.types import ByteRange

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """One operation that a `Fault` saw.

    Attributes
    ----------
    number
        Counted from 1.
    op
        ``get``, ``read_into``, ``put``, ``put-new`` (create-only), ``writer``, ``write``,
        ``commit``, ``abort``, ``stat``, ``list``, ``children``, ``delete``, ``sync``, ``sweep``,
        or an inner step such as ``os.link`` or ``s3.put_object``.
    key
        The key or prefix; of a delete the first key; of an inner step the path.
    size
        Bytes that the operation writes or reads, 0 where that is unknown.
    """

    number: int
    op: str
    key: str
    size: int


class Fault(base.Wrapper):
    """Fails on schedule; see `FaultRule` for what it can do.

    Attributes
    ----------
    operations
        What was called so far, in the order in which the calls began.
    """

    def __init__(self, inner: base.Store, spec: base.FaultSpec | None = None) -> None:
        spec = spec or base.FaultSpec()
        super().__init__(inner, spec)
        self.operations: list[FaultPoint] = []
        self._rules = spec.rules
        self._log = spec.log
        self._matches: Counter[int] = Counter()
        self._dead = False
        self._lock = threading.Lock()
        core = base.innermost(inner)
        if spec.inner and isinstance(core, base.Watchable):
            core.watch(self._inner_step)

    # -- deciding ------------------------------------------------------------------------------

    def step(self, op: str, key: str, size: int, act: Callable[[], _T]) -> _T:
        """Count the operation, then do it by way of the rule that strikes, if one does."""
        rule = self._begin(op, key, size)
        return act() if rule is None else self._act(rule, op, key, act)

    def _act(self, rule: base.FaultRule, op: str, key: str, act: Callable[[], _T]) -> _T:
        match rule.action:
            case "delay":
                time.sleep(rule.delay_s)
            case "kill":
                _kill()
            case "error" | "torn":
                raise _error(rule, op, key)
            case "die":
                self._dead = True
                raise _death(op, key)
        result = act()
        match rule.action:
            case "kill-after":
                _kill()
            case "lost":
                raise _error(rule, op, key)
            case "die-after":
                self._dead = True
                raise _death(op, key)
        return _spoil(rule, result)

    def _begin(self, op: str, key: str, size: int) -> base.FaultRule | None:
        with self._lock:
            operation = FaultPoint(len(self.operations) + 1, op, key, size)
            self.operations.append(operation)
            if self._log is not None:
                self._append_log(operation)
            if self._dead:
                raise _death(op, key)
            for i, rule in enumerate(self._rules):
                if _matches(rule, operation):
                    self._matches[i] += 1
                    if _strikes(rule, self._matches[i]):
                        return rule
        return None

    def _append_log(self, operation: FaultPoint) -> None:
        line = json.dumps(
            {
                "pid": os.getpid(),
                "number": operation.number,
                "op": operation.op,
                "key": operation.key,
                "size": operation.size,
            }
        )
        with open(self._log or os.devnull, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _inner_step(self, point: str, path: str) -> None:
        self.step(point, path, 0, lambda: None)

    # -- operations ----------------------------------------------------------------------------

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Count; maybe fail, or give back fewer or other bytes."""
        size = byte_range.length if byte_range else 0
        return self.step("get", key, size, lambda: self.inner.get(key, byte_range))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Count; maybe fail, or fill less of `buffer`, or with other bytes."""
        view = base.as_bytes_view(buffer)

        def act() -> memoryview:
            # Into memory of our own: a short read leaves the caller's last bytes as they were.
            data = bytearray(len(view))
            self.inner.read_into(key, offset, memoryview(data))
            return memoryview(data)

        data = self.step("read_into", key, len(view), act)
        view[: len(data)] = data

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Count; maybe fail."""
        op = "put-new" if create_only else "put"
        self.step(op, key, len(data), lambda: self.inner.put(key, data, create_only=create_only))

    def writer(self, key: str, size: int) -> base.Writer:
        """Count; maybe fail, now or at a later write or commit."""
        inner = self.step("writer", key, size, lambda: self.inner.writer(key, size))
        return _FaultWriter(self, inner, key, size)

    def stat(self, key: str) -> base.ObjectInfo:
        """Count; maybe fail."""
        return self.step("stat", key, 0, lambda: self.inner.stat(key))

    def exists(self, key: str) -> bool:
        """Count as ``stat``; maybe fail."""
        return self.step("stat", key, 0, lambda: self.inner.exists(key))

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        """Count; maybe fail, or list fewer objects."""
        yield from self.step("list", prefix, 0, lambda: list(self.inner.list(prefix)))

    def children(self, prefix: str = "") -> base.Names:
        """Count; maybe fail, or name fewer children."""
        return self.step("children", prefix, 0, lambda: self.inner.children(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Count; maybe fail."""
        found = [*keys]
        self.step("delete", found[0] if found else "", 0, lambda: self.inner.delete(found))

    def sync(self, prefix: str) -> None:
        """Count; maybe fail."""
        self.step("sync", prefix, 0, lambda: self.inner.sync(prefix))

    def sweep(
        self, prefix: str = "", *, older_than_s: float = 86_400.0, deep: bool = True
    ) -> base.Names:
        """Count; maybe fail."""
        return self.step(
            "sweep",
            prefix,
            0,
            lambda: self.inner.sweep(prefix, older_than_s=older_than_s, deep=deep),
        )


class _FaultWriter(base.Writer):
    def __init__(self, fault: Fault, inner: base.Writer, key: str, size: int) -> None:
        self._fault = fault
        self._inner = inner
        self._key = key
        self._size = size

    def write(self, data: memoryview) -> None:
        """Count; maybe write half and fail."""
        rule = self._fault._begin("write", self._key, len(data))
        if rule is None:
            self._inner.write(data)
            return
        if rule.action == "torn":
            self._inner.write(data[: len(data) // 2])
        self._fault._act(rule, "write", self._key, lambda: self._inner.write(data))

    def cut(self) -> None:
        """Pass on."""
        self._inner.cut()

    def commit(self) -> None:
        """Count; maybe fail."""
        self._fault.step("commit", self._key, self._size, self._inner.commit)

    def abort(self) -> None:
        """Count; maybe delay or kill. What would raise leaves everything behind, as a crash."""
        with suppress(CkptdError):
            self._fault.step("abort", self._key, 0, self._inner.abort)


def _matches(rule: base.FaultRule, operation: FaultPoint) -> bool:
    if rule.number is not None and rule.number != operation.number:
        return False
    if rule.op is not None and not fnmatchcase(operation.op, rule.op):
        return False
    return rule.key is None or fnmatchcase(operation.key, rule.key)


def _strikes(rule: base.FaultRule, match_number: int) -> bool:
    nth = match_number - rule.skip
    return nth > 0 and (rule.times == 0 or nth <= rule.times)


def _spoil(rule: base.FaultRule, result: _T) -> _T:
    """Give back less of `result`, or flip the lowest bit of its middle byte."""
    if rule.action == "short" and isinstance(result, (bytes, memoryview, list)):
        return result[: len(result) // 2]  # type: ignore[return-value]
    if rule.action == "flip" and isinstance(result, (bytes, memoryview)) and len(result):
        flipped = bytearray(result)
        flipped[len(flipped) // 2] ^= 1
        return bytes(flipped) if isinstance(result, bytes) else memoryview(flipped)  # type: ignore[return-value]
    return result


def _error(rule: base.FaultRule, op: str, key: str) -> Exception:
    if rule.errno is not None:
        return OSError(rule.errno, os.strerror(rule.errno))
    return CkptdError.from_dict({"where": f"{op} {key}", **rule.error})


def _death(op: str, key: str) -> StoreError:
    return StoreError("the process is dead, by schedule", where=f"{op} {key}")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is on its way; nothing may happen meanwhile
