"""The watch over a node: what ranks show arrives at the daemon, whatever happens to them or it."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptd.base.runtime.host import node_name
from ckptd.errors import UsageError
from ckptd.monitor.agent.rings import Rings
from ckptd.monitor.agent.uplink import Uplink
from ckptd.monitor.agent.watched import floors_of
from ckptd.monitor.agent.watcher import Watcher
from ckptd.monitor.job import Phase
from ckptd.monitor.report import AgentOrders, LinkProbe, NodeReport, job_of
from ckptd.monitor.rules.hang import hangs
from ckptd.monitor.rules.limits import HangLimits, Learned
from tests.monitor.agent.daemons import SECRET, Daemon, daemon
from tests.monitor.agent.writers import writers
from tests.processes import PATIENCE_S, stop, until

SHORT = HangLimits(floors=dict.fromkeys(Phase, 1.0), warm_steps=0)


@contextmanager
def watcher(folder: Path, there: Daemon, limits: HangLimits | None = None) -> Iterator[Watcher]:
    uplink = Uplink(there.url, SECRET, timeout_s=60.0)
    watching = Watcher("j", "n", Rings(folder), uplink, SECRET, limits=limits)
    watching.start()
    try:
        yield watching
    finally:
        watching.close()
        uplink.close()


def subtypes(sheet: NodeReport) -> dict[int, str]:
    """Return what the diagnosis says of ranks that stand still, by rank."""
    job = job_of([sheet], [0.0])
    gone = np.zeros(len(job.ranks), bool)
    limits = HangLimits(floors=dict.fromkeys(Phase, 3.0), warm_steps=0)
    return {
        int(suspect.name): suspect.detail
        for verdict in hangs(job, limits, Learned(), gone)
        for suspect in verdict.suspects
        if suspect.name.isdecimal()
    }


def members(there: Daemon) -> dict[int, Any]:
    return {group: info for sheet in there.sheets for group, info in sheet.members.items()}


def test_what_ranks_use_is_told_every_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.monitor.agent.report._USAGE_S", 0.5)
    with daemon() as there, writers(tmp_path, 2), watcher(tmp_path, there):
        until(lambda: sum(bool(s.usage) for s in there.sheets) >= 3, "three looks")
        told = [s.table("usage") for s in there.sheets if s.usage]
        assert all(0 <= cpu < 64 for cpu in told[-1]["cpu"])
        assert len(told) < len(there.sheets)


def test_ranks_are_told(tmp_path: Path) -> None:
    with daemon() as there, writers(tmp_path, 3) as ranks, watcher(tmp_path, there):
        until(lambda: len(there.rows()) == 3, "three ranks")
        until(lambda: any(len(s.table("steps")) for s in there.sheets), "steps")
        until(lambda: any(len(s.table("gaps")) for s in there.sheets), "pauses")
        until(lambda: any(len(s.usage) for s in there.sheets), "what ranks use")
        (used,) = [s.table("usage") for s in there.sheets if len(s.usage)][:1]
        rows = there.rows()
        assert used["row"].tolist() == [0, 1, 2]
        assert (used["memory"] > 1 << 20).all()
        assert (used["threads"] >= 1).all()
        assert np.isnan(used["cpu"]).all()  # at the first look nobody knows
        assert [rows[r]["pid"] for r in range(3)] == [rank.pid for rank in ranks]
        assert all(row["alive"] and row["world"] == 3 for row in rows.values())
        assert all(row["heartbeat"] < 60 and row["lived"] < 600 for row in rows.values())
        info = members(there)[7]
        assert (info.name, info.kind, list(info.ranks())) == ("world", "dp", [0, 1, 2])
        texts = {t for sheet in there.sheets for t in sheet.texts.values()}
        assert {"all_reduce", "train.py:1"} <= texts
        told = [len(sheet.members) for sheet in there.sheets]
        assert sum(told) == 1
        there.orders.append(AgentOrders(tell=True))
        until(lambda: sum(len(s.members) for s in there.sheets) == 2, "told again")
        numbers = [sheet.number for sheet in there.sheets]
        assert numbers == sorted(set(numbers))
        assert there.sheets[-1].agents[0].rings == 3


def test_an_end_is_told_with_its_code(tmp_path: Path) -> None:
    with daemon() as there, writers(tmp_path, 3) as ranks, watcher(tmp_path, there):
        until(lambda: len(there.rows()) == 3, "three ranks")
        os.kill(ranks[1].pid, signal.SIGSEGV)
        ranks[2].say("exit 3")
        until(lambda: not there.rows()[1]["alive"], "a death")
        until(lambda: not there.rows()[2]["alive"], "an end")
        rows = there.rows()
        assert (rows[1]["exit_code"], rows[2]["exit_code"]) == (-signal.SIGSEGV, 3)
        assert rows[0]["alive"]


def test_a_death_is_told_out_of_turn(tmp_path: Path) -> None:
    with daemon() as there, writers(tmp_path, 2) as ranks, watcher(tmp_path, there):
        until(lambda: len(there.rows()) == 2, "two ranks")
        there.orders = [AgentOrders(period_s=50.0) for _ in range(1000)]
        until(lambda: len(there.orders) < 1000, "a long period")
        os.kill(ranks[1].pid, signal.SIGKILL)
        until(lambda: not there.rows()[1]["alive"], "a death")


def test_stopped_held_sleeping_and_waiting_are_told_apart(tmp_path: Path) -> None:
    with daemon() as there, writers(tmp_path, 5) as ranks, watcher(tmp_path, there, SHORT):
        until(lambda: len(there.rows()) == 5, "five ranks")
        ranks[4].more(30000)  # so that it waits for all others
        ranks[0].say("stop")
        ranks[1].say("gil")
        ranks[2].say("hold")
        ranks[3].say("spin")
        ranks[4].say("wait")
        wanted = {
            0: "stopped by a signal or a debugger",
            1: "the GIL is held, or the interpreter is frozen",
            2: "Python runs: it computes, sleeps or spins",
            3: "Python runs: it computes, reads or writes",
        }

        def told() -> dict[str, Any] | None:
            """Return what one and the same sheet says of the rank that waits."""
            sheet = there.sheets[-1]
            row = {int(r["rank"]): r for r in sheet.table("ranks")}.get(4)
            # On a busy machine a heart is late now and then: then it was asked, in that sheet.
            at_ease = row is not None and row["answers"] == -1
            return row if at_ease and subtypes(sheet) == wanted else None

        row = until(told, f"{wanted}")
        assert row is not None
        assert row["pending_group"] == 7
        assert row["pending_age"] > 0


def stacks(there: Daemon) -> dict[int, str]:
    texts = {rank: s.text for found in there.found for rank, s in found.stacks.items()}
    if any("forbids it" in text for text in texts.values()):
        pytest.skip("STACKS OF PYTHON ARE NOT TESTED: the kernel forbids py-spy here")
    return texts


def test_stacks_are_taken_when_asked(tmp_path: Path) -> None:
    with daemon() as there, writers(tmp_path, 2) as ranks, watcher(tmp_path, there):
        until(lambda: len(there.rows()) == 2, "two ranks")
        stop(ranks[0].pid)
        there.orders.append(AgentOrders(stacks=(0, 1, 77)))
        until(lambda: set(stacks(there)) == {0, 1}, "stacks")
        assert "<module>" in stacks(there)[0]


def test_stacks_of_a_stuck_rank_outlive_it(tmp_path: Path) -> None:
    with daemon() as there, writers(tmp_path, 2) as ranks, watcher(tmp_path, there, SHORT) as on:
        until(lambda: len(there.rows()) == 2, "two ranks")
        ranks[0].say("hold")
        until(lambda: 0 in on._evidence._kept, "stacks kept early")
        os.kill(ranks[0].pid, signal.SIGKILL)
        until(lambda: not there.rows()[0]["alive"], "its death")
        there.orders.append(AgentOrders(stacks=(0,)))
        until(lambda: stacks(there), "stacks")
        assert "as it had not moved for" in stacks(there)[0]
        assert "<module>" in stacks(there)[0]


def test_stacks_of_the_others_are_taken_at_the_first_death(tmp_path: Path) -> None:
    with daemon() as there, writers(tmp_path, 3) as ranks, watcher(tmp_path, there) as on:
        until(lambda: len(there.rows()) == 3, "three ranks")
        os.kill(ranks[1].pid, signal.SIGKILL)
        until(lambda: set(on._evidence._kept) == {0, 2}, "stacks of the others")
        for rank in (0, 2):
            os.kill(ranks[rank].pid, signal.SIGTERM)
        until(lambda: not any(r["alive"] for r in there.rows().values()), "all ended")
        there.orders.append(AgentOrders(stacks=(0, 1, 2)))
        until(lambda: set(stacks(there)) == {0, 1, 2}, "stacks")
        assert "rank 1 had just ended" in stacks(there)[2]
        assert "no stack was kept" in stacks(there)[1]


def test_many_calls_when_asked(tmp_path: Path) -> None:
    with daemon() as there, writers(tmp_path, 1, rate=0.0) as ranks, watcher(tmp_path, there):
        ranks[0].more(600)
        until(lambda: there.sheets and len(there.sheets[-1].table("calls")) == 64, "stuck")
        there.orders.append(AgentOrders(calls=(0,)))
        until(lambda: any(len(s.table("calls")) == 512 for s in there.sheets), "many")


def test_links_are_probed_when_asked(tmp_path: Path) -> None:
    with daemon() as there, watcher(tmp_path, there):
        probes = [
            LinkProbe(nonce=n, from_node=node, to_node="b", address="127.0.0.1:1")
            for n, node in ((4, "n"), (5, "another"))
        ]
        there.orders.append(AgentOrders(probes=tuple(probes)))
        until(lambda: there.found, "a result")
        results = [result for found in there.found for result in found.probes]
        assert [(r.nonce, r.src, r.dst) for r in results] == [(4, "n", "b")]
        assert results[0].error


def test_damaged_rings_do_not_spoil_the_sheet(tmp_path: Path) -> None:
    """The daemon of the tests checks every sheet as the real one does."""
    dice = random.Random(7)
    with daemon() as there, writers(tmp_path, 3) as ranks, watcher(tmp_path, there):
        until(lambda: len(there.rows()) == 3, "three ranks")
        size = ranks[1].path.stat().st_size
        for _ in range(12):
            with open(ranks[1].path, "r+b") as file:
                for _ in range(200):
                    file.seek(256 + dice.randrange(size - 300))
                    file.write(dice.randbytes(dice.choice((1, 8, 40))))
            seen = len(there.sheets)
            until(lambda: len(there.sheets) > seen, "another sheet")  # noqa: B023
            assert {0, 2} <= set(there.rows())
        with open(ranks[1].path, "r+b") as file:
            file.truncate(10)
        until(lambda: set(there.rows()) == {0, 2}, "let go")
        assert there.sheets[-1].agents[0].bad_rings == 1


def nothing(handler: Any) -> bool:
    """Hang up instead of answering."""
    handler.close_connection = True
    return True


def test_a_daemon_that_is_away_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with writers(tmp_path, 1) as ranks, daemon() as first:
        with watcher(tmp_path, first) as on, caplog.at_level(logging.WARNING, "ckptd.monitor"):
            until(lambda: first.rows(), "a rank")
            first.garbage = nothing
            until(lambda: on._uplink.away, "noticed")
            os.kill(ranks[0].pid, signal.SIGKILL)
            first.garbage = None
            until(lambda: not first.rows()[0]["alive"], "what happened meanwhile")
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot reach the daemon" in text for text in said) == 1


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    with daemon() as there, watcher(folder, there):
        with writers(folder, 1) as ranks:
            until(lambda: there.rows(), "a rank")
            ranks[0].path.unlink()
            folder.rmdir()
            seen = len(there.sheets)
            until(lambda: len(there.sheets) > seen + 2, "sheets")
            assert there.rows()[0]["alive"]
        with writers(folder, 2):
            until(lambda: set(there.rows()) == {0, 1}, "a new folder")


def test_nothing_is_left(tmp_path: Path) -> None:
    before = opened()
    with daemon() as there, writers(tmp_path, 2), watcher(tmp_path, there):
        until(lambda: len(there.rows()) == 2, "ranks")
    assert not opened() - before  # what others left may be closed meanwhile


def opened() -> Counter[str]:
    """Return what this process has open: files, pipes and sockets by number."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder itself
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found


def test_the_last_sheet_is_told_though_another_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon() as there, writers(tmp_path, 2) as ranks, watcher(tmp_path, there):
        until(lambda: len(there.rows()) == 2, "ranks")
        monkeypatch.setattr(Uplink, "ready", False)
        for rank in ranks:
            rank.say("exit 0")
            rank.process.wait(PATIENCE_S)
    assert [int(row["alive"]) for row in there.rows().values()] == [0, 0]


def test_floors() -> None:
    assert floors_of({"train": 5.0}).floors[Phase.TRAIN] == 5.0
    assert floors_of(None).floors == HangLimits().floors
    for words in ({"lunch": 5.0}, {"train": 0.0}, {"train": float("nan")}):
        with pytest.raises(UsageError) as info:
            floors_of(words)
        assert "invalid --floor" in info.value.message


def test_names_of_nodes() -> None:
    assert node_name("a") == "a"
    long, other = node_name("x" * 100), node_name("x" * 101)
    assert long != other
    assert max(map(len, (long, other))) <= 64


def test_a_watcher_looks_rarely_while_no_rank_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first rank, and in an agent that outlives its job."""
    monkeypatch.setattr("ckptd.monitor.agent.watcher._IDLE_POLL_S", 0.123)
    pauses: list[float] = []

    class Poll:
        def __init__(self, real: Any) -> None:
            self.register, self.unregister, self._poll = real.register, real.unregister, real.poll

        def poll(self, pause_ms: float) -> Any:
            pauses.append(pause_ms)
            return self._poll(pause_ms)

    with daemon() as there, watcher(tmp_path, there) as watching:
        watching._poll = Poll(watching._poll)  # type: ignore[assignment]
        until(lambda: 123.0 in pauses, "no rank")
        with writers(tmp_path, 1):
            until(lambda: 50.0 in pauses, "a rank")
        pauses.clear()
        until(lambda: pauses[-3:] == [123.0] * 3, "its end")
