"""Parts of tensors on their way over a socket: the bytes, and the digest of both ends."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest

from ckptd.checkpoint.save.arena import Slot
from ckptd.publish.blocks import (
    BLOCK_BYTES,
    BlockDigests,
    gather_blocks,
    incoming_digest,
    outgoing,
    read_bytes,
    run_of,
)
from ckptd.publish.messages import BlockRead, PublishedTensor

ROWS, COLUMNS = 700, 300
TENSORS = (
    PublishedTensor("a", "float32", 0, ROWS * COLUMNS),
    PublishedTensor("b", "bfloat16", 4 * ROWS * COLUMNS, 64),
)


@pytest.fixture
def slot() -> Iterator[Slot]:
    found = Slot(0, 4 * ROWS * COLUMNS + 128)
    found.begin(1)
    values = np.random.default_rng(0).standard_normal(ROWS * COLUMNS).astype(np.float32)
    found.put(0, values.view(np.uint8))
    found.put(4 * ROWS * COLUMNS, np.arange(128, dtype=np.uint8))
    found.seal()
    yield found
    found.close()


def drawn(draw: random.Random) -> BlockRead:
    """Return a part: rows together, a rectangle, a transpose, one that is cast, or nothing."""
    if draw.random() < 0.2:
        return BlockRead(1, draw.randint(0, 32), (draw.randint(0, 32),), (1,))
    row, column = draw.randint(0, ROWS - 1), draw.randint(0, COLUMNS - 1)
    rows, columns = draw.randint(1, ROWS - row), draw.randint(1, COLUMNS - column)
    kind = draw.randint(0, 3)
    if kind == 0:
        return BlockRead(0, row * COLUMNS, (rows, 1, COLUMNS), (COLUMNS, 7, 1))
    shape, strides = (rows, columns), (COLUMNS, 1)
    if kind == 1:
        shape, strides = shape[::-1], strides[::-1]
    return BlockRead(0, row * COLUMNS + column, shape, strides, "bfloat16" if kind == 2 else "")


def test_what_is_sent_is_what_is_gathered_and_both_ends_have_one_digest(slot: Slot) -> None:
    draw = random.Random(1)
    digests = BlockDigests(TENSORS)
    runs = 0
    for number in range(60):
        blocks = [drawn(draw) for _ in range(draw.randint(1, 5))]
        runs += sum(run_of(TENSORS[b.tensor], b) is not None for b in blocks)
        wanted = np.empty(read_bytes(TENSORS, blocks), np.uint8)
        gather_blocks(slot, TENSORS, blocks, wanted)
        known = digests if number % 2 else BlockDigests(TENSORS)  # computed before, or not
        parts, sent, _ = outgoing(slot, TENSORS, blocks, known, lambda n: np.empty(n, np.uint8))
        found = np.frombuffer(b"".join(parts), np.uint8).copy()
        assert np.array_equal(found, wanted)
        assert incoming_digest(TENSORS, blocks, found) == sent
        if len(found):
            found[draw.randrange(len(found))] ^= 1
            assert incoming_digest(TENSORS, blocks, found) != sent
    assert 20 < runs < 150


def test_a_block_is_digested_once(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptd.publish import blocks as module

    calls: list[int] = []
    inner = module.digest
    monkeypatch.setattr(module, "digest", lambda d: (calls.append(len(d)), inner(d))[1])
    digests = BlockDigests(TENSORS)
    every = math.ceil(4 * ROWS * COLUMNS / BLOCK_BYTES) + 1
    half = BlockRead(0, 0, (ROWS // 2, COLUMNS), (COLUMNS, 1))
    outgoing(slot, TENSORS, [half], digests, lambda n: np.empty(n, np.uint8))
    whole = digests.complete(slot, {t.name: t for t in TENSORS})
    assert sum(map(len, whole.values())) == every
    assert sum(n in (BLOCK_BYTES, 128) for n in calls) == every - 1  # the last one is shorter
    calls.clear()
    outgoing(slot, TENSORS, [half], digests, lambda n: np.empty(n, np.uint8))
    assert sum(calls) < BLOCK_BYTES  # the end of the part, which is no whole block
