"""``ckptd serve`` and ``ckptd incidents``: real processes, found without flags."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.base.net.signing import access_token, derived_key
from ckptd.errors import UsageError
from ckptd.monitor.cli import serve as verb
from ckptd.monitor.daemon.access import Shown
from ckptd.monitor.daemon.client import DaemonClient
from ckptd.monitor.daemon.place import DaemonPlace, daemons
from tests.cli.running import COMMAND, Cli
from tests.processes import PATIENCE_S, until

QUICK = ("--set", "floor.train=1", "--set", "floor.init=1", "--set", "settle_s=0")


@pytest.fixture(autouse=True)
def _run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a daemon that is killed leaves its folder
    for name in ("CKPTD_JOB", "CKPTD_SECRET"):
        monkeypatch.delenv(name, raising=False)


class Process:
    """``ckptd serve --json`` as a process."""

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "serve", "--json", *options], stdout=subprocess.PIPE, text=True
        )
        text = ""
        while not text.rstrip().endswith("}"):
            line = self._process.stdout.readline() if self._process.stdout else ""
            assert line, "it ended without a document"
            text += line
        self.document: dict[str, Any] = json.loads(text)

    @property
    def client(self) -> DaemonClient:
        return DaemonClient(self.document["login"])

    def end(self, number: int = signal.SIGTERM) -> int:
        """Return the exit code after a signal."""
        self._process.send_signal(number)
        code = self._process.wait(PATIENCE_S)
        if self._process.stdout:
            self._process.stdout.close()
        return code


@pytest.fixture
def serve() -> Iterator[Any]:
    started: list[Process] = []

    def start(*options: str) -> Process:
        started.append(Process(*options))
        return started[-1]

    yield start
    for process in started:
        if process._process.poll() is None:
            process.end(signal.SIGKILL)


def test_no_incident_is_lost_when_the_daemon_is_killed(
    serve: Any, cli: Cli, tmp_path: Path
) -> None:
    first = serve("--job", "j", "--simulate", "8", "--fault", "crash:5@1", *QUICK)
    opened = until(lambda: first.client.get("/incidents")["incidents"])
    assert DaemonPlace("j").address.stat().st_mode & 0o777 == 0o600

    found = cli.good("incidents", "--json").document
    assert found["source"] == first.document["url"]
    assert found["incidents"][0]["id"] == "j-1"
    assert "rank 5" in cli.good("incidents", "--job", "j").out
    shown = cli.good("incidents", "j-1", "--ack", "looked\x1b[2J at").out
    assert "suspect: rank 5" in shown
    assert "looked" in shown
    assert "\x1b" not in shown
    second = cli("serve", "--job", "j", "--json")
    assert (second.code, second.error["message"]) == (
        5,
        "a daemon of this job runs on this machine already",
    )
    assert "unknown incident" in cli("incidents", "none", "--json").error["message"]

    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    assert daemons() == []
    assert "no daemon runs here" in cli("incidents", "--json").error["message"]
    history = first.document["history"]
    left = cli.good("incidents", "--history", history, "--json").document["incidents"]
    assert [i["id"] for i in left] == [i["id"] for i in opened]
    assert "suspect: rank 5" in cli.good("incidents", "j-1", "--history", history).out

    again = serve("--job", "j")
    (kept,) = again.client.get("/incidents")["incidents"]
    assert (kept["id"], kept["note"]) == ("j-1", "looked\x1b[2J at")
    assert again.end() == 0
    assert not DaemonPlace("j").address.exists()


def test_following_outlives_the_daemon(serve: Any, tmp_path: Path) -> None:
    options = ("--job", "j", "--simulate", "8", "--fault", "crash:5@1", *QUICK)
    first = serve(*options)
    with subprocess.Popen(
        [*COMMAND, "incidents", "--follow", "--job", "j"], stdout=subprocess.PIPE, text=True
    ) as follower:
        assert follower.stdout is not None
        try:
            assert "j-1  crash: rank 5" in follower.stdout.readline()
            assert first.end(signal.SIGKILL) == -signal.SIGKILL
            (tmp_path / "run" / Path(first.document["history"]).name).unlink()
            serve("--job", "j", "--simulate", "8", "--fault", "crash:6@1", *QUICK)
            while "rank 6" not in follower.stdout.readline():
                assert follower.poll() is None
        finally:
            follower.kill()


def test_forwarder_and_lingering(serve: Any) -> None:
    root = serve("--job", "j", "--linger", "0.5")
    below = serve("--job", "j", "--forward-to", root.document["url"])
    assert below.document["forwards_to"] == root.document["url"]
    assert below.document["login"] is None
    assert below.end() == 0
    simulated = serve("--job", "k", "--simulate", "4")
    until(lambda: simulated.client.get("/job")["world"] == 4)
    assert simulated.end(signal.SIGINT) == 0
    assert root._process.poll() is None  # no rank has reported yet, so there is nothing to end


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--bind", "0.0.0.0"), "without a secret"),
        (("--fault", "hang:1"), "--fault needs --simulate"),
        (("--simulate", "0"), "no job of that size"),
        (("--simulate", "8", "--fault", "hang"), "not a fault"),
        (("--set", "none=1"), "invalid setting"),
        (("--floor", "train=x"), "invalid setting"),
        (("--webhook", "ftp://x"), "invalid URL of a service for incidents"),
        (("--forward-to", "nowhere"), "invalid URL of the daemon"),
        (("--bind", "192.0.2.1"), "without a secret"),
    ],
)
def test_what_is_refused(cli: Cli, options: tuple[str, ...], words: str) -> None:
    assert words in cli("serve", "--json", *options).error["message"]


def test_address_that_cannot_be_had(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_SECRET", "some random text")
    assert cli("serve", "--bind", "192.0.2.1", "--json").error["kind"] == "listen"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--state", "lost"), "invalid --state"),
        (("--ack", "x", "--daemon", "http://127.0.0.1:1"), "--ack needs the id of an incident"),
        (("--daemon", "x"), "invalid URL of the daemon"),
        (("--daemon", "http://127.0.0.1:1"), "the daemon does not answer"),
        (("--history", "none"), "the history file does not exist"),
        (("--history", "x", "--follow"), "--history reads a file"),
    ],
)
def test_incidents_that_cannot_be_asked_for(cli: Cli, options: tuple[str, ...], words: str) -> None:
    assert words in cli("incidents", "--json", *options).error["message"]


def test_what_was_left_by_one_that_was_killed_is_nobody(tmp_path: Path) -> None:
    place = DaemonPlace("j")
    place.address.write_text('{"job": "j"}')
    assert place.read() is None
    place.lock.write_text("")
    assert place.read() is None
    assert daemons() == []
    assert os.path.exists(place.address)


def test_the_key_of_a_webhook_opens_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = b"0123456789abcdef0123456789abcdef"
    monkeypatch.delenv(verb.HOOK_VARIABLE, raising=False)
    key = verb._webhook_key(secret)
    assert key == derived_key(secret, "webhook").hex().encode()  # as the API's page says
    access = verb._access(secret, "127.0.0.1", (), False)
    assert access.of_token(access_token(secret)) == Shown("token", True)
    assert access.of_token(access_token(key)) is None
    monkeypatch.setenv(verb.HOOK_VARIABLE, "a key of the hook's own")
    assert verb._webhook_key(secret) == b"a key of the hook's own"
    monkeypatch.setenv(verb.HOOK_VARIABLE, "short")
    with pytest.raises(UsageError) as caught:
        verb._webhook_key(secret)
    assert caught.value.where == verb.HOOK_VARIABLE
