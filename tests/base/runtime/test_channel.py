"""Messages over a socket: what an interrupt leaves of one, the next one finds whole."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import msgspec
import pytest

from ckptd.base.runtime import channel
from ckptd.base.runtime.channel import SocketChannel
from tests.processes import PATIENCE_S

LARGE = 4 << 20
"""More than a socket's buffer takes."""


class Text(msgspec.Struct, tag=True):
    number: int
    body: bytes = b""


@pytest.fixture
def ends() -> Iterator[tuple[SocketChannel, SocketChannel]]:
    one, other = (SocketChannel(s, Text) for s in socket.socketpair())
    yield one, other
    one.close()
    other.close()


@contextmanager
def interrupts(at: list[float]) -> Iterator[None]:
    """Raise `KeyboardInterrupt` in the channel after each of these pauses, where it is running."""
    main, over = threading.main_thread().ident, threading.Event()
    assert main is not None

    def send() -> None:
        for pause in at:
            if over.wait(pause):
                return
            signal.pthread_kill(main, signal.SIGUSR2)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_filename == channel.__file__:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, interrupt)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("with_fd", [False, True])
def test_the_rest_of_a_message_goes_before_the_next(
    ends: tuple[SocketChannel, SocketChannel], with_fd: bool
) -> None:
    # The channel was shut, and every later call failed.
    (one, other), (read, write) = ends, os.pipe()
    fd = read if with_fd else None
    with pytest.raises(KeyboardInterrupt), interrupts([0.2]):
        one.send(Text(1, bytes(LARGE)), fd)
    found = []
    reader = threading.Thread(
        target=lambda: found.extend(other.receive(PATIENCE_S) for _ in range(3))
    )
    reader.start()
    one.send(Text(2), fd)
    one.send(Text(3))
    reader.join()
    messages = [item[0] for item in found if item]
    assert [(m.number, len(m.body)) for m in messages] == [(1, LARGE), (2, 0), (3, 0)]
    for item, has_fd in zip(found, (with_fd, with_fd, False), strict=True):
        assert item is not None
        assert (item[1] is not None) == has_fd
        if item[1] is not None:
            assert os.path.sameopenfile(item[1], read)
            os.close(item[1])
    os.close(read)
    os.close(write)


def test_interrupts_at_any_moment(ends: tuple[SocketChannel, SocketChannel]) -> None:
    rng, (one, other) = random.Random(3), ends
    found: list[Text] = []

    def read() -> None:
        while not found or found[-1].number < 1000:
            item = other.receive(PATIENCE_S)
            assert item is not None
            found.append(item[0])
            time.sleep(0.0005)

    reader = threading.Thread(target=read)
    reader.start()
    sent: list[int] = []
    left = 0
    with interrupts([rng.random() * 0.002 for _ in range(400)]):
        for number in range(300):
            body = bytes([number % 256]) * rng.choice([0, 10, 1 << 18, 1 << 20])
            try:
                one.send(Text(number, body))
            except KeyboardInterrupt:
                left += 1
            else:
                sent.append(number)
    one.send(Text(1000))
    reader.join()
    numbers = [m.number for m in found]
    assert numbers == sorted(set(numbers))
    assert {*sent} <= {*numbers}
    assert all({*m.body} <= {m.number % 256} for m in found)
    assert left > 0
