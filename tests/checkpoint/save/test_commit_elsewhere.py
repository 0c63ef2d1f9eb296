"""Manifests of parts that refer to older files: every piece once, tables shared, lies refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.invariants import check_files, check_manifest
from ckptd.checkpoint.format.manifest import FileEntry, encode_manifest
from ckptd.checkpoint.format.names import CommitName, data_folder, file_key
from ckptd.checkpoint.save.commit import MOST_REFERS, assemble
from ckptd.checkpoint.save.dedup import MOST_FOLDERS, Base, Refer, runs_of
from ckptd.checkpoint.save.messages import Extra, RankPart, SaveRequest
from ckptd.checkpoint.save.structure import SavePlan
from ckptd.errors import SaveError
from tests.checkpoint.save.saving import plan_of

SHAPES: dict[str, tuple[int, ...]] = {f"layer{i}": (64, 64, 4096) for i in range(5)}
SHAPES |= {"a": (512, 64), "b": (512, 64), "c": (3, 1), "s": ()}
WORLD = 4
PLAN = plan_of(SHAPES, world=WORLD)
CUT = plan_of({"wide": (512, 64, 4096), "a": (512, 64)}, world=WORLD)
"""Of a tensor that several ranks write, so that its pieces lie in several files."""
INDEX = "0" * 32


def save_of(plan: SavePlan = PLAN) -> SaveRequest:
    return SaveRequest(9, 1, "0001", 1, plan.digest, (), (), {}, None, 1.0)


def old_file(step: int, rank: int) -> FileEntry:
    folder = data_folder(CommitName(step, 1), "0001")
    return FileEntry(file_key(folder, rank), rank, 4096, 1 << 40, INDEX)


def part_of(
    rank: int, referred: Mapping[FileEntry, Sequence[int]], plan: SavePlan = PLAN
) -> RankPart:
    """Return a part whose own file holds what it does not refer to."""
    chunks = plan.filemap.chunks(rank)
    gone = {n for numbers in referred.values() for n in numbers}
    own = sum(c.end - c.start for i, c in enumerate(chunks) if i not in gone)
    refers = tuple(
        Refer(f, runs_of(np.array(sorted(n)))) for f, n in sorted(referred.items(), key=str) if n
    )
    there = any(i not in gone for i in range(len(chunks)))
    return RankPart(
        rank,
        plan.digest,
        4096 if there else 0,
        own,
        INDEX if there else "",
        base=Base(8, 1, "0001") if refers else None,
        refers=refers,
    )


@st.composite
def choices(draw: st.DrawFn) -> tuple[SavePlan, list[dict[FileEntry, list[int]]]]:
    """For each rank which of its chunks lie in which of three old files of its own."""
    plan = draw(st.sampled_from([PLAN, CUT]))
    out = []
    for rank in range(WORLD):
        where = [draw(st.integers(-1, 2)) for _ in plan.filemap.chunks(rank)]
        out.append(
            {old_file(s, rank): [i for i, w in enumerate(where) if w == s] for s in range(3)}
        )
    return plan, out


@given(choices())
def test_every_piece_lies_where_its_part_says(
    drawn: tuple[SavePlan, list[dict[FileEntry, list[int]]]],
) -> None:
    plan, chosen = drawn
    parts = [part_of(rank, referred, plan) for rank, referred in enumerate(chosen)]
    manifest = assemble(plan, parts, save_of(plan), None)
    name, raw = encode_manifest(manifest)
    filemap = check_manifest(manifest, name, len(raw))
    check_files(manifest, filemap)
    for rank, referred in enumerate(chosen):
        away = {n: f.path for f, numbers in referred.items() for n in numbers}
        own = file_key(manifest.folder, rank)
        for number, chunk in enumerate(plan.filemap.chunks(rank)):
            file = filemap.owner(chunk.tensor, chunk.piece.index)
            assert manifest.files[file].path == away.get(number, own)
    assert encode_manifest(assemble(plan, parts, save_of(plan), None)) == (name, raw)


def test_tensors_that_are_referred_to_alike_share_their_map() -> None:
    layers = [i for i, t in enumerate(PLAN.tensors) if t.name.startswith("layer")]
    parts = []
    for rank in range(WORLD):
        numbers = [i for i, c in enumerate(PLAN.filemap.chunks(rank)) if c.tensor in layers]
        parts.append(part_of(rank, {old_file(1, rank): numbers}))
    manifest = assemble(PLAN, parts, save_of(), None)
    assert len({(manifest.tensors[i].owners, manifest.tensors[i].base) for i in layers}) == len(
        {(PLAN.tensors[i].owners, PLAN.tensors[i].base) for i in layers}
    )
    # What lay in the files of ranks 0 to 3 lies in files 4 to 7: the maps are the old ones.
    assert manifest.owners == PLAN.owners
    assert {manifest.tensors[i].base - PLAN.tensors[i].base for i in layers} == {WORLD}


def test_a_rank_with_a_value_of_its_own_keeps_it_in_its_own_file() -> None:
    parts = []
    for rank in range(WORLD):
        part = part_of(rank, {old_file(1, rank): range(len(PLAN.filemap.chunks(rank)))})
        mine = (Extra("seed", 10 + rank, "reseed"),)
        parts.append(
            msgspec.structs.replace(
                part, extra=mine, data_start=4096, data_bytes=10 + rank, index=INDEX
            )
        )
    manifest = assemble(PLAN, parts, save_of(), None)
    _, raw = encode_manifest(manifest)
    filemap = check_manifest(manifest, "m", len(raw))
    check_files(manifest, filemap)
    (seed,) = [i for i, t in enumerate(manifest.tensors) if t.name == "seed"]
    assert [filemap.owner(seed, rank) for rank in range(WORLD)] == list(range(WORLD))


def test_a_part_without_references_changes_nothing() -> None:
    parts = [part_of(rank, {}) for rank in range(WORLD)]
    manifest = assemble(PLAN, parts, save_of(), None)
    assert (manifest.tensors, manifest.owners) == (PLAN.tensors, PLAN.owners)


def test_the_metadata_of_rank_0_count() -> None:
    parts = [
        msgspec.structs.replace(part_of(rank, {}), metadata={"rank": rank}) for rank in range(WORLD)
    ]
    assert assemble(PLAN, parts, save_of(), None).metadata == {"rank": 0}


LAST = len(PLAN.filemap.chunks(0))
HOME = FileEntry(file_key(save_of().folder, 7), 7, 4096, 100, INDEX)
LIES: dict[str, Any] = {
    "beyond": (Refer(old_file(1, 0), ((LAST, 1),)),),
    "far beyond": (Refer(old_file(1, 0), ((0, 1 << 60),)),),
    "below": (Refer(old_file(1, 0), ((-1, 1),)),),
    "nothing": (Refer(old_file(1, 0), ((0, 0),)),),
    "twice": (Refer(old_file(1, 0), ((0, 1),)), Refer(old_file(2, 0), ((0, 1),))),
    "home": (Refer(HOME, ((0, 1),)),),
    "outside": (Refer(msgspec.structs.replace(HOME, path="../x.safetensors"), ((0, 1),)),),
    "no file": (Refer(msgspec.structs.replace(old_file(1, 0), data_start=0), ((0, 1),)),),
    "two files": (
        Refer(old_file(1, 0), ((0, 1),)),
        Refer(msgspec.structs.replace(old_file(1, 0), data_bytes=5), ((1, 1),)),
    ),
    "many files": tuple(Refer(old_file(i, 0), ((0, 1),)) for i in range(MOST_REFERS + 1)),
    "many folders": tuple(Refer(old_file(i, 0), ((i, 1),)) for i in range(MOST_FOLDERS)),
}


@pytest.mark.parametrize("lie", LIES)
def test_parts_that_lie_are_refused(lie: str) -> None:
    parts = [part_of(rank, {}) for rank in range(WORLD)]
    parts[0] = msgspec.structs.replace(parts[0], refers=LIES[lie])
    with pytest.raises(SaveError) as caught:
        assemble(PLAN, parts, save_of(), None)
    assert caught.value.kind == "structure"


@given(st.integers(0, WORLD - 1))
def test_chunk_numbers_are_the_chunks(rank: int) -> None:
    filemap: FileMap = PLAN.filemap
    tensors, pieces = filemap.chunk_numbers(rank)
    chunks = filemap.chunks(rank)
    assert [(c.tensor, c.piece.index) for c in chunks] == list(
        zip(tensors.tolist(), pieces.tolist(), strict=True)
    )
