"""How long a version takes to workers far away, and how much real training changes a step.

    sudo python bench/publish_far.py --reps 2    # 0.13 GB through each way; minutes
    python bench/publish_far.py --case trace     # real training

*Ways*: one publisher and one worker, which holds the version before, of bfloat16 weights of which
some elements, scattered, take any other value; with 100 % it pulls all. Seconds are from the call
of ``publish`` to the worker's return from ``update``. Ways: sockets of the loopback; sockets over
a link of 1 Gbit/s, 25 ms each way; a bucket (moto, one process of Python that shares the cores);
and a bucket at the trainer's side of that link. *Plain socket*: all bytes sent at once by the
same two processes over one connection that is there, with nothing else: the limit.

The link is two network namespaces with a TUN device each, and a process between them that keeps
each packet for as long as its bytes take at that rate, and 25 ms more; kernels with ``netem`` do
that themselves, others do not have it. TCP is the kernel's, with packets of 64 KiB.

*Training*: the demo's policy, wider, in bfloat16, with AdamW on float32 masters, which learns from
the better half of what it sampled itself, as the demo's does. Published after each step to a worker
over sockets. From 1e-6 on, which is usual where large models are trained so, to the demo's 5e-3.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import common
import numpy as np
import s3
import torch
import torch.distributed as dist
from publish import ONE, changed
from torch.nn import Module

import ckptd
from ckptd.testing.ranks import run_ranks

sys.path.insert(0, str(common.HERE.parent))
sys.path.insert(0, str(common.HERE.parent / "examples"))
from ckptd_demo import policyjob
from ckptd_demo.model import build
from ckptd_demo.spec import GptShape
from tests.monitor.cluster.namespaces import enter, kernel_lacks

GBIT, ONE_WAY_S = 1.0, 0.025
ENDS = ("10.78.0.1", "10.78.0.2")
PARTS = (0.001, 0.01, 0.045, 1.0)
WAYS = ("sockets", "sockets, link", "bucket", "bucket, link")
RATES = (1e-6, 1e-5, 1e-4, 5e-3)
SHAPE = GptShape(layers=2, heads=4, width=256, seq=24)
_TUNSETIFF, _TUN, _NO_INFO = 0x400454CA, 1, 0x1000
_PACKET = 65_000
_WAIT_S = 600.0


# --- a link -------------------------------------------------------------------------------------


def _end(space: str, number: int) -> int:
    """Return the descriptor of one end's device, which is up in its namespace."""
    enter(space)
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", b"far", _TUN | _NO_INFO))
    for words in (
        f"addr add {ENDS[number]} peer {ENDS[1 - number]} dev far",
        f"link set far mtu {_PACKET} txqueuelen 10000 up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    return fd


def _carry(spaces: tuple[str, str], ready: Any) -> None:
    """Carry packets between two ends until the process is killed."""
    ends = [_end(space, i) for i, space in enumerate(spaces)]
    ready.set()
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free = [0.0, 0.0]  # when the link has sent all that it was given
    while True:
        now = time.monotonic()
        for to, packets in zip(reversed(ends), waiting, strict=True):
            while packets and packets[0][0] <= now:
                os.write(to, packets.popleft()[1])
        due = min((p[0][0] for p in waiting if p), default=now + 1.0)
        for fd in select.select(ends, [], [], max(0.0, due - time.monotonic()))[0]:
            packet, way = os.read(fd, _PACKET + 64), ends.index(fd)
            free[way] = max(free[way], time.monotonic()) + 8 * len(packet) / (GBIT * 1e9)
            waiting[way].append((free[way] + ONE_WAY_S, packet))


@contextmanager
def link() -> Iterator[tuple[str, str]]:
    """Give two network namespaces with a link between them."""
    spaces = tuple(f"ckfar{os.getpid()}{side}" for side in "tw")
    run = subprocess.run
    with ExitStack() as ends:
        for space in spaces:
            run(["ip", "netns", "add", space], check=True)
            ends.callback(run, ["ip", "netns", "del", space], check=False)
            run(["ip", "-n", space, "link", "set", "lo", "up"], check=True)
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        carrier = context.Process(target=_carry, args=(spaces, ready), daemon=True)
        carrier.start()
        ends.callback(carrier.kill)
        if not ready.wait(60):
            raise SystemExit("the link does not come up")
        yield spaces[0], spaces[1]


# --- versions through each way ------------------------------------------------------------------


def world(
    folder: str, way: str, gb: float, reps: int, worker_space: str, port: int
) -> list[dict[str, Any]]:
    """Publish, or pull, a version after the other."""
    torch.set_num_threads(1)
    rank, far = dist.get_rank(), way.endswith("link")
    alone = [dist.new_group([r]) for r in range(2)][rank]
    dist.barrier()
    if far and rank:
        enter(worker_space)
    os.environ["CKPTD_BIND"] = ENDS[rank] if far else "127.0.0.1"
    os.environ["AWS_ENDPOINT_URL"] = f"http://{ENDS[0] if far and rank else '127.0.0.1'}:{port}"
    values = torch.randn(int(gb * 1e9) // 8192, 4096, generator=torch.Generator().manual_seed(1))
    values = (values * 0.02).bfloat16()
    found: list[dict[str, Any]] = []
    place = f"{folder}/{way.replace(', ', '-')}"
    live = f"s3://{s3.BUCKET}/{Path(place).name}"
    stored = way.startswith("bucket")
    if rank == 0:
        party: Any = ckptd.Publisher(
            ONE, None if stored else place, to=live if stored else None, process_group=alone
        )
    else:
        into = {"a": torch.zeros_like(values)}
        party = ckptd.Subscriber(ONE, {"m": into}, live if stored else place, group=alone)
        if not stored:
            party._far = True
    with party:
        for number, part in enumerate((0.0, *PARTS * reps), 1):
            if part:
                bits = values.view(torch.int16).view(-1).numpy().view(np.uint16)
                bits[:] = changed(bits, part, "any value")[0]
            dist.barrier()
            at = time.monotonic()
            row: dict[str, Any] = {"way": way, "part": part}
            if rank == 0:
                party.publish(number, {"m": {"a": values}}, wait_s=_WAIT_S)
            else:
                report = party.update(wait_s=_WAIT_S)
                assert report is not None, party.last_error
                assert torch.equal(into["a"].view(torch.int16), values.view(torch.int16))
                row |= {"received": report.bytes_received, "needed": values.nbytes}
            both: list[Any] = [None, None]
            dist.all_gather_object(both, (at, time.monotonic()))
            found.append(row | {"s": both[1][1] - both[0][0]})
        if not stored:
            found += [_plain(values, rank, ENDS[0] if far else "127.0.0.1") | {"way": way}]
    return found[1:]


def _plain(values: torch.Tensor, rank: int, address: str) -> dict[str, Any]:
    """Send all bytes over one connection."""
    data = memoryview(values.view(torch.int16).numpy()).cast("B")
    places: list[Any] = [None, None]
    if rank == 0:
        with socket.create_server((address, 0)) as listening:
            dist.all_gather_object(places, listening.getsockname())
            other, _ = listening.accept()
    else:
        dist.all_gather_object(places, None)
        other = socket.create_connection(places[0])
        data = memoryview(bytearray(len(data)))
    with other:
        dist.barrier()
        at = time.monotonic()
        if rank == 0:
            other.sendall(data)
        for start in range(0, len(data) * rank, 1 << 22):
            piece = data[start : start + (1 << 22)]
            if other.recv_into(piece, len(piece), socket.MSG_WAITALL) != len(piece):
                raise SystemExit("the plain socket ended early")
        both: list[Any] = [None, None]
        dist.all_gather_object(both, (at, time.monotonic()))
    return {"part": 0.0, "s": both[1][1] - both[0][0]}


def ways(options: Any) -> tuple[list[dict[str, Any]], str]:
    """Measure all ways; return rows, and a table."""
    rows: list[dict[str, Any]] = []
    with link() as (trainer, worker), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        enter(trainer)  # and so all that this starts
        os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "CKPTD_NODE": "far"}
        with s3.server("moto", "0.0.0.0") as bucket:
            if isinstance(bucket, str):
                raise SystemExit(bucket)
            port = int(bucket["endpoint_url"].rpartition(":")[2])
            for way in WAYS:
                given = folder, way, options.gb, options.reps, worker, port
                rows += run_ranks(2, world, *given, deadline_s=3000.0)[1]
    table = []
    for way in WAYS:
        mine = [r for r in rows if r["way"] == way]
        plain = [r["s"] for r in mine if not r["part"]] or [float("nan")]
        for part in PARTS:
            at = [r for r in mine if r["part"] == part]
            seconds = float(np.median([r["s"] for r in at]))
            share = float(np.median([r["received"] / r["needed"] for r in at]))
            table.append([way, 100 * part, seconds, 100 * share, plain[0], seconds / plain[0]])
    head = ["way", "elements changed %", "publish to use s", "received, of all bytes %"]
    head += ["plain socket, all bytes s", "it / plain"]
    return rows, common.table(head, table)


# --- real training ------------------------------------------------------------------------------


def _sampled(low: Module, draws: torch.Generator) -> torch.Tensor:
    """Return the better half of some samples of the policy."""
    parts = dict(enumerate(policyjob.rollout_parts(dict(low.named_parameters()))))
    tokens = torch.randint(policyjob.VOCABULARY, (32, 1), generator=draws)
    with torch.no_grad():
        while tokens.shape[1] <= SHAPE.seq:
            found = policyjob.logits(parts, tokens[:, -SHAPE.seq :], sum)
            chances = torch.cat([f[:, -1] for f in found], 1).float().softmax(-1)
            tokens = torch.cat([tokens, chances.multinomial(1, generator=draws)], 1)
    return tokens[policyjob.reward_of(tokens).argsort(descending=True)[:16]]


def trace(folder: str, rate: float, steps: int) -> list[dict[str, Any]]:
    """Train for some steps; return of each how much changed, and what a worker received."""
    torch.set_num_threads(1)
    policyjob.SHAPE = SHAPE
    masters, low = build(SHAPE, 7), build(SHAPE, 7).bfloat16()
    optimizer = torch.optim.AdamW(masters.parameters(), rate)
    draws = torch.Generator().manual_seed(7)
    count = sum(p.numel() for p in low.parameters())
    flat, into = (torch.zeros(-(-count // 1024), 1024, dtype=torch.bfloat16) for _ in range(2))
    found = []
    with (
        ckptd.Publisher(ONE, f"{folder}/{rate}") as publisher,
        ckptd.Subscriber(ONE, {"m": {"a": into}}, f"{folder}/{rate}") as subscriber,
    ):
        subscriber._far = True
        for step in range(steps + 1):
            if step:
                best = _sampled(low, draws)
                (low(best) / best[:, 1:].numel()).backward()
                for one, other in zip(masters.parameters(), low.parameters(), strict=True):
                    one.grad, other.grad = other.grad.float(), None
                optimizer.step()
            with torch.no_grad():
                for one, other in zip(masters.parameters(), low.parameters(), strict=True):
                    other.copy_(one)
                flat.view(-1)[:count] = torch.cat([p.view(-1) for p in low.parameters()])
            moved = int((flat.view(torch.int16) != into.view(torch.int16)).sum())
            assert publisher.publish(step, {"m": {"a": flat}}).wait()
            report = subscriber.update(wait_s=60)
            assert report is not None, subscriber.last_error
            assert torch.equal(flat.view(torch.int16), into.view(torch.int16))
            found.append({"rate": rate, "changed": moved / count, "wire": report.bytes_received})
            found[-1]["all"] = 2 * count
    return found[1:]


def traces(options: Any) -> tuple[list[dict[str, Any]], str]:
    """Train at each rate; return rows, and a table."""
    rows = [r for rate in RATES for r in trace(options.dir, rate, options.steps)]
    table = []
    for rate in RATES:
        mine = [r for r in rows if r["rate"] == rate]
        shares = [100 * r["changed"] for r in mine]
        by = [r["wire"] / (r["changed"] * r["all"]) for r in mine if r["changed"]]
        whole = [100 * r["wire"] / r["all"] for r in mine]
        row: list[Any] = [f"{rate:g}", float(np.median(shares)), min(shares), max(shares)]
        table.append([*row, float(np.median(by)), float(np.median(whole)), max(whole)])
    head = ["learning rate", "elements changed a step %", "least", "most"]
    head += ["wire / changed bytes", "wire / all bytes %", "most"]
    return rows, common.table(head, table)


def main() -> None:
    options = common.arguments(__doc__, gb=0.13, steps=8)
    if options.case == "trace":
        data, text = traces(options)
        count = data[0]["all"] // 2
        head = f"{count:,} weights in bfloat16, AdamW, float32 masters, {options.steps} steps."
    elif why := kernel_lacks():
        raise SystemExit(f"no link: {why}")
    else:
        data, text = ways(options)
        head = (
            f"{options.gb:g} GB of bfloat16, medians of {options.reps}; a link of {GBIT:g} Gbit/s, "
        )
        head += f"{1000 * ONE_WAY_S:g} ms each way."
    name = "publish_trace" if options.case == "trace" else "publish_far"
    common.publish(name, common.command(), f"{head}\n\n{text}", data)


if __name__ == "__main__":
    main()
