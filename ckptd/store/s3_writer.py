"""The writer of `S3Store`: one PUT, or a multipart upload with parallel parts."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ckptd import events
from ckptd.errors import CkptdError, NotFoundError, StoreError, TransientStoreError, UsageError
from ckptd.store.base import RetrySpec, SizedWriter
from ckptd.store.s3_client import S3Client, S3Options
from ckptd.store.s3_errors import s3_errors
from ckptd.store.wrap import Backoff

MOST_PARTS = 10_000
_LARGEST_PART = 5 << 30
_MiB = 1 << 20


def part_size(size: int, wanted: int) -> int:
    """Return the part size in bytes for an object of `size` bytes: at most 10,000 parts."""
    least = -(-size // MOST_PARTS)
    found = max(wanted, -(-least // _MiB) * _MiB)
    if found > _LARGEST_PART:
        raise UsageError("too large for one object", kind="size", found=f"{size} bytes")
    return found


class S3Writer(SizedWriter):
    """Uploads full parts while the next ones are written; see `Writer`.

    A part is copied out of the caller's buffers only when its upload begins, so the memory held is
    `S3Options.parts_in_flight` parts, not the object.
    """

    def __init__(
        self,
        client: S3Client,
        place: dict[str, str],
        where: str,
        size: int,
        *,
        options: S3Options,
        step: Callable[[str], None],
    ) -> None:
        super().__init__(where, size)
        self._client = client
        self._place = place
        self._options = options
        self._step = step
        self._part_bytes = part_size(size, options.part_bytes)
        self._views: list[memoryview] = []  # of the part under way; the caller keeps them unchanged
        self._held = 0
        self._flying: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []
        self._upload: str | None = None
        self._begun = 0
        self._completing = False
        self._uploading = events.Activity("upload")
        if size > self._part_bytes:
            step("create_multipart_upload")
            self._upload = client.call("create_multipart_upload", where, **place)["UploadId"]

    def _append(self, view: memoryview) -> None:
        while len(view):
            piece = view[: self._part_bytes - self._held]
            self._views.append(piece)
            self._held += len(piece)
            view = view[len(piece) :]
            if self._held == self._part_bytes and self._upload is not None:
                self._send_part()

    def _send_part(self) -> None:
        while len(self._flying) >= self._options.parts_in_flight:
            self._land()
        self._step("upload_part")
        self._begun += 1
        body, number = b"".join(self._views), self._begun
        self._views.clear()
        self._held = 0
        self._flying.append(self._start(body, number))

    def _start(self, body: bytes, number: int) -> Future[dict[str, Any]]:
        async def once() -> dict[str, Any]:
            with self._uploading.piece(len(body)):
                answer = await self._client.request(
                    "upload_part",
                    Body=io.BytesIO(body),
                    PartNumber=number,
                    UploadId=self._upload,
                    **self._place,
                )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        return self._client.start(lambda: self._client.persist(self.key, once))

    def _land(self) -> None:
        future = self._flying.popleft()
        with s3_errors(self.key, self.size):
            # Parts of other uploads may hold the slots for a while.
            self._parts.append(self._client.wait(future, 4 * self._options.tries))

    def _finish(self) -> None:
        if self._upload is None:
            self._step("put_object")
            self._completing = True
            self._put(b"".join(self._views))
        else:
            if self._held or not self._begun:
                self._send_part()
            while self._flying:
                self._land()
            self._step("complete_multipart_upload")
            self._completing = True
            self._complete()
        self._uploading.emit()
        self._views.clear()

    def _put(self, body: bytes) -> None:
        async def once() -> dict[str, Any]:
            with self._uploading.piece(len(body)):
                return await self._client.request(
                    "put_object", Body=io.BytesIO(body), **self._place
                )

        with s3_errors(self.key, self.size):
            future = self._client.start(lambda: self._client.persist(self.key, once))
            self._client.wait(future, 4 * self._options.tries)

    def _complete(self) -> None:
        """Complete the upload; after a lost answer, the object that stands there decides."""
        backoff = Backoff(RetrySpec(deadline_s=self._options.request_timeout_s))
        while True:
            try:
                self._client.call(
                    "complete_multipart_upload",
                    self.key,
                    UploadId=self._upload,
                    MultipartUpload={"Parts": self._parts},
                    **self._place,
                )
                return
            except NotFoundError as error:
                # After a lost answer the upload may be gone because it was completed.
                if backoff.tries > 1 and self._stands():
                    return
                raise StoreError("the multipart upload no longer exists", where=self.key) from error
            except TransientStoreError as error:
                if backoff.tries >= self._options.tries:
                    raise
                backoff.wait(error)

    def _stands(self) -> bool:
        try:
            answer = self._client.call("head_object", self.key, **self._place)
        except NotFoundError:
            return False
        return int(answer["ContentLength"]) == self.size

    def _drop(self) -> None:
        for future in self._flying:
            future.cancel()
        for future in self._flying:
            with suppress(BaseException):
                self._client.wait(future)
        self._flying.clear()
        self._views.clear()
        if self._upload is not None:
            self._step("abort_multipart_upload")
            with suppress(CkptdError):
                self._client.call(
                    "abort_multipart_upload", self.key, UploadId=self._upload, **self._place
                )
        if self._completing:  # it may have come through all the same
            self._step("delete_object")
            self._client.call("delete_object", self.key, **self._place)
