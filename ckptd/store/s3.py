"""`S3Store`: objects in a bucket: create-only put and lost answers, listing, ranged reads, deletes.

A commit rests on one thing only: one small, single-part PUT with ``If-None-Match: *``, and reading
the object back when the answer is a failure or got lost. Never on multipart conditions (Ceph
ignores them), compare-and-swap, ETags, rename or the order of a listing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec

from ckptd.errors import ConflictError, NotFoundError, StoreError, TransientStoreError, UsageError
from ckptd.store import base
from ckptd.store.s3_client import S3Client, S3Options, check_installed
from ckptd.store.s3_errors import PreconditionError, S3Answer, s3_errors
from ckptd.store.s3_http import Flight
from ckptd.store.s3_writer import S3Writer
from ckptd.types import ByteRange

_LEAST_PART = 5 << 20
_LONGEST_PREFIX = 1024 - base.MAX_KEY_BYTES - 1  # S3 takes 1024 bytes in all
_Uploads = list[S3Answer]


def open_s3(url: str, options: dict[str, Any]) -> S3Store:
    """Open ``s3://bucket/prefix``.

    Raises
    ------
    UsageError
        Kind ``missing-package``: the extra ``s3`` is not installed.
    """
    check_installed()
    return S3Store(url, base.parse_options(url, options, S3Options))


class S3Store(base.Store):
    """Objects below a prefix of a bucket.

    Parameters
    ----------
    url
        ``s3://bucket`` or ``s3://bucket/prefix``.
    options
        See `S3Options`.
    """

    def __init__(self, url: str, options: S3Options | None = None) -> None:
        options = options or S3Options()
        bucket, _, prefix = url.partition("://")[2].partition("/")
        prefix = prefix.strip("/")
        if not bucket:
            raise UsageError("no bucket", where=url, wanted="s3://bucket/prefix")
        if len(prefix.encode()) > _LONGEST_PREFIX:
            raise UsageError("the prefix is too long", where=url, wanted=f"{_LONGEST_PREFIX} bytes")
        if options.part_bytes < _LEAST_PART or options.parallel < 1 or options.parts_in_flight < 1:
            raise UsageError("an option is out of range", where=url)
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.options: dict[str, Any] = {
            k: v for k, v in msgspec.to_builtins(options).items() if v != getattr(S3Options(), k)
        }
        self.capabilities = base.Capabilities(
            create_only=True,
            consistent_list=True,
            durable=True,
            local_files=False,
            shared=True,
            parallel=options.parallel,
            block_bytes=options.part_bytes,
        )
        self._settings = options
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = S3Client(options)
        self._hook: Callable[[str, str], None] | None = None

    def watch(self, hook: Callable[[str, str], None]) -> None:
        """Call ``hook("s3.put_object", key)`` and so on before each request that changes things."""
        self._hook = hook

    def _step(self, operation: str, key: str) -> None:
        if self._hook is not None:
            self._hook(f"s3.{operation}", key)

    def _place(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + base.check_key(key)}

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    # -- reading -------------------------------------------------------------------------------

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""
        place, where = self._place(key), self._where(key)
        if byte_range is not None:
            data = bytearray(byte_range.length)
            self.read_into(key, byte_range.start, memoryview(data))
            return bytes(data)

        def whole(flight: Flight) -> bytes:
            grown = bytearray()
            self._client.read(flight, grown, **place)
            return bytes(grown)

        return self._client.together(where, [whole])[0]

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` by parallel ranged reads of at most `S3Options.part_bytes` each."""
        view = base.as_bytes_view(buffer)
        if not len(view):
            base.check_end(self._where(key), offset, self.stat(key).size)
            return
        step = self._settings.part_bytes
        starts = range(0, len(view), step)
        parts = [partial(self._read_part, key, offset + s, view[s : s + step]) for s in starts]
        self._client.together(self._where(key), parts)

    def _read_part(self, key: str, start: int, part: memoryview, flight: Flight) -> None:
        where = self._where(key)
        wanted = f"bytes={start}-{start + len(part) - 1}"
        count = self._client.read(flight, part, Range=wanted, **self._place(key))
        base.check_end(where, start + len(part), start + count)
        if count != len(part):
            raise StoreError("the store ignored the requested range", where=where)

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time of one object."""
        answer = self._client.call("head_object", self._where(key), **self._place(key))
        modified, tag = answer["LastModified"].timestamp(), answer.get("ETag", "")
        return base.ObjectInfo(key, int(answer["ContentLength"]), modified, tag)

    # -- listing -------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        """Yield every object below `prefix`, in key order."""
        base.check_prefix(prefix)
        found = []
        for page in self._pages(prefix):
            for item in page.parts("Contents"):
                key = item["Key"][len(self._prefix) :]
                if len(key) <= base.MAX_KEY_BYTES and all(
                    base.is_segment(p) for p in key.split("/")
                ):
                    modified = item["LastModified"].timestamp()
                    found.append(base.ObjectInfo(key, int(item["Size"]), modified))
        # Not every store lists in order, so all pages come first.
        yield from sorted(found, key=lambda i: i.key)

    def children(self, prefix: str = "") -> base.Names:
        """Return names directly below `prefix`, sorted; folders end in "/"."""
        full = self._prefix + base.check_prefix(prefix)
        names: set[str] = set()
        for page in self._pages(prefix, Delimiter="/"):
            names |= {item["Key"][len(full) :] for item in page.parts("Contents")}
            names |= {item["Prefix"][len(full) :] for item in page.parts("CommonPrefixes")}
        return sorted(n for n in names if base.is_segment(n.removesuffix("/")))

    def _pages(self, prefix: str, **params: Any) -> Iterator[S3Answer]:
        where = self._where(prefix)
        params |= {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        while True:
            page = self._client.call("list_objects_v2", where, **params)
            yield page
            if not page.get("IsTruncated"):
                return
            params["ContinuationToken"] = page["NextContinuationToken"]

    # -- writing -------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object by one request."""
        place, where = self._place(key), self._where(key)
        self._step("put_object", key)
        if not create_only:
            self._put(where, data, place)
            return
        try:
            self._put(where, data, {**place, "IfNoneMatch": "*"})
        except (PreconditionError, TransientStoreError) as error:
            self._resolve(key, data, error)

    def _put(self, where: str, data: bytes, params: dict[str, str]) -> None:
        self._client.call("put_object", where, len(data), Body=bytes(data), **params)

    def _resolve(self, key: str, data: bytes, error: PreconditionError | StoreError) -> None:
        """Find out which put won: the answer may be to our own first try, or be lost on its way."""
        try:
            found = self.get(key)
        except NotFoundError:
            if isinstance(error, StoreError):
                raise error from None
            # Taken and gone again: a new try may win.
            raise TransientStoreError(
                "the object was deleted during the write", where=error.where, found=error.found
            ) from error
        except TransientStoreError:
            if isinstance(error, StoreError):
                raise error from None
            raise
        if found != data:
            raise ConflictError(
                "the object exists already",
                kind="exists",
                where=self._where(key),
                found=error.found,
            ) from error

    def writer(self, key: str, size: int) -> base.Writer:
        """Begin a large object: one request, or a multipart upload with parallel parts."""
        return S3Writer(
            self._client,
            self._place(key),
            self._where(key),
            size,
            options=self._settings,
            step=lambda operation: self._step(operation, key),
        )

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, one request each: bulk deletes are not known to every look-alike."""
        names = [*keys]
        places = [self._place(k) for k in names]
        for key in names:
            self._step("delete_object", key)
        self._client.together(self.url, [partial(self._delete_one, p) for p in places])

    def _delete_one(self, place: dict[str, str], flight: Flight) -> None:
        with suppress(NotFoundError), s3_errors(place["Key"]):
            self._client.request(flight, "delete_object", **place)

    def sync(self, prefix: str) -> None:
        """Do nothing: an object is durable, name included, when its request returns."""
        base.check_prefix(prefix)

    def sweep(
        self, prefix: str = "", *, older_than_s: float = 86_400.0, deep: bool = True
    ) -> base.Names:
        """Abort unfinished multipart uploads."""
        limit = datetime.now(UTC) - timedelta(seconds=older_than_s)
        swept = []
        for upload in self._uploads(base.check_prefix(prefix)):
            if upload["Initiated"] > limit:
                continue
            key = upload["Key"][len(self._prefix) :]
            if not deep and "/" in key[len(prefix) :]:
                continue
            self._step("abort_multipart_upload", key)
            with suppress(NotFoundError):
                self._client.call(
                    "abort_multipart_upload",
                    self._where(key),
                    Bucket=self._bucket,
                    Key=upload["Key"],
                    UploadId=upload["UploadId"],
                )
            swept.append(key)
        return sorted(swept)

    def _uploads(self, prefix: str) -> _Uploads:
        params: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        found: _Uploads = []
        while True:
            page = self._client.call("list_multipart_uploads", self._where(prefix), **params)
            found += page.parts("Uploads")
            if not page.get("IsTruncated"):
                return found
            params["KeyMarker"] = page["NextKeyMarker"]
            params["UploadIdMarker"] = page["NextUploadIdMarker"]

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._client.close()
