"""Which chunks are referred to, and when the search is off: pure rules."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptd.base.digest import digest
from ckptd.checkpoint.format.manifest import FileEntry
from ckptd.checkpoint.save.dedup import (
    FIRST_OFF,
    LEAST_BYTES,
    LONGEST_OFF,
    MOST_FOLDERS,
    PATIENCE,
    ChunkDigests,
    Digests,
    Switch,
    after,
    digest_table,
    refers,
    runs_of,
    same_as,
    worth_keeping,
)

OLD, NEW = "data/000000000001-g00000001-0001/", "data/000000000002-g00000001-0001/"
BIG = LEAST_BYTES


def file(folder: str, nbytes: int, rank: int = 0) -> FileEntry:
    return FileEntry(f"{folder}r{rank:05d}.safetensors", rank, 4096, nbytes, "0" * 32)


def table(*words: bytes) -> Digests:
    return digest_table(b"".join(digest(w) for w in words))


def held(*words: bytes, nbytes: int = 0) -> ChunkDigests:
    entry = file(OLD, nbytes or BIG * len(words))
    return ChunkDigests("plan", (entry,), np.zeros(len(words), dtype=np.int64), table(*words))


def sizes(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def test_a_chunk_with_the_same_digest_is_referred_to_and_others_are_not() -> None:
    before = held(b"a", b"b", b"c")
    same = same_as(before, table(b"a", b"x", b"c"), sizes(BIG, BIG, BIG), {OLD})
    assert same.tolist() == [True, False, True]
    (found,) = refers(before, same)
    assert found.runs == ((0, 1), (2, 1))
    assert found.file == before.files[0]


@pytest.mark.parametrize("word", [0, 1])
def test_a_digest_that_is_alike_in_half_is_another(word: int) -> None:
    now = table(b"a").copy()
    now[0, word] ^= np.uint64(1)
    assert not same_as(held(b"a"), now, sizes(BIG), {OLD}).any()


def test_small_chunks_and_unknown_ones_are_written() -> None:
    before = held(b"a", b"b", b"c", nbytes=BIG)
    before.where[2] = -1
    same = same_as(before, table(b"a", b"b", b"c"), sizes(BIG, BIG - 1, BIG), {OLD})
    assert same.tolist() == [True, False, False]


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_of_which_less_than_half_is_needed_is_let_go(shared: bool) -> None:
    before = replace(held(b"a", b"b", b"c"), shared=shared)
    now = table(b"a", b"x", b"y")
    same = same_as(before, now, sizes(BIG, BIG, BIG), {OLD})
    assert bool(same.any()) is shared  # a shared one is looked at by its folder
    assert after("plan", file(NEW, 0), now, before, same).shared is shared


def test_folders_that_are_not_announced_are_not_referred_to() -> None:
    before = held(b"a")
    assert not same_as(before, table(b"a"), sizes(BIG), {NEW}).any()


def test_what_a_save_leaves_behind_is_found_by_the_next() -> None:
    before = held(b"a", b"b", b"c")
    now = table(b"a", b"x", b"c")
    same = same_as(before, now, sizes(BIG, BIG, BIG), {OLD})
    left = after("plan", file(NEW, BIG), now, before, same)
    assert [f.path for f in left.files] == [file(NEW, 0).path, file(OLD, 0).path]
    assert left.where.tolist() == [1, 0, 1]
    again = same_as(left, now, sizes(BIG, BIG, BIG), {OLD, NEW})
    assert again.all()
    assert [r.runs for r in refers(left, again)] == [((0, 1), (2, 1)), ((1, 1),)]


@given(st.sets(st.integers(0, 200)))
def test_runs_say_the_same_numbers(numbers: set[int]) -> None:
    runs = runs_of(np.array(sorted(numbers), dtype=np.int64))
    assert [n for first, count in runs for n in range(first, first + count)] == sorted(numbers)
    assert all(a + n < b for (a, n), (b, _) in pairwise(runs))


def test_folders_with_little_in_use_and_too_many_are_let_go() -> None:
    assert worth_keeping([(OLD, 49, 100), (NEW, 10, 100)], NEW) == (NEW,)
    assert worth_keeping([(OLD, 50, 100), (NEW, 10, 10)], NEW) == (OLD, NEW)
    many = [(f"data/{i:012d}-g00000001-0001/", 100 + i, 100 + i) for i in range(20)]
    kept = worth_keeping(many, many[0][0])
    assert kept == tuple(name for name, _, _ in many[-(MOST_FOLDERS - 1) :])


def test_the_search_is_off_for_longer_and_longer_where_it_finds_nothing() -> None:
    switch = Switch()
    for _ in range(PATIENCE):
        assert switch.take()
        switch.found(1, 100)
    pauses = []
    for _ in range(6):
        assert not switch.on
        pause = 0
        while not switch.take():
            pause += 1
        pauses.append(pause)
        switch.found(0, 100)
    assert pauses == [8, 16, 32, 64, 64, 64]
    assert (pauses[0], pauses[-1]) == (FIRST_OFF, LONGEST_OFF)


def test_one_find_puts_the_search_on_again() -> None:
    switch = Switch()
    for _ in range(PATIENCE):
        switch.found(0, 100)
    while not switch.take():
        pass
    switch.found(2, 100)
    switch.found(0, 100)
    assert switch.on
