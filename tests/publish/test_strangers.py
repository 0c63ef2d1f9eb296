"""Whoever reaches a server's port: nothing is given, memory is bounded, and others are served."""

from __future__ import annotations

import random
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ckptd.base.net.address import parse_address
from ckptd.base.net.connection import Connection, greet_server
from ckptd.checkpoint.save.arena import Slot
from ckptd.errors import CkptdError, StoreError
from ckptd.publish.client import PublishClient
from ckptd.publish.link import ServerLink
from ckptd.publish.messages import (
    PURPOSE,
    AskNewest,
    AskRead,
    AskTensors,
    BlockRead,
    Newest,
    Opening,
    PublishedTensor,
    ReadBytes,
    ServerEntry,
    SetTensors,
    SlotMemory,
    TensorPlaces,
    VersionSealed,
)
from tests.onpath import ACTS, OnPath

pytestmark = pytest.mark.timeout(120)

SECRET = b"s" * 32
WEIGHTS = b"weights!" * 512
IDLE = 1000
MOST_BYTES = 64 << 20
"""By which a server may grow for a thousand connections."""


class Served:
    """A server of a rank in a process of its own, with one version of one tensor."""

    def __init__(self) -> None:
        opening = Opening("epoch", 0, 1, SECRET, "127.0.0.1", 0, "", 2, 60.0, 1.0)
        self.client = PublishClient(opening, lambda _: None, lambda *_: None)
        self.entry = self.client.ready()
        self.address = parse_address(self.entry.address)
        self.slot = Slot(0, 4096)
        self.slot.begin(1)
        self.slot.put(0, np.frombuffer(WEIGHTS, np.uint8))
        self.slot.seal()
        self.client.send(SetTensors((PublishedTensor("a", "float32", 0, 1024),)))
        self.client.send(SlotMemory(0, 4096), self.slot)
        self.client.send(VersionSealed(1, 0))

    def link(self) -> ServerLink:
        return ServerLink.to(self.entry, SECRET)

    def connect(self) -> socket.socket:
        found = socket.create_connection(self.address, timeout=30.0)
        found.settimeout(30.0)
        return found

    def resident_bytes(self) -> int:
        rows = Path(f"/proc/{self.client.pid}/status").read_text().splitlines()
        return next(1024 * int(r.split()[1]) for r in rows if r.startswith("VmRSS"))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.client.pid}/task").iterdir()))

    def serves(self) -> None:
        """Have a worker get an answer."""
        link = self.link()
        assert link.ask(AskNewest(0, 0.0), Newest).number == 0
        link.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.client.close()
    found.slot.close()


def gives(sock: socket.socket) -> bytes:
    """Return what comes until the other end closes."""
    out = b""
    try:
        while data := sock.recv(4096):
            out += data
    except ConnectionError:
        pass
    return out


def test_a_stranger_gets_nothing(served: Served) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n" * 8, b"\xff" * 64, bytes(24), b"\xff\xff\xff\x7f" * 8):
        with served.connect() as sock:
            sock.sendall(said)
            assert b"epoch" not in gives(sock)
    with pytest.raises(StoreError) as caught:
        ServerLink.to(served.entry, b"x" * 32)
    assert caught.value.kind == "permission"
    # What a worker has sent once is worth nothing in another connection.
    recorded: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: bytes, *args: int) -> None:  # type: ignore[override]
            recorded.append(bytes(data))
            super().sendall(data, *args)

    with Recorded(fileno=served.connect().detach()) as sock:
        connection = Connection(sock, "a server", 30.0)
        greet_server(connection, SECRET, PURPOSE, role="worker", wait_s=30.0)
    with served.connect() as sock:
        sock.sendall(b"".join(recorded))
        said = gives(sock)
    assert len(recorded) == 2
    assert said  # it proves itself first, and gives no more
    assert len(said) < 2000
    with served.connect() as sock:
        sock.sendall(recorded[0][:30])  # half a greeting, and no more
        served.serves()


def test_a_thousand_idle_connections_keep_nobody_out(served: Served) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    served.serves()
    before, threads = served.resident_bytes(), served.threads()
    try:
        with ExitStack() as open_:
            for _ in range(IDLE):
                open_.enter_context(served.connect())
            begun = time.monotonic()
            served.serves()
            assert time.monotonic() - begun < 10.0
            assert served.resident_bytes() - before < MOST_BYTES
            assert served.threads() - threads <= 1  # none of a stranger
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_pulled_is_neither_read_nor_changed_on_the_way(served: Served) -> None:
    dice = random.Random(5)
    between = OnPath(served.address)
    entry = msgspec.structs.replace(served.entry, address=between.address)
    whole = 0
    try:
        for number in range(40):
            if number % 2:
                between.plan = (dice.choice(ACTS), dice.random() < 0.8, dice.randrange(6000))
            wait_s = 0.5 if number % 2 else 30.0
            try:
                link = ServerLink.to(entry, SECRET, wait_s=wait_s, connect_s=wait_s, far=True)
                try:
                    link.ask(AskTensors(("a",)), TensorPlaces)
                    asked = ((BlockRead(0, 0, (1024,), (1,)),), np.empty(4096, np.uint8))
                    (found,) = link.reads(1, [asked])
                    assert found.tobytes() == WEIGHTS
                    whole += 1
                finally:
                    link.close()
            except CkptdError:
                assert number % 2
            between.plan = None
        assert 20 <= whole < 36
        assert between.done > 5
        assert b"weights" not in between.seen
    finally:
        between.close()


BEYOND = [
    BlockRead(0, 0, (1 << 63,), (1,)),
    BlockRead(0, 1 << 63, (1,), (1,)),
    BlockRead(0, 0, (1 << 61, 1 << 61), (0, 0)),
    BlockRead(0, 0, (2, 2), (1 << 61, 1 << 61)),
    BlockRead(0, 0, (1 << 24, 64), (0, 0)),
    BlockRead(0, 0, (-1, 4), (1, 1)),
    BlockRead(7, 0, (1,), (1,)),
    BlockRead(0, 0, (4,), (1,), "no-such-type"),
]


def test_numbers_beyond_the_tensor_are_refused(served: Served) -> None:
    for block in BEYOND:
        link = served.link()
        assert link.ask(AskTensors(("a",)), TensorPlaces).places[0].numel == 1024
        with pytest.raises(CkptdError):
            link.ask(AskRead(1, (block,)), ReadBytes)
        link.close()
    link = served.link()
    link.ask(AskTensors(("a",)), TensorPlaces)
    nothing = BlockRead(0, 0, (0, 1 << 61), (5, 9))
    assert link.ask(AskRead(1, (nothing,)), ReadBytes).digest
    link.close()


def test_an_entry_of_another_publisher_is_not_believed(served: Served) -> None:
    other = msgspec.structs.replace(served.entry, epoch="another")
    assert isinstance(other, ServerEntry)
    with pytest.raises(CkptdError) as caught:
        ServerLink.to(other, SECRET)
    assert caught.value.kind == "link-lost"
