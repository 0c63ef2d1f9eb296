"""The membership log in etcd, through the JSON gateway of its v3 API.

PyTorch's own etcd rendezvous speaks v2, which etcd 3.4 no longer answers; a log needs no more than
one transaction and one range, so no client library is used.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import json
import urllib.parse
from collections.abc import Sequence
from typing import Any

from ckptd.elastic.log import entry_key, entry_number
from ckptd.elastic.membership import Record, check_log, decode_record, encode_record
from ckptd.errors import ConflictError, CorruptError, TransientStoreError, UsageError

__all__ = ["EtcdLog"]

_MOST_ANSWER_BYTES = 64 << 20
_PAGE = 64


class EtcdLog:
    """The log as keys below a prefix.

    Parameters
    ----------
    endpoints
        ``http://HOST:PORT`` of members; the next is asked when one does not answer.
    prefix
        Of the job.
    timeout_s
        For one request to one member.

    Raises
    ------
    UsageError
        kind ``bad-url``: an endpoint is none.
    """

    def __init__(self, endpoints: Sequence[str], prefix: str, timeout_s: float = 5.0) -> None:
        self._members = [_address(endpoint) for endpoint in endpoints]
        if not self._members:
            raise UsageError("no endpoint of etcd is given", kind="bad-url")
        self._prefix = prefix.rstrip("/") + "/"
        self._timeout_s = timeout_s
        self._where = f"{endpoints[0]}{'' if prefix.startswith('/') else '/'}{self._prefix}"

    def read(self) -> list[Record]:
        """Return all records; see `ckptd.elastic.log.MembershipLog.read`."""
        found: dict[int, bytes] = {}
        begin, end = self._prefix.encode(), _after(self._prefix.encode())
        while True:
            answer = self._ask(
                "range",
                {
                    "key": _b64(begin),
                    "range_end": _b64(end),
                    "limit": _PAGE,
                    "sort_order": "ASCEND",
                },
            )
            pairs = answer.get("kvs", [])
            for pair in pairs:
                key = _unb64(pair["key"], self._where)
                number = entry_number(key.decode(errors="replace").removeprefix(self._prefix))
                if number is not None:
                    found[number] = _unb64(pair.get("value", ""), self._where)
                begin = key + b"\0"
            if not pairs or not answer.get("more"):
                break
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
        key = _b64((self._prefix + entry_key(number)).encode())
        raw = encode_record(record)
        answer = self._ask(
            "txn",
            {
                "compare": [{"key": key, "target": "CREATE", "create_revision": "0"}],
                "success": [{"request_put": {"key": key, "value": _b64(raw)}}],
                "failure": [{"request_range": {"key": key}}],
            },
        )
        if answer.get("succeeded"):
            return
        # A request that was sent again, because its answer was lost, meets its own record.
        pairs = answer["responses"][0]["response_range"].get("kvs", [])
        if [_unb64(pair.get("value", ""), self._where) for pair in pairs] != [raw]:
            raise ConflictError(
                "another controller has decided",
                kind="log-taken",
                where=self._where + entry_key(number),
                hint="this controller ends; the other one goes on",
            )

    def _ask(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        failures = []
        for turn in range(len(self._members)):
            member = self._members[turn]
            try:
                answer = self._post(member, verb, request)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append(f"{member[1]}:{member[2]}: {error!r}")
                continue
            # Whoever answers is asked first from now on.
            self._members = [*self._members[turn:], *self._members[:turn]]
            return answer
        raise TransientStoreError(
            "no member of etcd answers", where=self._where, found="; ".join(failures)[:500]
        )

    def _post(
        self, member: tuple[str, str, int], verb: str, request: dict[str, Any]
    ) -> dict[str, Any]:
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
        answer = json.loads(raw)
        if len(raw) > _MOST_ANSWER_BYTES or not isinstance(answer, dict):
            raise ValueError(f"an answer of {len(raw)} bytes that is none")
        return answer


def _address(endpoint: str) -> tuple[str, str, int]:
    parts = urllib.parse.urlsplit(endpoint)
    try:
        port = parts.port or 2379
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise UsageError(
            "this is no endpoint of etcd",
            kind="bad-url",
            wanted="http://HOST:2379",
            found=endpoint,
        )
    return parts.scheme, parts.hostname, port


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
