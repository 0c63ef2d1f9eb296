"""How fast a store over a connection is, beside a plain socket that does nothing else.

    python bench/net.py
    python bench/net.py --mib 1024 --reps 7

Connections on loopback TCP and on a Unix socket, the server in a process of its own; of several at
once each has its part, and a thread at both ends. A plain socket sends the same bytes from memory
and receives them into memory, in 4 MiB calls; no framing, no checks, not encrypted. Over TCP the
bytes of the store go through TLS 1.3. Speeds are medians of fresh pairs of processes, processor
times of both of them the least.

Behind that, processor times of TLS without any socket, by cipher and by how much is handed to it at
once, and those of what would only authenticate: with a plain socket's they are the limit of what a
connection can reach.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import numpy as np
import psutil
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ckptd.base.net.tls import Identity, TlsSession
from ckptd.store.base import SizedWriter, Store, StoreSpec, Writer
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore
from ckptd.store.net import StoreServer, new_secret

BLOCK = 4 << 20
WHAT = ("plain", "read file", "read memory", "write")
CASES = [
    *(f"tcp {what}, {n}" for n in (1, 2, 4) for what in (WHAT if n == 1 else WHAT[::2])),
    *(f"unix {what}, 1" for what in WHAT),
]
PARTS = 4
AES, AES_128, CHACHA = (
    "TLS_AES_256_GCM_SHA384",
    "TLS_AES_128_GCM_SHA256",
    "TLS_CHACHA20_POLY1305_SHA256",
)
ALONE = [
    *(f"{AES}, {kib} KiB" for kib in (16, 64, 256, 1024, 4096)),
    f"{AES_128}, 256 KiB",
    f"{CHACHA}, 256 KiB",
    "BLAKE3 keyed, 256 KiB",
    "GMAC of cryptography, 256 KiB",
    "AES-256-GCM of cryptography, 256 KiB",
]


class _Sink(SizedWriter):
    """Takes the bytes and forgets them."""

    def _append(self, view: memoryview) -> None:
        pass

    def _finish(self) -> None:
        pass

    def _drop(self) -> None:
        pass


def parts_of(case: str) -> tuple[str, str, int]:
    """Return the way, what is done, and the number of connections."""
    way, _, rest = case.partition(" ")
    what, _, count = rest.partition(", ")
    return way, what, int(count)


def serve(case: str, folder: str, size: int) -> None:
    """Be the other end of `case` until the standard input ends."""
    way, what, count = parts_of(case)
    if what == "plain":
        _serve_plain(way, folder, size, count)
        return

    class Sink(MemoryStore):
        def writer(self, key: str, size: int) -> Writer:
            return _Sink(key, size)

    stores: dict[str, Store] = {"read file": LocalStore(f"{folder}/root"), "write": Sink("bench")}
    store = stores.get(what, MemoryStore("bench"))
    data = pattern(size if what != "write" else BLOCK)
    with store.writer("data/big", len(data)) as writer:
        writer.write(data)
        writer.commit()
    url = "ckptd://127.0.0.1:0" if way == "tcp" else f"ckptd+unix://{folder}/sock"
    with StoreServer(store, url, secret=new_secret()) as server:
        print(server.describe().to_json().decode(), flush=True)
        sys.stdin.read()


def _serve_plain(way: str, folder: str, size: int, count: int) -> None:
    if way == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
        print(json.dumps(listener.getsockname()[1]), flush=True)
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder}/sock")
        listener.listen()
        print(json.dumps(f"{folder}/sock"), flush=True)
    data = pattern(size)

    def sending(sock: socket.socket) -> None:
        with sock:
            while wanted := sock.recv(1):
                begin = wanted[0] * size // count
                for at in range(begin, begin + size // count, BLOCK):
                    sock.sendall(data[at : at + BLOCK])

    threads = [threading.Thread(target=sending, args=(listener.accept()[0],)) for _ in range(count)]
    with listener:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def pattern(size: int) -> memoryview:
    """Return bytes that memory really holds."""
    return np.arange(size // 8, dtype=np.uint64).view(np.uint8).data


def measure(case: str, folder: str, size: int) -> dict[str, Any]:
    """Return GB/s of `case`, the best of a few rounds on one connection."""
    command = [sys.executable, __file__, "--case", case, "--role", "server", "--dir", folder]
    command += ["--mib", str(size >> 20)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        where = server.stdout.readline()
        buffer = np.ones(size, np.uint8)
        move, close, right = client(case, where, buffer)
        seconds, worked = [], []
        there = psutil.Process(server.pid)
        for _ in range(PARTS):
            start, used = time.perf_counter(), _used(there)
            move()
            seconds.append(time.perf_counter() - start)
            worked.append(_used(there) - used)
        fine = right()
        close()
        assert server.stdin is not None
        server.stdin.close()
    cpu_s = min(worked[1:]) / (size / 1e9)
    return {"gb_per_s": size / 1e9 / min(seconds[1:]), "cpu_s_per_gb": cpu_s, "right": fine}


def _used(there: psutil.Process) -> float:
    times = there.cpu_times()
    return float(times.user + times.system) + time.process_time()


def client(case: str, where: str, buffer: np.ndarray[Any, Any]) -> tuple[Any, Any, Any]:
    """Return what moves the bytes once, what closes, and what checks the bytes."""
    view, size = buffer.data, len(buffer)
    expected = np.frombuffer(pattern(size), np.uint8)
    _, what, count = parts_of(case)
    ends: list[Any] = []
    for _ in range(count):
        if what != "plain":
            ends.append(StoreSpec.from_json(where).open())
        elif isinstance(place := json.loads(where), int):
            ends.append(socket.create_connection(("127.0.0.1", place)))
        else:
            ends.append(socket.socket(socket.AF_UNIX))
            ends[-1].connect(place)

    def move(number: int) -> None:
        end, begin = ends[number], number * size // count
        part = view[begin : begin + size // count]
        if what == "plain":
            end.sendall(bytes([number]))
            for at in range(0, len(part), BLOCK):
                end.recv_into(part[at : at + BLOCK], 0, socket.MSG_WAITALL)
        elif "read" in what:
            end.read_into("data/big", begin, part)
        else:
            with end.writer("data/new", len(part)) as writer:
                writer.write(part)
                writer.commit()

    threads = ThreadPoolExecutor(count)

    def close() -> None:
        threads.shutdown()
        for end in ends:
            end.close()

    def right() -> bool:
        return what == "write" or bool((buffer == expected).all())

    return lambda: list(threads.map(move, range(count))), close, right


# --- without a socket -----------------------------------------------------------------------------


def alone(case: str) -> dict[str, float]:
    """Return the processor time of one end that sends and of one that receives, seconds a GB."""
    name, _, kib = case.partition(", ")
    piece = int(kib.split()[0]) << 10
    data, room = pattern(64 << 20), memoryview(bytearray(64 << 20))
    send, receive = _tls(name) if name.startswith("TLS") else _library(name)
    least = [float("inf")] * 2
    for _ in range(PARTS):
        took = [0.0, 0.0]
        for at in range(0, len(data), piece):
            start = time.process_time()
            sent = send(data[at : at + piece])
            between = time.process_time()
            receive(sent, room[at : at + piece])
            took[0] += between - start
            took[1] += time.process_time() - between
        least = [min(pair) for pair in zip(least, took, strict=True)]
    return dict(zip(("send", "receive"), (t / (len(data) / 1e9) for t in least), strict=True))


_Ends = tuple[Callable[[memoryview], Any], Callable[[Any, memoryview], object]]


def _tls(name: str) -> _Ends:
    secret = b"s" * 32
    ends = [
        TlsSession(Identity(secret, role, "n"), server=server, where="the other end")
        for role, server in (("rank", False), ("agent", True))
    ]
    client, server = ends
    while sum(end.shake() for end in ends) < len(ends):
        server.feed(client.to_send())
        client.feed(server.to_send())
    assert client._tls.cipher()[0] == name, client._tls.cipher()

    def send(data: memoryview) -> bytes:
        client.write(data)
        return client.to_send()

    def receive(sent: bytes, room: memoryview) -> None:
        server.feed(sent)
        server.read_into(room)

    server.feed(client.to_send())
    return send, receive


def _library(name: str) -> _Ends:
    if name.startswith("BLAKE3"):
        key = bytes(32)
        return (
            lambda data: (data, blake3(data, key=key).digest()),
            lambda sent, _: blake3(sent[0], key=key).digest(),
        )
    aes = AESGCM(bytes(32))
    if name.startswith("GMAC"):
        return (
            lambda data: (data, aes.encrypt(bytes(12), b"", data)),
            lambda sent, _: aes.decrypt(bytes(12), sent[1], sent[0]),
        )
    return lambda data: aes.encrypt(bytes(12), data, None), lambda sent, _: aes.decrypt(
        bytes(12), sent, None
    )


def all_alone(reps: int) -> dict[str, list[dict[str, float]]]:
    """Measure each case in fresh processes: OpenSSL reads there which cipher it takes."""
    found: dict[str, list[dict[str, float]]] = {case: [] for case in ALONE}
    with tempfile.NamedTemporaryFile("w", suffix=".cnf") as file:
        for case in [*ALONE, *ALONE[::-1]] * ((reps + 1) // 2):
            file.seek(0)
            file.truncate()
            suite = case.partition(",")[0] if case.startswith("TLS") else AES
            file.write("openssl_conf = a\n[a]\nssl_conf = b\n[b]\nsystem_default = c\n[c]\n")
            file.write(f"Ciphersuites = {suite}\n")
            file.flush()
            os.environ["OPENSSL_CONF"] = file.name
            found[case].append(common.in_fresh_process(str(Path(__file__)), ["--alone", case]))
            print(f"{case}: {found[case][-1]}", file=sys.stderr)
    del os.environ["OPENSSL_CONF"]
    return found


def report(
    options: argparse.Namespace,
    found: dict[str, list[dict[str, Any]]],
    bare: dict[str, list[dict[str, float]]],
) -> None:
    speed = {case: common.median(rows, "gb_per_s") for case, rows in found.items()}
    right = {case: all(r["right"] for r in rows) for case, rows in found.items()}
    cpu = {case: min(r["cpu_s_per_gb"] for r in rows) for case, rows in found.items()}
    head = ["over", "case", "connections", "GB/s", "of the plain socket", "CPU s/GB", "bytes right"]
    rows: list[list[Any]] = []
    for case in CASES:
        way, what, count = parts_of(case)
        ratio = speed[case] / speed[f"{way} plain, {count}"]
        rows.append([way, what, count, speed[case], ratio, cpu[case], right[case]])
    plain = cpu["tcp plain, 1"]
    least = {
        case: [min(r[end] for r in rows) for end in ("send", "receive")]
        for case, rows in bare.items()
    }
    limits = [
        [*case.rsplit(", ", 1), *least[case], plain / (plain + sum(least[case]))] for case in ALONE
    ]
    text = (
        f"{options.mib} MiB, medians of {len(found[CASES[0]])} runs; aim: 0.7"
        " of the plain socket, and 0.5 over TCP, where the store encrypts. *file*: from a"
        " descriptor of the server's store; *memory*: the server's store can only copy; *write*:"
        " into a store that keeps nothing.\n\n"
        + common.table(head, rows)
        + "\n\nWithout a socket, CPU s/GB of each end, the least of all runs. *Limit*: what a"
        " connection reaches of the plain socket's rate on one core, where it takes no more than"
        " both ends and the plain socket. The first are ckptd's TLS, and it speaks the cipher of"
        " the first ones; the last authenticate only, or encrypt by another OpenSSL.\n\n"
        + common.table(["what", "pieces", "sending", "receiving", "limit"], limits)
    )
    command = f"python bench/net.py --mib {options.mib} --reps {options.reps}"
    common.publish("net", command, text, {"gb_per_s": speed, "runs": found, "alone": bare})


def main() -> None:
    options = common.arguments(__doc__, mib=512, role="", alone="")
    size = options.mib << 20
    if options.role == "server":
        serve(options.case, options.dir, size)
        return
    if options.alone:
        print(json.dumps(alone(options.alone)))
        return
    if options.case:
        print(json.dumps(measure(options.case, options.dir, size)))
        return
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for rep in range(options.reps):
        for case in CASES if rep % 2 == 0 else CASES[::-1]:
            base = "/dev/shm" if os.path.isdir("/dev/shm") else None
            with tempfile.TemporaryDirectory(dir=base) as folder:
                asked = ["--case", case, "--dir", folder, "--mib", str(options.mib)]
                found[case].append(common.in_fresh_process(str(Path(__file__)), asked))
            print(f"{rep + 1}/{options.reps} {case}: {found[case][-1]}", file=sys.stderr)
    report(options, found, all_alone(options.reps))


if __name__ == "__main__":
    main()
