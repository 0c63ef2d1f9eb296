"""Sources of signs: recorded trees and lines, and sources that hang, flood and fail."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ckptd.monitor.agent import health
from ckptd.monitor.agent.health import Health, HealthSource, kernel, kernel_log, links, pressure
from ckptd.monitor.report import AgentState, Sign, from_views, pack, unpack_report
from tests.processes import until

SIGN = Sign(what="fan", text="a fan stands still", kinds=("slow rank",))


def words(found: Iterable[Sign]) -> list[tuple[str, str]]:
    return [(sign.what, sign.text) for sign in found]


# --- the kernel's log -----------------------------------------------------------------------------


def record(text: str, age_s: float = 1.0) -> bytes:
    at = time.clock_gettime(time.CLOCK_BOOTTIME) - age_s
    return f"4,77,{int(at * 1e6)},-;{text}\n SUBSYSTEM=pci\n".encode()


def test_lines_of_the_kernel_are_signs(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    look = kernel(str(log))
    assert look is not None
    with log.open("wb", buffering=0) as file:
        found = []
        for line in (
            record("NVRM: Xid (PCI:0000:3b:00): 79, pid=900, GPU has fallen off the bus"),
            record("NVRM: Xid (PCI:0000:3b:00): 48, pid=900, DBE", age_s=500.0),
            record("usb 1-1: new device"),
            record("INFO: task kworker/3:1:77 blocked for more than 120 seconds."),
            record("Out of memory: Killed process 77 (another job's)"),
            b"nonsense",
            b"6,1," + b"9" * 5000 + b",-;NVRM: Xid (PCI:0000:3b:00): 79\n",
            record("mlx5_0: \x1b]0;port\x07 1 link down"),
        ):
            file.write(line)
            found += list(look())
    assert [(s.what, s.weight) for s in found] == [
        ("device fault", 0.6),
        ("file system", 0.4),
        ("link fault", 0.5),
    ]
    assert 0.5 < found[0].age_s < 60
    assert all(sign.text.isprintable() for sign in found)


def test_a_log_without_an_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_MOST_RECORDS", 100)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.setblocking(False)
        for number in range(5):
            theirs.send(record(f"line {number}"))
        assert [text for _, text in kernel_log(ours.fileno())] == [f"line {n}" for n in range(5)]
    zero = os.open("/dev/zero", os.O_RDONLY)
    try:
        assert list(kernel_log(zero)) == []
    finally:
        os.close(zero)


def test_a_log_that_may_not_be_read_is_no_source(tmp_path: Path) -> None:
    assert kernel(str(tmp_path / "none")) is None


# --- links ----------------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


PORT = "infiniband/mlx5_0/ports/1"
RECORDED = {
    f"{PORT}/state": "4: ACTIVE",
    f"{PORT}/counters/link_downed": 3,
    f"{PORT}/counters/symbol_error": 40,
    f"{PORT}/hw_counters/packet_seq_err": 0,
    "net/eth2/device/vendor": "0x15b3",
    "net/eth2/operstate": "up",
    "net/eth2/carrier_down_count": 1,
    "net/veth0/carrier_down_count": 5,
}


def test_a_link_that_flaps_or_counts_errors_is_a_sign(tmp_path: Path) -> None:
    look = links(tree(tmp_path, RECORDED))
    assert look is not None
    assert words(look()) == [], "what was before is nothing"
    tree(tmp_path, {f"{PORT}/counters/symbol_error": 49, "net/veth0/carrier_down_count": 6})
    assert words(look()) == [], "rare errors, and a port of no card"
    tree(tmp_path, {f"{PORT}/counters/link_downed": 4, "net/eth2/carrier_down_count": 2})
    assert words(look()) == [("link down", "mlx5_0/1 went down"), ("link down", "eth2 went down")]
    tree(tmp_path, {f"{PORT}/hw_counters/packet_seq_err": 500})
    assert words(look()) == [("link errors", "mlx5_0/1 counts 500 new errors")]
    tree(tmp_path, {f"{PORT}/state": "1: DOWN"})
    assert words(look()) == words(look()) == [("link down", "mlx5_0/1 is down")]
    tree(tmp_path, {f"{PORT}/counters/symbol_error": "x" * 10_000, f"{PORT}/state": "4: ACTIVE"})
    assert words(look()) == []
    assert links(tmp_path / "none") is None


# --- disks and memory -----------------------------------------------------------------------------


def pressed(some: float, full: float) -> str:
    return "\n".join(
        f"{name} avg10={share:.2f} avg60=0.00 avg300=0.00 total=1"
        for name, share in (("some", some), ("full", full))
    )


def test_stalls_and_ends_by_a_limit_are_signs(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    tree(
        proc,
        {
            "pressure/io": pressed(30, 1),
            "pressure/memory": pressed(0, 0),
            "self/cgroup": "1:cpu:/x\n0::/pod/train",
        },
    )
    tree(groups, {"pod/train/memory.events": "low 0\noom 2\noom_kill 2"})
    look = pressure(proc, groups)
    assert words(look()) == []
    tree(proc, {"pressure/io": pressed(91, 40)})
    text = "some tasks waited for io 91 % of the last 10 s, all at once 40 %"
    assert words(look()) == [("io stall", text)]
    tree(proc, {"pressure/io": "full avg10=nan"})
    tree(groups, {"pod/train/memory.events": "oom_kill 3"})
    text = "the kernel ended 1 processes at this group's memory limit"
    assert words(look()) == [("memory limit", text)]
    assert words(look()) == []


@pytest.mark.parametrize(
    ("own", "counts"),
    [
        pytest.param("0::/docker/1f", "memory.events", id="the mount is the container's"),
        pytest.param("0::/job/step", "job/memory.events", id="a group without a controller"),
        pytest.param("4:memory:/job", "memory/job/memory.oom_control", id="version 1"),
    ],
)
def test_ends_by_a_limit_are_counted_where_the_group_is(
    own: str, counts: str, tmp_path: Path
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    tree(proc, {"self/cgroup": own})
    (groups / "job/step").mkdir(parents=True)
    tree(groups, {counts: "oom_kill 2"})
    look = pressure(proc, groups)
    assert words(look()) == []
    tree(groups, {counts: "oom_kill 4"})
    text = "the kernel ended 2 processes at this group's memory limit"
    assert words(look()) == [("memory limit", text)]


# --- the threads ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_EVERY_S", 0.01)


def started(**sources: HealthSource) -> Health:
    made = Health(sources)
    made.start()
    return made


def test_a_source_that_hangs_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "_DEADLINE_S", 0.0)
    forever = threading.Event()

    def hangs() -> tuple[Sign, ...]:
        forever.wait()
        return ()

    found = started(hangs=lambda: hangs, works=lambda: lambda: (SIGN,))
    try:
        until(lambda: bool(found.signs()), "no sign")
        assert [(s.source, s.what) for s in found.signs()] == [("works", "fan")]
        with caplog.at_level(logging.WARNING):
            until(lambda: bool(found.signs()) and "hangs" in caplog.text, "nothing is said")
        told = caplog.text.count("the health source hangs: it has not answered")
        found.signs()
        assert told == caplog.text.count("the health source hangs") == 1
    finally:
        found.close()
        forever.set()


def test_a_source_that_fails_is_told_once_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = itertools.count()

    def look() -> tuple[Sign, ...]:
        if next(asked) < 5:
            raise OSError("no such device")
        return (SIGN,)

    def broken() -> None:
        raise ImportError("libnvidia")

    with caplog.at_level(logging.WARNING):
        found = started(fails=lambda: look, broken=broken)
        until(lambda: bool(found.signs()), "it is not asked again")
    found.close()
    assert caplog.text.count("no such device") == caplog.text.count("libnvidia") == 1


def test_hostile_signs_are_bounded_and_fit_a_report() -> None:
    def floods() -> Iterator[Sign]:
        for number in itertools.count():
            yield Sign(
                what=f"{number}\x1b[2J",
                text="\ud800\n" + "x" * 100_000,
                kinds=("crash",) * 1000,
                weight=1e300,
                age_s=-5.0,
            )

    found = started(**{f"s{k}": lambda: floods for k in range(8)})
    try:
        until(lambda: len(found.signs()) == 64, "fewer signs")
        state = AgentState(signs=found.signs())
    finally:
        found.close()
    sheet = from_views([], job="j", source="a", number=1, agents={"n0": state})
    (agent,) = unpack_report(pack(sheet)).agents
    assert len(agent.signs) == 64
    for sign in agent.signs:
        assert (sign.what + sign.text).isprintable()
        assert len(sign.text) <= 200
        assert sign.weight <= 0.9


def test_nothing_is_asked_while_no_rank_runs() -> None:
    asked: list[int] = []

    def look() -> tuple[Sign, ...]:
        asked.append(1)
        return ()

    found = Health({"one": lambda: look})
    found.awake = False
    found.start()
    time.sleep(0.2)
    assert asked == []
    found.awake = True
    until(lambda: bool(asked), "it is not asked")
    found.close()


def test_a_plugin_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fans.py").write_text(
        "from ckptd.monitor import Sign\n"
        "def fans():\n"
        "    return lambda: [Sign(what='fan', text='1 of 8', kinds=('slow rank',))]\n"
    )
    info = tmp_path / "fans-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fans\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[ckptd.health]\nfans = fans:fans\nbad = nothing:x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = Health()
    found.start()
    try:
        until(lambda: any(s.source == "fans" for s in found.signs()), "the plugin is not asked")
    finally:
        found.close()
