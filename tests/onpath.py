"""`OnPath`: somebody between two processes, that sees what passes and meddles with it."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ckptd.base.net.address import Address
from tests.processes import PATIENCE_S

__all__ = ["ACTS", "Act", "OnPath"]

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
    time.sleep(dice.uniform(0.0, 0.6))
    return data


ACTS: tuple[Act, ...] = (flip, flip, flip, drop, repeat, insert, delay)


class OnPath:
    """Passes connections on, keeps what it saw, and meddles once with each where it is asked to.

    A connection is cut, or one piece of what passes is changed: the one in which the byte number
    `at`, counted from the first of that direction, goes by.
    """

    def __init__(self, target: Address) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._target = target
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
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
