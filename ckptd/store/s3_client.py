"""The connection of `S3Store`: aiobotocore's client with our deadlines, tries and errors.

aiobotocore gives credentials, endpoints and requests, fsspec the event loop in a thread. A request
is tried once: a second try inside would hide that a create-only put met itself.
"""

from __future__ import annotations

import asyncio
import functools
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import msgspec

from ckptd.base.runtime.ownership import in_child
from ckptd.errors import StoreError, TransientStoreError, UsageError
from ckptd.store.base import MOST_WHOLE_BYTES
from ckptd.store.s3_errors import S3Answer, s3_errors

_T = TypeVar("_T")
_GRACE_S = 5.0
_CHUNK_BYTES = 1 << 20


class S3Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of ``s3://``. What is not given comes from the usual AWS variables and files.

    Attributes
    ----------
    endpoint_url, region
        Where the service is, when it is not AWS's own.
    key, secret, token, profile, anon
        Credentials: given, from a profile, or none at all.
    addressing
        Bucket in the path or in the host name; ``auto`` is botocore's choice.
    verify
        Check TLS certificates; or the path of a bundle of authorities.
    sign_payload
        Let requests carry a SHA-256 of their body. By default only without TLS, which has a
        checksum of its own.
    part_bytes
        Size of the parts of an upload and of a large read, in bytes; at least 5 MiB.
    parallel
        Requests for data in flight at most, over all threads of this store.
    parts_in_flight
        Parts of one upload that are held in memory at a time.
    connect_timeout_s, read_timeout_s
        Deadlines for a connection, and for the next bytes of an answer, in seconds.
    request_timeout_s
        Deadline for one request with its body, in seconds.
    tries
        How often one part of a large read or upload is tried before the call fails.
    """

    endpoint_url: str | None = None
    region: str | None = None
    key: str | None = None
    secret: str | None = None
    token: str | None = None
    profile: str | None = None
    anon: bool = False
    addressing: Literal["auto", "path", "virtual"] = "auto"
    verify: bool | str = True
    sign_payload: bool | None = None
    part_bytes: int = 16 << 20
    parallel: int = 16
    parts_in_flight: int = 4
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    request_timeout_s: float = 300.0
    tries: int = 4


class S3Client:
    """Runs requests in the loop's thread and gives their results to any thread."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Of the loop's thread:
        self._opening: asyncio.Lock | None = None
        self._opened: AsyncExitStack | None = None
        self._client: Any = None
        self._slots: asyncio.Semaphore | None = None
        self._leaving: weakref.finalize[[asyncio.AbstractEventLoop, AsyncExitStack], S3Client]
        in_child(self._begin_anew)

    def _begin_anew(self) -> None:
        """Have connections of its own in a forked child, which the loop's thread is not in."""
        self._lock = threading.Lock()
        self._loop = self._client = self._opening = self._opened = self._slots = None
        if hasattr(self, "_leaving"):
            self._leaving.detach()

    # -- from any thread -----------------------------------------------------------------------

    def call(self, operation: str, where: str, **params: Any) -> S3Answer:
        """Do one small request and return its answer."""
        with s3_errors(where):
            return self.wait(self.start(lambda: self.request(operation, **params)))

    def start(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> Future[_T]:
        """Begin a coroutine in the loop's thread."""
        return asyncio.run_coroutine_threadsafe(make(), self._running())

    def wait(self, future: Future[_T], rounds: int = 1) -> _T:
        """Return the result of a coroutine that makes up to `rounds` requests in a row.

        Each request has its deadline in the loop; this one is for a loop that is stuck itself.
        """
        try:
            return future.result(rounds * (self._options.request_timeout_s + _GRACE_S))
        except FutureTimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Close the connections. Idempotent; the next call would open new ones."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None:
            return
        future = asyncio.run_coroutine_threadsafe(self._shut(), loop)
        with suppress(Exception):  # nothing depends on a clean goodbye
            future.result(_GRACE_S)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = _loop()
                self._client = self._opening = self._opened = self._slots = None
            return self._loop

    # -- in the loop's thread ------------------------------------------------------------------

    async def request(self, operation: str, **params: Any) -> S3Answer:
        """Do one request within its deadline."""
        return await asyncio.wait_for(
            self._send(operation, params), self._options.request_timeout_s
        )

    async def _send(self, operation: str, params: dict[str, Any]) -> S3Answer:
        client = self._client or await self._open()
        answer = await getattr(client, operation)(**params)
        return S3Answer(answer, f"{params.get('Bucket')}/{params.get('Key', '')}")

    async def _open(self) -> Any:
        """Return the client; the first call makes it."""
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._client is None:
                self._opened = AsyncExitStack()
                self._client = await self._opened.enter_async_context(_new_client(self._options))
                # Connections of a store that is never closed end with it.
                loop = asyncio.get_running_loop()
                self._leaving = weakref.finalize(self, _leave, loop, self._opened)
                self._leaving.atexit = False
            return self._client

    async def _shut(self) -> None:
        opened, self._opened = self._opened, None
        self._client = self._opening = self._slots = None
        if opened is not None:
            await opened.aclose()

    async def read(self, target: memoryview | bytearray, **params: Any) -> int:
        """Do one get within its deadline; its bytes go into `target`. Returns their number.

        A bytearray grows as needed; a memoryview takes what fits, and the number tells the rest.
        """
        return await asyncio.wait_for(
            self._receive(target, params), self._options.request_timeout_s
        )

    async def _receive(self, target: memoryview | bytearray, params: dict[str, Any]) -> int:
        answer = await self._send("get_object", params)
        done = 0
        async with answer["Body"] as body:
            while chunk := await body.read(_CHUNK_BYTES):
                if isinstance(target, bytearray):
                    target += chunk
                    if len(target) > MOST_WHOLE_BYTES:
                        raise StoreError(
                            "an object that is read whole is too large",
                            where=params["Key"],
                            wanted=f"{MOST_WHOLE_BYTES} bytes at most",
                        )
                else:
                    target[done : done + len(chunk)] = chunk[: len(target) - done]
                done += len(chunk)
        return done

    async def together(self, parts: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Do all of `parts` at once; when one fails, end the others before raising.

        After the raise nothing writes into a caller's buffer any more.
        """
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def persist(self, where: str, act: Callable[[], Awaitable[_T]]) -> _T:
        """Do `act` in one of the slots for data, trying again what may heal."""
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._options.parallel)
        async with self._slots:
            pause = 0.1
            for left in range(max(1, self._options.tries) - 1, -1, -1):
                try:
                    with s3_errors(where):
                        return await act()
                except TransientStoreError:
                    if not left:
                        raise
                await asyncio.sleep(random.uniform(0, pause))
                pause *= 3
        raise TransientStoreError("no attempt was made", where=where)


def _leave(loop: asyncio.AbstractEventLoop, opened: AsyncExitStack) -> None:
    """Have the loop close what a client had opened; a second time it finds nothing."""
    with suppress(RuntimeError):  # the loop ended first
        loop.call_soon_threadsafe(lambda: asyncio.ensure_future(opened.aclose(), loop=loop))


def check_installed() -> None:
    """Raise `UsageError` (kind ``missing-package``) where a package that s3:// needs is missing.

    Before anything is asked of the store: what translates its errors needs them as well. They are
    looked for, not imported, which would take a second.
    """
    for name in ("aiobotocore", "botocore"):
        try:
            found = find_spec(name) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise _missing(f"no module named {name!r}")


def _missing(found: object) -> UsageError:
    return UsageError(
        "s3:// needs the package aiobotocore",
        kind="missing-package",
        found=found,
        hint="pip install 'ckptd[s3]', or pip install '.[s3]' in a clone",
    )


def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop that all stores of fsspec share, in a thread of its own."""
    from fsspec.asyn import get_loop

    loop: asyncio.AbstractEventLoop = get_loop()
    return loop


def _new_client(options: S3Options) -> Any:
    """Return a context that gives the client."""
    try:
        from aiobotocore.config import AioConfig
        from botocore import UNSIGNED
    except ImportError as error:
        raise _missing(error) from error
    keys = {
        "aws_access_key_id": options.key,
        "aws_secret_access_key": options.secret,
        "aws_session_token": options.token,
    }
    config = _config(options)
    if options.anon:
        keys, config["signature_version"] = {}, UNSIGNED
    return _session(options.profile).create_client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint_url,
        verify=options.verify,
        config=AioConfig(**config),
        **keys,
    )


@functools.cache
def _session(profile: str | None) -> Any:
    """Return one session for all stores of a profile: it keeps what botocore reads from disk."""
    import aiobotocore.session

    return aiobotocore.session.AioSession(profile=profile)


def _config(options: S3Options) -> dict[str, Any]:
    plain = (options.endpoint_url or "").startswith("http://")
    sign = plain if options.sign_payload is None else options.sign_payload
    return {
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.read_timeout_s,
        "max_pool_connections": options.parallel + 8,
        # One try: see the module.
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        # Trailing checksums break older Ceph and most look-alikes.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"addressing_style": options.addressing, "payload_signing_enabled": sign},
    }
