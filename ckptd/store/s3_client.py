"""S3 client: options and timeouts, credentials, endpoints, threads, tries.

botocore gives credentials and endpoints, signs and parses; `S3Transport` carries. A request is
tried once: a second try inside would hide that a create-only put met itself.
"""

from __future__ import annotations

import functools
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import msgspec

from ckptd.base.runtime.ownership import in_child
from ckptd.errors import StoreError, TransientStoreError, UsageError
from ckptd.store.base import MOST_WHOLE_BYTES
from ckptd.store.s3_errors import S3Answer, s3_errors
from ckptd.store.s3_http import Flight, S3Transport

_T = TypeVar("_T")
_GRACE_S = 5.0
_CHUNK_BYTES = 1 << 20
_making = threading.Lock()
"""Of clients: a session is no thread's alone."""


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
        Check TLS certificates, by AWS_CA_BUNDLE where that is set; or the path of a bundle.
    sign_payload
        Let requests carry a SHA-256 of their body. By default only without TLS, which has a
        checksum of its own.
    part_bytes
        Size of the parts of an upload and of a large read, in bytes; at least 5 MiB.
    parallel
        Requests for data in flight at most, over all threads of this store.
    parts_in_flight
        Parts of one upload that are under way at a time.
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
    """Runs requests in threads and gives their results to any thread."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._begin()
        in_child(self._begin_anew)

    def _begin(self) -> None:
        self._opened: tuple[Any, S3Transport] | None = None
        self._data = ThreadPoolExecutor(self._options.parallel, "ckptd-s3-data")
        self._beside = ThreadPoolExecutor(self._options.parallel, "ckptd-s3")

    def _begin_anew(self) -> None:
        """Have connections of its own in a forked child, which the threads are not in."""
        global _making
        # Another thread may have held a lock of these.
        _making = threading.Lock()
        _session.cache_clear()
        if self._opened is not None:
            self._opened[1].close()
        self._begin()

    # -- from any thread -----------------------------------------------------------------------

    def call(self, operation: str, where: str, size: int | None = None, **params: Any) -> S3Answer:
        """Do one small request, which takes `size` bytes there, and return its answer."""
        flight = Flight()
        with s3_errors(where, size):
            future = self._beside.submit(self.request, flight, operation, **params)
            return self.wait([future], flight)[0]

    def start(self, flight: Flight, where: str, act: Callable[[Flight], _T]) -> Future[_T]:
        """Begin `act` in one of the threads for data, to be tried again where that may heal."""
        return self._data.submit(self._persist, flight, where, act)

    def wait(self, futures: list[Future[_T]], flight: Flight, rounds: int = 1) -> list[_T]:
        """Return the results of what makes up to `rounds` requests in a row, all of `flight`.

        Where one fails, or this does not end in time, the flight is ended before this raises. Each
        request has its deadline; the one here is for what has none, such as a program that gives
        credentials.
        """
        try:
            done, late = wait(
                futures, rounds * (self._options.request_timeout_s + _GRACE_S), FIRST_EXCEPTION
            )
            found = [future.result() for future in futures if future in done]
            if late:
                raise TimeoutError
            return found
        except BaseException:
            flight.end()
            for future in futures:
                future.cancel()
            wait(futures, self._options.connect_timeout_s + _GRACE_S)
            raise

    def together(
        self, where: str, acts: Iterable[Callable[[Flight], _T]], size: int | None = None
    ) -> list[_T]:
        """Do all of `acts` at once, each as by `start`."""
        flight = Flight()
        with s3_errors(where, size):
            futures = [self.start(flight, where, act) for act in acts]
            # Later ones wait for a thread while earlier ones are tried again.
            return self.wait(futures, flight, self._options.tries * max(1, len(futures)))

    def close(self) -> None:
        """Close the connections. Idempotent; the next call would open new ones."""
        opened, pools = self._opened, (self._data, self._beside)
        self._begin()
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        if opened is not None:
            opened[1].close()

    # -- in one of its threads -------------------------------------------------------------------

    def request(self, flight: Flight, operation: str, **params: Any) -> S3Answer:
        """Do one request within its deadline."""
        client, transport = self._open()
        with transport.requests(flight, self._options.request_timeout_s):
            return self._send(client, operation, params)

    def _send(self, client: Any, operation: str, params: dict[str, Any]) -> S3Answer:
        answer = getattr(client, operation)(**params)
        return S3Answer(answer, f"{params.get('Bucket')}/{params.get('Key', '')}")

    def _open(self) -> tuple[Any, S3Transport]:
        """Return the client and its connections; the first call makes them."""
        opened = self._opened
        if opened is None:
            with _making:
                opened = self._opened = self._opened or _new_client(self._options)
                # Connections of a store that is never closed end with it.
                weakref.finalize(self, opened[1].close)
        return opened

    def read(self, flight: Flight, target: memoryview | bytearray, **params: Any) -> int:
        """Do one get within its deadline; its bytes go into `target`. Returns their number.

        A bytearray grows as needed; a memoryview takes what fits, and one more tells of a rest.
        """
        client, transport = self._open()
        with transport.requests(flight, self._options.request_timeout_s):
            body = self._send(client, "get_object", params)["Body"]
            if isinstance(target, memoryview):
                done: int = body.readinto(target)
                return done + len(body.read(1))
            while piece := body.read(_CHUNK_BYTES):
                target += piece
                if len(target) > MOST_WHOLE_BYTES:
                    raise StoreError(
                        "an object that is read whole is too large",
                        where=params["Key"],
                        wanted=f"{MOST_WHOLE_BYTES} bytes at most",
                    )
            return len(target)

    def _persist(self, flight: Flight, where: str, act: Callable[[Flight], _T]) -> _T:
        pause = 0.1
        for left in range(max(1, self._options.tries) - 1, -1, -1):
            try:
                with s3_errors(where):
                    return act(flight)
            except TransientStoreError:
                if not left or flight.over.wait(random.uniform(0, pause)):
                    raise
            pause *= 3
        raise TransientStoreError("no attempt was made", where=where)


def check_installed() -> None:
    """Raise `UsageError` (kind ``missing-package``) where the package that s3:// needs is missing.

    Before anything is asked of the store: what translates its errors needs it as well. It is
    looked for, not imported, which would take a second.
    """
    try:
        found = find_spec("botocore") is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise UsageError(
            "s3:// needs the package botocore",
            kind="missing-package",
            found="no module named 'botocore'",
            hint="pip install 'ckptd[s3]', or pip install '.[s3]' in a clone",
        )


def _new_client(options: S3Options) -> tuple[Any, S3Transport]:
    """Return botocore's client, and what carries its requests."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.httpsession import get_cert_path

    session = _session(options.profile)
    keys = {
        "aws_access_key_id": options.key,
        "aws_secret_access_key": options.secret,
        "aws_session_token": options.token,
    }
    config = _config(options)
    if options.anon:
        keys, config["signature_version"] = {}, UNSIGNED
    client = session.create_client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint_url,
        config=Config(**config),
        **keys,
    )
    verify = options.verify
    if verify is True:
        verify = (
            session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE") or True
        )
    authorities = get_cert_path(verify) or None
    transport = S3Transport(options.connect_timeout_s, options.read_timeout_s, authorities)
    client.meta.events.register("before-send.s3", transport.send)
    return client, transport


@functools.cache
def _session(profile: str | None) -> Any:
    """Return one session for all stores of a profile: it keeps what botocore reads from disk."""
    import botocore.session

    return botocore.session.Session(profile=profile)


def _config(options: S3Options) -> dict[str, Any]:
    plain = (options.endpoint_url or "").startswith("http://")
    sign = plain if options.sign_payload is None else options.sign_payload
    return {
        # One try: see the module.
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        # Trailing checksums break older Ceph and most look-alikes.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"addressing_style": options.addressing, "payload_signing_enabled": sign},
    }
