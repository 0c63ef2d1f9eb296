"""Whatever arrives at a server, it goes on serving the others."""

from __future__ import annotations

import os
import random
import resource
import secrets
import socket
import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from ckptd.base.net.address import Address, parse_server
from ckptd.base.net.connection import (
    HELLO,
    VERSION,
    Admitted,
    Connection,
    Hello,
    Refusal,
    greet_server,
)
from ckptd.base.net.roles import Role
from ckptd.base.net.tls import TlsSession, identity
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CkptdError, NotFoundError, StoreError, TransientStoreError, UsageError
from ckptd.store.base import Store, StoreSpec
from ckptd.store.memory import MemoryStore
from ckptd.store.net import Limits, StoreServer, messages, new_secret
from ckptd.store.net.messages import Complete, ObjectPiece
from tests.processes import PATIENCE_S, until
from tests.store.netserver import ServerProcess, server_process

HEAD = struct.Struct("<II")
RECORD = struct.Struct(">BHH")
ANSWER = msgpack_decoder(messages.Answer)
LIMITS = Limits(greeting_s=60.0)


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture
def server(memory: MemoryStore) -> Iterator[StoreServer]:
    with StoreServer(memory, secret=new_secret(), limits=LIMITS) as server:
        yield server


def dial(url: str) -> socket.socket:
    address = parse_server(url)
    assert isinstance(address, Address)
    return socket.create_connection(address, timeout=30)


def knock(sock: socket.socket) -> bool:
    """Begin a handshake; return whether the server answers, and so holds this connection."""
    session = TlsSession(None, server=False, where="server")
    session.shake()
    sock.sendall(session.to_send())
    return bool(sock.recv(1))


def friend(spec: StoreSpec, role: Role = "rank") -> tuple[Connection, socket.socket]:
    """A client that knows the secret, and then does what it likes."""
    sock = dial(spec.url)
    wire = Connection(sock, "server", 30.0)
    try:
        secret = bytes.fromhex(spec.options["secret"])
        greet_server(wire, secret, messages.PURPOSE, role=role, wait_s=30.0)
    except BaseException:
        wire.release()
        raise
    return wire, sock


def patient(spec: StoreSpec, retry_s: float = 60.0) -> StoreSpec:
    """The same store, for a machine that is busy with other tests."""
    return StoreSpec(spec.url, spec.options | {"retry_s": retry_s, "connect_s": 60.0})


def until_closed(sock: socket.socket) -> bytes:
    """What the server says before it ends the connection."""
    sock.setblocking(True)
    sock.settimeout(60)
    said = b""
    try:
        while data := sock.recv(1 << 16):
            said += data
    except ConnectionError:
        pass
    return said


def still_serves(store: Store) -> bool:
    key = uuid.uuid4().hex
    store.put(key, b"fine")
    return store.get(key) == b"fine"


# --- strangers ------------------------------------------------------------------------------------


def strange_bytes(dice: random.Random) -> bytes:
    lengths = [0, 1, 24, 1 << 10, 1 << 20, 1 << 31, (1 << 32) - 1]
    body = dice.choice(
        [
            dice.randbytes(dice.randrange(200)),
            msgspec.msgpack.encode(Hello(VERSION, messages.PURPOSE)),
            msgspec.msgpack.encode(messages.Get("a")),
        ]
    )
    honest = HEAD.pack(len(body), 0) + body
    hello = TlsSession(None, server=False, where="server")
    hello.shake()
    greeting = hello.to_send()
    return dice.choice(
        [
            dice.randbytes(dice.randrange(1, 3000)),
            HEAD.pack(dice.choice(lengths), dice.choice(lengths)) + body,
            RECORD.pack(22, 0x0301, dice.choice(lengths) % 65536) + body,
            greeting[: dice.randrange(1, len(greeting) + 1)],
            greeting + honest,
            honest,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        ]
    )


def harass(spec: StoreSpec, rounds: int, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(rounds):
        # The server may hang up at any byte.
        with dial(spec.url) as sock, suppress(OSError):
            sock.sendall(strange_bytes(dice))
            if dice.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
                until_closed(sock)


def test_noise_from_strangers(server: StoreServer, memory: MemoryStore) -> None:
    memory.put("a", b"secret")
    with patient(server.describe()).open() as store:
        harass(server.describe(), 60, 1)
        assert still_serves(store)
        until(lambda: server.counts().refused == 60)
        assert server.counts().accepted == 1
        assert {o.key for o in memory.list()} == {"a", *[o.key for o in store.list()]}


@pytest.mark.long
def test_noise_from_strangers_for_long(report: Callable[[str], None]) -> None:
    seed = secrets.randbits(32)
    report(f"seed {seed}")
    with (
        server_process(StoreSpec(f"memory://{uuid.uuid4().hex}")) as server,
        server.spec.open() as store,
    ):
        harass(server.spec, 100, seed)
        before = peak_kib(server)
        harass(server.spec, 3000, seed + 1)
        befriend(server.spec, 1000, seed + 2)
        assert still_serves(store)
        assert peak_kib(server) - before < 64 << 10


def peak_kib(server: ServerProcess) -> int:
    rows = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return int(next(r for r in rows if r.startswith("VmHWM")).split()[1])


def test_a_stranger_who_says_nothing_is_sent_away(memory: MemoryStore) -> None:
    limits = Limits(greeting_s=0.5)
    with StoreServer(memory, secret=new_secret(), limits=limits) as server:
        spec = patient(server.describe())
        with dial(server.url) as silent, dial(server.url) as slow, spec.open() as store:
            slow.sendall(b"\x20")  # the first byte of a frame, and no more
            assert still_serves(store)
            for sock in (silent, slow):
                until_closed(sock)
            until(lambda: server.counts().refused >= 2)
            assert still_serves(store)


def test_strangers_do_not_pile_up(memory: MemoryStore) -> None:
    limits = Limits(strangers=3, greeting_s=60.0)
    with StoreServer(memory, secret=new_secret(), limits=limits) as server:
        with patient(server.describe()).open() as store:
            assert still_serves(store)
            held = [dial(server.url) for _ in range(3)]
            for sock in held:
                assert knock(sock)  # this one has a place
            with dial(server.url) as fourth:
                assert knock(fourth)  # the oldest makes room for it, and no other
                until_closed(held[0])
                until(lambda: server.counts().refused == 1)
            assert still_serves(store)  # who is in stays in
            for sock in held:
                sock.close()


def test_silent_connections_keep_nobody_out(memory: MemoryStore) -> None:
    limits = Limits(strangers=16, greeting_s=60.0)
    with StoreServer(memory, secret=new_secret(), limits=limits) as server, ExitStack() as crowd:
        for _ in range(40):
            crowd.enter_context(dial(server.url))
        # At the first try: a client that were refused would have to wait and come again.
        with StoreSpec(server.url, server.describe().options | {"retry_s": 0.0}).open() as store:
            assert still_serves(store)
        assert server.counts().accepted == 1


def test_another_secret_from_now_on(memory: MemoryStore) -> None:
    with StoreServer(memory, secret=new_secret()) as server:
        before = server.describe()
        with before.open() as old:
            assert still_serves(old)
            server.change_secret(new_secret())
            assert still_serves(old)  # it has proved itself
            with server.describe().open() as new:
                assert still_serves(new)
            with before.open() as late, pytest.raises(StoreError, match="different secrets"):
                late.get("a")
        with pytest.raises(UsageError):
            server.change_secret("no digits")


def test_another_secret(server: StoreServer) -> None:
    spec = StoreSpec(server.url, {"secret": new_secret()})
    with spec.open() as store, pytest.raises(StoreError) as caught:
        store.get("a")
    assert caught.value.kind == "permission"
    assert caught.value.where == server.url
    assert server.counts().accepted == 0


def test_a_false_server_is_found_out() -> None:
    """It lets everybody in, and cannot prove itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def lie() -> None:
            sock, _ = listener.accept()
            wire = Connection(sock, "client", 30.0)
            wire.expect_tls(identity(b"of another job..", "agent"))
            with suppress(CkptdError):
                wire.take(HELLO, 30.0)
                heard.extend(wire.take(HELLO, 30.0))
            wire.release()

        heard: list[object] = []
        liar = threading.Thread(target=lie)
        liar.start()
        url = f"ckptd://127.0.0.1:{listener.getsockname()[1]}"
        with StoreSpec(url, {"secret": new_secret()}).open() as store:
            with pytest.raises(StoreError) as caught:
                store.put("a", b"told to nobody")
            assert caught.value.kind == "permission"
        liar.join(PATIENCE_S)
        assert not liar.is_alive()
        assert not heard


def test_another_version_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            sock, _ = listener.accept()
            wire = Connection(sock, "client", 30.0)
            wire.expect_tls(identity(bytes.fromhex(secret), "agent"))
            while not wire.take(HELLO, 30.0):
                pass
            wire.send(Refusal("version", str(VERSION + 1)))
            until_closed(sock)
            wire.release()

        secret = new_secret()
        newer = threading.Thread(target=speak)
        newer.start()
        url = f"ckptd://127.0.0.1:{listener.getsockname()[1]}"
        with StoreSpec(url, {"secret": secret}).open() as store:
            with pytest.raises(StoreError) as caught:
                store.stat("a")
        assert "the server speaks another version of the protocol" in caught.value.message
        newer.join(PATIENCE_S)


# --- clients that are let in and misbehave --------------------------------------------------------


def befriend(spec: StoreSpec, rounds: int, seed: int) -> None:
    """Let clients with the secret send well-protected nonsense."""
    dice = random.Random(seed)
    requests: list[Callable[[], msgspec.Struct]] = [
        lambda: messages.Get("../../etc/passwd"),
        lambda: messages.Get("a", dice.randrange(-9, 9), dice.choice([None, -1, 1 << 62])),
        lambda: messages.Read("a", dice.randrange(-9, 9), dice.choice([-1, 0, 1 << 62])),
        lambda: messages.Put("p", dice.choice([-1, 0, 5, 1 << 62]), dice.random() < 0.5),
        lambda: messages.BeginWriter("w", dice.choice([-1, 0, 5])),
        lambda: ObjectPiece(),
        lambda: messages.CommitWriter(),
        lambda: messages.AbortWriter(),
        lambda: messages.List("../"),
        lambda: messages.Sweep("", float("nan"), True),
        lambda: messages.Delete(tuple("x" * 5 for _ in range(dice.randrange(5000)))),
        lambda: messages.Open("a"),
        lambda: Complete(),
        lambda: Admitted(),
    ]
    for _ in range(rounds):
        wire, sock = friend(spec)
        try:
            for _ in range(dice.randrange(1, 6)):
                bulk = dice.randbytes(dice.randrange(1, 9)) if dice.random() < 0.3 else None
                wire.send(dice.choice(requests)(), None if bulk is None else memoryview(bulk))
            sock.shutdown(socket.SHUT_WR)
            until_closed(sock)
        except (TransientStoreError, OSError):
            pass  # the server had enough of this one
        finally:
            wire.release()


def test_nonsense_from_friends(server: StoreServer, memory: MemoryStore) -> None:
    memory.put("a", b"1")
    with patient(server.describe()).open() as store:
        befriend(server.describe(), 60, 2)
        assert still_serves(store)
        until(lambda: server.counts().served == 1)


def asked(spec: StoreSpec, request: msgspec.Struct) -> messages.Failed | None:
    """How the server refuses a request; None where it ends the connection."""
    wire, _ = friend(spec)
    try:
        wire.send(request)
        found, _ = wire.receive(msgpack_decoder(messages.Answer), 30.0)
    except TransientStoreError:
        return None
    finally:
        wire.release()
    assert isinstance(found, messages.Failed)
    return found


def test_a_put_of_less_than_nothing_is_no_object(server: StoreServer, memory: MemoryStore) -> None:
    assert asked(server.describe(), messages.Put("p", -1, False)) is None
    with pytest.raises(NotFoundError):
        memory.get("p")


def test_no_descriptor_is_asked_of_the_store_over_tcp(
    server: StoreServer, memory: MemoryStore
) -> None:
    memory.put("a", b"1")
    found = asked(server.describe(), messages.Open("a"))
    assert found is not None
    assert found.error["message"] == "descriptors pass through Unix sockets only"


def test_a_server_keeps_no_descriptor_that_it_gave(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with (
        StoreSpec(f"file://{tmp_path}/store").open() as store,
        StoreServer(store, f"ckptd+unix://{tmp_path}/socket") as server,
        server.describe().open() as client,
    ):
        store.put("a", b"1")
        opened = [client.open_file("a") for _ in range(8)]

        def held() -> int:
            files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
            return sum(str(tmp_path) in file and file.endswith("/a") for file in files)

        until(lambda: held() == 8, "the server closes its own")
        for each in opened:
            assert each is not None
            os.close(each.fd)


@pytest.mark.parametrize("lengths", [((1 << 20) + 1, 0), (4, 1), ((1 << 32) - 1, (1 << 32) - 1)])
def test_a_length_is_checked_before_anything_is_allocated(
    server: StoreServer, lengths: tuple[int, int]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wire, sock = friend(server.describe())
    wire._put(memoryview(HEAD.pack(*lengths)))
    assert until_closed(sock) == b""  # at once: it waits for nothing more
    wire.release()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    with patient(server.describe()).open() as store:
        assert still_serves(store)


class _Recorder:
    """Passes one connection on, record by record, and lets a function change what the client says.

    Records are numbered from when `armed` is set.
    """

    def __init__(self, url: str, change: Callable[[int, bytes], list[bytes]]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target = url
        self._change = change
        self.armed = False
        self.url = f"ckptd://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with client, dial(self._target) as server:
            client.settimeout(60)
            back = threading.Thread(target=self._back, args=(server, client))
            back.start()
            stream = client.makefile("rb")
            number = 0
            try:
                while head := stream.read(RECORD.size):
                    record = head + stream.read(RECORD.unpack(head)[2])
                    for changed in self._change(number, record) if self.armed else [record]:
                        server.sendall(changed)
                    number += self.armed
                server.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the server hung up
            back.join(PATIENCE_S)
            stream.close()

    @staticmethod
    def _back(server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client hung up

    def close(self) -> None:
        self._threads[0].join(PATIENCE_S)
        assert not self._threads[0].is_alive()
        self._listener.close()


def _flip(record: bytes, at: int) -> bytes:
    changed = bytearray(record)
    changed[at] ^= 1
    return bytes(changed)


_DELETE = msgspec.msgpack.encode(messages.Delete(("b",)))
_FRAME = HEAD.pack(len(_DELETE), 0) + _DELETE
FORGED = RECORD.pack(23, 0x0303, len(_FRAME)) + _FRAME
# The client's records: three deletions.
CHANGES: dict[str, Callable[[int, bytes], list[bytes]]] = {
    "replayed": lambda n, f: [f, f] if n == 0 else [f],
    "dropped": lambda n, f: [] if n == 0 else [f],
    "head changed": lambda n, f: [_flip(f, 4)] if n == 1 else [f],
    "seal changed": lambda n, f: [_flip(f, len(f) - 1)] if n == 1 else [f],
    "message changed": lambda n, f: [_flip(f, 20)] if n == 1 else [f],
    "injected": lambda n, f: [FORGED, f] if n == 0 else [f],
    "injected in the clear": lambda n, f: [_FRAME, f] if n == 0 else [f],
}


@pytest.mark.parametrize("name", CHANGES)
def test_nobody_in_between_can_change_what_is_said(
    server: StoreServer, memory: MemoryStore, name: str
) -> None:
    for key in "abc":
        memory.put(key, b"1")
    recorder = _Recorder(server.url, CHANGES[name])
    wire = None
    try:
        spec = StoreSpec(recorder.url, server.describe().options)
        wire, _ = friend(spec)
        recorder.armed = True
        with pytest.raises(CkptdError):
            for key in "abc":
                wire.send(messages.Delete((key,)))
            for _ in "abc":
                assert isinstance(wire.receive(ANSWER, 30.0)[0], Complete)
    finally:
        if wire is not None:
            wire.release()
        recorder.close()
    # What was changed, or came again or out of turn, had no effect, nor what followed it.
    assert memory.exists("b")
    assert memory.exists("c")


def test_bytes_of_a_put_cannot_be_changed(server: StoreServer, memory: MemoryStore) -> None:
    recorder = _Recorder(server.url, lambda n, f: [_flip(f, len(f) - 20)] if len(f) > 4000 else [f])
    recorder.armed = True
    try:
        options = server.describe().options | {"retry_s": 0.0, "connect_s": 1.0}
        with StoreSpec(recorder.url, options).open() as store:
            with pytest.raises(TransientStoreError):
                store.put("a", b"x" * 4000)
    finally:
        recorder.close()
    assert not memory.exists("a")


# --- room -----------------------------------------------------------------------------------------


def test_no_room_is_told_and_passes(memory: MemoryStore) -> None:
    limits = Limits(connections=2)
    with StoreServer(memory, secret=new_secret(), limits=limits) as server:
        spec = server.describe()
        with spec.open() as first, patient(spec, 0.2).open() as second:
            with first.writer("a", 1), first.writer("b", 1):
                with pytest.raises(TransientStoreError) as caught:
                    second.exists("a")
                assert caught.value.kind == "link-busy"
            first.close()
            with patient(spec).open() as third:
                assert still_serves(third)


def test_an_idle_connection_ends_and_nobody_notices(memory: MemoryStore) -> None:
    limits = Limits(idle_s=0.2)
    with StoreServer(memory, secret=new_secret(), limits=limits) as server:
        with patient(server.describe()).open() as store:
            assert still_serves(store)
            until(lambda: server.counts().served == 0)
            assert still_serves(store)
            assert server.counts().accepted > 1


def test_a_client_that_is_gone_leaves_no_part_of_its_object(
    server: StoreServer, memory: MemoryStore
) -> None:
    wire, _ = friend(server.describe())
    wire.send(messages.BeginWriter("a", 100))
    assert isinstance(wire.receive(ANSWER, 30.0)[0], Complete)
    wire.send(ObjectPiece(), memoryview(bytes(50)))
    wire._put(memoryview(b"half a"))
    wire.release()
    until(lambda: server.counts().served == 0)
    assert [*memory.list()] == []
