"""The chunks that parts refer to are leased while a checkpoint is published, and its base's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from ckptd.checkpoint.format.manifest import FileEntry
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.commit import leased
from ckptd.checkpoint.save.dedup import Base, Refer
from ckptd.checkpoint.save.messages import RankPart
from ckptd.errors import SaveError
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.root.checkpoints import put_attempt
from tests.checkpoint.save.referring import is_held

_numbers = itertools.count()
INDEX = "0" * 32


@pytest.fixture
def catalogue() -> Iterator[Catalogue]:
    name = f"referred{next(_numbers)}"
    found = Catalogue(MemoryStore(name))
    found.create_or_open()
    found.claim(None, 2, "test")
    found.publish(put_attempt(found.store, CommitName(1, 1), "0001"))
    yield found
    forget_memory(name)


def part(rank: int, base: Base | None, folder: str = "") -> RankPart:
    file = FileEntry(f"{folder}r{rank:05d}.safetensors", rank, 4096, 1, INDEX)
    return RankPart(rank, "plan", base=base, refers=(Refer(file, ((0, 1),)),) if folder else ())


def test_the_base_is_held_while_the_block_runs(catalogue: Catalogue) -> None:
    folder = catalogue.commit(CommitName(1, 1)).folder
    with leased(catalogue, [part(0, None), part(1, Base(1, 1, "0001"), folder)]):
        assert is_held(catalogue.store)
    assert not is_held(catalogue.store)


def test_parts_that_refer_to_nothing_hold_nothing(catalogue: Catalogue) -> None:
    with leased(catalogue, [part(0, None), part(1, None)]):
        assert not is_held(catalogue.store)


@pytest.mark.parametrize(
    ("bases", "folder", "words"),
    [
        ([Base(2, 1, "0001")], "", "was deleted during the save"),
        ([Base(1, 1, "0002")], "", "was deleted during the save"),
        ([Base(1, 1, "0001"), Base(1, 1, "0002")], "", "ranks refer to different checkpoints"),
        (
            [Base(1, 1, "0001")],
            "data/000000000000-g00000001-0001/",
            "a rank's part refers to what its",
        ),
        ([None], "data/000000000001-g00000001-0001/", "a rank's part refers to what its"),
    ],
)
def test_what_is_not_there_or_not_the_bases_ends_the_save(
    catalogue: Catalogue, bases: list[Base | None], folder: str, words: str
) -> None:
    parts = [part(rank, base, folder) for rank, base in enumerate(bases)]
    with pytest.raises(SaveError) as caught, leased(catalogue, parts):
        pytest.fail("nothing may be published")
    assert words in caught.value.message
    assert not is_held(catalogue.store)
