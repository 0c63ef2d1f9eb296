"""`EtcdStore`: objects as keys of etcd, through the JSON gateway of its v3 API.

PyTorch's own etcd rendezvous speaks v2, which etcd 3.4 no longer answers; a store needs no more
than transactions, ranges and puts, so no client library is used.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from ckptd.base.net import Address, HttpClient
from ckptd.decoding import json_decoder
from ckptd.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from ckptd.store import (
    Capabilities,
    ObjectInfo,
    SizedWriter,
    Store,
    Writer,
    check_end,
    check_key,
    check_prefix,
    parse_options,
)
from ckptd.types import ByteRange

__all__ = ["EtcdOptions", "EtcdStore", "open_etcd"]

_Answer = TypeVar("_Answer", bound=msgspec.Struct)

_MOST_OBJECT_BYTES = 3 << 19
"""Most bytes that a member of etcd takes in one request by default: 1.5 MiB."""
_PAGE = 32
_MOST_ANSWER_BYTES = 72 << 20
"""A page of the largest objects in base64, and some more."""
_DELETED_AT_ONCE = 100
"""A transaction of etcd has at most 128 operations."""


class EtcdOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Options of ``etcd://``.

    Attributes
    ----------
    timeout_s
        For one request to one member.
    tls
        Whether members speak TLS.
    """

    timeout_s: float = 5.0
    tls: bool = False


class _Pair(msgspec.Struct):
    key: str
    value: str = ""


class _Range(msgspec.Struct):
    kvs: list[_Pair] = []
    more: bool = False


class _Response(msgspec.Struct):
    response_range: _Range = msgspec.field(default_factory=_Range)


class _Transaction(msgspec.Struct):
    succeeded: bool = False
    responses: list[_Response] = []


class _Put(msgspec.Struct):
    """The answer to a put: that there is one is all that counts."""


# Now, and not by the first request, in whichever thread that is made.
json_decoder(_Range)
json_decoder(_Transaction)
json_decoder(_Put)


def open_etcd(url: str, options: dict[str, Any]) -> EtcdStore:
    """Open ``etcd://HOST:PORT[,HOST:PORT]/PREFIX``.

    Raises
    ------
    UsageError
        A member or the prefix is missing or no such thing;.
    """
    return EtcdStore(url, parse_options(url, options, EtcdOptions))


class EtcdStore(Store):
    """Objects as keys ``/PREFIX/KEY`` of etcd, of at most 1.5 MiB each.

    Parameters
    ----------
    url
        ``etcd://HOST:PORT[,HOST:PORT]/PREFIX``. The next member is asked when one does not answer.
    options
        See `EtcdOptions`.

    Raises
    ------
    UsageError
        No store opens this URL, or its scheme is taken.
    """

    capabilities = Capabilities(
        create_only=True,
        consistent_list=True,
        durable=True,
        local_files=False,
        shared=True,
        parallel=16,
        block_bytes=1 << 20,
    )

    def __init__(self, url: str, options: EtcdOptions | None = None) -> None:
        self._options = options or EtcdOptions()
        members, _, prefix = url.partition("://")[2].partition("/")
        prefix = prefix.strip("/")
        found = [_member(text, self._options) for text in members.split(",")]
        self._members = [member for member in found if member is not None]
        if not prefix or len(self._members) < len(found):
            raise UsageError(
                "invalid etcd URL",
                wanted="etcd://HOST:PORT[,HOST:PORT]/PREFIX",
                found=url[:200],
            )
        self.url = f"etcd://{members}/{prefix}"
        self.options: dict[str, Any] = msgspec.to_builtins(self._options)
        self._root = f"/{prefix}/".encode()

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Return the whole object, or exactly `byte_range` of it."""
        answer = self._ask("range", {"key": self._name(key)}, _Range)
        if not answer.kvs:
            raise NotFoundError("no such object", where=self._where(key))
        raw = self._unb64(answer.kvs[0].value)
        if byte_range is None:
            return raw
        check_end(self._where(key), byte_range.end, len(raw))
        return raw[byte_range.start : byte_range.end]

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write an object; with `create_only` in a transaction that one writer wins."""
        name, value = self._name(key), _b64(data)
        if len(data) > _MOST_OBJECT_BYTES:
            raise StoreError(
                "an object is too large for etcd",
                where=self._where(key),
                wanted=f"at most {_MOST_OBJECT_BYTES} bytes",
                found=f"{len(data)} bytes",
            )
        if not create_only:
            self._ask("put", {"key": name, "value": value}, _Put)
            return
        answer = self._ask(
            "txn",
            {
                "compare": [{"key": name, "target": "CREATE", "create_revision": "0"}],
                "success": [{"request_put": {"key": name, "value": value}}],
                "failure": [{"request_range": {"key": name}}],
            },
            _Transaction,
        )
        # A request that was sent again, because its answer was lost, finds its own object.
        pairs = [pair for response in answer.responses for pair in response.response_range.kvs]
        if not answer.succeeded and [self._unb64(pair.value) for pair in pairs] != [data]:
            raise ConflictError("the object exists already", kind="exists", where=self._where(key))

    def writer(self, key: str, size: int) -> Writer:
        """Begin an object of exactly `size` bytes; it is sent with `Writer.commit`."""
        return _EtcdWriter(self, check_key(key), size)

    def stat(self, key: str) -> ObjectInfo:
        """Return the size of one object; etcd keeps no time: 0."""
        return ObjectInfo(key, len(self.get(key)), 0.0)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below `prefix`, in key order."""
        for key, raw in self._pairs(prefix):
            yield ObjectInfo(key, len(raw), 0.0)

    def last(self, prefix: str = "") -> ObjectInfo | None:
        """Return the last object below `prefix`, None if there is none."""
        for key, raw in self._pairs(prefix, limit=1, order="DESCEND"):
            return ObjectInfo(key, len(raw), 0.0)
        return None

    def read_all(
        self, prefix: str = "", *, most_bytes: int
    ) -> Iterator[tuple[ObjectInfo, bytes | None]]:
        """Yield every object below `prefix`, in key order, with its bytes, of the same requests."""
        for key, raw in self._pairs(prefix):
            yield ObjectInfo(key, len(raw), 0.0), raw if len(raw) <= most_bytes else None

    def _pairs(
        self, prefix: str, *, limit: int = _PAGE, order: str = "ASCEND"
    ) -> Iterator[tuple[str, bytes]]:
        """Yield keys and values below `prefix`, page by page; from behind only the first page."""
        begin = self._root + check_prefix(prefix).encode()
        end = begin[:-1] + bytes([begin[-1] + 1])  # the first key behind those that begin so
        more = True
        while more:
            request = {"key": _b64(begin), "range_end": _b64(end), "limit": limit}
            answer = self._ask("range", request | {"sort_order": order}, _Range)
            before = begin
            for pair in answer.kvs:
                name = self._unb64(pair.key)
                key = name.decode(errors="replace").removeprefix(self._root.decode())
                yield key, self._unb64(pair.value)
                begin = name + b"\0"
            more = order == "ASCEND" and answer.more and bool(answer.kvs)
            if more and begin <= before:
                raise CorruptError("etcd returned a key twice", where=self.url)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is gone already is no error."""
        names = iter([self._name(key) for key in keys])
        while some := [*itertools.islice(names, _DELETED_AT_ONCE)]:
            success = [{"request_delete_range": {"key": name}} for name in some]
            self._ask("txn", {"success": success}, _Transaction)

    def sync(self, prefix: str) -> None:
        """Do nothing: what etcd has answered is durable."""
        check_prefix(prefix)

    def _name(self, key: str) -> str:
        return _b64(self._root + check_key(key).encode())

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _unb64(self, text: str) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise CorruptError("etcd returned invalid base64", where=self.url) from error

    def _ask(self, verb: str, request: dict[str, Any], kind: type[_Answer]) -> _Answer:
        failures = []
        members = self._members  # another thread may change their order meanwhile
        for turn, member in enumerate(members):
            try:
                answer = json_decoder(kind).decode(_post(member, verb, request))
            except StoreError as error:
                failures.append(f"{member.url}: {error.found or error.message}")
                continue
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                failures.append(f"{member.url}: {error!r}")
                continue
            # The member that answers is asked first from now on.
            self._members = [*members[turn:], *members[:turn]]
            return answer
        raise TransientStoreError(
            "no member of etcd answers", where=self.url, found="; ".join(failures)[:500]
        )


class _EtcdWriter(SizedWriter):
    def __init__(self, store: EtcdStore, key: str, size: int) -> None:
        super().__init__(key, size)
        self._store, self._data = store, bytearray()

    def _append(self, view: memoryview) -> None:
        self._data += view

    def _finish(self) -> None:
        self._store.put(self.key, bytes(self._data))

    def _drop(self) -> None:
        self._data = bytearray()


def _member(text: str, options: EtcdOptions) -> HttpClient | None:
    """Return the client of a member, or None."""
    try:
        parts = urllib.parse.urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port or 2379
    except ValueError:
        return None
    plain = text.isascii() and text.isprintable() and " " not in text
    if not host or not plain or parts.netloc != text or "@" in text or text.endswith(":"):
        return None
    return HttpClient(
        f"{'https' if options.tls else 'http'}://{Address(host, port)}",
        "a member of etcd",
        timeout_s=options.timeout_s,
        most_bytes=_MOST_ANSWER_BYTES,
    )


def _post(member: HttpClient, verb: str, request: dict[str, Any]) -> bytes:
    headers = {"Content-Type": "application/json"}
    answer = member.ask("POST", f"/v3/kv/{verb}", msgspec.json.encode(request), headers)
    if answer.status != 200:
        raise TransientStoreError(
            "a member of etcd refused", found=f"status {answer.status}: {answer.body[:200]!r}"
        )
    return answer.body


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
