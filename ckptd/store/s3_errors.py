"""Errors of S3: codes and statuses as transient, gone, full, denied; answers that lack fields.

In it: lists of codes and statuses.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptd.errors import (
    CkptdError,
    CorruptError,
    NotFoundError,
    RefusedError,
    StoreError,
    TransientStoreError,
)
from ckptd.store.osio import explain

_TRANSIENT_CODES = {
    "BadDigest",
    "ClientDisconnected",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestThrottled",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
}
_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
_GONE_CODES = {"404", "NoSuchKey", "NoSuchUpload", "NotFound"}
_FULL_CODES = {"QuotaExceeded", "StorageFull", "InsufficientCapacity", "XMinioStorageFull"}
_DENIED_CODES = {
    "401",
    "403",
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}

_MOST_CHARS = 1000


class PreconditionError(CkptdError):
    """A create-only put found the key taken, maybe by its own first try. Stays inside the store."""


class S3Answer(dict[str, Any]):
    """An answer, or a part of one: of a field that the store has left out it says so by name."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        super().__init__(fields)
        self._where = where

    def __missing__(self, name: str) -> Any:
        raise StoreError(f"the answer of the store has no {name}", where=self._where)

    def parts(self, name: str) -> list[S3Answer]:
        """Return the entries of a list, none when it is left out."""
        return [S3Answer(entry, self._where) for entry in self.get(name, ())]


@contextmanager
def s3_errors(where: str, size: int | None = None) -> Iterator[None]:
    """Turn what a request for `where` raises into an error of the store contract."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except CkptdError:
        raise
    except ClientError as error:
        raise _from_answer(error.response, where, size) from error
    except BotoCoreError as error:
        raise _from_botocore(error, where) from error
    except TimeoutError as error:
        raise TransientStoreError("the store did not answer in time", where=where) from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            raise StoreError(
                "no secure connection", where=where, found=error, hint="see the option verify"
            ) from error
        if isinstance(error, OSError) and error.errno is not None:
            known = explain(error, where, "the store failed", size)
            raise TransientStoreError(known.message, where=where, found=known.found) from error
        raise TransientStoreError(
            "no connection", where=where, found=_short(repr(error))
        ) from error
    except Exception as error:
        if isinstance(error, (KeyError, ValueError, ResponseParserError)):
            found = _short(repr(error))
            raise StoreError("the answer cannot be read", where=where, found=found) from error
        raise


def _short(text: str) -> str:
    """Return what a server said, no longer than a person reads."""
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."


def _from_botocore(error: Exception, where: str) -> CkptdError:
    from botocore import exceptions

    if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        return StoreError(
            "no credentials for this store",
            kind="permission",
            where=where,
            found=error,
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or key and secret",
        )
    if isinstance(error, exceptions.SSLError):
        return StoreError(
            "no secure connection", where=where, found=error, hint="see the option verify"
        )
    healing = (
        exceptions.ConnectionError,
        exceptions.HTTPClientError,  # time-outs, broken connections
        exceptions.IncompleteReadError,
        exceptions.ResponseStreamingError,
        exceptions.CredentialRetrievalError,
    )
    kind = TransientStoreError if isinstance(error, healing) else StoreError
    return kind("the store could not be asked", where=where, found=_short(repr(error)))


def _from_answer(response: dict[str, Any], where: str, size: int | None) -> CkptdError:
    detail = response.get("Error", {})
    code = str(detail.get("Code", "?"))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    found = _short(f"{status} {code}: {detail.get('Message', '')}".rstrip(": "))
    if status == 412 or code == "PreconditionFailed":
        return PreconditionError("the key already exists", where=where, found=found)
    if code == "NoSuchBucket":
        return StoreError("the bucket does not exist", where=where, found=found)
    if code in _GONE_CODES:
        return NotFoundError("no such object", where=where, found=found)
    if status == 416 or code == "InvalidRange":
        return CorruptError(
            "the object is shorter than the range asked for",
            kind="truncated",
            where=where,
            found=found,
        )
    if code in _FULL_CODES or status == 507:
        wanted = None if size is None else f"{size} bytes"
        return StoreError("no space left", kind="no-space", where=where, wanted=wanted, found=found)
    if code in _DENIED_CODES:
        return StoreError("not permitted", kind="permission", where=where, found=found)
    if code in _TRANSIENT_CODES or status in _TRANSIENT_STATUS:
        return TransientStoreError("the store failed", where=where, found=found)
    if code == "NotImplemented":
        return RefusedError(
            "the store rejects this request", kind="no-create-only", where=where, found=found
        )
    return StoreError("the store refused", where=where, found=found)
