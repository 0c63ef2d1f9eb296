"""Finding an agent: private folders, one at a time, and nobody connects to one that leaves."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from ckptd.base.runtime.agentlink import AgentPlace, connect_agent, listen, locked, peer_of, reach
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.save.client import AgentSpec, WriterClient
from ckptd.errors import CkptdError, DeadlineError, ProcessError, RefusedError, StoreError
from ckptd.store import StoreSpec
from tests.processes import agents_in, lives, until


def run_folder() -> Path:
    return Path(os.environ["CKPTD_RUN_DIR"])


def test_sockets_lie_in_a_folder_of_ones_own() -> None:
    place = AgentPlace("job", "node")
    assert place.socket.parent == run_folder()
    assert stat.S_IMODE(run_folder().stat().st_mode) == 0o700
    again = AgentPlace("job", "node")
    assert again.socket == place.socket
    assert len({place.socket, AgentPlace("jo", "bnode").socket, AgentPlace("job", "n").socket}) == 3


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_may_enter_is_refused(mode: int) -> None:
    run_folder().mkdir()
    run_folder().chmod(mode)
    with pytest.raises(RefusedError) as caught:
        AgentPlace("job", "node")
    assert "the folder for sockets is accessible to others" in caught.value.message


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    run_folder().symlink_to(tmp_path / "real")
    with pytest.raises(RefusedError):
        AgentPlace("job", "node")


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_where_the_folder_should_be_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "file" / below))
    with pytest.raises(StoreError) as caught:
        AgentPlace("job", "node")
    assert caught.value.where == str(tmp_path / "file" / below)
    assert "CKPTD_RUN_DIR" in (caught.value.hint or "")


def test_a_path_that_is_too_long_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ProcessError) as caught:
        AgentPlace("job", "node", str(tmp_path / ("x" * 100)))
    assert "CKPTD_RUN_DIR" in (caught.value.hint or "")


def test_who_comes_second_waits_for_the_lock() -> None:
    place = AgentPlace("job", "node")
    with locked(place):
        with pytest.raises(DeadlineError) as caught, locked(place, 0.05):
            pass
    assert "another process holds the agent's lock" in caught.value.message
    with locked(place, 0.05):
        pass


def test_nobody_listens_where_nobody_ever_did_or_no_longer_does() -> None:
    place = AgentPlace("job", "node")
    assert reach(place.socket) is None
    with locked(place), listen(place) as listener:
        sock = reach(place.socket)
        assert sock is not None
        with sock:
            other, _ = listener.accept()
            with other:
                assert peer_of(other) == (os.getpid(), os.geteuid())
    assert place.socket.exists()
    assert reach(place.socket) is None


def test_a_place_that_cannot_be_bound_is_told() -> None:
    place = AgentPlace("job", "node")
    place.socket.mkdir()
    with pytest.raises(ProcessError, match="cannot create its socket"):
        listen(place)


def test_whoever_comes_at_once_meets_one_agent() -> None:
    place = AgentPlace("job", "node")
    found = []

    def come() -> None:
        with connect_agent(place) as sock:
            found.append(peer_of(sock)[0])

    threads = [threading.Thread(target=come) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    (agent,) = agents_in(run_folder())
    os.kill(agent, 15)
    until(lambda: not lives(agent))


def test_an_agent_that_ended_is_no_zombie(tmp_path: Path) -> None:
    client = WriterClient(
        StoreSpec(str(tmp_path)),
        LocalBoard(),
        agent=AgentSpec(AgentPlace(str(tmp_path), "node")),
    )
    pid = client.answer().pid
    client.close(60.0)
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_where_no_agent_can_be_started_saves_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.checkpoint.save.client.START_S", 0.5)
    monkeypatch.setattr("sys.executable", "/bin/false")
    place = AgentPlace(str(tmp_path), "node")
    client = WriterClient(StoreSpec(str(tmp_path)), LocalBoard(), agent=AgentSpec(place))
    with pytest.raises(CkptdError):
        client.acquire(1, 60.0)
    client.close(1.0)
