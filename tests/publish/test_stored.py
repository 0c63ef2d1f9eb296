"""Versions through a store: every bit, in few bytes and requests; nothing bad is believed."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from ckptd.errors import (
    CkptdError,
    ConflictError,
    CorruptError,
    NotFoundError,
    TransientStoreError,
)
from ckptd.publish import stored
from ckptd.publish.blocks import BlockDigests
from ckptd.publish.follow import StoredWeights
from ckptd.publish.messages import (
    AskAbout,
    Opening,
    PlaceLost,
    PublishedAbout,
    PublishedTensor,
    StoredShare,
    StoreOrder,
)
from ckptd.publish.server import PublishServer
from ckptd.publish.stored import ShareWriter, StoreDesk
from ckptd.publish.versions import VersionTable
from ckptd.store import open_store
from ckptd.store.base import Store
from tests.lay.test_copies import composed
from tests.lay.test_live import PAIRS
from tests.processes import PATIENCE_S, until
from tests.publish.deltaworld import PATTERNS, DeltaServer, Weights
from tests.publish.storedworld import StoredWorld, small_blocks
from tests.publish.test_chains import DTYPES, ONE
from tests.reshard.live.test_move import CASES, pair

Report = Callable[[str], None]


def in_memory() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def drawn(draw: random.Random, store: Store) -> StoredWorld:
    """Return a pair of layouts with values of some type."""
    seed, kind = draw.randrange(1 << 30), draw.random()
    if kind < 0.15:
        to = draw.choice(("bfloat16", "float16"))
        source, target = CASES[draw.choice(("transposed", "interleaved"))]
        composition = pair(source, f"{target} cast({to})", n=40, m=36, e=4)
        return StoredWorld(composition, Weights("float32", seed, normal=True), store, kind=to)
    if kind < 0.9:
        composition = pair(*CASES[draw.choice(list(CASES))], n=40, m=36, e=4)
    else:
        composition = composed(*draw.choice(PAIRS))
    return StoredWorld(composition, Weights(draw.choice(DTYPES), seed), store)


def lives(draw: random.Random, versions: int, tally: Counter[str]) -> None:
    """Take versions of one world, now and then some later, or with other values than it got."""
    with (
        small_blocks(draw.choice((64, 256, 4096))),
        closing(drawn(draw, in_memory())) as world,
    ):
        for _ in range(versions):
            for _ in range(draw.choice((1, 1, 1, 2, 3, 12))):
                world.publish(draw.choice(PATTERNS))
            if draw.random() < 0.15:
                world.restart()
                world.publish("few")
                tally["publishers"] += 1
            if draw.random() < 0.15:
                world.touch(draw)
                tally["touched"] += 1
            if draw.random() < 0.15 and world.places[0]._mirrors:
                mirror = draw.choice(list(world.places[0]._mirrors.values()))
                if len(mirror._data):
                    mirror._data[draw.randrange(len(mirror._data))] ^= 0x40
                    tally["mirrors touched"] += 1
            reports = world.update()
            tally["exact"] += len(reports)
            tally["fewer bytes"] += sum(r.bytes_received < r.bytes_needed for r in reports)


def test_every_bit_arrives_whatever_the_layouts_types_and_changes() -> None:
    draw, tally = random.Random(5), Counter[str]()
    while tally["exact"] < 60:
        lives(draw, 8, tally)
    assert min(tally["fewer bytes"], tally["touched"], tally["publishers"]) > 1


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_of_them(report: Report) -> None:
    draw, tally = random.Random(7), Counter[str]()
    while tally["exact"] < 10_000:
        lives(draw, 8, tally)
    report(f"publish, deltas through a store, of random layouts: {dict(tally)}")


@pytest.fixture
def world() -> Iterator[StoredWorld]:
    """One rank and one worker, which has version 1."""
    with small_blocks(1024):
        found = StoredWorld(pair(*ONE, n=96, m=48, e=1), Weights("bfloat16", 1), in_memory())
        with closing(found):
            found.publish("all")
            found.update()
            yield found


def keys(world: StoredWorld, prefix: str = "") -> list[str]:
    return [i.key for i in world.store.list(prefix)]


def share(world: StoredWorld, kind: str, number: int | None = None) -> str:
    number = world.number if number is None else number
    return stored.data_key(world.publisher.desk.generation, f"00000000-{kind}", number)


def test_few_bytes_a_version_and_whole_only_at_anchors(world: StoredWorld) -> None:
    whole = world.store.stat(share(world, "full")).size
    for _ in range(7):
        world.publish("few")
        assert world.store.stat(share(world, "delta")).size < whole / 8
        assert world.store.exists(share(world, "full")) is (world.number % 4 == 1)
        assert world.update()[0].bytes_received < whole / 8
    for _ in range(3):
        world.publish("few")
    assert world.update()[0].bytes_received < whole / 4  # three of them, one after the other
    world.publish("all")
    assert not world.store.exists(share(world, "delta"))
    assert world.update()[0].bytes_received <= 1.02 * whole
    world.publish("none")
    assert world.update()[0].bytes_received < whole / 20


def test_old_versions_go_and_a_late_worker_gets_all_of_the_newest_anchor(
    world: StoredWorld,
) -> None:
    whole = world.store.stat(share(world, "full")).size
    for _ in range(17):
        world.publish("few")
    assert [k[-12:] for k in keys(world, stored.VERSIONS)] == [f"{n:012d}" for n in range(13, 19)]
    folders = {k.split("/")[2] for k in keys(world, stored.DATA) if k.count("/") > 2}
    assert folders == {f"{n:012d}" for n in range(13, 19)}
    assert whole <= world.update()[0].bytes_received < 1.5 * whole


def test_what_a_worker_writes_to_its_tensors_or_their_mirror_is_found_out(
    world: StoredWorld,
) -> None:
    world.touch(random.Random(0))
    world.publish("few")
    world.update()
    world.mirror()._data[100] ^= 1
    world.publish("few")
    assert world.update()[0].bytes_received > 1024  # one block of it whole


WRONG = ("flip", "cut", "gone", "of another version", "of the one before")


@pytest.mark.parametrize(
    ("kind", "what"),
    [(k, w) for k in ("delta", "full", "manifest") for w in WRONG]
    + [(k, w) for k in ("about", "rank") for w in WRONG[:3]],
)
def test_objects_that_are_not_what_they_should_be(world: StoredWorld, kind: str, what: str) -> None:
    """Nothing is written, and the error is named; the next whole version is taken."""
    store, generation = world.store, world.publisher.desk.generation
    fresh = kind in ("full", "about", "rank")  # of what a worker gets that has nothing yet
    for _ in range(4 if fresh else 2):
        world.publish("some")
    key = {
        "manifest": stored.version_key(generation, world.number),
        "about": stored.data_key(generation, "about"),
        "rank": stored.data_key(generation, "rank-00000000"),
    }.get(kind) or share(world, kind)
    raw, other = store.get(key), ""
    if kind in ("delta", "full"):
        other = share(world, kind, world.number - (4 if kind == "full" else 1))
    elif kind == "manifest":
        other = stored.version_key(generation, world.number - 1)
    if what == "flip":
        at = len(raw) - 3
        store.put(key, raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
    elif what == "cut":
        store.put(key, raw[: len(raw) // 2])
    elif what == "gone":
        store.delete([key])
    elif what == "of another version":
        store.put(key, store.get(other))
    else:
        store.put(other, raw)
        store.put(key, raw[::-1])
    before = {n: a.tobytes() for n, a in world.found[0].items()}
    place = StoredWeights(store.url) if fresh else world.places[0]
    with pytest.raises((CorruptError, NotFoundError)) as caught:
        number = place.newest(0 if fresh else world.held, 0.0).number
        if number < world.number:
            raise NotFoundError("it is not there", kind="no-version")
        place.ask(AskAbout(), PublishedAbout)
        plan = world.plans[0]
        plan.stage(number, place.pull(plan, number, None, lambda: None)[0], None).apply()
    assert caught.value.kind in ("digest", "truncated", "no-version", "corrupt")
    assert {n: a.tobytes() for n, a in world.found[0].items()} == before
    while world.number % 4 != 1 or not store.exists(share(world, "full")):
        world.publish("few")
    world.publish("some")
    world.update()


def test_a_version_that_is_deleted_while_it_is_read(world: StoredWorld) -> None:
    for _ in range(2):
        world.publish("few")
    place, store = world.places[0], world.store
    number = place.newest(world.held, 0.0).number
    place.version(number)
    store.delete([k for k in keys(world) if not k.startswith(stored.CLAIMS)])
    with pytest.raises(NotFoundError) as caught:
        place.pull(world.plans[0], number, None, lambda: None)
    assert caught.value.kind == "no-version"
    assert place.newest(world.held, 0.0).number == 0


def test_a_pull_that_breaks_off_goes_on_with_what_it_has(
    world: StoredWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = world.store.stat(share(world, "full")).size
    for _ in range(3):
        world.publish("few")
    place, get = world.places[0], StoredWeights.get

    def lost(self: StoredWeights, key: str, start: int, end: int) -> bytes:
        if f"{3:012d}" in key:
            raise NotFoundError("injected", kind="no-version")
        return get(self, key, start, end)

    assert place.newest(world.held, 0.0).number == 4
    with monkeypatch.context() as patch, pytest.raises(NotFoundError):
        patch.setattr(StoredWeights, "get", lost)
        place.pull(world.plans[0], 4, None, lambda: None)
    assert world.mirror().number == 0
    assert world.update()[0].bytes_received < whole / 4


def test_one_publisher_at_a_time(world: StoredWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "BEAT_S", 0.05)
    world.publisher.desk._next_beat = 0.0
    first = world.publisher
    with pytest.raises(ConflictError) as caught:
        world._publisher()
    assert (caught.value.kind, caught.value.where) == ("busy", world.store.url)
    # The first is stopped for a while, and another one takes the place meanwhile.
    monkeypatch.setattr(first.desk, "_beat", lambda **more: None)
    monkeypatch.setattr(stored, "GONE_S", 0.3)
    second = StoredWorld(pair(*ONE, n=96, m=48, e=1), Weights("bfloat16", 2), world.store)
    with closing(second):
        second.publish("all")
        second.update()
        world.publish("few")  # what the first writes all the same, nobody sees
        assert world.places[0].newest(world.held, 0.0).number == 1
        assert world.places[0].entry.epoch == second.publisher.epoch
        second.publish("few")
        second.update()
        monkeypatch.undo()
        first.desk._next_beat = 0.0
        until(lambda: first.error, "the first finds out", within_s=20.0)
        assert first.error is not None
        assert first.error.kind == "superseded"


@pytest.mark.parametrize("what", ["put", "delete"])
def test_a_publisher_lives_and_holds_what_it_needs_while_the_store_is_slow(
    world: StoredWorld, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """At a manifest, or as old versions go, for longer than one without a sign of life may."""
    monkeypatch.setattr(stored, "BEAT_S", 0.02)
    monkeypatch.setattr(stored, "GONE_S", 4.0)
    publisher, begun, ends = world.publisher, threading.Event(), threading.Event()
    book, plain = publisher.book, getattr(world.store, what)
    book.lease_s, publisher.desk._next_beat = 3.0, 0.0

    def slow(found: Any, *args: Any, **more: Any) -> Any:
        if found and stored.VERSIONS in (found if what == "put" else found[0]):
            begun.set()
            assert ends.wait(PATIENCE_S)
        return plain(found, *args, **more)

    for _ in range(7):
        world.publish("few")
    monkeypatch.setattr(world.store, what, slow)
    thread = threading.Thread(target=world.publish, args=("few",))
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        with pytest.raises(ConflictError) as caught:
            desk_of(world.store).claim(5.0)
        assert caught.value.kind == "busy"
        time.sleep(book.lease_s)
        # What is stored, and what its changes are since; once it is there, that alone.
        assert book.held == (2 if what == "put" else 1)
    finally:
        ends.set()
        thread.join(PATIENCE_S)
    world.update()
    assert publisher.error is None


def test_a_share_that_is_not_written_makes_no_version(world: StoredWorld) -> None:
    publisher = world.publisher
    publisher.number += 1
    publisher.book.place(publisher.number, publisher.number)
    publisher.book.commit(publisher.number)
    publisher.desk.next(publisher.number - 1, 20.0, 0)
    publisher.desk.done(0, publisher.number, None)
    until(lambda: publisher.book.held == 1, "given up", within_s=20.0)
    assert world.places[0].newest(world.held, 0.0).number == 0
    world.publish("few")  # its changes are since the last that is there
    world.update()


@pytest.mark.parametrize("off_s", [-1e9, 1e9])
def test_a_clock_that_is_off_decides_nothing(
    world: StoredWorld, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + off_s)
    world.publish("few")
    monkeypatch.undo()
    assert world.places[0].newest(world.held, 0.0).age_s >= 0.0
    world.update()


def test_a_store_that_is_away_is_named_as_a_publisher_that_is() -> None:
    class Away:
        def last(self, prefix: str) -> Any:
            raise TransientStoreError("injected")

    place = StoredWeights(in_memory().url)
    place._store = Away()  # type: ignore[assignment]
    with pytest.raises(CkptdError) as caught:
        place.newest(0, 0.0)
    assert caught.value.kind == "link-lost"


def test_tied_and_empty_tensors_and_runs_of_blocks() -> None:
    found = stored.BlockMap(
        [
            PublishedTensor("a", "float32", 0, 100_000),
            PublishedTensor("tied", "float32", 0, 100_000),
            PublishedTensor("none", "float32", 400_000, 0),
            PublishedTensor("b", "int8", 400_000, 7),
        ]
    )
    assert found.first == {"a": 0, "tied": 0, "none": 2, "b": 2}
    assert (found.ends - found.starts).tolist() == [1 << 18, 400_000 - (1 << 18), 7]
    assert found.runs() == [(0, 400_007)]
    assert found.sizes.tolist() == [4, 4, 1]
    assert np.all(found.starts == [0, 1 << 18, 400_000])


def test_whatever_ends_a_share_its_version_is_given_up_and_the_next_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array = {"a": np.arange(1000, dtype=np.float32)}
    store, write = in_memory(), ShareWriter.write
    with closing(DeltaServer(array, "float32")) as rank:
        server, about = rank.server, PublishedAbout("e", 1, "", {})
        desk = server._desk = StoreDesk(store, "e", 1, server._book, lambda: about, 4, 2)
        desk.claim(5.0)
        opening = Opening("e", 0, 1, b"s" * 16, "127.0.0.1", 0, "", 2, 60.0, 1.0)
        ends = threading.Event()
        threads = [
            threading.Thread(target=desk.run, args=(ends.is_set, ends.is_set)),
            threading.Thread(target=server._store_all, args=(opening, store)),
        ]
        for thread in threads:
            thread.start()

        def publish(number: int) -> None:
            server._book.place(number, number)
            rank.publish(number, array)
            server._book.commit(number)

        def broken(*_: object) -> None:
            raise ValueError("no CkptdError")

        try:
            monkeypatch.setattr(ShareWriter, "write", broken)
            publish(1)
            until(lambda: desk._failed and server._book.held == 0, "given up", within_s=20.0)
            monkeypatch.setattr(ShareWriter, "write", write)
            publish(2)
            until(lambda: desk._base == 2, "stored", within_s=20.0)
        finally:
            ends.set()
            server._ended.set()
            for thread in threads:
                thread.join(PATIENCE_S)
    assert [i.key[-12:] for i in store.list(stored.VERSIONS)] == [f"{2:012d}"]


def test_no_request_of_a_pull_that_failed_fills_a_mirror_later_on(
    world: StoredWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would change a block that another pull has proved since."""
    place, get = StoredWeights(world.store.url), StoredWeights.get
    begun, ended = threading.Event(), threading.Event()

    def slow(self: StoredWeights, key: str, start: int, end: int) -> bytes:
        if "full" not in key or not start:
            return get(self, key, start, end)
        if start < 2000:  # of two pieces the first
            assert begun.wait(PATIENCE_S)
            raise TransientStoreError("injected")
        begun.set()
        time.sleep(0.2)
        ended.set()
        return get(self, key, start, end)

    with closing(place), monkeypatch.context() as patch:
        patch.setattr(StoredWeights, "get", slow)
        number = place.newest(0, 0.0).number
        with pytest.raises(TransientStoreError):
            place.pull(world.plans[0], number, None, lambda: None)
        assert ended.is_set()


def test_a_listing_that_is_late_brings_no_older_publisher_back(
    world: StoredWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, place = world.store, world.places[0]
    before = store.last(stored.VERSIONS)
    assert before is not None
    raw = store.get(before.key)
    world.restart()
    world.publish("few")
    world.update()
    store.put(before.key, raw)
    with monkeypatch.context() as patch:
        patch.setattr(place._store, "last", lambda prefix: before)
        assert place.newest(world.held, 0.0).number == 0
    assert place.entry.epoch == world.publisher.epoch
    # A place that was emptied begins with the first generation again.
    world.publisher.close()
    store.delete(keys(world))
    world.publisher, world.held = world._publisher(), 0
    world.publish("few")
    assert world.publisher.desk.generation == 1 < int(place.entry.address)
    world.update()


@pytest.mark.parametrize("what", ["a base that is itself", "no shares"])
def test_a_manifest_that_leads_nowhere(world: StoredWorld, what: str) -> None:
    for _ in range(2):
        world.publish("few")
    key = stored.version_key(world.publisher.desk.generation, world.number)
    found = stored.unsealed(world.store.get(key), stored.VERSION, key)
    more: dict[str, Any] = {"shares": ()} if what == "no shares" else {"base": found.number}
    world.store.put(key, stored.sealed(msgspec.structs.replace(found, **more)))
    with pytest.raises(CorruptError):
        place = world.places[0]
        place.pull(world.plans[0], place.newest(world.held, 0.0).number, None, lambda: None)


def unlisted(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """Have the listing of claims be late."""
    last = store.last
    monkeypatch.setattr(store, "last", lambda p: None if p == stored.CLAIMS else last(p))


def test_a_publisher_whose_claim_no_listing_shows_keeps_its_place(
    world: StoredWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "BEAT_S", 0.05)
    world.publisher.desk._next_beat = 0.0
    unlisted(monkeypatch, world.store)
    with pytest.raises(ConflictError) as caught:
        world._publisher()
    assert caught.value.kind == "busy"


def desk_of(store: Store, world: int = 1) -> StoreDesk:
    """Return a desk that has nothing stored yet."""
    about = PublishedAbout("e", world, "", {})
    return StoreDesk(store, uuid.uuid4().hex, world, VersionTable(2, 60.0), lambda: about, 4, 2)


def test_a_claim_that_no_listing_shows_is_waited_for_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = in_memory()
    desk_of(store).claim(1.0)
    monkeypatch.setattr(stored, "GONE_S", 0.2)
    unlisted(monkeypatch, store)
    second = desk_of(store)
    second.claim(1.0)
    assert second.generation == 2


def test_what_others_keep_below_a_place_stays(world: StoredWorld) -> None:
    names = ["data/00000/part-0", "data/00000000/readme", "data/00000001/000000000001/00000000-x"]
    for name in names:
        world.store.put(name, b"of somebody else")
    for _ in range(13):
        world.publish("few")
    assert set(names) <= set(keys(world, stored.DATA))
    assert not world.store.exists(share(world, "full", 1))


def test_a_rank_whose_server_never_asks_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_ABSENT_S", 0.3)
    monkeypatch.setattr(stored, "_TICK_S", 0.05)
    desk, ends = desk_of(in_memory(), world=2), threading.Event()
    desk.claim(5.0)
    thread = threading.Thread(target=desk.run, args=(ends.is_set, ends.is_set))
    thread.start()
    try:
        desk._book.place(1, 1)
        desk._book.commit(1)
        assert desk.next(0, 20.0, "rank 0").number == 1
        desk.done(0, 1, StoredShare(1, 0, b"", b""))
        until(lambda: desk._book.held == 0, "given up", within_s=20.0)
    finally:
        desk.gone("rank 0")
        ends.set()
        thread.join(PATIENCE_S)


def test_a_share_that_is_written_counts_whatever_its_rank_meets_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array = {"a": np.arange(1000, dtype=np.float32)}
    with closing(DeltaServer(array, "float32")) as rank:
        server, store = rank.server, in_memory()
        desk = server._desk = desk_of(store, world=2)
        desk._book = server._book
        desk.claim(5.0)
        opening = Opening("e", 0, 2, b"s" * 16, "127.0.0.1", 0, "", 2, 60.0, 1.0)
        ordered, met, ends = PublishServer._ordered, threading.Event(), threading.Event()

        def lost(self: PublishServer, than: int) -> StoreOrder:
            if than == 1 and not met.is_set():
                met.set()
                raise TransientStoreError("injected")
            return ordered(self, than)

        monkeypatch.setattr(PublishServer, "_ordered", lost)
        threads = [
            threading.Thread(target=desk.run, args=(ends.is_set, ends.is_set)),
            threading.Thread(target=server._store_all, args=(opening, store)),
        ]
        for thread in threads:
            thread.start()
        try:
            server._book.place(1, 1)
            rank.publish(1, array)
            server._book.commit(1)
            assert desk.next(0, 20.0, "rank 1").number == 1
            assert met.wait(PATIENCE_S)
            time.sleep(0.1)
            desk.done(1, 1, StoredShare(1, 0, b"", b""))
            until(lambda: desk._base == 1, "stored", within_s=10.0)
        finally:
            ends.set()
            server._ended.set()
            for thread in threads:
                thread.join(PATIENCE_S)


def test_whatever_ends_a_desk_the_trainer_learns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = desk_of(in_memory())

    def broken(leaving: object, over: object) -> None:
        raise ValueError("no CkptdError")

    monkeypatch.setattr(desk, "run", broken)
    with closing(DeltaServer({"a": np.arange(4)}, "int64")) as rank:
        said: list[Any] = []
        monkeypatch.setattr(rank.server, "_reply", said.append)
        rank.server._decide(desk)
    assert [type(s) for s in said] == [PlaceLost]


def test_digests_that_cannot_be_made_are_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no CkptdError")

    monkeypatch.setattr(BlockDigests, "complete", broken)
    with closing(DeltaServer({"a": np.arange(4)}, "int64")) as rank:
        rank.publish(1, {"a": np.arange(4)})
        rank.settle()
    assert "no CkptdError" in caplog.text


def test_a_version_is_stored_that_is_whole_before_this_server_has_its_share() -> None:
    values = {"w": np.arange(1000, dtype=np.float32)}
    server, store = DeltaServer(values, "float32"), in_memory()
    with ThreadPoolExecutor(1) as other:
        share = other.submit(server.server._share, 0, StoreOrder(1, 0, True, 1), store)
        with suppress(TimeoutError):
            share.result(0.2)  # the last rank of all has told the leader, and not yet this one
        server.publish(1, values)
        assert share.result(PATIENCE_S).full > 4000
    server.close()
