"""``ckptd trace``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckptd.cli.output import seconds_text
from ckptd.events.event import AnyEvent
from tests.cli.recorded import MS, failed_of, opened, span, write_events, write_file
from tests.cli.running import Cli


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_events(tmp_path / "events")


def test_the_table_marks_the_slowest_phase(cli: Cli, folder: str) -> None:
    out = cli.good("trace", folder).out
    head, first, second, *_ = (line.split() for line in out.splitlines())
    assert head[-3:] == ["call", "gate_wait", "write"]
    assert (first[0], first[4], first[5]) == ("10", "durable", "2")
    assert " ".join(second[-6:]) == "4 ms 2 ms 300 ms*"
    rows = out.partition("step 20 of generation 1, over 2 ranks\n")[2].splitlines()
    assert rows[1].split() == ["stall", "2", "5", "ms", "5.5", "ms", "6", "ms", "1"]
    assert "write*" in out


def test_document(cli: Cli, folder: str) -> None:
    document = cli.json("trace", folder)
    assert (document["verb"], document["files"], document["events"]) == ("trace", 2, 20)
    assert [s["step"] for s in document["saves"]] == [10, 20]
    save = document["saves"][1]
    assert (save["outcome"], save["ranks"], save["slowest"]) == ("durable", 2, "write")
    assert (save["seconds"], save["durable_s"]) == (0.4, {"local": 0.4})
    assert (save["bytes"], save["stall"]["max_s"]) == (2 << 20, 0.006)
    write = next(p for p in save["phases"] if p["name"] == "write")
    assert (write["min_s"], write["median_s"], write["max_s"]) == (0.1, 0.2, 0.3)
    assert (write["slowest_rank"], write["ranks"]) == (1, 2)
    assert document["out"] is None


def test_last(cli: Cli, folder: str) -> None:
    result = cli("trace", folder, "--last", "1", "--json")
    assert [s["step"] for s in result.document["saves"]] == [20]
    assert result.document["left_out"] > 0
    assert cli("trace", folder, "--last", "0").code == 2


def test_chrome_trace(cli: Cli, folder: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    cli.good("trace", folder, "--out", str(out))
    items = json.loads(out.read_text())
    write = next(i for i in items if i["name"] == "write 20" and i["pid"] == 1)
    assert (write["ph"], write["dur"], write["args"]["tier"]) == ("X", 300_000.0, "local")
    lanes = {(i["pid"], i["tid"]): i["args"]["name"] for i in items if i["name"] == "thread_name"}
    assert lanes[1, write["tid"]] == "write"
    named = {i["pid"]: i["args"]["name"] for i in items if i["name"] == "process_name"}
    assert named == {0: "rank 0 on node", 1: "rank 1 on node"}
    assert all({"ph", "pid", "name"} <= set(i) for i in items)
    assert not list(tmp_path.glob("*.partial"))


def test_a_trace_that_cannot_be_written(cli: Cli, folder: str, tmp_path: Path) -> None:
    result = cli("trace", folder, "--out", str(tmp_path / "none" / "x"), "--json")
    assert (result.code, result.error["kind"]) == (1, "store")


def test_exit_codes(cli: Cli, tmp_path: Path) -> None:
    result = cli("trace", str(tmp_path / "none"), "--json")
    assert result.code == 4
    assert result.error["message"] in ("no events were recorded here", "the folder cannot be read")
    assert cli("trace", str(tmp_path)).code == 4
    (tmp_path / "a.jsonl").write_text("{}\n")
    result = cli("trace", str(tmp_path), "--json")
    assert (result.code, result.error["message"]) == (3, "the files hold no events")


def test_what_was_skipped_is_said(cli: Cli, folder: str) -> None:
    path = Path(folder, "node-0.000000.jsonl")
    path.write_bytes(
        path.read_bytes() + b"garbage\n" + b"[" * 100_000 + b'\n{"event":"Lost","count":3}\n'
    )
    Path(folder, "other.jsonl").write_text("not events\n")
    os.mkfifo(Path(folder, "pipe.jsonl"))
    result = cli("trace", folder)
    assert result.code == 0
    for said in ("2 files hold no events", "2 lines without an event", "3 events were lost"):
        assert said in result.err
    assert "durable" in result.out


def test_texts_from_files_do_not_reach_the_terminal_raw(cli: Cli, tmp_path: Path) -> None:
    bad: list[AnyEvent] = [
        failed_of(0, 30, "\x1b[31mred\n"),
        span("write", 0, 0, 1, step=30, attempt="0030", tier="\x1b[2J"),
    ]
    write_file(tmp_path / "a.jsonl", opened(1, host="\x1b[1m"), bad)
    out = cli.good("trace", str(tmp_path)).out
    assert "failed" in out
    assert "\x1b" not in out


def test_no_saves(cli: Cli, tmp_path: Path) -> None:
    write_file(tmp_path / "a.jsonl", opened(1), [])
    assert cli.good("trace", str(tmp_path)).out == "no save was recorded\n"


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 us"),
        (52_000, "52 us"),
        (MS, "1 ms"),
        (340 * MS, "340 ms"),
        (1500 * MS, "1.5 s"),
        (999_600_000, "1 s"),
        (5_000_000 * MS, "5000 s"),
    ],
)
def testseconds_text(ns: int, text: str) -> None:
    assert seconds_text(ns / 1e9) == text
