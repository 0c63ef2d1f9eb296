"""The membership log in etcd, through the JSON gateway of its v3 API.

PyTorch's own etcd rendezvous speaks v2, which etcd 3.4 no longer answers; a log needs no more than
one transaction and one range, so no client library is used.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import json
import time
import urllib.parse
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ckptd.decoding import json_decoder
from ckptd.elastic.log import entry_key, entry_number
from ckptd.elastic.membership import Record, check_log, decode_record, encode_record
from ckptd.elastic.seat import SIGNS, SeatRecord, decode_seat, decode_sign, seat_taken
from ckptd.elastic.signs import Sign
from ckptd.errors import ConflictError, CorruptError, TransientStoreError, UsageError

__all__ = ["Etcd", "EtcdLog", "EtcdSeat"]

_Answer = TypeVar("_Answer", bound=msgspec.Struct)

_MOST_ANSWER_BYTES = 64 << 20
_PAGE = 64


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


class Etcd:
    """A client of etcd that knows two requests: create a key, and read those below a prefix.

    Parameters
    ----------
    endpoints
        ``http://HOST:PORT`` of members; the next is asked when one does not answer.
    timeout_s
        For one request to one member.

    Raises
    ------
    UsageError
        kind ``bad-url``: an endpoint is none.
    """

    def __init__(self, endpoints: Sequence[str], timeout_s: float = 5.0) -> None:
        self._members = [_address(endpoint) for endpoint in endpoints]
        if not self._members:
            raise UsageError("no endpoint of etcd is given", kind="bad-url")
        self._timeout_s = timeout_s
        self.where = endpoints[0].rstrip("/")

    def create(self, key: str, raw: bytes) -> bool:
        """Create a key; return false if it is there with another value. Durable on return.

        Raises
        ------
        TransientStoreError
            No member answers; the key may be there or not.
        """
        name = _b64(key.encode())
        answer = self._ask(
            "txn",
            {
                "compare": [{"key": name, "target": "CREATE", "create_revision": "0"}],
                "success": [{"request_put": {"key": name, "value": _b64(raw)}}],
                "failure": [{"request_range": {"key": name}}],
            },
            _Transaction,
        )
        if answer.succeeded:
            return True
        # A request that was sent again, because its answer was lost, meets its own record.
        pairs = [pair for response in answer.responses for pair in response.response_range.kvs]
        return [_unb64(pair.value, self.where) for pair in pairs] == [raw]

    def put(self, key: str, raw: bytes) -> None:
        """Set a key, whatever it was. Durable on return.

        Raises
        ------
        TransientStoreError
            No member answers; the key may be set or not.
        """
        self._ask("put", {"key": _b64(key.encode()), "value": _b64(raw)}, _Put)

    def below(self, prefix: str, *, last: bool = False) -> dict[str, bytes]:
        """Return the keys below a prefix, without it, and their values.

        Parameters
        ----------
        prefix
            Ends in a slash.
        last
            Only the last key in their order.

        Raises
        ------
        CorruptError
            kind ``bad-log``: etcd answers in no base64, or with the same keys again and again.
        TransientStoreError
            No member answers.
        """
        found: dict[str, bytes] = {}
        begin, end = prefix.encode(), _after(prefix.encode())
        while True:
            answer = self._ask(
                "range",
                {
                    "key": _b64(begin),
                    "range_end": _b64(end),
                    "limit": 1 if last else _PAGE,
                    "sort_order": "DESCEND" if last else "ASCEND",
                },
                _Range,
            )
            before = begin
            for pair in answer.kvs:
                begin = _unb64(pair.key, self.where)
                name = begin.decode(errors="replace").removeprefix(prefix)
                found[name] = _unb64(pair.value, self.where)
                begin += b"\0"
            if last or not answer.kvs or not answer.more:
                return found
            if begin <= before:
                raise CorruptError("etcd repeats its keys", kind="bad-log", where=self.where)

    def _ask(self, verb: str, request: dict[str, Any], kind: type[_Answer]) -> _Answer:
        failures = []
        for turn in range(len(self._members)):
            member = self._members[turn]
            try:
                answer = json_decoder(kind).decode(self._post(member, verb, request))
            except (
                OSError,
                http.client.HTTPException,
                msgspec.MsgspecError,
                ValueError,
                RecursionError,
            ) as error:
                failures.append(f"{member[1]}:{member[2]}: {error!r}")
                continue
            # Whoever answers is asked first from now on.
            self._members = [*self._members[turn:], *self._members[:turn]]
            return answer
        raise TransientStoreError(
            "no member of etcd answers", where=self.where, found="; ".join(failures)[:500]
        )

    def _post(self, member: tuple[str, str, int], verb: str, request: dict[str, Any]) -> bytes:
        scheme, host, port = member
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        connection = kind(host, port, timeout=self._timeout_s)
        try:
            connection.request(
                "POST",
                f"/v3/kv/{verb}",
                json.dumps(request),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            raw = response.read(_MOST_ANSWER_BYTES + 1)
        finally:
            connection.close()
        if response.status != 200:
            raise OSError(f"status {response.status}: {raw[:200]!r}")
        if len(raw) > _MOST_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {_MOST_ANSWER_BYTES} bytes")
        return raw


class EtcdLog:
    """The log as keys below a prefix.

    Parameters
    ----------
    endpoints, timeout_s
        See `Etcd`.
    prefix
        Of the job.

    Raises
    ------
    UsageError
        kind ``bad-url``: an endpoint is none.
    """

    def __init__(self, endpoints: Sequence[str], prefix: str, timeout_s: float = 5.0) -> None:
        self._etcd = Etcd(endpoints, timeout_s)
        self._prefix = prefix.rstrip("/") + "/"
        self._where = f"{endpoints[0]}{'' if prefix.startswith('/') else '/'}{self._prefix}"

    def read(self) -> list[Record]:
        """Return all records; see `ckptd.elastic.log.MembershipLog.read`."""
        found: dict[int, bytes] = {}
        for name, raw in self._etcd.below(self._prefix).items():
            number = entry_number(name)
            if number is not None:
                found[number] = raw
        if sorted(found) != list(range(len(found))):
            raise CorruptError(
                "a record of the membership log is missing",
                kind="bad-log",
                where=self._where,
                found=f"{len(found)} records",
            )
        records = [decode_record(found[n], self._where + entry_key(n)) for n in sorted(found)]
        check_log(records, self._where)
        return records

    def append(self, record: Record, number: int) -> None:
        """Write a record; see `ckptd.elastic.log.MembershipLog.append`."""
        if not self._etcd.create(self._prefix + entry_key(number), encode_record(record)):
            raise ConflictError(
                "another controller has decided",
                kind="log-taken",
                where=self._where + entry_key(number),
                hint="this controller ends; the other one goes on",
            )


class EtcdSeat:
    """The controller's seat as keys below a prefix; see `ckptd.elastic.seat.SeatBook`.

    Parameters
    ----------
    etcd
        The client.
    prefix
        Of the job's seats; ends in a slash.
    """

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd, self._prefix = etcd, prefix
        self._signs = f"{prefix.rstrip('/').rpartition('/')[0]}/{SIGNS}"

    def newest(self) -> SeatRecord | None:
        """See `ckptd.elastic.seat.SeatBook.newest`."""
        found = self._etcd.below(self._prefix, last=True)
        for name, raw in found.items():
            return decode_seat(raw, self._etcd.where + self._prefix + name)
        return None

    def take(self, number: int, address: str, by: str) -> SeatRecord:
        """See `ckptd.elastic.seat.SeatBook.take`."""
        record = SeatRecord(number=number, address=address, by=by, at=time.time())
        key = self._prefix + entry_key(number)
        if not self._etcd.create(key, msgspec.json.encode(record)):
            raise seat_taken(self._etcd.where + key)
        return record

    def still(self, by: str) -> bool:
        """See `ckptd.elastic.seat.SeatBook.still`."""
        newest = self.newest()
        return newest is not None and newest.by == by

    def sign(self, name: str, sign: Sign) -> None:
        """See `ckptd.elastic.signs.SignBook.sign`."""
        self._etcd.put(self._signs + name, msgspec.json.encode(sign))

    def signs(self) -> dict[str, Sign]:
        """See `ckptd.elastic.signs.SignBook.signs`."""
        found = {}
        for name, raw in self._etcd.below(self._signs).items():
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):  # a damaged one is none
                found[name] = decode_sign(raw)
        return found


def _address(endpoint: str) -> tuple[str, str, int]:
    scheme, host, port = "", "", 0
    try:
        parts = urllib.parse.urlsplit(endpoint)
        scheme, host, port = parts.scheme, parts.hostname or "", parts.port or 2379
    except ValueError:
        port = 0
    if scheme not in ("http", "https") or not host or not port:
        raise UsageError(
            "this is no endpoint of etcd",
            kind="bad-url",
            wanted="http://HOST:2379",
            found=endpoint,
        )
    return scheme, host, port


def _after(prefix: bytes) -> bytes:
    """Return the first key that does not begin with `prefix`, which ends in a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _unb64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise CorruptError("etcd answers in no base64", kind="bad-log", where=where) from error
