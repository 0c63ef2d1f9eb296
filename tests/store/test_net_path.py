"""Somebody between a store's server and its client: no wrong byte, nothing read, and an end."""

from __future__ import annotations

import random
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from ckptd.base.net.address import Address, parse_server
from ckptd.errors import CkptdError
from ckptd.store.base import StoreSpec
from ckptd.store.memory import MemoryStore
from ckptd.store.net import Limits, StoreServer, new_secret
from tests.processes import PATIENCE_S

DATA = b"these are weights, " * 16_000
"""Some 300 kB: several reads of a socket, and tens of TLS records."""
WAIT_S = 0.3
LIMITS = Limits(greeting_s=WAIT_S, idle_s=PATIENCE_S, frame_s=WAIT_S)

Act = Callable[[random.Random, bytes], bytes]


def flip(dice: random.Random, data: bytes) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]


def drop(dice: random.Random, data: bytes) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + data[at + dice.randrange(1, 20_000) :]


def repeat(dice: random.Random, data: bytes) -> bytes:
    at = dice.randrange(len(data))
    return data[: at + 1] + data[dice.randrange(at + 1) :]


def insert(dice: random.Random, data: bytes) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + dice.randbytes(dice.randrange(1, 100)) + data[at:]


def delay(dice: random.Random, data: bytes) -> bytes:
    time.sleep(dice.uniform(0.0, 2 * WAIT_S))
    return data


ACTS: tuple[Act, ...] = (flip, flip, flip, drop, repeat, insert, delay)


class Path:
    """Passes connections on, keeps what it saw, and meddles once with each where it is asked to.

    A connection is cut, or one piece of what passes is changed: the one in which the byte number
    `at`, counted from the first of that direction, goes by.
    """

    def __init__(self, url: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._target = parse_server(url)
        self.url = f"ckptd://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self.plan: tuple[Act | None, bool, int] | None = None
        self.done = 0
        self.dice = random.Random(0)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Once both sides are closed."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            assert isinstance(self._target, Address)
            server = socket.create_connection(self._target, PATIENCE_S)
            self._threads.append(threading.Thread(target=self._both, args=(client, server)))
            self._threads[-1].start()

    def _both(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            back = threading.Thread(target=self._pass, args=(server, client, True))
            back.start()
            self._pass(client, server, False)
            back.join()

    def _pass(self, source: socket.socket, to: socket.socket, answers: bool) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16):
                plan = self.plan
                passed += len(data)
                if plan is not None and plan[1] == answers and passed > plan[2]:
                    self.plan, self.done = None, self.done + 1
                    if plan[0] is None:
                        break
                    data = plan[0](self.dice, data)
                self.seen += data
                to.sendall(data)
        except OSError:
            pass
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def path() -> Iterator[tuple[Path, StoreServer, MemoryStore, StoreSpec]]:
    memory = MemoryStore(uuid.uuid4().hex)
    with StoreServer(memory, secret=new_secret(), limits=LIMITS) as server:
        between = Path(server.url)
        options = server.describe().options
        options |= {"retry_s": 0.0, "connect_s": WAIT_S, "answer_s": WAIT_S}
        try:
            yield between, server, memory, StoreSpec(between.url, options)
        finally:
            server.close()
            between.close()


def meddle(rounds: int, seed: int) -> dict[str, int]:
    """Have transfers meddled with; each ends in time, in an error or as if nothing had been."""
    dice = random.Random(seed)
    counts: dict[str, int] = dict.fromkeys(("whole", "refused", "meddled"), 0)
    with path() as (between, _, memory, spec):
        between.dice = random.Random(seed + 1)
        memory.put("there", DATA)
        for number in range(rounds):
            reads = dice.random() < 0.7
            # The bulk goes one way; the handshake, questions and answers both.
            bulk = dice.random() < 0.7
            at = dice.randrange(len(DATA) if bulk else 2000)
            act = dice.choice(ACTS) if dice.random() < 0.9 else None
            before = between.done
            between.plan = (act, reads if bulk else dice.random() < 0.5, at)
            began = time.monotonic()
            with spec.open() as store:
                try:
                    counts[one(store, memory, reads, number)] += 1
                except CkptdError:
                    counts["refused"] += 1
            assert time.monotonic() - began < PATIENCE_S
            counts["meddled"] += between.done - before
            between.plan = None
        assert b"weights" not in between.seen
        assert bytes.fromhex(spec.options["secret"]) not in between.seen
    return counts


def one(store: Any, memory: MemoryStore, reads: bool, number: int) -> str:
    """Transfer, and compare all that could have been believed."""
    if reads and number % 2:
        assert store.get("there") == DATA
    elif reads:
        room = bytearray(len(DATA))
        store.read_into("there", 0, memoryview(room))
        assert room == DATA
    else:
        key = f"put {number}"
        try:
            if number % 2:
                store.put(key, DATA)
            else:
                with store.writer(key, len(DATA)) as writer:
                    writer.write(DATA)
                    writer.commit()
        finally:
            # The answer may be what was lost.
            assert not memory.exists(key) or memory.get(key) == DATA
    return "whole"


def test_transfers_that_are_meddled_with_end_and_are_never_wrong() -> None:
    counts = meddle(60, 3)
    assert counts["meddled"] > 30
    assert counts["refused"] > 20


@pytest.mark.long
def test_transfers_that_are_meddled_with_for_long(report: Callable[[str], None]) -> None:
    seed = secrets.randbits(32)
    counts = meddle(600, seed)
    report(f"seed {seed}: {counts}")
    assert counts["meddled"] > 300
    assert counts["refused"] > 200


def test_what_passes_is_not_the_data() -> None:
    """At the version before, an attacker found the weights in it, and put others in their place."""
    with path() as (between, _, memory, spec):
        memory.put("there", DATA)
        with spec.open() as store:
            assert store.get("there") == DATA
            store.put("new", DATA)
        assert memory.get("new") == DATA
        assert len(between.seen) > 2 * len(DATA)
        assert b"weights" not in between.seen
        assert b"there" not in between.seen  # nor what is asked for
