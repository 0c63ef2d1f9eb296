"""A real daemon on the loopback address, in a thread of the test's process."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ckptd.base.net.address import listen_at
from ckptd.base.net.signing import access_token, sign_request
from ckptd.monitor.daemon.access import Access
from ckptd.monitor.daemon.app import make_app
from ckptd.monitor.daemon.client import DaemonClient
from ckptd.monitor.daemon.server import Serving, url_of
from ckptd.monitor.daemon.service import DaemonSetup, Service
from ckptd.monitor.job import Phase
from ckptd.monitor.rules.limits import HangLimits
from ckptd.monitor.settings import WatchSettings
from ckptd_simulated.feed import Feeder, PlantedAt, Simulation, mesh_for
from tests.processes import PATIENCE_S, until

JOB = "job"
SECRET = b"secret of the tests, long enough"


def quick_settings() -> WatchSettings:
    """Return settings with which what stands still is told after a second."""
    floors = dict.fromkeys(Phase, 1.0)
    limits = replace(HangLimits(), floors=floors, warm_steps=0)
    return WatchSettings(period_s=0.1, settle_s=0.0, limits=limits)


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def kind(self) -> str:
        """Kind of the error that was told."""
        return str(self.document["error"]["kind"])

    @property
    def message(self) -> str:
        """Message of the error that was told."""
        return str(self.document["error"]["message"])


@dataclass
class Running:
    """A daemon that runs."""

    service: Service
    url: str
    token: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def client(self) -> DaemonClient:
        return DaemonClient(self.url, self.token)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        token: bool = True,
    ) -> Answer:
        """Return the answer to one request."""
        given = {"Authorization": f"Bearer {self.token}"} if token else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, {**given, **(headers or {})})
            got = connection.getresponse()
            return Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
        finally:
            connection.close()

    def post(self, kind: str, body: bytes, secret: bytes = SECRET, **headers: str) -> Answer:
        """Return the answer to a signed message."""
        path = {"sheet": "/api/v1/sheets", "found": "/api/v1/found"}[kind]
        mac = sign_request(secret, "POST", path, self.service.ingest.challenge, body)
        return self.ask("POST", path, body, {"Ckptd-Mac": mac, **headers}, token=False)


@contextmanager
def running(
    history: Path,
    *,
    settings: WatchSettings | None = None,
    access: Access | None = None,
    port: int = 0,
    **setup: Any,
) -> Iterator[Running]:
    """Run a daemon while the block runs."""
    given = DaemonSetup(
        job=JOB, secret=SECRET, history=history, settings=settings or quick_settings(), **setup
    )
    token = access_token(SECRET)
    with listen_at("127.0.0.1", port, "the daemon") as sock:
        service = Service(given)
        serving = Serving(
            make_app(service, access or Access(token=token)),
            sock,
            started=service.start,
            ending=service.hub.close,
        )
        thread = threading.Thread(target=serving.run, args=(False,), name="serving")
        thread.start()
        try:
            yield Running(service, url_of(sock), token)
        finally:
            serving.stop()
            thread.join(PATIENCE_S)
            service.close()
    assert not thread.is_alive()


@contextmanager
def fed(daemon: Running, ranks: int, *faults: PlantedAt) -> Iterator[Simulation]:
    """Feed a daemon with a simulated job while the block runs."""
    simulation = Simulation(JOB, mesh_for(ranks), faults)
    feeder = Feeder(simulation, daemon.service.ingest.hand_in)
    try:
        until(lambda: len(daemon.service.rounds.last.job.ranks) == ranks, "nobody reports")
        yield simulation
    finally:
        feeder.close()
        assert not feeder.failed


def sheets(ranks: int = 4, job: str = JOB) -> list[bytes]:
    """Return a packed sheet of each node."""
    return [body for _, body in Simulation(job, mesh_for(ranks)).sheets(0.0)]
