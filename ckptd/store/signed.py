"""Signed checkpoints: `HashedStore` hashes what is written, `SignedStore` reads what was signed.

In it: size of a window; how many are kept; objects that need no signature.

A signature lies in the folder of a checkpoint, beside its manifest. It lists the BLAKE3 of each
object that a load of that checkpoint reads: the root's marker, the commit record, the manifest,
data files and their digests. Of a data file larger than a window, the BLAKE3 of each of its windows
are an object of the same folder, listed as well: so a part is compared without the rest.
"""

from __future__ import annotations

import hmac
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec

from ckptd.base.signatures import (
    MOST_BYTES,
    Signed,
    load_public,
    need_blake3,
    opened,
    refused,
    signature_key,
)
from ckptd.decoding import json_decoder
from ckptd.errors import CorruptError, NotFoundError, RefusedError
from ckptd.store import base
from ckptd.types import ByteRange

WINDOW_BYTES = 1 << 20
DIGEST_BYTES = 32
MARKER = "ckptd.json"
_SHARED = "/parts/"
_MAC_BYTES = 32
_MOST_RECORD_BYTES = 1 << 20
_KEPT = 16
"""Windows that are kept once they are compared: small tensors lie many in one."""
_FOLDER = re.compile(r"(data/([0-9]{12}-g[0-9]{8})-[a-z0-9]{1,32}/)[^/]+")
_RECORD = re.compile(r"commits/([0-9]{12}-g[0-9]{8})\.json")
_WRITE_ID = re.compile(r"[A-Za-z0-9]{1,64}")
_OPEN = ("generations/", "leases/", "pins/")
"""Where what is not signed is read: it says which checkpoint counts, not what is in it."""


class _Commit(msgspec.Struct, frozen=True):
    folder: str
    write_id: str


_commits = json_decoder(_Commit)


def windows_key(folder: str, key: str) -> str:
    """Return where the hashes of the windows of a data file are, in the folder of a checkpoint."""
    return folder + key.removeprefix("data/").replace("/", "-") + ".blake3"


class FileHash:
    """BLAKE3 of bytes that come front to back, and of each window of them."""

    def __init__(self) -> None:
        self._blake3 = need_blake3()
        self._whole, self._window, self._left = self._blake3(), self._blake3(), WINDOW_BYTES
        self._done: list[bytes] = []

    def update(self, data: memoryview) -> None:
        """Take in the next bytes."""
        self._whole.update(data)
        while len(data):
            part, data = data[: self._left], data[self._left :]
            self._window.update(part)
            self._left -= len(part)
            if not self._left:
                self._end_window()

    def _end_window(self) -> None:
        self._done.append(self._window.digest())
        self._window, self._left = self._blake3(), WINDOW_BYTES

    def end(self) -> tuple[str, bytes]:
        """Return the hash of all in hexadecimal digits, and those of windows, joined.

        Without the second where one window holds all.
        """
        if self._left < WINDOW_BYTES:
            self._end_window()
        return self._whole.hexdigest(), b"".join(self._done) if len(self._done) > 1 else b""


class HashedStore(base.Wrapper):
    """Hashes whatever is written through it, in a thread beside the writing.

    What processes tell each other through the store, below ``parts/`` of a folder, has a MAC behind
    it: what is signed follows from that.

    Parameters
    ----------
    vouch
        See `ckptd.base.signatures.voucher`.

    Attributes
    ----------
    hashes
        BLAKE3 in hexadecimal digits, by key. Windows are written as well, and are in it.
    """

    def __init__(self, inner: base.Store, vouch: Callable[[str, bytes], bytes]) -> None:
        self.inner, self._vouch = inner, vouch
        self.url, self.options, self.capabilities = inner.url, inner.options, inner.capabilities
        self.hashes: dict[str, str] = {}

    def describe(self) -> base.StoreSpec:
        """Return the store inside."""
        return self.inner.describe()

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object; `RefusedError` where no process with the key has told it."""
        if _SHARED not in key:
            return self.inner.get(key, byte_range)
        raw = self.inner.get(key)
        data, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._vouch(key, data)):
            raise RefusedError(
                "a part of a signed save is not from a process that has the key",
                kind="bad-mac",
                where=key,
                hint="give all nodes one key, and look which other processes write to the root",
            )
        return data if byte_range is None else data[byte_range.start : byte_range.end]

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the object."""
        (base.Store if _SHARED in key else base.Wrapper).read_into(self, key, offset, buffer)

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object."""
        if _SHARED in key:
            data += self._vouch(key, data)
        else:
            self.hashes[key] = need_blake3()(data).hexdigest()
        self.inner.put(key, data, create_only=create_only)

    def put_together(self, objects: Mapping[str, bytes]) -> None:
        """Write small new objects of one folder."""
        more: dict[str, bytes] = {}
        for key, data in objects.items():
            hashing = FileHash()
            hashing.update(memoryview(data))
            more |= self.hashed(key, hashing)
        self.inner.put_together({**more, **objects})

    def writer(self, key: str, size: int) -> base.Writer:
        """Begin a large object."""
        return _HashedWriter(self, key, self.inner.writer(key, size))

    def hashed(self, key: str, hashing: FileHash, folder: str = "") -> dict[str, bytes]:
        """Take in the hash of an object; return what is to be written for its windows, by key."""
        self.hashes[key], windows = hashing.end()
        if not windows:
            return {}
        where = windows_key(folder or key[: key.rfind("/") + 1], key)
        self.hashes[where] = need_blake3()(windows).hexdigest()
        return {where: windows}


class _HashedWriter(base.Writer):
    def __init__(self, store: HashedStore, key: str, inner: base.Writer) -> None:
        self._store, self._key, self._inner = store, key, inner
        self._hash = FileHash()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckptd-blake3")
        self._begun: Future[None] | None = None

    def write(self, data: memoryview) -> None:
        """Append `data`, which must not change until `commit` in any case."""
        self._inner.write(data)
        self._settle()  # one piece behind at most
        self._begun = self._pool.submit(self._hash.update, base.as_bytes_view(data))

    def _settle(self) -> None:
        if self._begun is not None:
            self._begun.result()

    def cut(self) -> None:
        """End the object at what was written."""
        self._inner.cut()

    def commit(self) -> None:
        """Return when every byte is durable, and the hashes of windows too."""
        self._settle()
        self._inner.commit()
        for key, windows in self._store.hashed(self._key, self._hash).items():
            self._store.inner.put(key, windows)
        self._pool.shutdown()

    def abort(self) -> None:
        """Give up."""
        self._pool.shutdown()
        self._inner.abort()


class SignedStore(base.Wrapper):
    """Reads checkpoints as one of the keys of `spec` has signed them, and no other.

    What is written passes through. Files are never mapped, nor given away open.
    """

    def __init__(self, inner: base.Store, spec: base.TrustSpec) -> None:
        super().__init__(inner, spec)
        self._blake3 = need_blake3()
        self.capabilities = replace(inner.capabilities, local_files=False)
        self._keys = [load_public(pem.encode()) for pem in spec.keys]
        self._lock = threading.Lock()
        self._files: dict[str, tuple[str, str]] = {}
        """BLAKE3 of an object, and the folder of the checkpoint that it was signed as a part of."""
        self._records: dict[str, bytes] = {}
        self._windows: dict[str, bytes] = {}
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object, or a part of it, as it was signed."""
        if key == MARKER or key.startswith(_OPEN):
            return self.inner.get(key, byte_range)  # a commit that is read compares the marker
        if byte_range is not None:
            buffer = bytearray(byte_range.end - byte_range.start)
            self.read_into(key, byte_range.start, memoryview(buffer))
            return bytes(buffer)
        if (record := _RECORD.fullmatch(key)) is not None:
            return self._read_commit(record[1])
        wanted = self._listed(key)[0]  # before anything of it is read
        raw = self.inner.get(key)
        self._check(key, raw, bytes.fromhex(wanted))
        return raw

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what was signed."""
        buffer = base.as_bytes_view(buffer)
        end, digests = offset + len(buffer), self._windows_of(key)
        if not digests:  # one window
            raw = self.get(key)
            base.check_end(key, end, len(raw))
            buffer[:] = raw[offset:end]
            return
        size = self.inner.stat(key).size
        base.check_end(key, end, size)
        if -(-size // WINDOW_BYTES) * DIGEST_BYTES != len(digests):
            raise self._wrong(key, f"{size} bytes")
        for number in range(offset // WINDOW_BYTES, -(-end // WINDOW_BYTES)):
            start = number * WINDOW_BYTES
            stop = min(start + WINDOW_BYTES, size)
            lo, hi = max(start, offset), min(stop, end)
            wanted = digests[number * DIGEST_BYTES :][:DIGEST_BYTES]
            if (lo, hi) == (start, stop):
                part = buffer[lo - offset : hi - offset]
                self.inner.read_into(key, start, part)
                self._check(key, part, wanted)
            else:
                window = self._window(key, number, stop - start, wanted)
                buffer[lo - offset : hi - offset] = window[lo - start : hi - start]

    def read_all(
        self, prefix: str = "", *, most_bytes: int
    ) -> Iterator[tuple[base.ObjectInfo, bytes | None]]:
        """Yield every object below `prefix` with its bytes, each by `get`."""
        return base.Store.read_all(self, prefix, most_bytes=most_bytes)

    def open_file(self, key: str) -> base.OpenFile | None:
        """Give nothing away that would not be compared."""
        return None

    def local_path(self, key: str) -> Path | None:
        """Give nothing away that would not be compared."""
        return None

    def _window(self, key: str, number: int, size: int, wanted: bytes) -> bytes:
        """Return a window of which a part is wanted."""
        with self._lock:
            if (found := self._kept.get((key, number))) is not None:
                self._kept.move_to_end((key, number))
                return found
        raw = bytearray(size)
        self.inner.read_into(key, number * WINDOW_BYTES, memoryview(raw))
        self._check(key, raw, wanted)
        with self._lock:
            self._kept[key, number] = found = bytes(raw)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def _windows_of(self, key: str) -> bytes:
        """Return the hashes of the windows of an object; none where one window holds all."""
        if _FOLDER.fullmatch(key) is None:
            return b""
        folder = self._listed(key)[1]
        where = windows_key(folder, key)
        if where not in self._files:
            return b""
        with self._lock:
            found = self._windows.get(where)
        if found is None:
            try:
                found = self.get(where)
            except NotFoundError:
                raise CorruptError("the hashes of a signed file are missing", where=where) from None
            with self._lock:
                self._windows[where] = found
        return found

    def _listed(self, key: str) -> tuple[str, str]:
        """Return the BLAKE3 that was signed of an object, and as a part of which folder."""
        found = _FOLDER.fullmatch(key)
        if key not in self._files and found is not None:
            try:
                self._read_commit(found[2])
            except NotFoundError:  # the commit of the folder is gone, or never was
                raise self._unsigned(key) from None
        if key not in self._files:
            raise self._unsigned(key)
        return self._files[key]

    def _read_commit(self, stem: str) -> bytes:
        """Return a commit record as it was signed, and take in what was signed with it."""
        key = f"commits/{stem}.json"
        if self.inner.stat(key).size > _MOST_RECORD_BYTES:
            raise CorruptError("record too large", where=key)
        raw = self.inner.get(key)
        if self._records.get(key) == raw:
            return raw
        try:
            record = _commits.decode(raw)
        except msgspec.MsgspecError as error:
            raise CorruptError("not a commit record", where=key, found=str(error)[:200]) from None
        found = _FOLDER.fullmatch(record.folder + "-")
        if not found or found[2] != stem or not _WRITE_ID.fullmatch(record.write_id):
            raise CorruptError("a commit record names another folder", where=key)
        signed = self._signature(record)
        for part, data in ((key, raw), (MARKER, self.inner.get(MARKER))):
            self._check(part, data, bytes.fromhex(signed.files.get(part, "")))
        with self._lock:
            self._records[key] = raw
            self._files |= {part: (wanted, found[1]) for part, wanted in signed.files.items()}
        return raw

    def _signature(self, record: _Commit) -> Signed:
        problem: RefusedError | CorruptError | None = None
        for key in self._keys:
            where = signature_key(record.folder, record.write_id, key)
            try:
                if (size := self.inner.stat(where).size) > MOST_BYTES:
                    raise CorruptError("not a signature", where=where, found=f"{size} bytes")
                return opened(self.inner.get(where), [key], where)
            except NotFoundError:
                continue
            except (CorruptError, RefusedError) as error:
                problem = error
        raise problem or self._unsigned(record.folder)

    def _unsigned(self, where: str) -> RefusedError:
        return refused("no trusted key has signed this", where, self._keys, "no such signature")

    def _check(self, key: str, data: bytes | bytearray | memoryview, wanted: bytes) -> None:
        if self._blake3(data).digest() != wanted:
            raise self._wrong(key, "other bytes")

    def _wrong(self, key: str, found: str) -> CorruptError:
        return CorruptError("a file is not what was signed", kind="digest", where=key, found=found)


def hash_object(
    store: base.Store, key: str, progress: Callable[[int], None] | None = None
) -> FileHash:
    """Return the hashes of an object that is there."""
    hashing, size = FileHash(), store.stat(key).size
    buffer = memoryview(bytearray(min(WINDOW_BYTES, size)))
    for at in range(0, size, WINDOW_BYTES):
        part = buffer[: min(WINDOW_BYTES, size - at)]
        store.read_into(key, at, part)
        hashing.update(part)
        if progress is not None:
            progress(len(part))
    return hashing
