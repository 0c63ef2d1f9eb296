"""What comes in and goes out: bodies within a limit, errors and plain data as JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ckptd.errors import (
    CkptdError,
    ConflictError,
    CorruptError,
    DeadlineError,
    NotFoundError,
    RefusedError,
    StoreError,
    TransientStoreError,
    UsageError,
)

__all__ = ["Hold", "document", "json_bytes", "plain", "read_body", "refusal", "status_of"]

READ_S = 20.0
"""A body must be there within so many seconds."""

_BY_KIND = {
    "bad-host": 421,
    "bad-origin": 403,
    "no-token": 401,
    "stale-mac": 401,
    "bad-mac": 403,
    "other-job": 403,
    "old-sheet": 409,
    "limits": 503,
    "too-large": 413,
    "bad-sheet": 400,
    "busy": 503,
    "late": 408,
}
_BY_CLASS: tuple[tuple[type[CkptdError], int], ...] = (
    (NotFoundError, 404),
    (UsageError, 400),
    (CorruptError, 400),
    (ConflictError, 409),
    (RefusedError, 403),
    (DeadlineError, 408),
    (TransientStoreError, 503),
    (StoreError, 500),
)


def status_of(error: CkptdError) -> int:
    """Return the HTTP status that says the same as `error`."""
    known = _BY_KIND.get(error.kind)
    return known or next((code for cls, code in _BY_CLASS if isinstance(error, cls)), 500)


def refusal(error: CkptdError, **more: Any) -> Response:
    """Return the answer to a request that ends with `error`."""
    status = status_of(error)
    # What was not read of a refused body must not be taken for the next request.
    headers = {"connection": "close"} if status in (408, 413, 503) else {}
    return Response(
        json_bytes({"error": error.to_dict(), **more}),
        status,
        headers,
        media_type="application/json",
    )


def document(body: Any, status: int = 200) -> Response:
    """Return plain data, or its encoded bytes, as an answer that nobody keeps."""
    data = body if isinstance(body, bytes) else json_bytes(body)
    return Response(data, status, {"cache-control": "no-store"}, media_type="application/json")


def json_bytes(body: Any) -> bytes:
    """Return plain data as JSON; numbers that are infinite or not a number become null."""
    return msgspec.json.encode(body, enc_hook=plain)


def plain(value: Any) -> Any:
    """Return numpy's values as Python's."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain data")


class Hold:
    """How many bytes of bodies are in memory at once, over all connections."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.bytes = 0

    def take(self, size: int) -> None:
        """Count `size` bytes more.

        Raises
        ------
        TransientStoreError
            kind ``busy``: that would be too many.
        """
        if self.bytes + size > self._most:
            raise TransientStoreError(
                "the daemon has no room for more messages now", kind="busy", hint="try again"
            )
        self.bytes += size


async def read_body(request: Request, most: int, hold: Hold | None = None) -> bytes:
    """Return a request's body; refuses before it reads more than `most` bytes.

    Raises
    ------
    RefusedError
        kind ``too-large``.
    DeadlineError
        kind ``late``: it did not come within `READ_S`.
    TransientStoreError
        kind ``busy``: see `Hold`.
    """
    said = request.headers.get("content-length")
    if said is not None and (not said.isdecimal() or len(said) > 18 or int(said) > most):
        raise _too_large(most, said)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(READ_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(most, f"more than {most}")
                if hold is not None:
                    hold.take(len(part))
                parts.append(part)
    except TimeoutError as error:
        raise DeadlineError("the body did not come", kind="late") from error
    except ClientDisconnect as error:
        raise UsageError("the body was not sent whole", kind="bad-request") from error
    finally:
        if hold is not None:
            hold.bytes -= sum(map(len, parts))
    return b"".join(parts)


def _too_large(most: int, found: str) -> RefusedError:
    return RefusedError(
        "the body is too large", kind="too-large", wanted=f"at most {most} bytes", found=found[:20]
    )
