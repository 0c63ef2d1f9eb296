"""Programs that go on in the same process when ranks come or go."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.base.runtime import launched
from ckptd.base.runtime.launched import whole
from ckptd.checkpoint.torch.copy import Snapshot
from ckptd.elastic import World, session
from ckptd.elastic.messages import LEASE_EXIT_CODE, Broken, FenceNow, Go, Out, Quit
from ckptd.elastic.policy import Shape
from ckptd.elastic.torch.session import interrupt
from ckptd.elastic.torch.session.interrupt import Interrupted, Interrupter
from ckptd.elastic.torch.session.session import _prepare_nccl
from ckptd.errors import SaveError, UsageError
from tests.elastic.torch.session.minilauncher import MiniJob
from tests.processes import PATIENCE_S, until

EXAMPLES = Path(__file__).parents[4] / "docs" / "examples"
PROGRAMS = Path(__file__).parent / "programs.py"
MakeJob = Callable[..., MiniJob]

# Several starts of PyTorch and several waits in one test: on a busy machine each may take long.


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeJob]:
    # Paths of sockets are short, and everything of a job goes with its folder.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES.parents[1]), *sys.path]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    jobs: list[MiniJob] = []

    def make(script: Path, *args: str, **environ: str) -> MiniJob:
        jobs.append(MiniJob(tmp_path, script, [*args, str(tmp_path)], **environ))
        jobs[-1].forks = True
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def check_samples(rows: list[dict[str, Any]], steps: int, most_lost: int) -> None:
    """Each step takes the samples that it is to take, and few are trained twice."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in (r for r in rows if "step" in r and r.get("stage", 0) == 0):
        by_step.setdefault(row["step"], []).append(row)
    assert sorted(by_step) == list(range(1, steps + 1))
    assert all(len({tuple(r["ids"]) for r in of}) == 1 for of in by_step.values())
    assert sum(len(of) - 1 for of in by_step.values()) <= most_lost
    taken = [i for step in range(1, steps + 1) for i in by_step[step][-1]["ids"]]
    assert all(taken.count(i) in (len(taken) // 257, len(taken) // 257 + 1) for i in taken[:20])


@pytest.mark.dist
def test_a_rank_is_killed(make_job: MakeJob, tmp_path: Path) -> None:
    """Two go on where three were, bitwise, and a third comes back later."""
    job = make_job(EXAMPLES / "elastic_ddp.py", STEPS="24", PAUSE_S="0.02")
    job.begin("a", "b", "c")
    job.nodes["a"].committed(1, 4)
    pids = {name: node.process.pid for name, node in job.nodes.items() if node.process}
    job.kill("c")
    job.interrupt()
    job.begin("a", "b")
    resumed = {step for _, step in job.loaded().values()}
    assert len(resumed) == 1
    assert min(resumed) >= 4
    job.nodes["b"].committed(2, min(resumed) + 2)
    job.interrupt()
    job.begin("b", "a", "c")
    job.loaded()
    last = {text.split()[-1] for text in job.done()}
    assert {n: node.process.pid for n, node in job.nodes.items() if node.process}["a"] == pids["a"]
    rows = rows_of(tmp_path)
    assert {r["generation"] for r in rows} == {1, 2, 3}
    check_samples(rows, 24, most_lost=4)
    for step in range(1, 25):
        assert len({r["parameters"] for r in rows if r["step"] == step}) == 1
    assert last == {rows[-1]["parameters"]}


@pytest.mark.dist
def test_what_a_program_may_be_in(make_job: MakeJob) -> None:
    """Everybody gets out of it: collectives, sleeps, locks, waits for a store, for a peer."""
    job = make_job(PROGRAMS, "waits")
    names = ("a", "b")
    broken = ("pending", "reducer", "raise")
    waits = ("sleep", "lock", "all_reduce", "recv", "store", "init", "swallow", *broken)
    for what in waits:
        (job.folder / "what").write_text(what)
        job.begin(*names)
        for name in names:
            path = job.folder / f"{job.generation}-{name}"
            until(path.exists, f"{name} does not come to {what}: {job.nodes[name].log[-3:]}")
        for name in names if what in broken[:2] else ():
            job.nodes[name].until(Broken, job.generation)
        job.interrupt()
    for name in names:
        assert f"{name} left {len(waits)}" in job.nodes[name].output.read_text()


@pytest.mark.dist
def test_a_process_goes_on_whose_groups_wait_for_one_another(make_job: MakeJob) -> None:
    """All groups are aborted at once, and one whose abort hangs is the last of its process."""
    job = make_job(PROGRAMS, "collects", CKPTD_INTERRUPT_S="20")
    for generation in (1, 2):
        job.begin("a")
        until((job.folder / f"{generation}-a").exists, job.nodes["a"].output.read_text)
        if generation == 2:
            break
        job.interrupt()
    node = job.nodes["a"]
    assert node.end is not None
    assert node.process is not None
    assert [m.unfit for _, m in node.log if isinstance(m, Out)] == [""]
    assert "cannot be" not in node.output.read_text()
    # Another process, whose aborts never return: it says so before it would be killed for it.
    (job.folder / "hangs").touch()
    job.environ["CKPTD_INTERRUPT_S"] = "0.5"
    job.begin("b")
    node = job.nodes["b"]
    until((job.folder / "3-b").exists, node.output.read_text)
    assert node.end is not None
    assert node.process is not None
    node.end.send(FenceNow(4, 0))
    unfit = node.until(Out, 3)[1].unfit
    assert "collectives of 3 groups cannot be aborted in time" in unfit
    assert node.process.wait(PATIENCE_S) == 1, "nobody has killed it"


@pytest.mark.dist
@pytest.mark.forks("small", "all")
def test_what_a_session_tells(make_job: MakeJob) -> None:
    """A failure of its own is told, and is its own; who is not needed any more ends well."""
    job = make_job(PROGRAMS, "fails")
    job.forks = False  # a fork of multiprocessing shows errors by itself
    job.begin("a")
    node = job.nodes["a"]
    node.until(Broken, 1)
    assert node.end is not None
    assert node.process is not None
    node.end.send(FenceNow(2, 0))
    node.until(Out, 1)
    node.end.send(FenceNow(2, 0))  # once more, for a generation that is left
    job.begin("a")
    node.until(Broken, 2)
    assert node.process.wait(PATIENCE_S) == 1
    said = node.output.read_text()
    assert "[rank0]: RuntimeError: of its own" in said
    assert "generation 2 failed here" in said
    assert "[rank0]: [rank0]" not in said, "what the first generation has put in place is gone"


@pytest.mark.dist
def test_an_idle_worker_ends(make_job: MakeJob) -> None:
    job = make_job(PROGRAMS, "idles")
    job.begin("a", "b", "c")
    for name in job.members:
        until((job.folder / f"1-{name}").exists, name)
    job.interrupt()
    a, b, c = (job.nodes[name] for name in "abc")
    assert a.end is not None
    # It was to be in a second generation, which ended before it was told to go.
    a.end.send(FenceNow(3, 0))
    a.until(Out, 2)
    a.end.send(Go(2, {}))  # overtaken
    a.end.send(Quit())
    b.lease.extend(1e-9)
    c.launcher.close()
    codes = [n.process.wait(PATIENCE_S) for n in (a, b, c) if n.process is not None]
    assert codes == [0, LEASE_EXIT_CODE, LEASE_EXIT_CODE]


@pytest.mark.dist
def test_no_step_without_a_lease(make_job: MakeJob) -> None:
    job = make_job(PROGRAMS, "steps")
    job.begin("a")
    until((job.folder / "1-a").exists, "it steps")
    job.nodes["a"].lease.extend(1e-9)
    process = job.nodes["a"].process
    assert process is not None
    assert process.wait(PATIENCE_S) == LEASE_EXIT_CODE
    assert "lease of this node is over" in job.nodes["a"].output.read_text()


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_two_hundred_regroups(make_job: MakeJob) -> None:
    """Nothing is left behind in a process that lives through them."""
    job = make_job(PROGRAMS, "regroups")
    for turn in range(200):
        job.begin("a", "b")
        job.nodes["a"].committed(job.generation, turn + 1)
        job.interrupt()
    for name in ("a", "b"):
        rows = [json.loads(x) for x in (job.folder / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == 200
        early, late = rows[40], rows[-1]
        assert late["fds"] <= early["fds"] + 4, (early, late)
        assert late["threads"] <= early["threads"] + 4, (early, late)
        assert late["rss"] <= early["rss"] + 32 * 1024 * 1024, (early, late)


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize(
    ("example", "shapes"),
    [
        ("elastic_fsdp2.py", ((1, 4, 1), (1, 3, 1), (1, 4, 1))),
        ("elastic_pipeline.py", ((2, 2, 1), (3, 1, 1), (2, 2, 1))),
    ],
)
def test_examples(
    make_job: MakeJob, tmp_path: Path, example: str, shapes: tuple[tuple[int, int, int], ...]
) -> None:
    job = make_job(EXAMPLES / example, STEPS="24", PAUSE_S="0.02")
    job.begin(*"abcd", shape=shapes[0])
    job.nodes["a"].committed(1, 4)
    job.kill("d")
    job.interrupt()
    job.begin(*"abc", shape=shapes[1])
    resumed = max(step for _, step in job.loaded().values())
    job.nodes["b"].committed(2, resumed + 3)
    job.interrupt()
    job.begin(*"abce", shape=shapes[2])
    job.loaded()
    job.done()
    rows = rows_of(tmp_path)
    check_samples(rows, 24, most_lost=4)
    known: dict[int, dict[str, str]] = {}
    loads = 0
    for row in rows:
        found = row["parameters"]
        found = found if isinstance(found, dict) else {"": found}
        if "loaded" in row:
            loads += 1
            assert found.items() <= known[row["loaded"]].items(), "what is loaded is what was saved"
        else:
            known.setdefault(row["step"], {}).update(found)
    assert loads >= 2


# -- without a launcher ----------------------------------------------------------------------------


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(world: World, first: int, *, second: int) -> tuple[World, int]:
        return world, first + second

    assert session(train, 1, second=2) == (World(), 3)
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL


def test_a_world_from_the_environment() -> None:
    environ = {
        "RANK": "5",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "1",
        "CKPTD_GENERATION": "7",
        "CKPTD_SHAPE": "2,3,2",
        "CKPTD_PLACE": "0,2,1",
        "CKPTD_STEP": "40",
    }
    world = World.of(environ)
    assert (world.rank, world.world_size, world.local_rank, world.generation) == (5, 12, 1, 7)
    assert (world.shape, tuple(world.place), world.resume_step) == (Shape(2, 3, 2), (0, 2, 1), 40)
    plain = World.of({"RANK": "1", "WORLD_SIZE": "4"})
    assert (plain.shape, tuple(plain.place)) == (Shape(1, 4, 1), (0, 1, 0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "x"},
        {"CKPTD_SHAPE": "1,2"},
        {"CKPTD_SHAPE": "1,2,y"},
        {"CKPTD_SHAPE": "2,2,1"},
        {"CKPTD_PLACE": "0,1,0"},
    ],
)
def test_no_world(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError) as raised:
        World.of({"RANK": "0", "WORLD_SIZE": "1", **wrong})
    assert "the environment lacks the variables of a rank" in raised.value.message


def test_only_the_main_thread_can_be_interrupted() -> None:
    raised: list[UsageError] = []

    def make() -> None:
        try:
            Interrupter()
        except UsageError as error:
            raised.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert [error.message for error in raised] == ["only the main thread can be interrupted"]


def test_who_enters_a_generation_that_has_just_ended_is_out_at_once() -> None:
    interrupter = Interrupter()
    try:
        interrupter.interrupt()  # between the look at the generation and the call
        with pytest.raises(Interrupted):
            interrupter.enter()
        interrupter.leave()
        interrupter.again()
        interrupter.enter()
        interrupter.check()
    finally:
        interrupter.close()


@pytest.fixture
def interrupter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupter]:
    made = Interrupter()
    monkeypatch.setattr(launched, "current", made)
    yield made
    made.close()


def interrupted_in(interrupter: Interrupter, call: Callable[[], object]) -> None:
    """Make a call in a generation, as a session does, and be interrupted in it or after it."""

    def program() -> None:
        try:
            interrupter.enter()
            call()
            threading.Event().wait(PATIENCE_S)
        finally:
            interrupter.leave()

    with pytest.raises(Interrupted):
        program()


def test_what_is_whole_is_not_cut_short(interrupter: Interrupter) -> None:
    done = []

    @whole
    def tidy() -> None:
        interrupter.interrupt()
        by_degrees()
        done.append("all")

    def by_degrees() -> None:
        signal.raise_signal(signal.SIGURG)
        done.append("half")

    interrupted_in(interrupter, tidy)
    assert done == ["half", "all"]
    interrupter.again()
    interrupted_in(interrupter, lambda: (interrupter.interrupt(), by_degrees()))
    assert done == ["half", "all"]


@pytest.mark.parametrize(("unwind_s", "then"), [(PATIENCE_S, ["put back"]), (0.0, [])])
def test_what_an_exception_ends_is_left_in_order(
    interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch, unwind_s: float, then: list[str]
) -> None:
    """A call is cut off at the same moment: what is put back on the way out is, if it is quick."""
    monkeypatch.setattr(interrupt, "_UNWIND_S", unwind_s)
    done: list[str] = []

    def fails() -> None:
        try:
            raise RuntimeError("its connection was shut down")
        finally:
            puts_back()

    def puts_back() -> None:
        interrupter.interrupt()
        signal.raise_signal(signal.SIGURG)
        done.append("put back")

    def goes_on() -> None:
        with suppress(RuntimeError):
            fails()
        threading.Event().wait(PATIENCE_S)

    try:
        raise ValueError("handled, while a session runs")
    except ValueError:
        interrupted_in(interrupter, goes_on)
    assert done == then


def test_no_module_is_left_imported_by_half(
    interrupter: Interrupter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registers_something.py").write_text(
        "import signal\n"
        "from ckptd.base.runtime import launched\n"
        "launched.current.interrupt()\n"
        "signal.raise_signal(signal.SIGURG)\n"
        "registered = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    interrupted_in(interrupter, lambda: importlib.import_module("registers_something"))
    assert sys.modules.pop("registers_something").registered


def test_a_program_within_an_import_is_interrupted(
    interrupter: Interrupter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what the program imports that is not cut short, not a program that is imported."""
    (tmp_path / "is_imported.py").write_text(
        "from ckptd.base.runtime import launched\nlaunched.current.program()\n"
    )
    program = partial(interrupted_in, interrupter, interrupter.interrupt)
    monkeypatch.setattr(interrupter, "program", program, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("is_imported")
    del sys.modules["is_imported"]


def test_no_snapshot_has_what_ran_behind_a_collective_that_was_cut_off(
    interrupter: Interrupter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device runs an optimizer's step behind an aborted collective, and the copies behind it."""
    copied = threading.Event()
    whole = Snapshot.copy_rest

    def wait_first(self: Snapshot) -> None:
        assert copied.wait(PATIENCE_S)
        whole(self)

    monkeypatch.setattr(Snapshot, "copy_rest", wait_first)
    state = {"w": torch.ones(1000)}
    with ckptd.Checkpointer(
        str(tmp_path / "root"), storage=ckptd.Storage(dedup=False)
    ) as checkpointer:
        handle = checkpointer.save(1, state)
        interrupter.aborts._threads[dist.group.WORLD] = threading.Thread()  # one has begun
        interrupter.again()  # another generation may have begun by the time of the last copy
        copied.set()
        with pytest.raises(SaveError, match="cut off") as raised:
            handle.durable(PATIENCE_S)
        assert raised.value.kind == "aborted"
        checkpointer.save(2, state).durable(PATIENCE_S)
        assert checkpointer.latest() == 2


def test_a_checkpointer_is_let_go_of_in_one_piece(
    interrupter: Interrupter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an interrupt left open of it once nobody would ever close: a second try does nothing."""
    checkpointer = ckptd.Checkpointer(str(tmp_path / "root"))
    client, watch = checkpointer._client, checkpointer._watch
    closed = watch.close

    def is_interrupted() -> None:
        closed()
        interrupter.interrupt()
        signal.raise_signal(signal.SIGURG)

    monkeypatch.setattr(watch, "close", is_interrupted)
    interrupted_in(interrupter, checkpointer.abandon)
    assert client is not None
    assert client._left


@pytest.mark.parametrize("given", ["", "1"])
def test_nccl_is_prepared_before_the_program_makes_groups(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_NVLS_ENABLE": given}
    environ["CKPTD_DEFAULTS"] = "TORCH_NCCL_ASYNC_ERROR_HANDLING,OMP_NUM_THREADS"
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")  # is put back after the test
    if not given:
        monkeypatch.delenv("NCCL_NVLS_ENABLE")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 25, 1) if given else (2, 29, 7))
    _prepare_nccl()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["NCCL_NVLS_ENABLE"] == (given or "0"), "what the user has set stays"
    assert ("NCCL_NVLS_ENABLE=1: NVLink SHARP is in use" in caplog.text) == bool(given)
    assert ("NCCL 2.25.1 may hang" in caplog.text) == bool(given)
    assert caplog.text.count("NCCL") == 0 or given
