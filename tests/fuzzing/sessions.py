"""Sessions of a connection that was let in: frames of an input, and where targets keep files."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from ckptd.base.net.connection import Connection
from ckptd.errors import TransientStoreError

SCRATCH = Path(os.environ.get("CKPTD_FUZZ_SCRATCH", "."))
"""Where a target that opens files by path writes its bytes."""
GAP = b"\xff\xfe"
"""Between two bodies of frames of an input; the lengths before a body are put right."""


def served(serve: Callable[[Connection], object], raw: bytes) -> None:
    """Have an end answer somebody who was let in, sends these frames, and hangs up."""
    here, there = socket.socketpair()
    with there:
        wire = Connection(here, "client", 1.0)
        wire.codec.let_in()
        try:
            there.setblocking(False)
            for body in raw.split(GAP):
                bulk = b""
                # No message begins so: the length of raw bytes follows, and they.
                if body[:1] == b"\xc1" and len(body) > 1:
                    body, bulk = body[2 + body[1] :], body[2 : 2 + body[1]]
                there.sendall(struct.pack("<II", len(body), len(bulk)) + body + bulk)
            there.shutdown(socket.SHUT_WR)
            with suppress(TransientStoreError):  # the end of the connection
                serve(wire)
        finally:
            wire.release()


def asked(*messages: msgspec.Struct) -> bytes:
    """Return the input in which a client asks these, one after another."""
    return GAP.join(map(msgspec.msgpack.encode, messages))
