from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ckptd.checkpoint.format.records import (
    MAX_RECORD_BYTES,
    Commit,
    Generation,
    Lease,
    Parent,
    Pin,
    RootMarker,
    decode_record,
    encode_record,
)
from ckptd.errors import CorruptError

FOLDER = "data/000000001200-g00000003-a1/"
OLDER = "data/000000001100-g00000002-b/"
COMMIT = Commit(
    step=1200,
    generation=3,
    attempt="a1",
    folder=FOLDER,
    folders=(OLDER, FOLDER),
    manifest="manifest.json",
    manifest_digest="0f" * 16,
    manifest_bytes=4711,
    write_id="w",
    created="2026-01-02T03:04:05.678Z",
    world_size=8,
    data_bytes=1 << 40,
    metadata={"loss": 1.5},
)
RECORDS: list[Any] = [
    RootMarker("r", "now"),
    Generation(3, "c", Parent(1100, 2), "now", 8, "resume"),
    Generation(1, "c", None, "now", 0),
    COMMIT,
    Lease(1200, 3, 1.9e9, "host"),
    Pin(1200, 3, "now", "best"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_round_trip(record: Any) -> None:
    raw = encode_record(record)
    assert decode_record(raw, type(record), "x") == record
    assert raw.endswith(b"\n")
    assert raw.count(b"\n") >= len(record.__struct_fields__)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_every_flipped_bit_is_found(record: Any) -> None:
    raw = encode_record(record)
    for bit in range(8 * len(raw)):
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            decode_record(bytes(bad), type(record), "x")


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_records_of_before_the_digest_are_read(record: Any) -> None:
    fields = json.loads(encode_record(record))
    old = {k: v for k, v in fields.items() if k not in ("digest", "root", "claim")}
    assert decode_record(json.dumps(old, indent=1).encode(), type(record), "x") == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_what_stands_after_the_digest_is_refused(record: Any) -> None:
    raw = encode_record(record)
    for bad in (raw[:-2] + b',"x": 1}\n', raw + b" ", raw.rstrip()):
        with pytest.raises(CorruptError) as caught:
            decode_record(bad, type(record), "x")
        assert caught.value.kind == "digest"


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_newer_versions_and_other_kinds(record: Any) -> None:
    raw = json.loads(encode_record(record))
    with pytest.raises(CorruptError) as caught:
        decode_record(json.dumps(raw | {"version": 2}).encode(), type(record), "x")
    assert caught.value.kind == "version"
    other = Commit if not isinstance(record, Commit) else Generation
    with pytest.raises(CorruptError) as caught:
        decode_record(json.dumps(raw).encode(), other, "x")
    assert caught.value.message == f"not a {other.__name__}"


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (RECORDS[1], {"generation": 0}),
        (RECORDS[1], {"generation": 10**8}),
        (RECORDS[1], {"generation": True}),
        (RECORDS[1], {"generation": 10**30}),
        (RECORDS[1], {"parent": {"step": 1, "generation": 3}}),
        (RECORDS[1], {"parent": {"step": -1, "generation": 2}}),
        (RECORDS[1], {"parent": {"step": 1, "generation": -1}}),
        (RECORDS[1], {"world_size": -1}),
        (RECORDS[1], {"world_size": 1.5}),
        (COMMIT, {"step": -1}),
        (COMMIT, {"step": 10**12}),
        (COMMIT, {"step": 1201}),
        (COMMIT, {"attempt": "../a1"}),
        (COMMIT, {"folder": "/etc/"}),
        (COMMIT, {"folder": OLDER}),
        (COMMIT, {"folders": [OLDER]}),
        (COMMIT, {"folders": [FOLDER, FOLDER]}),
        (COMMIT, {"folders": [FOLDER, "data/../../x/"]}),
        (COMMIT, {"folders": [FOLDER, OLDER[:-1]]}),
        (COMMIT, {"folders": [FOLDER, "commits/"]}),
        (COMMIT, {"manifest": "../manifest.json"}),
        (COMMIT, {"manifest": "r00000.safetensors"}),
        (COMMIT, {"manifest_bytes": 0}),
        (COMMIT, {"manifest_bytes": 1 << 31}),
        (COMMIT, {"data_bytes": -1}),
        (COMMIT, {"data_bytes": 1 << 62}),
        (COMMIT, {"world_size": -5}),
        (COMMIT, {"metadata": None}),
        (RECORDS[4], {"expires": -1}),
        (RECORDS[4], {"expires": 1e300}),
        (RECORDS[4], {"expires": "soon"}),
        (RECORDS[5], {"step": 10**12}),
    ],
)
def test_broken_records(record: Any, changes: dict[str, Any]) -> None:
    raw = json.loads(encode_record(record)) | changes
    with pytest.raises(CorruptError) as caught:
        decode_record(json.dumps(raw).encode(), type(record), "commits/x.json")
    assert re.match("not a |record breaks a rule", caught.value.message)
    assert caught.value.where == "commits/x.json"


def test_a_record_is_small() -> None:
    with pytest.raises(CorruptError) as caught:
        decode_record(b" " * (MAX_RECORD_BYTES + 1), Commit, "x")
    assert "record too large" in caught.value.message
