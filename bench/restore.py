"""A restore: how near to each tier's own limit does it run?

    python bench/restore.py --reps 3
    python bench/restore.py --cases memory,peer --layers 8 --reps 1

One rank loads 2.02 GB: what it saved itself (*memory*), what another process saved, from its
node's agent (*agent*), from another node's agent over TCP (*peer*, both on this machine), from a
folder (*local*, *local warm*) and from an object store (*remote*, Ceph's gateway or moto on this
machine, a smaller state). Where there is an accelerator the state is on it in two cases more:
loaded from the memory of the process that saved it (*device memory*) and from a folder in the page
cache (*device warm*); without one they are left out. Each process measures its limit in turn with
its loads: a copy in memory by as many threads, a plain socket, the disk's best read, a read of
what is in the page cache, s3fs, one copy from page-locked memory. A load verifies each byte before
it writes any, the limits verify nothing. The processor's time of both is measured besides: that of
this process alone. `--width` makes fewer and larger tensors of as many bytes (2 layers of 1024 are
0.7 GB in 84 of them), `ckptd recorder build` makes the copy that loads use. A repetition of all
takes about two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import s3

LIMITS = {
    "memory": "a copy in memory",
    "agent": "a copy in memory",
    "peer": "a plain socket",
    "local": "the disk's best read",
    "local warm": "a read of the page cache",
    "remote": "s3fs get",
    "device memory": "a page-locked copy",
    "device warm": "a page-locked copy",
}
LOADS = 3
REMOTE_LAYERS = 12
BLOCK = 4 << 20


# --- the limits ---------------------------------------------------------------------------------


def copying(size: int, threads: int = 2) -> Callable[[], float]:
    """Return what copies `size` bytes from touched memory into touched memory."""
    source, target = (np.ones(size, np.uint8) for _ in range(2))
    cuts = [size * i // threads for i in range(threads + 1)]

    def one(i: int) -> None:
        for at in range(cuts[i], cuts[i + 1], BLOCK):
            end = min(at + BLOCK, cuts[i + 1])
            np.copyto(target[at:end], source[at:end])

    return lambda: common.parallel(threads, one)


def receiving(size: int, streams: int) -> Callable[[], float]:
    """Return what receives `size` bytes over TCP from another process, by several connections."""
    command = [sys.executable, __file__, "--role", "sender", "--size", str(size // streams)]
    sender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # ends with its clients
    assert sender.stdout is not None
    port = int(sender.stdout.readline())
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    target = np.ones(size, np.uint8).data

    def one(i: int) -> None:
        per = size // streams
        socks[i].sendall(b"x")
        for at in range(0, per, BLOCK):
            piece = target[i * per + at : i * per + min(at + BLOCK, per)]
            socks[i].recv_into(piece, 0, socket.MSG_WAITALL)

    return lambda: common.parallel(streams, one)


def send(size: int) -> None:
    """Be the other end of `receiving`, until the last client has gone."""
    data = np.ones(size, np.uint8).data

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError):
            while sock.recv(1):
                for at in range(0, size, BLOCK):
                    sock.sendall(data[at : at + BLOCK])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60.0)
        print(listener.getsockname()[1], flush=True)
        threads: list[threading.Thread] = []
        while not threads or any(t.is_alive() for t in threads):
            listener.settimeout(0.5 if threads else 60.0)
            with contextlib.suppress(TimeoutError):
                threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
                threads[-1].start()


def reading(folder: str, size: int, threads: int = 2) -> Callable[[], float]:
    """Return what reads the files of a checkpoint, which are in the page cache, into memory."""
    files = [p for p in Path(folder).rglob("*.safetensors") if p.stat().st_size]
    target = np.ones(size + (1 << 20), np.uint8).data

    def one(i: int) -> None:
        at = 0
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            length = os.fstat(fd).st_size
            start, end = length * i // threads, length * (i + 1) // threads
            for offset in range(start, end, BLOCK):
                piece = target[at + offset : at + min(offset + BLOCK, end)]
                os.preadv(fd, [piece], offset)
            os.close(fd)
            at += length

    return lambda: common.parallel(threads, one)


def uploading(size: int, device: str) -> Callable[[], float]:
    """Return what copies `size` bytes from page-locked memory to a device, at once."""
    import torch

    piece = min(size, 1 << 30)
    source = torch.ones(piece, dtype=torch.uint8, pin_memory=True)
    target = torch.ones(piece, dtype=torch.uint8, device=device)

    def copy() -> float:
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        for at in range(0, size, piece):
            n = min(piece, size - at)
            target[:n].copy_(source[:n], non_blocking=True)
        torch.accelerator.synchronize()
        return time.perf_counter() - begin

    return copy


def accelerator() -> str:
    """Return the name of the accelerator that this machine has; empty without one."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


# --- one case -----------------------------------------------------------------------------------


class State:
    """The state that is saved; compares a loaded one with it."""

    def __init__(self, layers: int, width: int, device: str = "cpu") -> None:
        make = common.noise()
        self.live = common.state(lambda shape: make(shape).to(device), layers, width)
        self._expected = [t.clone() for t in common.tensors(self.live)]

    def clear(self) -> None:
        for tensor in common.tensors(self.live):
            tensor.zero_()

    def right(self) -> bool:
        import torch

        now = common.tensors(self.live)
        return all(torch.equal(a, b) for a, b in zip(now, self._expected, strict=True))


def measure(
    state: State,
    load: Callable[[], Any],
    *ways: Callable[[], float],
    before: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Time `load` in turn with the ways of its limit, of which the best one counts."""
    seconds, limits, right, tiers = [], [], True, set()
    used, limit_used = [], []
    for _ in range(LOADS):
        for way in ways:
            before()
            ran = time.process_time()
            limits.append(way())
            limit_used.append(time.process_time() - ran)
        state.clear()
        before()
        begin, ran = time.perf_counter(), time.process_time()
        report = load()
        seconds.append(time.perf_counter() - begin)
        used.append(time.process_time() - ran)
        right = right and state.right()
        tiers.add(report.tier)
    read = {"fetch_s": report.read.fetch_s, "copy_s": report.read.copy_s}
    return {
        "s": min(seconds),
        "limit_s": min(limits),
        "all_s": seconds,
        "cpu_s": min(used),
        "limit_cpu_s": min(limit_used),
        "right": right,
        "tier": "+".join(sorted(tiers)),
        **read,
    }


def memory_case(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    import ckptd

    state = State(options.layers, options.width)
    os.environ["CKPTD_RUN_DIR"] = folder + "/run"
    with ckptd.Checkpointer(folder + "/root", tiers=[ckptd.Memory(every=1)], every=100) as ck:
        saved(ck, state)

        def load() -> Any:
            ck.load(state.live)
            return ck.last_load

        return measure(state, load, copying(common.state_bytes(options.layers, options.width)))


def saved(ck: Any, state: State) -> None:
    handle = ck.save(1, state.live)
    handle.durable()


def agent_case(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    size = common.state_bytes(options.layers, options.width)
    with other_process(folder, options) as found:
        state = State(options.layers, options.width)
        load = from_node(folder + "/root", state, found["here"], None, "memory")
        return measure(state, load, copying(size))


def peer_case(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    size = common.state_bytes(options.layers, options.width)
    with other_process(folder, options) as found:
        state = State(options.layers, options.width)
        load = from_node(folder + "/root", state, found["memory"], found["secret"], "peer")
        return measure(state, load, *(receiving(size, n) for n in (1, 2)))


def size_of(options: argparse.Namespace) -> list[str]:
    """Return what gives another process a state of the same size."""
    return ["--layers", str(options.layers), "--width", str(options.width)]


@contextlib.contextmanager
def other_process(folder: str, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Start another process that saves, and yield the address of its node's agent."""
    command = [sys.executable, __file__, "--role", "node", "--dir", folder]
    command += size_of(options)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        found = next((x for x in node.stdout if x.startswith("{")), None)
        if found is None:
            raise SystemExit(f"the process that is to save ended with {node.wait(60)}: see above")
        yield json.loads(found)
        node.stdin.close()


def be_node(folder: str, layers: int, width: int) -> None:
    """Save into the memory of a node's agent and tell where it is read, until stdin ends."""
    import ckptd
    from ckptd.checkpoint.torch import nearby

    os.environ |= {
        "CKPTD_RUN_DIR": folder + "/run",
        "CKPTD_NODE": "other",
        "CKPTD_BIND": "127.0.0.1",
    }
    nearby.host_members = lambda agreement: (0, 1)  # an agent that is alone serves nobody
    with ckptd.Checkpointer(folder + "/root", tiers=[ckptd.Memory(every=1)], every=100) as ck:
        saved(ck, State(layers, width))
        answer = ck._client.answer()  # type: ignore[union-attr]
        found = {"here": answer.here, "memory": answer.memory, "secret": answer.secret}
        print(json.dumps(found), flush=True)
        sys.stdin.read()


def from_node(
    root: str, state: State, url: str, secret: str | None, tier: str, timeout_s: float = 300.0
) -> Callable[[], Any]:
    """Return a load of one rank whose only near tier is what an agent serves."""
    from ckptd.base.runtime.ranks import LocalBoard
    from ckptd.base.torch.ranks import Agreement
    from ckptd.checkpoint.load.union import UnionSource
    from ckptd.checkpoint.root.catalogue import Catalogue
    from ckptd.checkpoint.torch.loader import Loader
    from ckptd.store import StoreSpec, open_store

    source = UnionSource(StoreSpec(url, {"secret": secret} if secret else {}).open(), tier)
    agreement = Agreement(LocalBoard(), timeout_s)
    catalogue = Catalogue(open_store(root))
    loader = Loader(catalogue, agreement, [0], timeout_s, None, lambda: [source])
    rest: dict[str, Any] = dict.fromkeys(("only", "rename", "device", "progress"))
    return lambda: loader.load(state.live, None, strict=True, weights_only=False, **rest)


def local_case(folder: str, options: argparse.Namespace, *, warm: bool = False) -> dict[str, Any]:
    import ckptd

    state = State(options.layers, options.width)
    size = common.state_bytes(options.layers, options.width)
    command = [sys.executable, __file__, "--role", "saver", "--dir", folder]
    subprocess.run([*command, *size_of(options)], check=True)
    with ckptd.Checkpointer(folder + "/root", storage=ckptd.Storage(dedup=False)) as ck:

        def load() -> Any:
            ck.load(state.live)
            return ck.last_load

        if warm:
            return measure(state, load, reading(folder + "/root", size))

        def limit() -> float:
            found = common.disk_limit(folder + "/limit", size)
            return min(v for k, v in found.items() if k.startswith("read"))

        found = measure(state, load, limit, before=lambda: common.drop_caches(folder + "/root"))
        # That of the limit is mostly its writes and what empties the cache.
        return found | {"limit_cpu_s": None}


def device_case(folder: str, options: argparse.Namespace, *, again: bool = False) -> dict[str, Any]:
    """Load to a device: what this process has saved, or `again` by a checkpointer of its own."""
    import ckptd

    device = accelerator()
    state = State(options.layers, options.width, device)
    limit = uploading(common.state_bytes(options.layers, options.width), device)
    with ckptd.Checkpointer(folder + "/root", storage=ckptd.Storage(dedup=False)) as ck:
        saved(ck, state)

        def load() -> Any:
            ck.load(state.live)
            return ck.last_load

        if not again:
            return measure(state, load, limit)

    with ckptd.Checkpointer(folder + "/root", storage=ckptd.Storage(dedup=False)) as ck:
        return measure(state, load, limit)


def be_saver(folder: str, layers: int, width: int) -> None:
    """Save into a folder."""
    import ckptd

    with ckptd.Checkpointer(folder + "/root", storage=ckptd.Storage(dedup=False)) as ck:
        saved(ck, State(layers, width))


def remote_case(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    import ckptd

    server = json.loads(options.server)
    state = State(min(options.layers, REMOTE_LAYERS), options.width)
    url = f"{s3.BUCKET}/{os.getpid()}"
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else folder
    with (
        ckptd.Checkpointer(
            f"s3://{url}", store_options=server, storage=ckptd.Storage(dedup=False)
        ) as ck,
        tempfile.TemporaryDirectory(dir=base) as back,
    ):
        saved(ck, state)
        store = s3.filesystem(server)

        def load() -> Any:
            ck.load(state.live)
            return ck.last_load

        def limit() -> float:
            common.remove(f"{back}/all")
            begin = time.perf_counter()
            store.get(url, f"{back}/all", recursive=True)
            return time.perf_counter() - begin

        found = measure(state, load, limit)
        store.rm(url, recursive=True)
    return found


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "memory": memory_case,
    "agent": agent_case,
    "peer": peer_case,
    "local": local_case,
    "local warm": lambda folder, options: local_case(folder, options, warm=True),
    "remote": remote_case,
    "device memory": device_case,
    "device warm": lambda folder, options: device_case(folder, options, again=True),
}


# --- telling ------------------------------------------------------------------------------------


@contextlib.contextmanager
def some_server(wanted: bool) -> Iterator[tuple[s3.Options | str, str]]:
    """Give the first S3 server that starts, and its name."""
    for kind in reversed(s3.KINDS) if wanted else ():
        with s3.server(kind) as server:
            if not isinstance(server, str):
                yield server, kind
                return
    yield "no S3 server" if wanted else "not asked for", ""


def main() -> None:
    options = common.arguments(
        __doc__, cases=",".join(CASES), layers=48, width=512, server="", role="", size=0
    )
    if options.role == "sender":
        send(options.size)
    elif options.role == "node":
        be_node(options.dir, options.layers, options.width)
    elif options.role == "saver":
        be_saver(options.dir, options.layers, options.width)
    elif options.case:
        folder = f"{options.dir}/case"
        common.remove(folder)
        Path(folder).mkdir(parents=True)
        print(json.dumps(CASES[options.case](folder, options)), flush=True)
        common.remove(folder)
    else:
        alternate(options)


def alternate(options: argparse.Namespace) -> None:
    names = options.cases.split(",")
    if unknown := set(names) - set(CASES):
        raise SystemExit(f"no such case: {unknown}; there are {sorted(CASES)}")
    found: dict[str, list[dict[str, Any]]] = {}
    order = random.Random(0)
    with some_server("remote" in names) as (server, kind):
        if isinstance(server, str):
            names = [n for n in names if n != "remote"]
        left_out = [n for n in names if n.startswith("device") and not accelerator()]
        for name in left_out:
            print(f"{name}: left out, there is no accelerator", file=sys.stderr)
        names = [n for n in names if n not in left_out]
        shared = ["--dir", options.dir, *size_of(options)]
        shared += ["--server", json.dumps(server)]
        for _ in range(options.reps):
            for name in order.sample(names, len(names)):
                run = common.in_fresh_process(__file__, [*shared, "--case", name])
                found.setdefault(name, []).append(run)
                print(f"{name}: {run}", file=sys.stderr)
    report(options, {n: found[n] for n in CASES if n in found}, kind, left_out)


def report(
    options: argparse.Namespace, found: dict[str, Any], kind: str, left_out: list[str]
) -> None:
    m = common.median
    rows = []
    for name, runs in found.items():
        layers = min(options.layers, REMOTE_LAYERS) if name == "remote" else options.layers
        size = common.state_bytes(layers, options.width) / 1e9
        seconds, limit = m(runs, "s"), m(runs, "limit_s")
        what = LIMITS[name] + (f", {kind}" if name == "remote" else "")
        right = all(r["right"] for r in runs)
        runs = [{**r, "first_s": r["all_s"][0]} for r in runs]
        passes = [m(runs, k) for k in ("first_s", "fetch_s", "copy_s")]
        row = [name, size, seconds, size / seconds, *passes, what, size / limit, limit / seconds]
        rows.append([*row, m(runs, "limit_cpu_s") / m(runs, "cpu_s"), right])
    head = ["from", "GB", "s", "GB/s", "first s", "verifying s", "copying s", "limit", "limit GB/s"]
    head += ["of the limit", "of it in processor time", "bytes right"]
    text = (
        f"One rank; medians of {options.reps} processes, in each the best of {LOADS} loads and of "
        f"{LOADS} measurements of the limit, in turn, at a load of {os.getloadavg()[1]:.0f}. "
        "A load digests all bytes before it writes any. "
        "The first load of a process from a peer or a store also gets its memory.\n\n"
    )
    if left_out:
        text += f"Not measured, without an accelerator: {', '.join(left_out)}.\n\n"
    text += common.table(head, rows)
    command = f"python bench/restore.py --reps {options.reps} --layers {options.layers}"
    command += f" --width {options.width}"
    command += f" --cases {shlex.quote(','.join(found))}"
    common.publish("restore", command, text, {"runs": found})


if __name__ == "__main__":
    main()
