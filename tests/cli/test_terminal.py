"""Screens that a user sees: verbs on a real terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.monitor.daemon.history import History, to_stored
from ckptd.monitor.incidents import Incident
from ckptd.monitor.recording import encode
from ckptd.monitor.report import Stack
from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind
from ckptd.store import open_store
from tests.cli.recorded import write_events
from tests.cli.roots import cut, flip, put, rank_file, values
from tests.cli.running import COMMAND
from tests.monitor.test_recording import frames
from tests.monitor.watched import JOB as WATCHED
from tests.processes import PATIENCE_S, until
from tests.terminal import Terminal, golden

SCREENS = Path(__file__).with_name("screens")
WIDTHS = (80, 140)

BAR = """
import sys
from ckptd.cli.output import note, progress_bar
from ckptd.cli.terminal import printing
with printing(), progress_bar("verify") as say:
    for word in map(input, [""] * 9):
        if word == "note":
            note("a name with \\x1b[31mcolours\\x1b[0m of its own")
        elif word == "end":
            break
        else:
            say(int(word), 4 << 30)
print("good")
"""

BUSY = """
import sys, time
from ckptd.cli.output import progress_bar
from ckptd.cli.terminal import printing
with printing(), progress_bar("verify") as say:
    while True:
        time.sleep(0.01)  # a signal that comes just before a long wait is taken after it
"""

DRAWN = """
import sys
import msgspec
from ckptd.cli.screen import screen
from ckptd.cli.terminal import drawing, printing
job, ranks, incidents, versions = msgspec.json.decode(sys.argv[1])
with printing():
    drawing(sys.stdout).print(screen(job, ranks, incidents, 6, versions=versions))
"""

JOB = {
    "job": "llm-7b",
    "state": "incident",
    "step": {"min": 12_345, "max": 12_346},
    "ranks_reporting": 7,
    "world": 8,
    "agents": {"up": 1, "silent": 1},
    "goodput": {"share": 0.9731},
    "phases": {"TRAIN": 7, "CKPT": 0},
}
RANKS = {
    "rank": [0, 1, 2, 3, 4, 5, 6],
    "node": [0, 0, 0, 0, 1, 1, 1],
    "nodes": ["node-1.cluster.example", "node-2.cluster.example"],
    "pid": [4711, 4712, 4713, 4714, None, 812, 813],
    "status": [0, 1, 1, 2, 4, 3, 5],
    "step": [12_346, 12_346, 12_346, 12_345, -1, 12_345, 12_346],
    "progress_age_s": [0.2, 31.0, 31.2, 31.4, None, 33.0, 0.1],
    "self_s": [0.119, 0.12, 0.118, None, None, 0.121, 0.199],
    "score": [0.1, 0.0, 0.2, 7.25, None, None, 3.1],
    "pending": [None, "all_reduce(sum) of dp, train.py:48", None, None, None, None, None],
}
INCIDENTS = [
    {
        "id": "llm-7b-3",
        "opened_at": 1_790_000_000.0,
        "headline": "Rank 3 on node-1 has not moved for 31 s: stopped by a signal or a debugger; "
        "6 ranks wait",
        "verdict": {
            "kind": "non-communication hang",
            "suspects": [{"target": "rank", "name": "3"}],
            "evidence": ["the last came 31 s ago"],
        },
    }
]


VERSIONS = {
    "number": 60,
    "step": 12_340,
    "published_at": 1_790_000_000.0,
    "workers": 3,
    "behind": 2,
    "received": 1_288_490_188,
    "whole": 24 << 30,
    "mapped": 8 << 30,
}


@pytest.fixture(autouse=True)
def _in_a_folder_with_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    with open_store("run") as store:
        for step in (10, 20):
            loss, created = {"loss": 1.0 / step}, f"2026-11-29T06:{step}:00Z"
            put(store, cut(values(step)), step, metadata=loss, created=created)
    with open_store("long") as store:
        named = {f"decoder.layers.0.self_attention.{key}": v for key, v in values(1).items()}
        loss = {"validation/perplexity_of_the_held_out_set": 12.3456789, "tokens": 123_456_789}
        put(store, cut(named), 10, metadata=loss, created="2026-11-29T06:10:00Z")


SHOWN = {
    "ls": "ls run",
    "inspect": "inspect run",
    "verify": "verify run",
    "diff": "diff run@10 run@20",
    "gc": "gc run",
    "usage": "ls run --al",
    "ls-long": "ls long",
    "inspect-long": "inspect long",
    "inspect-chunks": "inspect long --tensor * --chunks",
    "help": "--help",
    "help-all": "--help-all",
    "help-of-a-verb": "verify --help",
    "help-of-run": "run --help",
    "help-of-run-all": "run --help-all",
    "help-of-pin": "pin --help",
}


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", SHOWN)
def test_screens(name: str, columns: int) -> None:
    with Terminal([*COMMAND, *SHOWN[name].split()], columns, 70) as one:
        one.done()
        assert not one.cursor_hidden
        assert "\N{REPLACEMENT CHARACTER}" not in one.shown()
        golden(SCREENS / f"{name}-{columns}.txt", one.shown())


CONTROLLED = """
from ckptd.cli.terminal import printing
from ckptd.elastic.cli.ctl import CtlWhyDocument, _explain, _show
from ckptd.elastic.messages import NodeRow, Recovery, Status
from ckptd.elastic.placement import NodeSlot
from ckptd.elastic.policy import JobSpec, Shape, choose
cause = "a worker on n2 ended with -9: rank 1: SIGKILL from another process; "
cause += "the kernel recorded no OOM kill"
sick = ("slot 3: the device fails: lost",)
recovery = Recovery(
    at=1_790_000_010.0, cause=cause, planned=False, before=2, after=3, level=1, detect=0.0,
    fence=0.03, plan=0.01, spawn=0.06, import_=0.2, init=0.21, load=0.32, first_step=4.2,
    total=4.82, steps_lost=0,
)
nodes = [
    NodeRow(name="n1", up=True, slots=8, running=3),
    NodeRow(name="n2", up=True, slots=7, faults=1, spare=True, sick=sick),
    NodeRow(name="n3", up=False, slots=8, out_until_s=None, faults=12),
]
with printing():
    _show(Status(
        job="llm-7b", state="running", reason="", since=1_790_000_000.0, at=1_790_000_060.0,
        generation=3, step=12_345, shape=Shape(1, 8, 1), world=8, planned=Shape(1, 24, 1),
        nodes=tuple(nodes), recoveries=(recovery,),
        goodput={"useful": 97.1, "lost": 1.2, "restarting": 1.0, "waiting": 0.7},
        told=("n3 is left out: 3 faults in an hour; ckptd ctl add n3 takes it back, "
              "once it is well",),
        address="n1:29400", log="/shared/llm-7b/log",
    ))
"""
EXPLAINED = (
    CONTROLLED.partition("with printing")[0]
    + """
at = {"n1": ("b0", "r0"), "n2": ("b0", "r0"), "n3": ("b0", "r1"), "n4": ("b0", "r1")}
job = JobSpec(microbatches=8, planned=Shape(2, 4, 2), pp=(1, 4))
slots = [
    NodeSlot(name, k, None, at[name], 2 * (name in ("n2", "n4"))) for name in at for k in range(3)
]
choice = choose(job, slots, Shape(2, 4, 2))
ranks = {name: [] for name in at}
for rank, place in enumerate(choice.places):
    ranks[place.slot.node].append(rank)
rows = [
    NodeRow(name=name, up=True, slots=3, domains=at[name], ranks=tuple(ranks[name]))
    for name in at
]
rows += [
    NodeRow(name="n6", up=True, slots=1, spare=True),
    NodeRow(name="n7", up=False, slots=3, out_until_s=None, out_why="it failed 3 times"),
]
with printing():
    _explain(CtlWhyDocument(
        job="llm-7b", reason="", generation=3, shape=choice.shape, planned=job.planned,
        chosen_at=1_790_000_000.0, why=choice.why, candidates=choice.candidates,
        nodes=tuple(rows),
    ))
"""
)

STOPPED = Verdict(
    kind=VerdictKind.HANG,
    suspects=(Suspect(SuspectKind.RANK, "5", 0.95, "stopped by a signal or a debugger"),),
    evidence=(
        "15 ranks wait for 1 rank in no call",
        "the first has not moved for 62.1 s: stopped by a signal or a debugger",
    ),
    rules_out=("a broken link: these ranks have not entered the call",),
    refuted_by="a counter of a named rank moves, or the rank is inside a call after all",
    action="take stacks, flush the snapshot, restart; isolate a stopped or unkillable process",
    numbers={"hung": 1, "waiting": 15, "runs": 0, "idle s": 62.1268, "limit s": 30},
)


def _incident() -> None:
    line = "/shared/a/rather/long/path/to/the/program/of/the/trainer.py"
    stack = Stack(
        text=f"Thread 1 (MainThread)\n    step ({line}:211)\n    main (t.py:340)", how="py-spy"
    )
    call = "-2.046 s  mesh_tp #566  all_reduce  1088 bytes  step 113  took 0.0036 s  t.py:200"
    one = Incident(
        id="llm-7b-3",
        kind=STOPPED.kind,
        verdict=STOPPED,
        opened_at=1_790_000_000.0,
        updated_at=1_790_000_060.0,
        generation=2,
        step=113,
        latency_s=2.04,
        stacks={0: stack, 5: stack},
        calls={5: call},
        logs={5: "epoch 3: loss 2.31"},
        acknowledged_at=1_790_000_050.0,
        note="the disk of n1 is being replaced",
    )
    history = History("h.sqlite")
    history.put_incident(one.id, one.opened_at, one.state, to_stored(one))
    history.close()


def _recording() -> None:
    Path("job.recording").write_bytes(encode(WATCHED, 1e9, frames()))


TOLD: dict[str, tuple[list[str], Callable[[], object]]] = {
    "trace": ([*COMMAND, "trace", "events"], lambda: write_events(Path("events"))),
    "replay": ([*COMMAND, "replay", "job.recording"], _recording),
    "incidents": ([*COMMAND, "incidents", "--history", "h.sqlite"], _incident),
    "incident": ([*COMMAND, "incidents", "llm-7b-3", "--history", "h.sqlite"], _incident),
    "ctl": ([sys.executable, "-c", CONTROLLED], lambda: None),
    "ctl-why": ([sys.executable, "-c", EXPLAINED], lambda: None),
    "ctl-error": ([*COMMAND, "ctl", "status", "--controller", "127.0.0.1:1"], lambda: None),
}


@pytest.fixture
def run_folder() -> Iterator[str]:
    """A run folder with a short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="ckptd-") as folder:
        yield folder


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", TOLD)
def test_screens_of_jobs(name: str, columns: int, run_folder: str) -> None:
    command, prepare = TOLD[name]
    prepare()
    with Terminal(command, columns, 70, env={"CKPTD_RUN_DIR": run_folder}) as one:
        one.done()
        shown = one.shown()
        assert max(map(len, shown.splitlines())) <= columns
        golden(SCREENS / f"{name}-{columns}.txt", shown)
        colours = {cell.fg for row in one.screen.buffer.values() for cell in row.values()}
        assert all(map(legible, colours - {"default", "red"}))


TRAINS = """
import os, sys
print("trains on rank", os.environ.get("RANK"), flush=True)
sys.exit(3)
"""


def masked(shown: str) -> str:
    """Hide what differs from run to run: port and token of a daemon, a pid."""

    def hide(found: re.Match[str]) -> str:
        return re.sub(r"[0-9a-f]", "#", found[0])

    shown = re.sub(r"(?<=127\.0\.0\.1:)\d+|(?<=token=)(?:[0-9a-f]\n?){40}", hide, shown)
    return re.sub(r"(?<=process )\d+", "#", shown)


@pytest.mark.dist
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("verb", ["watch", "run"])
def test_a_job_of_one_rank_that_fails(
    verb: str, columns: int, tmp_path: Path, run_folder: str
) -> None:
    (tmp_path / "t.py").write_text(TRAINS)
    words = {"watch": ["--", sys.executable, "t.py"], "run": ["--max-restarts=0", "t.py"]}
    env = {"CKPTD_RUN_DIR": run_folder, "CKPTD_NODE": "n0"}
    with Terminal([*COMMAND, verb, "--job=seen", *words[verb]], columns, 40, env=env) as one:
        assert one.done() == 3, one.shown()
        assert not one.cursor_hidden
        golden(SCREENS / f"{verb}-{columns}.txt", masked(one.shown()))


def test_a_copy_ends_with_one_sentence() -> None:
    with Terminal([*COMMAND, "cp", "run@20", "copy"], 200) as one:
        assert one.done() == 0
        assert one.shown().startswith("copied step 20: 1.26 KiB in 4 files, now step 20 of gener")


def test_damage_is_named_and_nothing_is_left_of_the_bar() -> None:
    flip(rank_file("run", 20, 0), -1)
    with Terminal([*COMMAND, "verify", "run"]) as one:
        assert one.done() == 3
        assert not one.cursor_hidden
        golden(SCREENS / "damage-80.txt", one.shown())


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_bar_and_a_line_that_is_printed_meanwhile(columns: int) -> None:
    with Terminal([sys.executable, "-c", BAR], columns, 8, echo=False) as one:
        one.until("verify ")
        one.press(f"{1 << 30}\n")
        one.until("1.0/4.0 GiB")
        assert one.cursor_hidden
        one.press("note\n")
        shown = one.until("note: ")
        assert "a name with \N{REPLACEMENT CHARACTER}[31mcolours" in shown
        assert one.looks("a name with") == {"default"}
        assert shown.index("note: ") < shown.index("1.0/4.0 GiB")
        one.press("end\n")
        assert one.done() == 0
        assert "GiB" not in one.shown()
        assert one.shown().endswith("good\n")
        assert not one.cursor_hidden


def test_an_interrupt_gives_the_cursor_back() -> None:
    with Terminal([sys.executable, "-c", BUSY]) as one:
        one.until("verify ")
        assert one.cursor_hidden
        one.press("\x03")
        assert one.done() in (1, -signal.SIGINT)
        assert not one.cursor_hidden


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
@pytest.mark.parametrize("args", ["ls run", "verify run", "verify --help", "trace run"])
def test_no_colours_where_none_are_wanted(args: str, env: dict[str, str]) -> None:
    with Terminal([*COMMAND, *args.split()], lines=40, env=env) as one:
        one.done()
        if "TERM" in env:
            assert b"\x1b" not in one.raw
        colours = {cell.fg for row in one.screen.buffer.values() for cell in row.values()}
        assert colours <= {"default"}


def test_lines_of_a_log_come_one_by_one(tmp_path: Path) -> None:
    program = "from ckptd.cli import main; main.run = lambda argv: (print('first'), input()); "
    log = tmp_path / "log"
    with log.open("w") as out:
        one = subprocess.Popen(
            [sys.executable, "-c", program + "main.main([])"], stdin=subprocess.PIPE, stdout=out
        )
        until(lambda: log.read_text() == "first\n", "the first line")
        one.communicate(b"\n", timeout=PATIENCE_S)


def test_an_error_is_red() -> None:
    with Terminal([*COMMAND, "ls", "nowhere"]) as one:
        one.done()
        assert one.looks("error:") == {"red"}


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_job_drawn(columns: int) -> None:
    import msgspec

    document = msgspec.json.encode([JOB, RANKS, INCIDENTS, VERSIONS]).decode()
    with Terminal([sys.executable, "-c", DRAWN, document], columns) as one:
        assert one.done() == 0
        golden(SCREENS / f"top-{columns}.txt", one.shown())
        assert one.looks("✕ dead     12,345") == {"d70000", "default"}
        assert one.looks("●") == {"008700"}
        colours = {cell.fg for row in one.screen.buffer.values() for cell in row.values()}
        assert all(map(legible, colours - {"default"}))


def legible(colour: str) -> bool:
    """Whether letters of a colour are read on white and on black: a contrast of 3 at least."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 1.05 / (light + 0.05) >= 3 and (light + 0.05) / 0.05 >= 3


@pytest.mark.parametrize("args", ["--help", "run --help-all"])
def test_a_help_is_legible_on_a_light_background(args: str) -> None:
    with Terminal([*COMMAND, *args.split()], lines=90) as one:
        one.done()
        colours = {cell.fg for row in one.screen.buffer.values() for cell in row.values()}
        assert all(map(legible, colours - {"default"}))


def test_top_lives_on_a_terminal_follows_its_size_and_ends(run_folder: str) -> None:
    env = {"CKPTD_RUN_DIR": run_folder}
    serve = [*COMMAND, "serve", "--simulate", "8", "--job", "seen"]
    with Terminal(serve, 140, env=env) as daemon:
        daemon.until("token=")
        with Terminal([*COMMAND, "top", "--job", "seen", "--every", "0.2"], env=env) as one:
            one.until("RANK")
            assert b"\x1b[?1049h" in one.raw
            assert max(map(len, one.shown().splitlines())) <= 80
            one.resize(140, 24)
            wide = one.until("IN CALL")
            assert "\N{REPLACEMENT CHARACTER}" not in wide
            one.press("\x03")
            assert one.done() == 130
            assert one.raw.rstrip().endswith(b"\x1b[?25h") or not one.cursor_hidden
            assert b"\x1b[?1049l" in one.raw
        os.kill(daemon.process.pid, signal.SIGTERM)
        daemon.done()
