"""Where a checkpointer of the tests writes: in a process of its own, as everywhere, or in a thread.

The process costs 0.35 s of CPU, nearly all of it for imports. A module of tests that are not about
it uses the fixture `writing_thread`: the same writer then has the other end of the same socket, in
a thread. Ranks do so too, since this is among what they have imported before they begin.
"""

from __future__ import annotations

import os
import socket
import threading

import msgspec

from ckptd.base.runtime.channel import Channel, SocketChannel
from ckptd.checkpoint.save.client import WriterClient
from ckptd.checkpoint.save.messages import Request, Response
from ckptd.checkpoint.save.writer import SaveWriter

__all__ = ["VARIABLE"]

VARIABLE = "TESTS_WRITE_IN"
"""``thread`` in a module that uses the fixture."""
_in_process = WriterClient._start_process


class _Ours(SocketChannel):
    def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        super().send(message, fd)
        if fd is not None:
            os.close(fd)  # of a thread the client thinks that it takes the number itself


def _start(client: WriterClient) -> Channel:
    if os.environ.get(VARIABLE) != "thread":
        return _in_process(client)
    ours, theirs = socket.socketpair()
    writer = SaveWriter(SocketChannel(theirs, Request))
    threading.Thread(target=writer.run, name="ckptd-worker", daemon=True).start()
    return _Ours(ours, Response)


WriterClient._start_process = _start  # type: ignore[method-assign]
