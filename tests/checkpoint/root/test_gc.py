"""Garbage collection: what a plan says; death, and company, at every operation."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.format.names import CommitName, commit_key, lease_key, pin_key
from ckptd.checkpoint.format.records import Commit, Lease, Pin, encode_record
from ckptd.checkpoint.root import index as marks
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import GcItem, GcPlan, missing_files, plan_gc, run_gc
from ckptd.checkpoint.root.leases import hold, leases
from ckptd.errors import CkptdError, ConflictError, CorruptError, NotFoundError, StoreError
from ckptd.store.base import FaultRule, FaultSpec, Store
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore
from tests.checkpoint.root.checkpoints import Visited, assert_whole, put_attempt, save, steps
from tests.processes import PATIENCE_S
from tests.sampling import sampled

_names = itertools.count()


class Reckless(Catalogue):
    """A zombie between its last look at the generations and the creation of its record."""

    def check_not_superseded(self, generation: int) -> None:
        pass


@dataclass
class Scene:
    """A root with one of everything that gc must tell apart, and what is in it."""

    store: Store
    in_flight: Commit
    zombie: Commit

    def plan(self, leftover_s: float = 3600.0) -> GcPlan:
        return plan_gc(Catalogue(self.store), 1, abandoned_s=0.0, leftover_s=leftover_s)


def set_scene(store: Store) -> Scene:
    """Put the scene into a store: a copy, for the tests need hundreds and none another one."""
    objects, in_flight, zombie = _objects_of_a_scene()
    for key, data in objects.items():
        store.put(key, data)
    return Scene(store, in_flight, zombie)


@cache
def _objects_of_a_scene() -> tuple[dict[str, bytes], Commit, Commit]:
    store = MemoryStore(f"gc-{next(_names)}")
    c = Catalogue(store)
    c.create_or_open()
    g1 = c.claim(None, 1, "start").generation
    for step in (10, 20, 30):
        save(c, step, g1)
    zombie = put_attempt(store, CommitName(35, g1), "z")
    g2 = c.claim(CommitName(20, g1), 1, "load").generation
    at_40 = save(c, 40, g2, reuse=c.commit(CommitName(20, g1)))
    put_attempt(store, CommitName(50, g2), "lost")
    save(c, 50, g2, reuse=c.commit(at_40))
    in_flight = put_attempt(store, CommitName(60, g2), "x", reuse=c.commit(CommitName(50, g2)))
    gone = Pin(5, 1, created="2026-01-01T00:00:00Z")
    store.put(pin_key(CommitName(5, 1)), encode_record(gone))
    store.put(lease_key("old"), encode_record(Lease(10, 1, expires=time.time() - 1e4)))
    return {o.key: store.get(o.key) for o in store.list()}, in_flight, zombie


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Company that comes in the middle of a clean-up cannot wait for its end."""
    monkeypatch.setattr(marks, "WAIT_S", 0.0)


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsyncs prove nothing here."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture(params=["memory", "local"])
def scene(request: pytest.FixtureRequest, ram: Path) -> Iterator[Scene]:
    with fresh(request.param, ram) as store:
        yield set_scene(store)


def fresh(kind: str, ram: Path) -> Store:
    number = next(_names)
    if kind == "memory":
        return MemoryStore(f"gc-{number}")
    return LocalStore(str(ram / str(number)))


def folders(store: Store) -> list[str]:
    return store.children("data/")


KEPT = ["000000000020-g00000001-a/", "000000000050-g00000002-a/", "000000000060-g00000002-x/"]


# -- the plan --------------------------------------------------------------------------------------


def test_plan_says_what_and_why(scene: Scene) -> None:
    before = {o.key for o in scene.store.list()}
    plan = scene.plan()
    said = {(i.kind, i.key): i.reason for i in plan.items}
    assert said == {
        ("commit", commit_key(CommitName(10, 1))): "no rule keeps it",
        ("commit", commit_key(CommitName(20, 1))): "no rule keeps it",
        ("commit", commit_key(CommitName(30, 1))): "abandoned by generation 2",
        ("commit", commit_key(CommitName(40, 2))): "no rule keeps it",
        ("data", "data/000000000010-g00000001-a/"): "no checkpoint refers to it",
        ("data", "data/000000000030-g00000001-a/"): "no checkpoint refers to it",
        ("data", "data/000000000040-g00000002-a/"): "no checkpoint refers to it",
        ("leftover", "data/000000000035-g00000001-z/"): (
            "never committed, and generation 1 is over"
        ),
        ("leftover", "data/000000000050-g00000002-lost/"): "another attempt committed this step",
        ("parts", "data/000000000020-g00000001-a/parts/"): "the attempt is committed",
        ("parts", "data/000000000050-g00000002-a/parts/"): "the attempt is committed",
        ("pin", "pins/000000000005-g00000001.json"): "the pinned checkpoint is gone",
        ("lease", "leases/old.json"): "expired (a reader)",
    }
    assert [(k.step, k.reasons) for k in plan.kept] == [
        (50, ("newest 1", "the newest complete checkpoint"))
    ]
    assert {o.key for o in scene.store.list()} == before
    freed = sum(o.size for i in plan.items if i.objects > 1 for o in scene.store.list(i.key))
    assert plan.nbytes >= freed > 0


def test_run_deletes_exactly_the_plan(scene: Scene) -> None:
    plan = scene.plan()
    report = run_gc(scene.store, plan)
    assert set(report.deleted) == set(plan.items)
    assert report.skipped == ()
    assert folders(scene.store) == KEPT
    c = Catalogue(scene.store)
    assert c.commits() == [CommitName(50, 2)]
    assert_whole(scene.store, c.commits())
    assert c.pins() == set()
    assert leases(c) == {}
    assert scene.plan().items == ()
    c.publish(scene.in_flight)
    assert_whole(scene.store, c.line())


def test_data_that_a_reader_holds_stays_even_without_its_record(scene: Scene) -> None:
    """A gc died between deleting a record and putting it back for the reader."""
    name = CommitName(30, 1)
    with hold(Catalogue(scene.store), name) as held:
        scene.store.delete([commit_key(name)])
        plan = scene.plan()
        assert held.commit.folder not in {i.key for i in plan.items}
        run_gc(scene.store, plan)
        assert missing_files(Catalogue(scene.store), held.commit) is None
    assert held.commit.folder in {i.key for i in scene.plan().items}


def test_data_stays_for_a_reader_that_came_after_the_plan(scene: Scene) -> None:
    """Another gc, which died, deleted the record after the reader had got hold of it."""
    name = CommitName(30, 1)
    plan = scene.plan()
    with hold(Catalogue(scene.store), name) as held:
        scene.store.delete([commit_key(name)])
        report = run_gc(scene.store, plan)
        assert (held.commit.folder, "pinned or leased") in {(i.key, w) for i, w in report.skipped}
        assert missing_files(Catalogue(scene.store), held.commit) is None


def test_no_data_goes_once_a_generation_is_claimed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job may go on from what was given up when the plan was made."""
    plan = scene.plan()
    before = folders(scene.store)

    def claimed(store: Store, folder: str, *, commit: bool = False) -> str:
        mark = marks.put_mark(store, folder, commit=commit)
        if not commit:
            monkeypatch.undo()
            Catalogue(store).claim(None, 1, "fresh")
        return mark

    monkeypatch.setattr("ckptd.checkpoint.root.gc.put_mark", claimed)
    report = run_gc(scene.store, plan)
    data = {i.key for i in plan.items if i.kind in ("data", "leftover")}
    assert {i.key: w for i, w in report.skipped if i.key in data} == dict.fromkeys(
        data, "a generation was claimed"
    )
    assert folders(scene.store) == before


def test_pins_and_leases_that_matter_again_stay(scene: Scene) -> None:
    c = Catalogue(scene.store)
    name = CommitName(10, 1)
    c.pin(name)
    raw = scene.store.get(commit_key(name))
    scene.store.delete([commit_key(name)])
    late = hold(c, CommitName(50, 2), seconds=-1e4)
    plan = scene.plan()
    scene.store.put(commit_key(name), raw)
    late.seconds = 1e4
    late.renew()
    report = run_gc(scene.store, plan)
    assert {(i.kind, why) for i, why in report.skipped} == {
        ("pin", f"{name} exists"),
        ("lease", "renewed"),
    }
    assert c.pins() == {name}
    assert lease_key(late.lease_id) in leases(c)


def test_a_pin_keeps_no_lost_attempt_of_its_step(scene: Scene) -> None:
    Catalogue(scene.store).pin(CommitName(50, 2))
    run_gc(scene.store, scene.plan())
    assert folders(scene.store) == KEPT


def test_old_attempts_of_the_live_generation_go_after_the_grace(scene: Scene) -> None:
    flying = ("leftover", "data/000000000060-g00000002-x/")
    assert flying not in {(i.kind, i.key) for i in scene.plan().items}
    plan = plan_gc(Catalogue(scene.store), 1, now=time.time() + 3700.0, leftover_s=3600.0)
    assert flying in {(i.kind, i.key) for i in plan.items}


def test_attempt_that_moved_since_the_plan_stays(scene: Scene) -> None:
    plan = plan_gc(Catalogue(scene.store), 1, now=time.time() + 3700.0, leftover_s=3600.0)
    time.sleep(0.02)
    scene.store.put(scene.in_flight.folder + "r00002.safetensors", b"more")
    report = run_gc(scene.store, plan)
    assert [(i.key, why) for i, why in report.skipped] == [
        (scene.in_flight.folder, "written to since the plan")
    ]
    assert scene.in_flight.folder.removeprefix("data/") in folders(scene.store)


def test_abandoned_lines_have_a_grace_period(scene: Scene) -> None:
    plan = plan_gc(Catalogue(scene.store), 1, abandoned_s=3600.0)
    kept = {(k.step, k.generation): k.reasons for k in plan.kept}
    assert kept[30, 1] == ("abandoned by generation 2, in its grace period",)
    later = plan_gc(Catalogue(scene.store), 1, abandoned_s=3600.0, now=time.time() + 3700.0)
    assert commit_key(CommitName(30, 1)) in {i.key for i in later.items}


def test_foreign_folders_below_data_stay(scene: Scene) -> None:
    scene.store.put("data/notes/readme.txt", b"mine")
    scene.store.put("data/000000000010-g00000001", b"a file with a folder's name, nearly")
    run_gc(scene.store, scene.plan())
    assert scene.store.get("data/notes/readme.txt") == b"mine"
    assert scene.store.exists("data/000000000010-g00000001")


def test_plan_refuses_when_a_record_is_unreadable(scene: Scene) -> None:
    scene.store.put(commit_key(CommitName(30, 1)), b"{}")
    with pytest.raises(CorruptError) as info:
        scene.plan()
    assert "000000000030-g00000001" in str(info.value.where)


def test_stale_plan_is_refused(scene: Scene) -> None:
    plan = scene.plan()
    Catalogue(scene.store).claim(None, 1, "fresh")
    before = {o.key for o in scene.store.list()}
    with pytest.raises(ConflictError) as info:
        run_gc(scene.store, plan)
    assert info.value.kind == "stale-plan"
    assert {o.key for o in scene.store.list()} == before


def test_forged_plan_cannot_take_the_newest(scene: Scene) -> None:
    key = commit_key(CommitName(50, 2))
    forged = GcPlan(2, (GcItem("commit", key, ""), GcItem("data", f"data/{KEPT[1]}", "")))
    report = run_gc(scene.store, forged)
    assert [why for _, why in report.skipped] == ["the newest", f"{CommitName(50, 2)} refers to it"]
    assert_whole(scene.store, [CommitName(50, 2)])


KILLED_PUT = """
import os, sys
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.store.local import LocalStore

store = LocalStore(sys.argv[1])
if sys.argv[2] != "ckptd.json":
    Catalogue(store).create_or_open()
store.watch(lambda step, _: os._exit(9) if step == "os.link" else None)
Catalogue(store).create_or_open()
store.put(sys.argv[2], b"{}", create_only=True)
"""


@pytest.mark.parametrize("key", ["ckptd.json", "commits/probe.json"])
def test_temporary_files_of_a_killed_put_are_swept(key: str, ram: Path) -> None:
    (ram / "theirs").mkdir()
    (ram / "~theirs").write_bytes(b"")
    command = [sys.executable, "-c", KILLED_PUT, str(ram), key]
    assert subprocess.run(command, timeout=PATIENCE_S).returncode == 9
    [left] = (ram / key).parent.glob("~*.put")
    with LocalStore(str(ram)) as store:
        set_scene(store)
        plan = plan_gc(Catalogue(store), 1, leftover_s=0.0)
        time.sleep(0.02)
        assert run_gc(store, plan).swept == (str(left.relative_to(ram)),)
    assert not left.exists()
    assert (ram / "theirs").exists()
    assert (ram / "~theirs").exists()


# -- death at every operation ----------------------------------------------------------------------


def count_operations(kind: str, ram: Path) -> int:
    scene = set_scene(fresh(kind, ram))
    fault = Fault(scene.store)
    run_gc(fault, scene.plan())
    return len(fault.operations)


ACTIONS = ["die", "die-after", "error", "lost"]


@sampled(8)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_death_at_every_operation(kind: str, action: str, every: int, ram: Path) -> None:
    whole = fresh(kind, ram)
    run_gc(whole, set_scene(whole).plan())
    wanted = [o.key for o in whole.list() if not o.key.startswith(("generations", "ckptd"))]
    total = count_operations(kind, ram)
    failed = 0
    numbers = range(1 + (ACTIONS.index(action) + (kind == "local")) % every, total + 1, every)
    for number in numbers:
        with fresh(kind, ram) as store:
            scene = set_scene(store)
            plan = scene.plan()
            rule = FaultRule(action, number=number)  # type: ignore[arg-type]
            try:
                run_gc(Fault(store, FaultSpec((rule,))), plan)
            except StoreError:
                failed += 1
            c = Catalogue(store)
            assert c.latest() == CommitName(50, 2)
            assert_whole(store, c.commits())
            run_gc(store, plan)
            left = [o.key for o in store.list() if not o.key.startswith(("generations", "ckptd"))]
            assert left == wanted
    print(f"gc on {kind}: {total} operations, {failed} deaths by {action!r}")
    assert failed > 0.9 * len(numbers)  # not at those that answer "no such object"


@sampled(8)
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_the_next_life_cleans_up_after_a_death(kind: str, every: int, ram: Path) -> None:
    for number in range(1 + (kind == "local") % every, count_operations(kind, ram) + 1, every):
        with fresh(kind, ram) as store:
            scene = set_scene(store)
            rule = FaultRule("die", number=number)
            with pytest.raises(StoreError):
                run_gc(Fault(store, FaultSpec((rule,))), scene.plan())
            c = Catalogue(store)
            c.claim(c.latest(), 1, "load")
            run_gc(store, scene.plan())
            assert folders(store) == KEPT[:2]
            assert_whole(store, c.commits())


# -- company at every operation --------------------------------------------------------------------


def visit_hold(scene: Scene) -> Callable[[], None]:
    """A reader that got hold of a checkpoint can read it until the end, also if gc plans again."""
    held = hold(Catalogue(scene.store), CommitName(40, 2))

    def check() -> None:
        assert missing_files(Catalogue(scene.store), held.commit) is None
        run_gc(scene.store, scene.plan())
        assert_whole(scene.store, [CommitName(40, 2)])
        held.release()

    return check


def visit_pin(scene: Scene) -> Callable[[], None]:
    Catalogue(scene.store).pin(CommitName(10, 1), "best so far")

    def check() -> None:
        run_gc(scene.store, scene.plan())
        assert_whole(scene.store, [CommitName(10, 1)])

    return check


def visit_rollback(scene: Scene) -> Callable[[], None]:
    Catalogue(scene.store).rollback(10)

    def check() -> None:
        assert Catalogue(scene.store).latest() == CommitName(10, 1)
        run_gc(scene.store, scene.plan())
        assert_whole(scene.store, [CommitName(10, 1)])

    return check


def visit_revival(scene: Scene) -> Callable[[], None]:
    Catalogue(scene.store).rollback(30, all=True)

    def check() -> None:
        assert steps(Catalogue(scene.store).line()) in ([30], [20, 30], [10, 20, 30])
        assert_whole(scene.store, [CommitName(30, 1)])

    return check


def visit_save(scene: Scene) -> Callable[[], None]:
    """The attempt in flight lands: it must not find its files gone."""
    Catalogue(scene.store).publish(scene.in_flight)

    def check() -> None:
        assert Catalogue(scene.store).latest() == CommitName(60, 2)

    return check


def visit_zombie(scene: Scene) -> Callable[[], None]:
    """An older life's attempt lands although nobody waits for it: whole, or not at all."""
    Reckless(scene.store).publish(scene.zombie)

    def check() -> None:
        assert Catalogue(scene.store).latest() == CommitName(50, 2)

    return check


def visit_gc(scene: Scene) -> Callable[[], None]:
    run_gc(scene.store, scene.plan())
    return lambda: None


def visit_claim(scene: Scene) -> Callable[[], None]:
    """A job that loaded an older step goes on from it."""
    claimed = Catalogue(scene.store).claim(CommitName(10, 1), 2, "load")

    def check() -> None:
        assert Catalogue(scene.store).latest() == CommitName(10, 1)
        assert_whole(scene.store, [CommitName(10, 1)])
        save(Catalogue(scene.store), 11, claimed.generation)

    return check


def visit_reuse(scene: Scene) -> Callable[[], None]:
    """A save goes on from a checkpoint that gc is about to delete, and takes chunks of it."""
    c = Catalogue(scene.store)
    with hold(c, CommitName(10, 1)) as held:
        c.publish(put_attempt(scene.store, CommitName(60, 2), "y", reuse=held.commit))

    def check() -> None:
        assert Catalogue(scene.store).latest() == CommitName(60, 2)
        assert_whole(scene.store, [CommitName(60, 2)])

    return check


VISITS = [
    visit_reuse,
    visit_hold,
    visit_pin,
    visit_claim,
    visit_rollback,
    visit_revival,
    visit_save,
    visit_zombie,
    visit_gc,
]
Visit = Callable[[Scene], Callable[[], None]]


def outcome(act: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Run a visit; being told that something is gone, or taken, is an honest answer."""
    try:
        return act()
    except (NotFoundError, CorruptError, ConflictError):
        return lambda: None


def run_unless_stale(store: Store, plan: GcPlan) -> bool:
    """Run a plan; tell whether it was run to its end."""
    try:
        run_gc(store, plan)
    except ConflictError as error:
        if error.kind != "stale-plan":
            raise
        return False
    return True


def settle(scene: Scene, checks: list[Callable[[], None]]) -> None:
    """After the dust: all that is visible is whole, nobody was lied to, and gc still works."""
    c = Catalogue(scene.store)
    assert c.latest() is not None
    assert_whole(scene.store, c.commits())
    for check in checks:
        check()
    run_gc(scene.store, scene.plan())
    assert_whole(scene.store, c.commits())


@sampled(5)
@pytest.mark.parametrize("visit", VISITS)
def test_company_at_every_operation_of_gc(visit: Visit, every: int, ram: Path) -> None:
    told = 0
    total = count_operations("memory", ram)
    for number in range(1 + VISITS.index(visit) % every, total + 1, every):
        scene = set_scene(MemoryStore(f"gc-{next(_names)}"))
        checks: list[Callable[[], None]] = []
        store = Visited(
            scene.store,
            number,
            lambda s=scene, out=checks: out.append(outcome(lambda: visit(s))),  # type: ignore[misc]
        )
        told += not run_unless_stale(store, scene.plan())
        assert len(checks) == 1
        settle(scene, checks)
    print(f"{visit.__name__}: {total} places, gc stopped at {told}")


@sampled(4)
@pytest.mark.parametrize("visit", VISITS)
def test_gc_at_every_operation_of_company(visit: Visit, every: int) -> None:
    number = -(VISITS.index(visit) % every)
    while True:
        number += every
        scene = set_scene(MemoryStore(f"gc-{next(_names)}"))
        plan = scene.plan()

        def collect(s: Scene = scene, p: GcPlan = plan) -> None:
            run_unless_stale(s.store, p)

        store = Visited(scene.store, number, collect)
        acting = Scene(store, scene.in_flight, scene.zombie)
        checks = [outcome(lambda s=acting: visit(s))]  # type: ignore[misc]
        store._at = 0
        settle(scene, checks)
        if store.count < number:
            break
    assert number > 3


# -- any interleaving ------------------------------------------------------------------------------


class Turns:
    """Two parties whose store operations happen in the order that a schedule says."""

    def __init__(self, schedule: list[bool]) -> None:
        self._schedule = iter(schedule)
        self._changed = threading.Condition()
        self._gone: set[bool] = set()
        self._next: bool | None = next(self._schedule, None)

    def wait(self, party: bool) -> None:
        with self._changed:
            ready = self._changed.wait_for(
                lambda: self._next in (None, party) or (not party) in self._gone, timeout=30
            )
            assert ready
            self._next = next(self._schedule, None)
            self._changed.notify_all()

    def leave(self, party: bool) -> None:
        with self._changed:
            self._gone.add(party)
            self._changed.notify_all()


class Taking(Visited):
    """A store that waits for its party's turn before each operation."""

    def __init__(self, inner: Store, turns: Turns, party: bool) -> None:
        super().__init__(inner, 0, lambda: None)
        self._turns = turns
        self._party = party

    def _step(self) -> None:
        self._turns.wait(self._party)


@given(visit=st.sampled_from(VISITS), schedule=st.lists(st.booleans(), max_size=120))
def test_any_interleaving_of_gc_and_company(visit: Visit, schedule: list[bool]) -> None:
    scene = set_scene(MemoryStore(f"gc-{next(_names)}"))
    plan = scene.plan()
    turns = Turns(schedule)
    problems: list[BaseException] = []
    checks: list[Callable[[], None]] = []

    def party(mine: bool, work: Callable[[Store], None]) -> None:
        try:
            work(Taking(scene.store, turns, mine))
        except CkptdError as error:
            if not (isinstance(error, ConflictError) and error.kind == "stale-plan"):
                problems.append(error)
        except BaseException as error:  # noqa: BLE001 - raised again below
            problems.append(error)
        finally:
            turns.leave(mine)

    def company(store: Store) -> None:
        acting = Scene(store, scene.in_flight, scene.zombie)
        checks.append(outcome(lambda: visit(acting)))

    threads = [
        threading.Thread(target=party, args=(True, lambda s: run_gc(s, plan)), daemon=True),
        threading.Thread(target=party, args=(False, company), daemon=True),
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE_S)
    assert not problems, problems
    settle(scene, checks)
