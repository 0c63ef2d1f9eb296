"""Event files: clocks are brought together, and nothing in a folder does harm."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from ckptd.errors import CorruptError, NotFoundError
from ckptd.events.event import Opened, SaveBegun
from ckptd.events.eventfiles import LINE_BYTES, EventFolder, shifts

WALL = 1_790_000_000 * 10**9


def opened(wall: int = WALL, monotonic: int = 0, clock: str = "boot") -> Opened:
    return Opened(host="h", pid=1, clock=clock, wall_ns=wall, monotonic_ns=monotonic)


def begun(step: int, at_ns: int = WALL) -> SaveBegun:
    return SaveBegun(step=step, generation=1, attempt="a", rank=0, at_ns=at_ns)


def raw(*items: msgspec.Struct) -> bytes:
    return b"".join(msgspec.json.encode(i) + b"\n" for i in items)


def steps(folder: Path) -> tuple[list[int], EventFolder]:
    found = EventFolder.open(str(folder))
    return [e.step for _, e in found.read()], found


@given(
    st.lists(
        st.tuples(st.integers(0, 10**15), st.integers(-(10**12), 10**12), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    )
)
def test_one_clock_gives_one_time(files: list[tuple[int, int, int]]) -> None:
    """Files begin at any moment, by a wall clock that was set in between."""
    heads = {
        Path(str(i)): opened(WALL + begin + error, begin, f"boot {clock}")
        for i, (begin, error, clock) in enumerate(files)
    }
    moved = shifts(heads)
    moment = 10**15  # of the monotonic clock
    times: dict[str, set[int]] = {}
    for path, head in heads.items():
        written = moment + head.wall_ns - head.monotonic_ns
        times.setdefault(head.clock, set()).add(written + moved[path])
    assert all(len(found) == 1 for found in times.values())
    for clock, (time,) in times.items():
        errors = [h.wall_ns - h.monotonic_ns for h in heads.values() if h.clock == clock]
        assert min(errors) <= time - moment <= max(errors)


def test_files_without_a_clock_keep_their_times() -> None:
    heads = {Path(str(i)): opened(WALL + i, clock="") for i in range(3)}
    assert set(shifts(heads).values()) == {0}


def test_times_of_one_host_are_brought_together(tmp_path: Path) -> None:
    for number, error in enumerate((0, 5_000, -7_000_000)):
        event = begun(number, WALL + 100 + error)
        (tmp_path / f"{number}.jsonl").write_bytes(raw(opened(WALL + error), event))
    times = {e.time_ns for _, e in EventFolder.open(str(tmp_path)).read()}
    assert times == {WALL + 100}


@given(st.lists(st.binary(max_size=40).filter(lambda b: b"\n" not in b), max_size=8), st.data())
def test_garbage_between_lines_costs_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, garbage: list[bytes], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("events")
    good = [raw(begun(i)) for i in range(5)]
    mixed = data.draw(st.permutations([*good, *(g + b"\n" for g in garbage)]))
    (folder / "a.jsonl").write_bytes(raw(opened()) + b"".join(mixed))
    found, seen = steps(folder)
    assert sorted(found) == list(range(5))
    assert seen.skipped == len(garbage)


@given(st.integers(0, 400))
def test_a_file_cut_off_anywhere_is_read_up_to_there(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("events")
    whole = raw(opened(), *(begun(i) for i in range(3)))
    (folder / "a.jsonl").write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n")
    if complete == 0:
        with pytest.raises(CorruptError, match="the files hold no events"):
            EventFolder.open(str(folder))
    else:
        found, seen = steps(folder)
        assert (found, seen.skipped) == (list(range(complete - 1)), 0)


HOSTILE = {
    "nested": b"[" * 60_000 + b"\n",
    "nested in an event": b'{"event":"SaveBegun","x":' + b"[" * 60_000 + b"\n",
    "long": b"x" * (5 * LINE_BYTES) + b"\n",
    "long event": raw(begun(1))[:-2] + b" " * LINE_BYTES + b"}\n",
    "negative": b'{"event":"SaveBegun","step":-1,"generation":1,"rank":0,"at_ns":1}\n',
    "huge": b'{"event":"SaveBegun","step":' + b"9" * 400 + b',"generation":1,"rank":0,"at_ns":1}\n',
    "float": b'{"event":"SaveBegun","step":1e99,"generation":1,"rank":0,"at_ns":1}\n',
    "unknown": b'{"event":"Later","step":1}\n',
    "name": b'{"event":"Span","name":"\\u001b[2J","step":1,"generation":1,"rank":0}\n',
    "not text": b'{"event":"\xff\xfe"}\n',
    "nothing": b"\n",
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_line_is_skipped(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(raw(opened(), begun(1)) + line + raw(begun(2)))
    found, seen = steps(tmp_path)
    assert (found, seen.skipped) == ([1, 2], 1)


@pytest.mark.slow
def test_a_line_without_end_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(raw(opened(), begun(1)) + b"{")
        file.truncate(1 << 30)  # the rest is zeros that take no room on the disk
    tracemalloc.start()
    found, _ = steps(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 16 * LINE_BYTES
    tracemalloc.stop()
    assert found == [1]


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    import os

    folder = tmp_path / "events"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(raw(opened(), begun(1)))
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "folder.jsonl").mkdir()
    (tmp_path / "outside").write_bytes(raw(opened(), begun(2)))
    (folder / "link.jsonl").symlink_to(tmp_path / "outside")
    found, seen = steps(folder)
    assert (found, seen.unreadable) == ([1], 3)


def test_a_file_that_grows_is_read_up_to_its_length(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(raw(opened(), begun(0)))
    folder = EventFolder.open(str(tmp_path))
    reading = folder.read()
    assert next(reading)[1].step == 0
    with path.open("ab") as file:
        file.write(raw(begun(1)))
    assert list(itertools.islice(reading, 5)) == []


def test_a_folder_without_events(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(NotFoundError) as caught:
            EventFolder.open(str(folder))
        assert caught.value.message in ("no events were recorded here", "the folder cannot be read")
