"""Request bodies within limits, errors as HTTP statuses, JSON answers; budget of unproved peers."""

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

READ_S = 20.0
"""A body must be there within so many seconds."""

_BY_KIND = {"bad-host": 421, "no-token": 401, "stale-mac": 401, "too-large": 413}
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
    """Return plain data, or its encoded bytes, as an answer that is not cached."""
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


class ClientConnection:
    """State of a connection, over all its requests.

    Attributes
    ----------
    proved
        Whether its other end has shown that it knows the job's secret, or a token.
    """

    def __init__(self) -> None:
        self.proved = False


def connection_of(request: Request) -> ClientConnection:
    """Return the connection of a request; see `ckptd.monitor.daemon.server`."""
    known = request.scope.get("state", {}).get("connection")
    return known if isinstance(known, ClientConnection) else ClientConnection()


class BodyBudget:
    """Bounds request bodies in memory; unauthenticated peers have a separate budget.

    Whether a body is signed is known once it is there whole. So connections on which a signed
    message came before have a budget of their own. In the other one the body that has been
    arriving for the longest makes room for the next one: an honest one arrives within
    milliseconds, and one that is held back on purpose blocks no other.

    Parameters
    ----------
    most
        Bytes of each of the two budgets.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = {True: 0, False: 0}
        self._strangers: dict[Body, None] = {}

    @property
    def bytes(self) -> int:
        """Bytes that are in memory now, of both budgets."""
        return sum(self._held.values())

    def take(self, body: Body, size: int) -> None:
        """Count `size` bytes more of `body`.

        Raises
        ------
        TransientStoreError
            kind ``busy``: that would be too many, or others needed the room.
        """
        if not (body.proved or body.ended):
            self._strangers[body] = None
            while self._held[False] + size > self._most:
                oldest = next(iter(self._strangers))
                if oldest is body:
                    break
                self.drop(oldest)
                oldest.end()
        if body.ended or self._held[body.proved] + size > self._most:
            raise body.busy()
        self._held[body.proved] += size
        body.size += size

    def drop(self, body: Body) -> None:
        """Count a body no more. Idempotent."""
        self._strangers.pop(body, None)
        self._held[body.proved] -= body.size
        body.size = 0


class Body:
    """A body that is coming in."""

    def __init__(self, proved: bool, ending: asyncio.Timeout) -> None:
        self.proved = proved
        self.size = 0
        self.ended = False
        self._ending = ending

    def end(self) -> None:
        """Read no more of it: it makes room for another."""
        self.ended = True
        self._ending.reschedule(asyncio.get_running_loop().time())

    def busy(self) -> TransientStoreError:
        """Return the error for a body that finds no room."""
        return TransientStoreError("the daemon's buffers are full", kind="busy", hint="try again")


async def read_body(
    request: Request, most: int, hold: BodyBudget | None = None, *, proved: bool = False
) -> bytes:
    """Return a request's body; refuses before it reads more than `most` bytes.

    `proved`: a signed message came before on this connection; see `BodyBudget`.

    Raises
    ------
    RefusedError
        kind ``too-large``.
    DeadlineError
        It did not come within `READ_S`.
    TransientStoreError
        kind ``busy``: see `BodyBudget`.
    """
    length = request.headers.get("content-length")
    if length is not None and (not length.isdecimal() or len(length) > 18 or int(length) > most):
        raise _too_large(most, length)
    parts: list[bytes] = []
    size = 0
    ending = asyncio.timeout(READ_S)
    body = Body(proved, ending)
    try:
        async with ending:
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(most, f"more than {most}")
                if hold is not None:
                    hold.take(body, len(part))
                parts.append(part)
    except TimeoutError as error:
        if body.ended:
            raise body.busy() from error
        raise DeadlineError("the body did not arrive in time") from error
    except ClientDisconnect as error:
        raise UsageError("the body was cut short") from error
    finally:
        if hold is not None:
            hold.drop(body)
    return b"".join(parts)


def _too_large(most: int, found: str) -> RefusedError:
    return RefusedError(
        "the body is too large", kind="too-large", wanted=f"at most {most} bytes", found=found[:20]
    )
