"""Answers of NCCL's RAS, in the form that its documentation shows and its source writes."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from ckptd.errors import CorruptError
from ckptd.monitor.verdict import Verdict
from ckptd_nccl.ras import parse, stuck


def _rank(rank: int, reduced: int) -> dict[str, Any]:
    counts = {"Broadcast": 0, "Reduce": 0, "AllGather": 1, "ReduceScatter": 0, "AllReduce": reduced}
    status = {
        "init_state": 0,
        "async_error": 0,
        "finalize_called": False,
        "destroy_flag": False,
        "abort_flag": False,
    }
    who = {"rank": rank, "host": "172.16.64.245", "pid": 1524344 + rank}
    return who | {"cuda_dev": 0, "nvml_dev": 0, "status": status, "collective_counts": counts}


def _answer(*reduced: int, missing: int = 0) -> dict[str, Any]:
    absent = {"unresponsive": True, "considered_dead": False}
    gone = [_rank(len(reduced) + k, 0) | {"status": absent} for k in range(missing)]
    for one in gone:
        del one["collective_counts"]
    communicator = {
        "hash": "0xae94423cfbb2ef4a",
        "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
        "size": len(reduced) + missing,
        "ranks_count": len(reduced),
        "missing_ranks_count": missing,
        "ranks": [_rank(k, n) for k, n in enumerate(reduced)],
        "missing_ranks": gone,
    }
    return {
        "nccl_version": "2.29.1",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2025-12-19 13:06:53",
        "communicators_count": 1,
        "communicators": [communicator],
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
    }


def _told(before: dict[str, Any], now: dict[str, Any]) -> list[Verdict]:
    one, other = (parse(msgspec.json.encode(a)) for a in (before, now))
    return list(stuck(one, other))


def test_who_is_behind_and_stays_there() -> None:
    (verdict,) = _told(_answer(6650, 6649, 6650), _answer(6650, 6649, 6650))
    assert verdict.kind == "non-communication hang"
    assert verdict.names() == ("172.16.64.245/1524345",)
    assert "rank 1" in verdict.suspects[0].detail


def test_counts_that_move_are_no_fault_however_far_apart() -> None:
    assert not _told(_answer(6650, 6649), _answer(6651, 6649))
    assert not _told(_answer(7, 7), _answer(7, 7))


def test_who_does_not_answer() -> None:
    assert not _told(_answer(7, 7, missing=1), _answer(8, 8, missing=1))
    (verdict,) = _told(_answer(7, 7, missing=1), _answer(7, 7, missing=1))
    assert verdict.kind == "cannot say"
    assert verdict.names() == ("172.16.64.245/1524346",)


def test_another_communicator_is_not_compared() -> None:
    other = copy.deepcopy(_answer(7, 6))
    other["communicators"][0]["secondary_hash"] = "0x1:0x2"
    assert not _told(other, _answer(7, 6))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"Job summary\n===========\n",
        b"{}",
        b'{"nccl_version":"2.29.1","timestamp":"","communicators":[{"hash":1,"size":2}]}',
        b'{"nccl_version":"2.29.1","timestamp":"","communicators":[{"hash":"1","size":1e99}]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        parse(data)
    assert "invalid answer of NCCL's RAS" in caught.value.message
