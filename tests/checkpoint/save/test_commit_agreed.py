"""Parts that do not belong together make no checkpoint: other plans, one name for two things."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest

from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.commit import assemble, commit_attempt, decode_plan, reported_key
from ckptd.checkpoint.save.messages import Extra, RankPart, SaveRequest
from ckptd.errors import CorruptError, SaveError
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.save.saving import plan_of

_numbers = itertools.count()
WORLD = 4
PLAN = plan_of({"w": (8, 8)}, world=WORLD)
SAVE = SaveRequest(1, 1, "0001", 1, PLAN.digest, (), (), {}, None, 1.0)
PARTS = [RankPart(rank, PLAN.digest) for rank in range(WORLD)]


@pytest.mark.parametrize("others", [[1], [2, 3], [0]])
def test_ranks_that_wrote_by_another_plan_are_named(others: list[int]) -> None:
    """Their bytes lie elsewhere in their files than the manifest would say."""
    name = f"agreed{next(_numbers)}"
    catalogue = Catalogue(MemoryStore(name))
    catalogue.create_or_open()
    catalogue.claim(None, WORLD, "test")
    for part in PARTS:
        plan = "another" if part.rank in others else part.plan
        raw = msgspec.structs.replace(part, plan=plan).encode()
        catalogue.store.put(reported_key(SAVE.folder, part.rank), raw)
    with pytest.raises(SaveError, match="disagree on the structure") as caught:
        commit_attempt(catalogue, PLAN, SAVE, lambda: None, 20.0)
    assert caught.value.kind == "structure"
    assert caught.value.found == f"another plan on ranks {others}"
    assert list(catalogue.commits()) == []
    forget_memory(name)


def of_ranks(*extras: Sequence[Extra]) -> list[RankPart]:
    every = [*extras, *([()] * (WORLD - len(extras)))]
    return [msgspec.structs.replace(p, extra=tuple(e)) for p, e in zip(PARTS, every, strict=True)]


def test_a_later_part_of_a_known_plan_is_checked_as_the_first() -> None:
    """Its lengths by what follows from the plan, its digests and its own values by themselves."""
    name = f"agreed{next(_numbers)}"
    catalogue = Catalogue(MemoryStore(name))
    catalogue.create_or_open()
    catalogue.claim(None, WORLD, "test")
    parts = [
        msgspec.structs.replace(p, data_start=4096, data_bytes=n, index="0f" * 16)
        for p in PARTS
        if (n := PLAN.filemap.data_bytes(p.rank)) or p.rank == 0
    ]
    parts += PARTS[len(parts) :]
    steps = itertools.count(1)

    def commit(*changes: dict[str, object]) -> None:
        step = next(steps)
        save = msgspec.structs.replace(SAVE, step=step, attempt=f"{step:04d}")
        changed = [msgspec.structs.replace(p, **c) for p, c in zip(parts, changes, strict=False)]
        these = [*changed, *parts[len(changed) :]]
        commit_attempt(catalogue, PLAN, save, lambda: None, 20.0, parts=these)

    wrong: list[dict[str, object]] = [
        {"data_bytes": parts[0].data_bytes + 1},
        {"data_bytes": 0},
        {"data_start": 4095},
        {"index": "no digest"},
        {"digests": b"others"},
        {"objects": (ObjectEntry("x", value=1, per_rank="drop"),)},
        {"objects": (ObjectEntry("", value=1),)},
        {"extra": (Extra("w", 4),)},
    ]
    for known in (False, True):
        for change in wrong:
            with pytest.raises((CorruptError, SaveError)):
                commit(change)
        assert len(list(catalogue.commits())) == known
        commit()
    assert len(list(catalogue.commits())) == 2
    forget_memory(name)


DROP, COMMON = [Extra("x", 4, "drop")], "a value that ranks have in common on another rank"
VALUE = msgspec.structs.replace(PARTS[0], objects=(ObjectEntry("x", value=1),))


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        (of_ranks(DROP, [Extra("x", 4, "error")]), 'PerRank(on_change="error") on rank 1'),
        (of_ranks([], [Extra("w", 4, "drop")]), "a tensor on another rank"),
        ([VALUE, *of_ranks([], DROP)[1:]], COMMON),
        (of_ranks(DROP, [Extra("x", 4)]), COMMON),
    ],
    ids=["declared otherwise", "a tensor", "a value", "a large value"],
)
def test_one_name_for_two_things_is_refused(parts: list[RankPart], found: str) -> None:
    plan = msgspec.structs.replace(PLAN, homes={"x": 1}) if found == COMMON else PLAN
    with pytest.raises(SaveError, match="different things") as caught:
        assemble(plan, parts, SAVE, None)
    assert caught.value.kind == "structure"
    assert caught.value.found == found


def _spoilt(**changed: object) -> bytes:
    first = msgspec.structs.replace(PLAN.tensors[0], **changed)
    plan = msgspec.structs.replace(PLAN, tensors=(first, *PLAN.tensors[1:]))
    return msgspec.msgpack.encode(plan.stamped())


@pytest.mark.parametrize(
    "raw",
    [
        _spoilt(dtype="float20"),
        _spoilt(grid=7),
        _spoilt(owners=-1),
        _spoilt(name=""),
        _spoilt(shape=(8, 9)),
        _spoilt(base=5),
        b"\xa1\xff",
        b"\x91" * 100_000,
    ],
)
def test_a_plan_of_a_stranger_is_refused_by_name(raw: bytes) -> None:
    assert decode_plan(msgspec.msgpack.encode(PLAN), "plan") == PLAN
    with pytest.raises(CorruptError):
        decode_plan(raw, "plan")
