"""Slots: a reader never takes half a snapshot for a whole one, wherever the writer was killed."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.save import arena as module
from ckptd.checkpoint.save.arena import CONTROL_BYTES, MOST_SLOTS, Slot, Slots, slots_for
from ckptd.errors import SaveError
from tests.processes import PATIENCE_S


def test_a_slot_is_sealed_for_the_job_that_filled_it() -> None:
    slot = Slot(0, 100)
    assert slot.sealed == 0
    slot.begin(1)
    slot.data[:] = b"a" * 100
    slot.staged = 100
    assert slot.sealed == 0
    slot.seal()
    assert slot.sealed == 1
    slot.begin(2)
    assert (slot.sealed, slot.staged) == (0, 0)
    slot.close()
    slot.close()


def test_a_slot_cannot_be_cut_short_under_those_who_map_it() -> None:
    slot = Slot(0, 1 << 16)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(slot.fd, 4096)
        assert fcntl.fcntl(slot.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    finally:
        slot.close()


@pytest.mark.parametrize("touched", [False, True])
def test_runs_are_put_into_their_places(touched: bool) -> None:
    slot, source = Slot(0, 100), np.arange(40, dtype=np.uint8)
    slot.begin(1)
    if touched:
        slot.allocate()
    at = source.ctypes.data
    slot.fill(np.array([(at, 60, 10), (at + 30, 0, 10), (at, 20, 0)]))
    assert bytes(slot.data[:10]) == bytes(range(30, 40))
    assert bytes(slot.data[60:70]) == bytes(range(10))
    assert not any(slot.data[10:60])
    assert not any(slot.data[70:])
    slot.close()


def test_many_small_runs_of_a_new_slot_go_where_they_belong() -> None:
    """By one call for many that follow one another; gaps and large ones lie between some."""
    rng = np.random.default_rng(0)
    source = rng.integers(1, 256, 1 << 20, dtype=np.uint8)
    sizes = rng.integers(0, 300, 3000)
    sizes[[700, 701, 2999]] = 80_000
    gaps = np.where(rng.random(3000) < 0.01, 5, 0)
    gaps[800:2900] = 0  # more in a row than the kernel takes at once
    starts = np.cumsum(sizes + gaps) - sizes
    froms = rng.integers(0, len(source) - sizes)
    slot = Slot(0, int(starts[-1] + sizes[-1]) + 9)
    expected = np.zeros(slot.nbytes, np.uint8)
    for at, start, size in zip(froms, starts, sizes, strict=True):
        expected[start : start + size] = source[at : at + size]
    slot.begin(1)
    slot.read(np.stack((source.ctypes.data + froms, starts, sizes), axis=1))
    assert bytes(slot.data) == expected.tobytes()
    slot.close()


def test_memory_that_is_freed_among_small_runs_of_a_new_slot_is_an_error() -> None:
    source = np.full(8, 7, np.uint8)
    runs = np.array([(source.ctypes.data, 8 * i, 8) for i in range(100)])
    runs[60, 0] = 4096  # nothing is mapped there
    slot = Slot(0, 800)
    slot.begin(1)
    with pytest.raises(SaveError):
        slot.read(runs)
    slot.close()


def test_another_process_sees_the_same_slot() -> None:
    slot = Slot(3, 5000)
    other = Slot(3, 5000, os.dup(slot.fd))
    slot.begin(7)
    slot.data[4990:] = b"0123456789"
    slot.staged = 5000
    other.wait(7, 5000, lambda: True, 1.0)
    assert bytes(other.data[4990:]) == b"0123456789"
    slot.seal()
    assert other.sealed == 7
    for s in (slot, other):
        s.close()


def test_a_new_slot_is_filled_without_being_touched_first() -> None:
    """Zeros that are about to be overwritten took most of what the first save held up."""
    nbytes = 8 << 20
    slot, rng = Slot(0, nbytes), np.random.default_rng(0)
    other = Slot(0, nbytes, os.dup(slot.fd))
    assert os.fstat(slot.fd).st_blocks * 512 < 1 << 20
    for job in (1, 2, 3):  # fresh, warm, and again
        expected = rng.integers(0, 256, nbytes, dtype=np.uint8)
        slot.begin(job)
        slot.put(0, expected[:5])
        slot.put(5, expected[5 : nbytes // 2])
        slot.place(nbytes // 2, nbytes - 7)[:] = expected[nbytes // 2 : -7]
        slot.put(nbytes - 7, expected[-7:])
        slot.put(nbytes, expected[:0])
        assert not len(slot.place(nbytes, nbytes))
        slot.staged = nbytes
        slot.seal()
        assert bytes(other.data) == bytes(slot.data) == expected.tobytes()
        slot.warm_up()
        assert slot._fresh is False
    assert os.fstat(slot.fd).st_blocks * 512 >= nbytes
    for s in (slot, other):
        s.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is mapped ahead")
def test_what_was_filled_is_mapped_by_few_faults_and_written_to_by_none() -> None:
    """A fault for each page took a sixth of the processor time of a first save."""
    nbytes = 16 << 20
    slot, data = Slot(0, nbytes), np.ones(nbytes, np.uint8)

    def faults(act: Callable[[], None]) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        act()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    slot.begin(1)
    slot.put(0, data)
    slot.staged = nbytes
    slot.seal()
    assert faults(slot.warm_up) < nbytes // 4096 // 4
    data[:] = 2
    assert faults(lambda: slot.put(0, data)) < nbytes // 4096 // 16
    assert bytes(slot.data) == data.tobytes()
    slot.close()


def test_a_slot_that_was_filled_in_part_is_still_a_new_one() -> None:
    slot = Slot(0, 4 << 20)
    slot.begin(1)
    slot.put(0, np.ones(100, np.uint8))
    slot.staged = 100
    slot.warm_up()
    assert slot._fresh, "what is not there would be taken for memory"
    slot.allocate()
    assert not slot._fresh
    assert os.fstat(slot.fd).st_blocks * 512 >= 4 << 20
    assert bytes(slot.data[:101]) == b"\1" * 100 + b"\0"
    slot.close()


def test_memory_that_is_not_there_is_an_error() -> None:
    """No SIGBUS: a limit on the size of files plays the lack of memory."""
    code = """
    import resource, signal, sys
    import numpy as np
    from ckptd.checkpoint.save.arena import Slot
    from ckptd.errors import SaveError
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    slot = Slot(0, 4 << 20)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    slot.put(0, np.ones(1000, np.uint8))
    try:
        slot.put(2 << 20, np.ones(9, np.uint8))
    except SaveError as error:
        print(error.kind)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert ended.stdout.split()[0] == "no-memory", ended.stderr


def test_bytes_of_another_job_are_not_waited_for() -> None:
    slot = Slot(0, 10)
    slot.begin(1)
    slot.staged = 10
    slot.seal()
    with pytest.raises(SaveError) as caught:
        slot.wait(2, 10, lambda: False, 5.0)
    assert "the trainer died before its state was copied" in caught.value.message
    with pytest.raises(SaveError):
        slot.wait(2, 10, lambda: True, 0.05)
    slot.close()


STEPS = """
import os, sys
from ckptd.checkpoint.save.arena import Slot
slot = Slot(0, 8, int(sys.argv[1]))
print(flush=True)
count = 0
def trace(frame, event, argument):
    global count
    if event == "opcode":
        count += 1
        if count == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
    elif event == "call":
        if "arena" not in frame.f_code.co_filename and frame.f_code.co_name != "work":
            return None
    frame.f_trace_opcodes = True
    return trace
def work():
    slot.begin(2)
    slot.data[:] = b"2" * 8
    slot.staged = 8
    slot.seal()
sys.settrace(trace)
work()
sys.settrace(None)
print(count, flush=True)
"""


def test_killed_between_any_two_instructions() -> None:
    """SIGKILL at each instruction of a writer that replaces a sealed snapshot by another one."""
    slot = Slot(0, 8)

    def write(at: int) -> tuple[int, list[str]]:
        slot.begin(1)
        slot.data[:] = b"1" * 8
        slot.staged = 8
        slot.seal()
        command = [sys.executable, "-c", textwrap.dedent(STEPS), str(slot.fd), str(at)]
        ended = subprocess.run(
            command,
            pass_fds=[slot.fd],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            cwd=Path(__file__).parents[3],
        )
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        return ended.returncode, ended.stdout.split()

    _, said = write(0)
    count = int(said[0])
    assert count > 30
    seen = set()
    for at in range(1, count + 1, 2):
        write(at)
        seen.add(slot.sealed)
        if slot.sealed:
            assert bytes(slot.data) == str(slot.sealed).encode() * 8, at
            assert slot.staged == 8, at
        assert bytes(slot.data) == b"2" * 8 or not slot._has(2, 8), at
    assert seen == {0, 1, 2}
    slot.close()


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 42))
def test_slots_by_memory(nbytes: int, room: int) -> None:
    found = slots_for(nbytes, None, room)
    assert found == 1 or (found == 2 and 8 * nbytes <= room)
    assert slots_for(nbytes, 3, room) == 3
    assert slots_for(nbytes, 99, room) == MOST_SLOTS


def test_a_slot_that_is_closed_is_not_said_to_lack_memory() -> None:
    slot = Slot(0, 100)
    slot.close()
    with pytest.raises(SaveError) as info:
        slot.put(0, np.zeros(100, np.uint8))
    assert info.value.kind == "aborted"


def _behind(slot: Slot) -> int:
    return 512 * os.fstat(slot.fd).st_blocks


def test_memory_ahead_is_for_a_slot_that_no_job_has() -> None:
    slot = Slot(0, 5 << 20)
    slot.begin(1)
    slot.touch()
    assert _behind(slot) <= CONTROL_BYTES
    slot.begin(0)
    slot.touch()
    assert _behind(slot) >= 5 << 20
    slot.close()


def test_the_last_memory_is_not_taken_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(0, 5 << 20)
    monkeypatch.setattr(module, "available_bytes", lambda: (5 << 20) - 1)
    slot.touch()
    assert _behind(slot) <= CONTROL_BYTES
    slot.close()
    slots = Slots(1, lambda slot: None)
    with pytest.raises(SaveError):
        slots.prepare(3 << 20)
    slots.prepare(2 << 20)
    assert slots.acquire(2 << 20, 0.0).nbytes == 2 << 20
    slots.prepare(1)  # there is one already
    slot = slots.acquire(1, 0.0)
    slot.begin(1)
    slot.put(0, np.ones(9, np.uint8))
    slot.staged = 9
    slot.seal()
    slot.warm_up()  # of a save that is smaller than what was loaded
    assert not slot._fresh
    assert _behind(slot) >= 2 << 20
    slots.close()
