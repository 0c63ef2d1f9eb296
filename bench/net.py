"""How fast a store over a connection is, beside a plain socket that does nothing else.

    python bench/net.py
    python bench/net.py --mib 1024 --reps 7

One connection on loopback TCP and on a Unix socket, the server in a process of its own. A plain
socket sends the same bytes from memory and receives them into memory, in 4 MiB calls; no framing,
no checks, not encrypted. Over TCP the bytes of the store go through TLS 1.3. Speeds are medians of
fresh pairs of processes, processor times of both of them the least.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import psutil

from ckptd.store.base import SizedWriter, Store, StoreSpec, Writer
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore
from ckptd.store.net import StoreServer, new_secret

BLOCK = 4 << 20
CASES = [
    f"{way} {what}"
    for way in ("tcp", "unix")
    for what in ("plain", "read file", "read memory", "write")
]
PARTS = 4


class _Sink(SizedWriter):
    """Takes the bytes and forgets them."""

    def _append(self, view: memoryview) -> None:
        pass

    def _finish(self) -> None:
        pass

    def _drop(self) -> None:
        pass


def serve(case: str, folder: str, size: int) -> None:
    """Be the other end of `case` until the standard input ends."""
    way, _, what = case.partition(" ")
    if what == "plain":
        _serve_plain(way, folder, size)
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


def _serve_plain(way: str, folder: str, size: int) -> None:
    if way == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
        print(json.dumps(listener.getsockname()[1]), flush=True)
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder}/sock")
        listener.listen()
        print(json.dumps(f"{folder}/sock"), flush=True)
    data = pattern(size)
    sock, _ = listener.accept()
    with sock, listener:
        while sock.recv(1):
            for at in range(0, size, BLOCK):
                sock.sendall(data[at : at + BLOCK])


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
    if case.endswith("plain"):
        place = json.loads(where)
        if isinstance(place, int):
            sock = socket.create_connection(("127.0.0.1", place))
        else:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(place)

        def plain() -> None:
            sock.sendall(b"x")
            for at in range(0, size, BLOCK):
                sock.recv_into(view[at : at + BLOCK], 0, socket.MSG_WAITALL)

        return plain, sock.close, lambda: bool((buffer == expected).all())
    store = StoreSpec.from_json(where).open()
    if "read" in case:
        return (
            lambda: store.read_into("data/big", 0, view),
            store.close,
            lambda: bool((buffer == expected).all()),
        )

    def write() -> None:
        with store.writer("data/new", size) as writer:
            writer.write(view)
            writer.commit()

    return write, store.close, lambda: True


def report(options: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    speed = {case: common.median(rows, "gb_per_s") for case, rows in found.items()}
    right = {case: all(r["right"] for r in rows) for case, rows in found.items()}
    cpu = {case: min(r["cpu_s_per_gb"] for r in rows) for case, rows in found.items()}
    head = ["connection", "case", "GB/s", "of the plain socket", "CPU s/GB", "bytes right"]
    rows: list[list[Any]] = []
    for case in CASES:
        way, _, what = case.partition(" ")
        ratio = speed[case] / speed[f"{way} plain"]
        rows.append([way, what, speed[case], ratio, cpu[case], right[case]])
    text = (
        f"{options.mib} MiB over one connection, medians of {len(found[CASES[0]])} runs; aim: 0.7"
        " of the plain socket, and 0.5 over TCP, where the store encrypts. *file*: from a"
        " descriptor of the server's store; *memory*: the server's store can only copy; *write*:"
        " into a store that keeps nothing.\n\n" + common.table(head, rows)
    )
    command = f"python bench/net.py --mib {options.mib} --reps {options.reps}"
    common.publish("net", command, text, {"gb_per_s": speed, "runs": found})


def main() -> None:
    options = common.arguments(__doc__, mib=512, role="")
    size = options.mib << 20
    if options.role == "server":
        serve(options.case, options.dir, size)
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
    report(options, found)


if __name__ == "__main__":
    main()
