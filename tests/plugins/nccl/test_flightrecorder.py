"""Dumps of PyTorch's flight recorder: real ones, ones that NCCL would write, and hostile ones."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.errors import CkptdError, CorruptError, NotFoundError
from ckptd.monitor.job import join
from ckptd.monitor.rules.diagnose import diagnose
from ckptd.monitor.rules.said import said_of
from ckptd.monitor.verdict import Verdict
from ckptd_nccl.flightrecorder import FILE_BYTES, STUCK, lines, read, read_folder
from tests.monitor import jobs

REAL = Path(__file__).parent / "flight"


def _told(folder: Path) -> list[tuple[str, list[str]]]:
    return jobs.told(_verdicts(folder))


def _verdicts(folder: Path) -> tuple[Verdict, ...]:
    return diagnose(join(read_folder(folder).views), STUCK)


@pytest.mark.parametrize("form", ["hang", "pickled"])
def test_the_rank_that_did_not_come(form: str) -> None:
    (verdict,) = _verdicts(REAL / form)
    assert jobs.told([verdict]) == [("non-communication hang", ["2"])]
    assert verdict.suspects[0].detail == "the state of its process is unknown"


def test_both_forms_say_the_same() -> None:
    one, other = (read_folder(REAL / form).views for form in ("hang", "pickled"))
    assert [v.groups.tolist() for v in one] == [v.groups.tolist() for v in other]
    assert [len(v.calls) for v in one] == [len(v.calls) for v in other] == [7, 7, 6, 7]
    assert one[0].members == other[0].members
    assert (2, 3) in one[2].members.values()


def test_calls_in_another_order() -> None:
    assert _told(REAL / "swap") == [("deadlock", ["2", "3"])]


def test_a_rank_whose_dump_is_missing(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        shutil.copy(REAL / "hang" / f"rank{rank}.json", tmp_path)
    assert _told(tmp_path) == [("cannot say", ["2"])]


def test_a_file_that_is_no_dump_is_told_and_left_out(tmp_path: Path) -> None:
    shutil.copytree(REAL / "hang", tmp_path, dirs_exist_ok=True)
    (tmp_path / "rank7.log").write_text("no dump")
    (tmp_path / "notes").write_text("{}")
    found = read_folder(tmp_path)
    assert set(found.unread) == {"rank7.log", "notes"}
    assert len(found.views) == 4


def _nccl(**other: Any) -> dict[str, Any]:
    """An entry with the fields of NCCL's, by its source."""
    usual = {
        "record_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_000_000_000,
        "duration_ms": 1.5,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "state": "started",
        "time_discovered_started_ns": 1_100_000_000,
        "time_discovered_completed_ns": None,
        "retired": False,
        "is_p2p": False,
        "frames": [{"name": "f", "filename": "x.py", "line": 3}],
    }
    return usual | other


def _write(folder: Path, rank: int, *entries: dict[str, Any], ranks: str = "[0, 1, 2]") -> None:
    body = {
        "version": "2.10",
        "entries": list(entries),
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {},
    }
    (folder / f"nccl_trace_rank_{rank}.json").write_bytes(msgspec.json.encode(body))


def test_sizes_that_differ_are_a_mismatch(tmp_path: Path) -> None:
    for rank in range(3):
        _write(tmp_path, rank, _nccl(input_sizes=[[5 if rank == 1 else 4]]))
    assert _told(tmp_path) == [("mismatch", ["1"])]


def test_a_call_that_all_entered_and_none_ended(tmp_path: Path) -> None:
    for rank in range(3):
        _write(tmp_path, rank, _nccl())
    assert _told(tmp_path) == [("communication hang", ["0", "1", "2"])]


def test_calls_that_ended_are_nobodys_fault(tmp_path: Path) -> None:
    for rank in range(3):
        entry = _nccl(state="completed", time_discovered_completed_ns=2_000_000_000)
        _write(tmp_path, rank, entry)
    assert _told(tmp_path) == []


def test_a_receiver_waits_for_its_sender(tmp_path: Path) -> None:
    pair = _nccl(is_p2p=True, p2p_seq_id=1, collective_seq_id=0)
    _write(tmp_path, 0, pair | {"profiling_name": "nccl:recv 0<-2"})
    _write(tmp_path, 1)
    _write(tmp_path, 2, pair | {"profiling_name": "nccl:send 2->1", "state": "completed"})
    shown = {v.rank: v for v in read_folder(tmp_path).views}
    assert list(shown[0].members.values()) == [(2, 0)]
    assert _told(tmp_path) == [("non-communication hang", ["2"])]


CALL = (
    b'{"version":"2.10","entries":[{"process_group":["0","d"],"profiling_name":"x",'
    b'"time_created_ns":%s}]}'
)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b'{"version": 3}',
        b"[" * 100_000,
        CALL % b"1e400",
        CALL % b"-5",
        b'{"version":"2.10","pg_status":{"0":{"last_enqueued_collective":"99999999999999999999"}}}',
    ],
)
def test_what_is_no_dump_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "rank0").write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        read(tmp_path / "rank0")
    assert "not a flight recorder dump" in caught.value.message
    with pytest.raises(NotFoundError):
        read_folder(tmp_path)


def test_what_it_claims_is_not_allocated(tmp_path: Path) -> None:
    _write(tmp_path, 0, _nccl(input_sizes=[[1 << 61] * 3]), ranks="[0, 99999999]")
    _write(tmp_path, 99999999, _nccl())
    found = read_folder(tmp_path)
    assert [v.rank for v in found.views] == [0]
    assert found.views[0].world == 1
    assert found.views[0].calls["bytes"].tolist() == [-1]
    with (tmp_path / "rank1").open("wb") as file:
        file.truncate(FILE_BYTES + 1)
    with pytest.raises(CorruptError):
        read(tmp_path / "rank1")


def test_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        read_folder(tmp_path / "none")
    assert "no dump of a flight recorder found" in caught.value.message


@pytest.mark.parametrize("form", ["hang", "pickled"])
def test_fuzz(form: str, tmp_path: Path) -> None:
    """Bytes that changed make another dump or none, and never anything else."""
    dice = random.Random(form)
    shutil.copytree(REAL / form, tmp_path, dirs_exist_ok=True)
    path = next(tmp_path.glob("rank0*"))
    whole = path.read_bytes()
    for _ in range(100):
        data = bytearray(whole[: dice.choice([len(whole), dice.randrange(len(whole))])])
        for _ in range(dice.randrange(1, 6)):
            if data:
                data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data)
        try:
            found = read_folder(tmp_path)
        except CkptdError as error:
            pytest.fail(str(error))  # the other three are good
        diagnose(join(found.views), STUCK)


def test_half_a_surrogate_pair_does_not_lose_the_folder(tmp_path: Path) -> None:
    """Pickle knows half a pair, and nobody who encodes a text: the other dumps are read."""
    for rank in range(3):
        entry = _nccl(
            process_group=("0\ud800" if rank == 1 else "0", "default_pg"),
            profiling_name="nccl:all_reduce\udfff",
        )
        body = {"version": "2.10", "entries": [entry], "pg_config": {}, "pg_status": {}}
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(body, 2))
    found = read_folder(tmp_path)
    assert [v.rank for v in found.views] == [0, 1, 2]


def test_one_entry_that_is_referred_to_again_and_again(tmp_path: Path) -> None:
    """36 kB that are 2 GB to whoever follows every reference."""
    value: Any = [7]
    for _ in range(8):
        value = [value] * 12
    many = [_nccl(input_sizes=value)] * 12_000
    body = {"version": "2.10", "entries": many, "pg_config": {}, "pg_status": {}}
    data = pickle.dumps(body, 2)
    assert len(data) < 40_000
    (tmp_path / "trace_0").write_bytes(data)
    _write(tmp_path, 1, _nccl())
    tracemalloc.start()
    try:
        found = read_folder(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert list(found.unread) == ["trace_0"]


def test_the_last_calls_of_a_dump_are_lines_of_an_incident(tmp_path: Path) -> None:
    logs = {}
    for rank in range(4):
        shutil.copy(REAL / "pickled" / f"rank{rank}_", tmp_path / f"trace{rank}")
        logs[rank] = "\n".join(
            f"flight recorder: {line}" for line in lines(tmp_path / f"trace{rank}")
        )
    assert said_of(logs).startswith("call timed out, rank 2; next:")
    assert logs[0].splitlines()[-1].endswith("entered, not ended")


def test_a_pipe_in_place_of_a_dump_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace0")
    with pytest.raises(CorruptError):
        lines(tmp_path / "trace0")
