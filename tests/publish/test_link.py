"""A worker's connection to a server: both ends go on, whatever the size of what is asked."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ckptd.base.net.connection import HELLO, Admitted, Connection, greet_server
from ckptd.base.net.tls import identity
from ckptd.publish.blocks import incoming_digest, read_bytes
from ckptd.publish.link import ServerLink
from ckptd.publish.messages import (
    MOST_BODY,
    PURPOSE,
    QUESTION,
    AskTensors,
    BlockRead,
    PublishedTensor,
    ReadBytes,
    ServerEntry,
    TensorPlaces,
    TileSteps,
)

TENSOR = PublishedTensor("a", "float32", 0, 1 << 20)
BUFFER_BYTES = 64 << 10
WAIT_S = 10.0
SECRET = b"s" * 32


def test_long_questions_and_long_answers_do_not_wait_for_each_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as ours:
        for sock in (listening, ours):  # as a network with small buffers has them
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        ours.connect(listening.getsockname())
        theirs, _ = listening.accept()
        ends = [Connection(s, "the other end", WAIT_S, MOST_BODY) for s in (ours, theirs)]
        server = threading.Thread(target=_answer, args=(ends[1],))
        server.start()
        greet_server(ends[0], SECRET, PURPOSE, role="worker", wait_s=WAIT_S)
        link = ServerLink(ends[0], ServerEntry("", "", "", ""), WAIT_S)
        try:
            link.ask(AskTensors(("a",)), TensorPlaces)
            assert sum(len(data) for data in link.reads(1, _questions())) == 3 * (_SIZE + _ONES)
        finally:
            link.close()
            server.join(WAIT_S)


_ONES = 100_000
_SIZE = 2 << 20


def _questions() -> Iterator[tuple[tuple[BlockRead, ...], NDArray[np.uint8]]]:
    """Yield what has many scales, and a long answer."""
    tiles, scales = (TileSteps(0, 1, 1),), bytes(4 * _ONES)
    many = BlockRead(0, 0, (_ONES,), (1,), "float8_e4m3fn", tiles, scales)
    long = BlockRead(0, 0, (_SIZE // 4,), (1,))
    for _ in range(3):
        yield (many, long), np.empty(_ONES + _SIZE, np.uint8)


def _answer(connection: Connection) -> None:
    connection.expect_tls(identity(SECRET, "rank"))
    while not connection.take(HELLO, WAIT_S):
        pass
    connection.send(Admitted())
    connection.codec.let_in()
    connection.receive(QUESTION, WAIT_S)
    connection.send(TensorPlaces((TENSOR,)))
    for blocks, _ in _questions():
        connection.receive(QUESTION, WAIT_S)
        data = np.zeros(read_bytes([TENSOR], blocks), np.uint8)
        digest = incoming_digest([TENSOR], blocks, data)
        connection.send_parts(ReadBytes(digest), [data.data])
    connection.release()
