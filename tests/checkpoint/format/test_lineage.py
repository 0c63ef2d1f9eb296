"""The line, against its definition spelled out commit by commit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.format.lineage import line, newest_on_line
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.format.records import Generation, Parent
from ckptd.errors import CorruptError

History = dict[int, Generation]


def generation(number: int, parent: tuple[int, int] | None) -> Generation:
    of = Parent(*parent) if parent else None
    return Generation(number, f"claim{number}", of, "2026-01-01T00:00:00Z", 1)


def history(*parents: tuple[int, int] | None) -> History:
    """Generations 1, 2, ... with these parents, each ``(step, generation)`` or None."""
    return {g: generation(g, p) for g, p in enumerate(parents, 1)}


def names(*pairs: tuple[int, int]) -> list[CommitName]:
    return [CommitName(s, g) for s, g in pairs]


def counts(name: CommitName, newest: int, claimed: History) -> bool:
    """The definition: own commits, the parent's up to the parent commit, and so on."""
    if name.generation == newest:
        return True
    parent = claimed[newest].parent
    if parent is None:
        return False
    if parent.generation == name.generation:
        return name.step <= parent.step
    return counts(name, parent.generation, claimed)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[CommitName], History]:
    newest = draw(st.integers(1, 6))
    claimed: History = {}
    for g in range(1, newest + 1):
        older = st.tuples(st.integers(0, 9), st.integers(1, g - 1)) if g > 1 else st.none()
        claimed[g] = generation(g, draw(st.none() | older))
    pairs = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, newest)), unique=True))
    return newest, names(*pairs), claimed


def test_one_generation() -> None:
    commits = names((20, 1), (10, 1))
    assert line(1, commits, history(None).__getitem__) == names((10, 1), (20, 1))


def test_no_commits() -> None:
    assert line(2, [], history(None, None).__getitem__) == []
    assert newest_on_line(2, [], history(None, None).__getitem__) is None


def test_a_zombie_lands_beside_the_line() -> None:
    claimed = history(None, (10, 1))
    commits = names((10, 1), (20, 1), (15, 2))
    assert line(2, commits, claimed.__getitem__) == names((10, 1), (15, 2))
    assert newest_on_line(2, names((10, 1), (20, 1)), claimed.__getitem__) == CommitName(10, 1)


def test_the_limit_is_that_of_the_child_on_the_line() -> None:
    # Generation 2 went on from 30; 3 rolled back to 10 of generation 1: 20 and 30 do not count.
    claimed = history(None, (30, 1), (10, 1))
    commits = names((10, 1), (20, 1), (30, 1), (40, 2))
    assert line(3, commits, claimed.__getitem__) == names((10, 1))


def test_an_abandoned_line_can_be_taken_up_again() -> None:
    claimed = history(None, (10, 1), (30, 1))
    commits = names((10, 1), (30, 1), (20, 2))
    assert line(3, commits, claimed.__getitem__) == names((10, 1), (30, 1))


def test_a_new_run_hides_all_before() -> None:
    claimed = history(None, (10, 1), None)
    assert line(3, names((10, 1), (20, 2)), claimed.__getitem__) == []


def test_a_parent_commit_may_be_deleted() -> None:
    claimed = history(None, (30, 1))
    assert newest_on_line(2, names((10, 1), (20, 1)), claimed.__getitem__) == CommitName(20, 1)


def test_newest_reads_no_more_generations_than_needed() -> None:
    claimed = history(None, (10, 1), (20, 2), (30, 3))
    read: list[int] = []

    def get(g: int) -> Generation:
        read.append(g)
        return claimed[g]

    commits = names((10, 1), (20, 2), (30, 3))
    assert newest_on_line(4, commits, get) == CommitName(30, 3)
    assert read == [4]
    assert newest_on_line(3, commits, get) == CommitName(30, 3)
    assert read == [4]


def test_a_cycle_is_corrupt_and_ends() -> None:
    claimed = {1: generation(1, None), 2: generation(2, (10, 3)), 3: generation(3, (10, 2))}
    with pytest.raises(CorruptError) as info:
        line(3, [], claimed.__getitem__)
    assert "a generation's parent is not older than itself" in info.value.message


@given(histories())
def test_line_is_its_definition(case: tuple[int, list[CommitName], History]) -> None:
    newest, commits, claimed = case
    found = line(newest, commits, claimed.__getitem__)
    assert set(found) == {c for c in commits if counts(c, newest, claimed)}
    assert len(found) == len(set(found))
    generations = [c.generation for c in found]
    assert generations == sorted(generations)


@given(histories())
def test_newest_is_the_last_of_the_line(case: tuple[int, list[CommitName], History]) -> None:
    newest, commits, claimed = case
    whole = line(newest, commits, claimed.__getitem__)
    found = newest_on_line(newest, commits, claimed.__getitem__)
    assert found == (whole[-1] if whole else None)
