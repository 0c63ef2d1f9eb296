"""A header that is encoded in parts, once a plan, is the one that is encoded whole at each save."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from ckptd.checkpoint.format.names import ranked_chunk_name, whole_name
from ckptd.checkpoint.save.drain import data_file
from ckptd.checkpoint.save.messages import Extra, SaveRequest
from ckptd.checkpoint.save.structure import RankGroup, RankPlan, Structure, build_plan
from ckptd.errors import UsageError
from ckptd.types import DTYPES, DType
from tests.checkpoint.save.saving import tensor

Shapes = list[tuple[str, str, tuple[int, ...]]]
BASE: Shapes = [
    ("a", "float32", (3, 4)),
    ("b", "int64", (5,)),
    ("c", "bool", (7,)),
    ('é"%@', "bfloat16", (0, 2)),
]
LIKE_IT: list[Shapes] = [
    BASE,
    BASE[::-1],
    [("x", "float32", (3, 4)), *BASE[1:]],
    [("a", "float16", (3, 4)), *BASE[1:]],
    [("a", "float32", (4, 3)), *BASE[1:]],
]
EXTRAS = [(), (Extra("o", 6),), (Extra("o", 9), Extra("r", 5, "keep"))]


def whole(
    chunks: Sequence[tuple[str, DType, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, int]:
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape in chunks:
        end = offset + math.prod(shape) * dtype.itemsize
        stored = {"dtype": dtype.stored_code, "shape": dtype.stored_shape(shape)}
        header[name] = {**stored, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(header)
    padded = -(-(8 + len(text)) // 4096) * 4096 - 8
    return padded.to_bytes(8, "little") + text.ljust(padded, b" "), offset


def plan_of(shapes: Shapes, rank: int, world: int) -> RankPlan:
    structure = Structure.of(tensor(name, shape, dtype=dtype) for name, dtype, shape in shapes)
    return RankPlan(build_plan([RankGroup(structure, tuple(range(world)))], world), rank)


@pytest.mark.parametrize("shapes", LIKE_IT)
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2)])
def test_a_header_is_the_same_in_parts(shapes: Shapes, rank: int, world: int) -> None:
    plan = plan_of(shapes, rank, world)
    for step, extra in enumerate([*EXTRAS, *EXTRAS[::-1]]):
        save = SaveRequest(step, 1, "at", job=step, extra=extra)
        for same in (None, np.arange(len(plan.chunks)) % 2 == 0):
            chunks = [e for i, e in enumerate(plan.entries) if same is None or not same[i]]
            for e in extra:
                name = ranked_chunk_name(e.name, rank) if e.on_change else whole_name(e.name)
                chunks.append((name, DTYPES["uint8"], (e.nbytes,)))
            found = data_file(plan, save, same)
            if found is None:
                assert not chunks
                continue
            said = {"format": "pt", "ckptd": f"step {step} generation 1 rank {rank}"}
            assert (found.header, found.data_bytes) == whole(chunks, said)
            sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in chunks]
            assert found.ends == tuple(np.cumsum(sizes).tolist())


def test_what_has_the_name_of_a_tensor_is_refused() -> None:
    plan = plan_of([(whole_name("o"), "float32", (2,))], 0, 1)
    assert plan.entries[0][0] == whole_name("o")
    with pytest.raises(UsageError, match="one name"):
        data_file(plan, SaveRequest(1, 1, "at", job=1, extra=(Extra("o", 6),)), None)
