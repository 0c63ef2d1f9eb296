"""Deltas of versions over sockets: every bit of every pair of layouts, in the fewest bytes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from ckptd.base.net.connection import Connection
from ckptd.errors import NotFoundError
from ckptd.lay.copies import Composition
from ckptd.publish import blocks, chains, pull, server
from ckptd.publish.chains import DeltaBook, VersionDeltas
from ckptd.publish.deltas import NOTHING, SPARSE, WHOLE
from ckptd.publish.messages import ReadBytes
from tests.lay.test_copies import composed
from tests.lay.test_live import PAIRS
from tests.publish.deltaworld import PATTERNS, DeltaServer, Weights, World
from tests.reshard.live.test_move import CASES, pair

DTYPES = (
    *("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "bool"),
    *("int8", "uint8", "int16", "int32", "int64", "complex64", "complex128"),
)


@contextmanager
def small_blocks(nbytes: int) -> Iterator[None]:
    """Have blocks of so few bytes that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, chains, server):
            patch.setattr(module, "BLOCK_BYTES", nbytes)
        patch.setattr(pull, "_MESSAGE_BYTES", 1 << 11)
        patch.setattr(pull, "published_layout", lambda about: SOURCE[0])
        yield


SOURCE: list[object] = [None]


def made(composition: Composition, dtype: str, seed: int, kind: str = "") -> World:
    SOURCE[0] = composition.source.bound
    return World(composition, Weights(dtype, seed, normal=bool(kind)), kind=kind)


def drawn(draw: random.Random) -> World:
    """Return a pair of layouts with values of some type."""
    seed, kind = draw.randrange(1 << 30), draw.random()
    if kind < 0.15:
        to = draw.choice(("bfloat16", "float16"))
        cast = f" cast({to})"
        source, target = CASES[draw.choice(("transposed", "interleaved"))]
        return made(pair(source, target + cast, n=40, m=36, e=4), "float32", seed, to)
    if kind < 0.9:
        composition = pair(*CASES[draw.choice(list(CASES))], n=40, m=36, e=4)
    else:
        composition = composed(*draw.choice(PAIRS))
    return made(composition, draw.choice(DTYPES), seed)


def lives(draw: random.Random, versions: int, tally: Counter[str]) -> None:
    """Take versions of one world, now and then some later, or with other values than it got."""
    with small_blocks(draw.choice((64, 256, 4096))), closing(drawn(draw)) as world:
        for _ in range(versions):
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                world.publish(draw.choice(PATTERNS))
                if draw.random() < 0.7:
                    for one in world.servers.values():
                        one.settle()
            if draw.random() < 0.1 and world.held:
                world.touch(draw)
                tally["touched"] += 1
            reports = world.update(in_place=draw.random() < 0.2)
            tally["exact"] += len(reports)
            tally["fewer bytes"] += sum(r.bytes_received < r.bytes_needed for r in reports)


def test_every_bit_arrives_whatever_the_layouts_types_and_changes() -> None:
    draw, tally = random.Random(5), Counter[str]()
    while tally["exact"] < 300:
        lives(draw, 6, tally)
    assert tally["fewer bytes"] > 50
    assert tally["touched"]


ONE = ("t:1;a = a[n m]", "t:1;a = a[n m]")
TURNED = ("t:1;a = a[n m]", "t:1;a = a[m n] cast(bfloat16)")


@pytest.fixture(params=["as it lies", "turned and cast"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """One publisher and one worker, which has version 1."""
    cast = request.param != "as it lies"
    composition = pair(*(TURNED if cast else ONE), n=96, m=48, e=1)
    with small_blocks(1024):
        kind = "bfloat16" if cast else ""
        found = made(composition, "float32" if cast else "bfloat16", 1, kind)
        with closing(found):
            found.publish("all")
            found.update()
            yield found


def test_a_worker_that_is_behind_gets_all_changes_joined(world: World) -> None:
    whole = world.update()[0].bytes_needed
    world.publish("few")
    assert 0 < world.update()[0].bytes_received < whole / 8  # found when it is asked for
    for _ in range(3):  # found beside the digests: the slot of the first is filled again
        world.publish("few")
        world.servers[0].settle()
    assert len(world.servers[0].server._deltas.between(world.held, world.number)) == 3
    assert 0 < world.update()[0].bytes_received < whole / 4


def test_where_a_base_is_gone_all_is_pulled_whole(world: World) -> None:
    whole = world.update()[0].bytes_needed
    book = world.servers[0].server._deltas
    book.budget_bytes = 0
    for _ in range(2):
        world.publish("few")
        world.servers[0].settle()
        world.update()
    assert not any(s.kept for s in book._steps.values())
    for _ in range(2):
        world.publish("few")
        world.servers[0].settle()
    assert world.update()[0].bytes_received == whole
    world.held = 99  # a version that there never was
    assert world.update()[0].bytes_received == whole


def test_all_that_changed_and_nothing_that_changed(world: World) -> None:
    whole = world.update()[0].bytes_needed
    world.publish("all")
    assert world.update()[0].bytes_received <= 1.01 * whole
    world.publish("none")  # the same values under another number
    assert world.update()[0].bytes_received < whole / 100 + 32


def test_a_worker_that_was_written_to_is_found_out(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    whole = world.update()[0].bytes_needed
    world.touch(random.Random(0))
    world.publish("few")
    assert world.update()[0].bytes_received > whole / 8
    assert "hold other values than they got" in caplog.text
    world.publish("few")
    assert world.update()[0].bytes_received < whole / 8


@pytest.mark.parametrize("wrong", [b"", NOTHING, b"\x11\x01\x00\x00\x00", b"\x03", bytes(99)])
def test_deltas_of_something_else_are_of_no_harm(
    world: World, wrong: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = world.update()[0].bytes_needed
    monkeypatch.setattr(VersionDeltas, "of", lambda *_: wrong)
    world.publish("all")
    assert world.update()[0].bytes_received >= whole


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """Count the blocks that are compared, by what has come out."""
    out, found = Counter[bytes](), chains.changed

    def counted(*args: Any) -> tuple[bytes | None, bytes]:
        delta, made = found(*args)
        out[(delta or WHOLE)[:1]] += 1
        return delta, made

    monkeypatch.setattr(chains, "changed", counted)
    return out


def test_of_blocks_that_rest_the_older_version_is_not_read(forms: Counter[bytes]) -> None:
    array = {"a": np.arange(1 << 18, dtype=np.float32), "b": np.zeros(9, np.float32)}
    with closing(DeltaServer(array, "float32")) as rank:
        for number in range(1, 5):
            rank.server._deltas.asked |= {("a", ""): number, ("b", ""): number}
            if number == 3:
                assert not forms
                array["a"][100_000] = -1.0
            rank.publish(number, array)
            rank.settle()
        assert forms == {SPARSE: 1, NOTHING: 1}  # and the block that came next
        kept = rank.server._deltas.between(2, 3)[0].kept
        assert [kept["a", "", i][:1] for i in range(4)] == [NOTHING, SPARSE, NOTHING, NOTHING]


def test_what_has_no_room_is_not_looked_for(forms: Counter[bytes]) -> None:
    array = {"a": np.zeros(1 << 18, np.float32)}
    with closing(DeltaServer(array, "float32", budget=1000)) as rank:
        for number in range(1, 3):
            rank.server._deltas.asked["a", ""] = number
            array["a"][:: 1 << 10] += np.float32(1.0)
            rank.publish(number, array)
            rank.settle()
        found = len(rank.server._deltas.between(1, 2)[0].kept)
        assert 0 < found < 4
        assert forms == {SPARSE: found + 1}


def test_what_is_written_while_it_is_compared_is_not_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish("few")
    world.update()
    book, found = world.servers[0].server._deltas, chains.changed
    old = world.servers[0].slots[world.number % 2]

    def meanwhile(*args: Any) -> tuple[bytes | None, bytes]:
        old.begin(77)  # the trainer fills it again
        return found(*args)

    with monkeypatch.context() as patch:
        patch.setattr(chains, "changed", meanwhile)
        world.publish("few")
        world.servers[0].settle()
    assert not book.between(world.held, world.number)[0].kept
    world.update()


@pytest.mark.parametrize("whole", [False, True])
def test_a_slot_may_be_filled_as_soon_as_an_answer_is_sent(
    world: World, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """A worker that was fast lost its connection, since the server looked at the slot later."""
    world.publish("few")
    world.held *= not whole
    slot, send = world.servers[0].slots[world.number % 2], Connection.send_parts

    def filled(connection: Connection, message: Any, parts: Sequence[memoryview]) -> None:
        if isinstance(message, ReadBytes) and bool(message.sizes) != whole:
            slot.begin(99)
        send(connection, message, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "send_parts", filled)
        patch.setattr(pull, "_MESSAGE_BYTES", 1 << 20)  # all in one
        world.update()
    world.publish("few")
    world.update()


@pytest.mark.parametrize("again", [False, True])
def test_an_answer_that_is_torn_is_asked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The slot is filled while it is sent: the digest shows it, and the server says it is gone."""
    world.publish("few")
    world.held = 0
    slot, send, torn = world.servers[0].slots[world.number % 2], Connection.send_parts, list[Any]()

    def tear(connection: Connection, message: Any, parts: Sequence[memoryview]) -> None:
        if isinstance(message, ReadBytes) and not torn:
            torn.append(message)
            parts = [memoryview(bytes(len(b"".join(parts))))]
            if not again:
                slot.begin(99)
        send(connection, message, parts)

    before = {n: a.tobytes() for n, a in world.found[0].items()}
    monkeypatch.setattr(Connection, "send_parts", tear)
    if again:
        world.update()
        return
    with pytest.raises(NotFoundError) as caught:
        world.update()
    assert caught.value.kind == "no-version"
    assert {n: a.tobytes() for n, a in world.found[0].items()} == before


def test_deltas_stay_within_their_budget_and_the_oldest_go_first() -> None:
    book = DeltaBook()
    book.budget_bytes = 3 * (chains._KEPT_BYTES + 100)
    for number in (2, 3, 4):
        book.begin(number - 1, number)
    first, second, third = (book.between(n - 1, n)[0] for n in (2, 3, 4))
    for at, step in enumerate((first, second, first)):
        book.keep(step, ("a", "", at), bytes(100))
    book.keep(first, ("a", "", 5), bytes(100))  # no room that is not its own
    assert len(first.kept) == 2
    book.keep(third, ("a", "", 0), bytes(100))
    assert book.between(1, 2) == []
    assert (len(second.kept), len(third.kept)) == (1, 1)
    book.keep(third, ("a", "", 1), bytes(400))
    assert (book.between(2, 3), len(third.kept)) == ([], 2)
    for number in range(5, 40):
        book.begin(number - 1, number)
    assert len(book._steps) == chains.KEPT_VERSIONS


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_of_them(report: Callable[[str], None]) -> None:
    draw, tally = random.Random(6), Counter[str]()
    while tally["exact"] < 10_000:
        lives(draw, 12, tally)
    report(f"publish, deltas of random layouts, types and changes: {dict(tally)}")
