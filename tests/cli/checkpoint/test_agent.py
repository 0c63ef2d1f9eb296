"""``ckptd agent``: found by trainers, outlives them, tells what it holds, ends when asked."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.agents import Place, make_place
from tests.cli.running import Cli, process
from tests.processes import PATIENCE_S, until, wait_for_end

pytestmark = pytest.mark.forks("small", "all")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with make_place(tmp_path) as place:
        monkeypatch.setenv("CKPTD_RUN_DIR", str(place.run))
        for name in ("CKPTD_JOB", "CKPTD_NODE"):
            monkeypatch.delenv(name, raising=False)
        yield place


def test_nobody_is_there(cli: Cli, place: Place) -> None:
    assert "no agent answers" in cli.good("agent", "status").out
    assert cli.json("agent", "ls")["agents"] == []
    for verb in ("status", "stop"):
        result = cli("agent", verb, place.root, "--json")
        assert (result.code, result.error["message"]) == (
            4,
            "no agent of this job runs on this node",
        )
        assert cli("agent", verb, "--job", "x").code == 4
    assert cli("agent", "stop").code == cli("agent", "run").code == 2


def test_one_that_outlives_its_trainer(cli: Cli, place: Place) -> None:
    agent, said = place.agent(place.root, "--stay", "--metrics-port", "0")
    (one,) = cli.json("agent", "status")["agents"]
    assert (one["pid"], one["ranks"], one["snapshots"]) == (agent.pid, [], [])
    assert cli.json("agent", "ls")["agents"][0]["pid"] == agent.pid
    assert one["ends_in_s"] is None
    second = cli("agent", "run", place.root, "--json")
    assert (second.code, second.error["message"]) == (
        5,
        "an agent of this job runs on this node already",
    )

    trainer = place.trainer()
    assert trainer.hear()[:3] == ["start", "9", "9.0"]
    assert {trainer.save(step) for step in (10, 12, 13)} == {agent.pid}
    # The trainer knows first that a snapshot is complete, and then tells the agent.
    until(lambda: place.statuses()[0].snapshots[-1].complete, "that the snapshot is complete")
    (one,) = cli.json("agent", "status", place.root)["agents"]
    assert (one["pid"], one["ranks"], one["ends_in_s"]) == (agent.pid, [0], None)
    assert one["folder"] == place.near
    newest = one["snapshots"][-1]
    assert (newest["step"], newest["generation"], newest["ranks"]) == (13, 1, [0])
    assert (newest["whole"], newest["world"], newest["complete"]) == (True, 1, ["memory"])
    assert newest["bytes"] > 4000
    out = cli.good("agent", "status").out
    assert f"process {agent.pid}, trainers 0, waits for them" in out
    assert "memory" in out
    text = urllib.request.urlopen(said["metrics"], timeout=PATIENCE_S).read().decode()
    assert 'ckptd_save_seconds_count{phase="digest"' in text

    trainer.die()
    until(lambda: not place.statuses()[0].ranks, "the trainer's end")
    (one,) = place.statuses()
    assert one.pid == agent.pid
    assert [s.step for s in one.snapshots if s.whole][-1] == 13

    again = place.trainer()
    assert again.hear()[:3] == ["start", "13", "13.0"]
    again.end()
    assert agent.poll() is None
    asked = cli.json("agent", "stop", place.root)
    assert (asked["agent"]["pid"], asked["now"]) == (agent.pid, False)
    assert agent.wait(PATIENCE_S) == 0
    assert place.statuses() == []


def test_it_ends_when_its_trainer_has_ended_or_at_once(cli: Cli, place: Place) -> None:
    trainer = place.trainer("")
    trainer.hear()
    first = trainer.save(10)
    assert "ends when its 1 trainers have ended" in cli.good("agent", "stop", place.root).out
    assert trainer.save(11) == first
    (one,) = place.statuses()
    assert one.ending
    assert one.ranks == (0,)
    assert f"process {first} ends" in cli.good("agent", "stop", place.root, "--now").out
    wait_for_end(first)
    # What was in memory only is at the root, and the trainer goes on with another agent.
    assert cli.json("ls", place.root)["newest"] == 11
    second = until(lambda: _saves_elsewhere(trainer, first), "another agent")
    assert [s.pid for s in place.statuses()] == [second]
    trainer.end()
    wait_for_end(second)


def _saves_elsewhere(trainer: object, first: int) -> int:
    from tests.cli.agents import Trainer

    assert isinstance(trainer, Trainer)
    pid = trainer.save(12)
    return 0 if pid == first else pid


def test_signals_end_it(place: Place) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        agent, _ = place.agent("--job", "j", "--node", "n", "--stay")
        os.kill(agent.pid, number)
        assert agent.wait(PATIENCE_S) == 0
        assert place.statuses() == []


def test_a_second_signal_leaves_the_trainers(place: Place) -> None:
    agent, _ = place.agent(place.root, "--stay")
    trainer = place.trainer("")
    trainer.hear()
    assert trainer.save(10) == agent.pid
    os.kill(agent.pid, signal.SIGTERM)
    until(lambda: place.statuses()[0].ending, "the first signal")
    assert agent.poll() is None
    os.kill(agent.pid, signal.SIGTERM)
    assert agent.wait(PATIENCE_S) == 0


def test_a_visitor_does_not_make_it_end(cli: Cli, place: Place) -> None:
    agent, _ = place.agent("--job", "j")
    for _ in range(3):
        (one,) = cli.json("agent", "status", "--job", "j")["agents"]
        assert one["ends_in_s"] > 0.0
    assert agent.poll() is None


def test_metrics_cannot_be_served(place: Place) -> None:
    taken, said = place.agent("--job", "a", "--stay", "--metrics-port", "0")
    port = said["metrics"].rpartition(":")[2].partition("/")[0]
    result = process("agent", "run", "--job", "b", "--metrics-port", port, "--json", env=place.env)
    assert (result.code, result.error["kind"]) == (1, "listen")
    env = place.env | {"CKPTD_AGENT_METRICS": "9400"}
    result = process("agent", "run", "--job", "b", "--json", env=env)
    assert (result.code, result.error["message"]) == (2, "not an address")
    assert taken.poll() is None
