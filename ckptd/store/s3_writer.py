"""S3 uploads: one PUT or multipart; part sizes, parallel parts, end and abort."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any

from ckptd import events
from ckptd.errors import CkptdError, NotFoundError, StoreError, TransientStoreError, UsageError
from ckptd.store.base import RetrySpec, SizedWriter
from ckptd.store.s3_client import S3Client, S3Options
from ckptd.store.s3_errors import S3Answer, s3_errors
from ckptd.store.s3_http import Flight, S3Body
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

    Parts are sent from the caller's buffers, without a copy.
    """

    def __init__(
        self,
        client: S3Client,
        place: dict[str, Any],
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
        self._flight = Flight()
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
        act = partial(self._upload_part, self._views, self._begun)
        self._views, self._held = [], 0
        self._flying.append(self._client.start(self._flight, self.key, act))

    def _upload_part(self, views: list[memoryview], number: int, flight: Flight) -> dict[str, Any]:
        more = {"PartNumber": number, "UploadId": self._upload}
        return {
            "PartNumber": number,
            "ETag": self._send("upload_part", views, flight, **more)["ETag"],
        }

    def _send(
        self, operation: str, views: list[memoryview], flight: Flight, **more: Any
    ) -> S3Answer:
        body = S3Body(views)
        with self._uploading.piece(len(body)):
            return self._client.request(flight, operation, Body=body, **more, **self._place)

    def _land(self) -> None:
        with s3_errors(self.key, self.size):
            # Parts of other uploads may hold the threads for a while.
            rounds = 4 * self._options.tries
            self._parts += self._client.wait([self._flying.popleft()], self._flight, rounds)

    def _finish(self) -> None:
        if self._upload is None:
            self._step("put_object")
            self._completing = True
            put = partial(self._send, "put_object", self._views)
            self._client.together(self.key, [put], self.size)
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
        self._flight.end()
        for future in self._flying:
            future.cancel()
        wait(self._flying, self._options.connect_timeout_s)
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
