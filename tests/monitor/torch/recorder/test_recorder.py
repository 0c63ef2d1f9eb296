"""The recorder: what is watched computes the same, and the ring says what happened."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckptd.monitor
from ckptd.errors import UsageError
from ckptd.monitor.injection import environment
from ckptd.monitor.job import CallFlag, Phase, RankView
from ckptd.monitor.ring import RecorderState, RingReader, read
from ckptd.monitor.torch.recorder.native import build
from ckptd.monitor.torch.recorder.sources import wanted
from ckptd.testing.ranks import run_ranks
from tests.monitor.torch.recorder.jobs import JOBS, Told, attach, run, told
from tests.processes import PATIENCE_S, until

pytestmark = pytest.mark.timeout(600)  # the first may compile: half a minute of a core to itself
WORLD = 2


SOURCES = ["python", "native"]


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest) -> str:
    return use(request.param)


def use(source: str) -> str:
    """Make sure that the source is there: the native one is built once for a machine."""
    if source == "native":
        if shutil.which(os.environ.get("CXX", "c++")) is None:
            pytest.skip("NO C++ COMPILER: the native recorder is NOT tested here")
        build()
    return source


@pytest.fixture(scope="module")
def ranks(source: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Told]]:
    return run_ranks(WORLD, run, list(JOBS), str(tmp_path_factory.mktemp("rings")), source)


@pytest.mark.dist
@pytest.mark.parametrize("job", JOBS)
def test_watched_and_unwatched_are_the_same_to_the_bit(
    ranks: list[dict[str, Told]], job: str
) -> None:
    for rank in ranks:
        plain, watched, _, _ = rank[job]
        assert plain
        assert watched == plain


@pytest.mark.dist
@pytest.mark.parametrize("job", JOBS)
def test_ranks_agree_about_what_they_did(ranks: list[dict[str, Told]], job: str) -> None:
    signatures: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for rank in ranks:
        view = rank[job][2]
        assert len(view.calls) > 1
        assert not np.isnan(view.calls["end"]).any()
        assert (view.groups["entered"] == view.groups["completed"]).all()
        for row in view.calls:
            loose = int(row["flags"]) & CallFlag.VARIABLE
            what = (row["op"], row["dtype"], 0 if loose else row["bytes"], row["root"])
            key = (int(row["group"]), int(row["seq"]))
            signatures.setdefault(key, set()).add(tuple(map(int, what)))
    assert all(len(found) == 1 for found in signatures.values())


BARRIER = "barrier [0,1] {} 0 -1"
LINES = {
    "p2p": [
        "p2p [0,1] 1 12 -1",
        "p2p [1,0] 1 12 -1",
        "p2p [0,1] 2 12 -1",
        "p2p [0,1] 3 12 -1",
        BARRIER.format(1),
    ],
    "several_groups": [
        "all_reduce [0,1] 1 20 -1 async",
        "broadcast [0,1] 1 20 1",
        "reduce max [0,1] 1 20 0",
        "all_gather [0,1] 2 40 -1",
        "gather [0,1] 3 20 0",
        "all_to_all_single [0,1] 4 12 -1 variable",
        BARRIER.format(5),
        BARRIER.format(6),
    ],
    "functional_calls": [
        "all_reduce [0,1] 1 16 -1 async",
        "all_gather_single_coalesced [0,1] 2 32 -1 async",
        "reduce_scatter_single_coalesced [0,1] 3 32 -1 async",
        BARRIER.format(4),
    ],
    "errors": [
        "broadcast [0,1] 1 8 99 failed",
        "all_gather_single [0,1] 2 12 -1 async failed",
        "all_gather [0,1] 3 4 -1 failed",
        BARRIER.format(4),
    ],
}


@pytest.mark.dist
@pytest.mark.parametrize("job", LINES)
def test_the_ring_says_what_happened_in_order(ranks: list[dict[str, Told]], job: str) -> None:
    _, _, view, texts = ranks[0][job]
    assert told(view, texts) == LINES[job]


@pytest.mark.dist
def test_calls_know_step_site_and_element_type(ranks: list[dict[str, Told]]) -> None:
    _, _, view, texts = ranks[0]["ddp"]
    assert (view.phase, view.step, view.steps_done) == (Phase.TRAIN, 1, 1)
    assert set(view.calls["phase"]) == {Phase.INIT, Phase.TRAIN}
    reduced = [row for row in view.calls if texts[int(row["op"])] == "all_reduce"]
    assert [int(row["step"]) for row in reduced] == [-1, 0]
    assert {texts[int(row["dtype"])] for row in reduced} == {"float32"}
    sites = {texts[int(row["site"])].rpartition("/")[2].split(":")[0] for row in view.calls}
    assert sites == {"jobs.py"}


def wait_for_the_other(folder: str, source: str) -> tuple[RankView, RankView]:
    """Rank 1 comes late and looks at what rank 0 waits for."""
    recorder = attach(folder, source)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    before = read(recorder.ring.path)
    if dist.get_rank() == 1:
        [path] = [p for p in Path(folder).glob("*.ring") if p != recorder.ring.path]
        until(lambda: read(path).pending_seq == 2 and read(path).groups["completed"][0] == 1)
        before = read(path)
    dist.all_reduce(tensor)
    dist.barrier()
    return before, read(recorder.ring.path)


def alone(folder: str, source: str) -> None:
    """Check what one rank can show by itself."""
    recorder = attach(folder, source, job="a job")
    assert ckptd.monitor.attach() is recorder
    path = recorder.ring.path
    tensor = torch.arange(3.0)

    def header() -> Any:
        with RingReader(path) as reader:
            return reader.header()

    assert (header().job, header().pid, header().state) == ("a job", os.getpid(), 1)
    until(lambda: read(path).heartbeat > 0 and header().interpreted > 0)
    ckptd.monitor.step(7)
    assert (read(path).phase, read(path).step) == (Phase.TRAIN, 7)
    with ckptd.monitor.phase("eval"):
        dist.all_reduce(tensor)
        assert read(path).phase is Phase.EVAL
    assert read(path).phase is Phase.TRAIN
    with pytest.raises(UsageError), ckptd.monitor.phase("lunch"):
        pass
    written = header().written
    _in_a_fork(tensor)
    assert header().written == written
    # A group of a name that was given away again is another group.
    for _ in range(2):
        group = dist.new_group([0], use_local_synchronization=True)
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
    assert len(set(read(path).groups["group"])) == len(read(path).groups) == 3
    ckptd.monitor.detach()
    dist.all_reduce(tensor)
    assert header().written == written + 2
    assert (header().state, read(path).phase) == (RecorderState.OFF, Phase.EXIT)
    again = attach(folder, source)
    dist.all_reduce(tensor)
    assert read(again.ring.path).calls["seq"].tolist() == [1]
    ckptd.monitor.detach()
    ckptd.monitor.step(8)
    with ckptd.monitor.phase(Phase.CKPT):
        pass
    assert tensor.tolist() == [0.0, 1.0, 2.0]


def _in_a_fork(tensor: torch.Tensor) -> None:
    pid = os.fork()
    if pid == 0:
        ckptd.monitor.step(99)
        os._exit(0 if ckptd.monitor.attach().on is False else 1)
    assert os.waitpid(pid, 0)[1] == 0


def breaks(folder: str, source: str) -> tuple[list[str], list[float]]:
    """Let the recorder break in the middle; return what was logged, and results."""
    recorder = attach(folder, source)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckptd.monitor").addHandler(handler)
    tensor = torch.arange(2.0)
    dist.all_reduce(tensor)
    other = dist.new_group([0])
    recorder.ring.add_group = None  # type: ignore[method-assign, assignment]
    for _ in range(3):
        dist.all_reduce(tensor, group=other)
    until(lambda: lines)
    with RingReader(recorder.ring.path) as reader:
        assert reader.header().state is RecorderState.ASIDE
        assert reader.header().written == 1
    assert not recorder.on
    return lines, tensor.tolist()


@pytest.mark.dist
def test_what_a_rank_waits_for_is_seen_from_outside(tmp_path: Path, source: str) -> None:
    _, (before, after) = run_ranks(2, wait_for_the_other, str(tmp_path), source)
    assert before.rank == 0
    assert before.pending_group == before.groups["group"][0]
    assert before.pending_since <= before.at
    assert before.groups[["entered", "completed"]].tolist() == [(2, 1)]
    assert len(after.calls) == 3


@pytest.mark.dist
def test_one_rank(tmp_path: Path, source: str) -> None:
    run_ranks(1, alone, str(tmp_path), source)


@pytest.mark.dist
def test_a_recorder_that_breaks_steps_aside_and_says_so_once(tmp_path: Path, source: str) -> None:
    [(lines, result)] = run_ranks(1, breaks, str(tmp_path), source)
    assert len(lines) == 1
    assert "not recorded any more" in lines[0]
    assert result == [0.0, 1.0]


def holds_the_gil(folder: str) -> None:
    """Rank 0 holds the GIL until rank 1 has seen in its ring that their call has ended."""
    recorder = attach(folder, "native")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    pipe = f"{folder}/pipe"
    if dist.get_rank() == 0:
        fd = os.open(pipe, os.O_RDWR)
        work = dist.all_reduce(tensor, async_op=True)
        # A library that is loaded like this is called with the GIL held.
        assert ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1) == 1
        work.wait()
        os.close(fd)
    else:
        [path] = [p for p in Path(folder).glob("*.ring") if p != recorder.ring.path]
        dist.all_reduce(tensor)
        until(lambda: read(path).groups["completed"].tolist() == [2])
        Path(pipe).write_bytes(b"x")


@pytest.mark.dist
def test_ends_are_seen_while_the_gil_is_held(tmp_path: Path) -> None:
    use("native")
    os.mkfifo(tmp_path / "pipe")
    run_ranks(2, holds_the_gil, str(tmp_path))


def late(folder: str, source: str) -> list[tuple[int, list[int], int]]:
    """Attach rank 1 later than rank 0, both after some calls; return what each says of groups."""
    tensor = torch.ones(3)
    both = dist.new_group([0, 1])
    for _ in range(40):
        dist.all_reduce(tensor)
    found = []
    for at in (0, 3):
        for k in range(6):
            if k == at * dist.get_rank():
                recorder = attach(folder, source)
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, group=both)
        until(lambda ring=recorder.ring: (read(ring.path).groups["completed"] > 0).all())
        groups = read(recorder.ring.path).groups
        found.append((at, groups["group"].tolist(), int(groups["entered"][0])))
        ckptd.monitor.detach()
    return found


@pytest.mark.dist
def test_counts_that_began_elsewhere_are_not_compared(tmp_path: Path, source: str) -> None:
    (one, first), (other, second) = run_ranks(2, late, str(tmp_path), source)
    assert one == other
    assert len(set(one[1])) == 2
    assert first[2] == 6
    assert second[2] == 3
    assert not set(first[1]) & set(second[1])


def counted(folder: str) -> tuple[list[int], list[int], int]:
    """Return counts of a group by way of PyTorch's own counters."""
    recorder = attach(folder, "counters")
    tensor = torch.ones(3)
    for _ in range(5):
        dist.all_reduce(tensor)
    # How many have completed PyTorch itself counts wrong where two end at a time.
    until(lambda: read(recorder.ring.path).groups["entered"].tolist() == [5])
    view = read(recorder.ring.path)
    with RingReader(recorder.ring.path) as reader:
        state = reader.header().state
    dist.barrier()
    return view.groups["group"].tolist(), view.groups["entered"].tolist(), state


@pytest.mark.dist
def test_counters_are_what_is_left_without_hooks(tmp_path: Path) -> None:
    first, second = run_ranks(2, counted, str(tmp_path))
    assert first == second
    assert first[1:] == ([5], RecorderState.COUNTERS)


def test_a_source_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted() == ("native", "python", "counters")
    monkeypatch.setenv("CKPTD_RECORDER", "off")
    assert wanted() == ()
    monkeypatch.setenv("CKPTD_RECORDER", "counters")
    assert wanted() == ("counters",)
    monkeypatch.setenv("CKPTD_RECORDER", "guess")
    with pytest.raises(UsageError, match="unknown recorder"):
        wanted()


def test_nobody_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError) as caught:
        ckptd.monitor.attach(tmp_path)
    assert "the rank of this process is unknown" in caught.value.message


SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed import init_process_group
store = dist.HashStore()
init_process_group("gloo", store=store, rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(tensor.tolist())
dist.destroy_process_group()
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    "told_by",
    ["init_process_group", "import of ckptd", pytest.param("environment", marks=pytest.mark.long)],
)
def test_injection_needs_no_edit(tmp_path: Path, told_by: str) -> None:
    rings = tmp_path / "rings"
    base = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}}
    script = SCRIPT
    if told_by == "import of ckptd":  # whose modules are half there as torch is imported
        script = f"import ckptd.monitor.torch.recorder.recorder\n{SCRIPT}"
    if told_by != "init_process_group":
        base |= {"RANK": "0", "WORLD_SIZE": "1"}
    env = base | environment(tmp_path / "inject", base) | {"CKPTD_RINGS": str(rings)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    said = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # 2.9's
    assert said == ["[1.0, 1.0]"]
    [path] = rings.iterdir()
    view = read(path)
    assert len(view.calls) == 1
    assert view.phase is Phase.EXIT
