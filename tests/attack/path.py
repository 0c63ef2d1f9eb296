"""The attacker: all TCP connections between the nodes of a network go through this process.

``python -m tests.attack.path FOLDER SEED``, in the network namespace of the router, where a rule
redirects what is forwarded. It finds out where a connection was to go, connects there, and passes
on. It keeps what it sees in files of FOLDER; while there is FOLDER/meddle it also changes, drops,
repeats, inserts, delays and cuts, and dials a server by itself and replays what somebody sent. The
counts are in FOLDER/counts.json.

It leaves alone what is not ckptd's: gloo and torch's store send in the clear and say so, and a
wrong gradient would prove nothing. ckptd's doors are told by the first bytes of TLS and of HTTP.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.onpath import ACTS

PORT = 9999
_ORIGINAL_DST = 80
_OURS = {b"\x16\x03": "TLS", b"GET": "HTTP", b"POS": "HTTP", b"PUT": "HTTP"}
"""How a connection of ckptd begins; what a client says first is in the clear in TLS as well."""
_WAIT_S = 10.0
_MOST_SEEN = 64 << 20


class Attacker:
    """Passes all connections on."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._hellos: list[tuple[tuple[str, int], bytes, str]] = []
        kinds = set(_OURS.values())
        self._seen = {kind: (folder / f"seen-{kind}").open("ab", buffering=0) for kind in kinds}
        self._listener = socket.create_server(("0.0.0.0", PORT), backlog=512)

    def run(self) -> None:
        """Pass on for ever; the folder says when to meddle."""
        threading.Thread(target=self._tell, daemon=True).start()
        threading.Thread(target=self._replay, daemon=True).start()
        (self._folder / "ready").touch()
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    @property
    def _meddles(self) -> bool:
        return (self._folder / "meddle").exists()

    def _tell(self) -> None:
        while True:
            with self._lock:
                said = json.dumps(self._counts)
            (self._folder / "counts.new").write_text(said)
            (self._folder / "counts.new").rename(self._folder / "counts.json")
            time.sleep(0.2)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _pass_on(self, client: socket.socket) -> None:
        raw = client.getsockopt(socket.SOL_IP, _ORIGINAL_DST, 16)
        port, packed = struct.unpack("!2xH4s8x", raw)
        target = (socket.inet_ntoa(packed), port)
        with client:
            try:
                server = socket.create_connection(target, _WAIT_S)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            with server:
                server.settimeout(None)
                first = _peeked(client, server)
                ours = next((_OURS[head] for head in _OURS if first.startswith(head)), "")
                self._count(f"connections of {ours or 'torch and others'}")
                if ours:
                    with self._lock:
                        self._hellos = [*self._hellos[-200:], (target, first, ours)]
                back = threading.Thread(target=self._pass, args=(server, client, ours), daemon=True)
                back.start()
                self._pass(client, server, ours)
                back.join()

    def _pass(self, source: socket.socket, to: socket.socket, ours: str) -> None:
        with self._lock:
            dice = random.Random(self._dice.random())
        try:
            while data := source.recv(1 << 16):
                self._keep(data, ours)
                if ours and self._meddles and dice.random() < 0.15:
                    act = dice.choice((*ACTS, None))
                    self._count(act.__name__ if act else "cut")
                    if act is None:
                        break
                    data = act(dice, data)
                to.sendall(data)
        except OSError:
            pass
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _keep(self, data: bytes, ours: str) -> None:
        if not ours:
            self._count("pieces of torch and others")
            return
        with self._lock:
            if self._seen[ours].tell() < _MOST_SEEN:
                self._seen[ours].write(data)

    def _replay(self) -> None:
        """Say again to servers what their clients had said to them, first messages and all."""
        while True:
            time.sleep(0.3)
            with self._lock:
                heard = self._dice.choice(self._hellos) if self._hellos else None
            if heard is None or not self._meddles:
                continue
            with suppress(OSError), socket.create_connection(heard[0], _WAIT_S) as server:
                server.settimeout(_WAIT_S)
                server.sendall(heard[1])
                answer = server.recv(1 << 16)
                server.sendall(heard[1][::-1])
                self._count("replay")
                self._keep(answer, heard[2])


def _peeked(client: socket.socket, server: socket.socket) -> bytes:
    """Return what the client says first, without taking it; empty where the server speaks first."""
    for _ in range(100):
        for end in (client, server):
            end.settimeout(0.02)
            with suppress(TimeoutError):
                said = end.recv(1 << 16, socket.MSG_PEEK)
                for each in (client, server):
                    each.settimeout(None)
                return said if end is client else b""
    for each in (client, server):
        each.settimeout(None)
    return b""


if __name__ == "__main__":
    Attacker(Path(sys.argv[1]), int(sys.argv[2])).run()
