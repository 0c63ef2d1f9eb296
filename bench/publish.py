"""Weights from four trainer ranks (FSDP2 x TP2) to two workers (TP2): ckptd, and what is done else.

    python bench/publish.py                # 4 GB in bfloat16; takes 16 GB of memory
    python bench/publish.py --gb 1
    python bench/publish.py --case deltas --gb 0.25     # changes alone

Six processes of one machine. *gather and broadcast* is what frameworks do: rank 0 gathers each
tensor whole (straight from the four ranks, over gloo), broadcasts it to the workers, and each cuts
out its slice. *memory* and *sockets* are the plain transports' limits: the bytes that the workers
need, copied once by them from shared memory in large pieces, or sent by the four to the two over
TCP of the loopback, without layouts, digests or versions. ckptd is timed from `publish` on all
ranks to the end of `update` on both workers, and its `update` alone, once from memory and once as
if the workers were on another host. Values are compared at the end of each.

*LoRA*: one percent of the bytes changes, in tensors of their own. *Training*: ranks multiply
matrices and publish every tenth step, with workers that pull each version and with ones that sleep.
*Crowded*: the six processes and the four servers share the two cores, so what a worker copies is
taken from training, whatever ckptd does; beside the time a step takes stands the processor time of
the trainers' own processes, servers left out. *A core each*: one rank trains on a core of its own,
and one worker, of as many bytes as one of the six has, pulls on the other one; the server runs
beside the worker, as on a host with a core to spare, or on the core that trains.

*Changes* (``--case deltas``): one publisher, and one worker over sockets that has the version
before, of bfloat16 weights of which some elements, scattered, take any other value, or change their
last bit. The bound is the entropy of which elements changed and, of any values, their 16 bits; of
last bits none. Processor time is that of a server's pass over the newer version, which reads the
older one where blocks differ, beside that of the digest alone, of each the least of some; both
versions are out of the cache.
"""

from __future__ import annotations

import math
import mmap
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import ckptd
from ckptd.base.digest import digest
from ckptd.publish.blocks import BLOCK_BYTES
from ckptd.publish.deltas import NOTHING
from ckptd.publish.deltas import changed as element_change
from ckptd.testing.ranks import run_ranks

HEADS, HD, WIDTH, HIDDEN, WORDS, RANK = 16, 64, 1024, 2816, 32768, 8
MIB = 1 << 20
CROWDED = ("crowded, workers sleep", "crowded, workers pull")
APART = (
    "a core each, worker sleeps",
    "a core each, worker pulls from memory",
    "a core each, worker pulls by sockets",
    "a core each, worker pulls by sockets, server on the core that trains",
)
CASES = ("ckptd, memory", "ckptd, sockets", "gather and broadcast", "memory", "sockets")

PROGRAM = f"""
mesh T = dp:2 tp:2
mesh W = tp:2
let hd = {HD}
let rep = 1
space llama {{
  E[v h] head[v h] nf[h]
  L{{l}}.q[kv rep hd h] L{{l}}.k[kv hd h] L{{l}}.v[kv hd h] L{{l}}.o[h kv rep hd]
  L{{l}}.g[f h] L{{l}}.u[f h] L{{l}}.d[h f] L{{l}}.n1[h] L{{l}}.lora[r h]
}}
layout trainer of llama on T {{
  embed = E[v@tp@dp:ceil h]
  layers.{{l}}.q = L{{l}}.q[((kv rep)@tp hd)@dp:ceil h]
  layers.{{l}}.k = L{{l}}.k[(kv@tp hd)@dp:ceil h]
  layers.{{l}}.v = L{{l}}.v[(kv@tp hd)@dp:ceil h]
  layers.{{l}}.o = L{{l}}.o[h@dp:ceil ((kv rep)@tp hd)]
  layers.{{l}}.gate = L{{l}}.g[f@tp@dp:ceil h]
  layers.{{l}}.up = L{{l}}.u[f@tp@dp:ceil h]
  layers.{{l}}.down = L{{l}}.d[h@dp:ceil f@tp]
  layers.{{l}}.norm = L{{l}}.n1[h@dp:ceil]
  layers.{{l}}.lora = L{{l}}.lora[r@dp:ceil h]
  norm = nf[h@dp:ceil]
  head = head[v@tp@dp:ceil h]
}}
layout worker of llama on W {{
  embed = E[v@tp h]
  layers.{{l}}.qkv = L{{l}}[(q:((kv rep)@tp hd)|k:(kv@tp hd)|v:(kv@tp hd)) h]
  layers.{{l}}.o = L{{l}}.o[h ((kv rep)@tp hd)]
  layers.{{l}}.gate_up = L{{l}}[(g:f@tp|u:f@tp) h]
  layers.{{l}}.down = L{{l}}.d[h f@tp]
  layers.{{l}}.norm = L{{l}}.n1[h]
  layers.{{l}}.lora = L{{l}}.lora[r h]
  norm = nf[h]
  head = head[v@tp h]
}}
"""
FUSED = {"q": ("qkv", 0, 3), "k": ("qkv", 1, 3), "v": ("qkv", 2, 3)}
FUSED |= {"gate": ("gate_up", 0, 2), "up": ("gate_up", 1, 2)}
"""Where a tensor lies in a fused one of a worker: its name, the place, of how many."""


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """Yield each tensor: name, whole shape, and the dimension that TP cuts."""
    yield "embed", (WORDS, WIDTH), 0
    for i in range(layers):
        for name in "qkv":
            yield f"layers.{i}.{name}", (HEADS * HD, WIDTH), 0
        yield f"layers.{i}.o", (WIDTH, HEADS * HD), 1
        yield f"layers.{i}.gate", (HIDDEN, WIDTH), 0
        yield f"layers.{i}.up", (HIDDEN, WIDTH), 0
        yield f"layers.{i}.down", (WIDTH, HIDDEN), 1
        yield f"layers.{i}.norm", (WIDTH,), None
        yield f"layers.{i}.lora", (RANK * 16, WIDTH), None
    yield "norm", (WIDTH,), None
    yield "head", (WORDS, WIDTH), 0


def layers_of(gb: float) -> int:
    """Return how many layers make up so many gigabytes."""
    size = sum(2 * int(np.prod(s)) for n, s, _ in shapes(1) if n.startswith("layers."))
    return max(1, round((gb * 1e9 - 4 * WORDS * WIDTH) / size))


def whole(number: int, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Return a tensor's values at a step: no two rows, tensors or steps are alike.

    Nor does their difference compress, as it would if a step added a number to each.
    """
    row = [shape[0], *[1] * (len(shape) - 1)]
    of_step = torch.Generator().manual_seed(1_000_003 * number + step)
    factors, more = torch.randint(-(1 << 15), 1 << 15, (2, *row), generator=of_step)
    of_tensor = torch.Generator().manual_seed(number)
    columns = torch.randint(-(1 << 15), 1 << 15, shape[1:], generator=of_tensor)
    factors, more, columns = (x.to(torch.int16) for x in (factors | 1, more, columns))
    return factors.mul(columns).add_(more).view(torch.bfloat16)


def module_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Return a module with these tensors as its parameters."""
    out = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = out
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return out


class Trainer:
    """State of a rank of the trainer."""

    def __init__(self, rank: int, layers: int, ways: int = 2) -> None:
        self.ways = ways
        self.dp, self.tp = divmod(rank, ways)
        self.specs = list(shapes(layers))
        self.state = {n: self._part(i, 0).clone() for i, (n, *_) in enumerate(self.specs)}

    def _part(self, number: int, step: int) -> torch.Tensor:
        _, shape, cut = self.specs[number]
        full = whole(number, shape, step)
        own = full if cut is None else full.chunk(self.ways, cut)[self.tp]
        return own.chunk(self.ways)[self.dp]

    def set(self, step: int, only: str = "") -> None:
        for i, (name, *_) in enumerate(self.specs):
            if name.endswith(only):
                self.state[name].copy_(self._part(i, step))


class Worker:
    """State of a worker."""

    def __init__(self, tp: int, layers: int, ways: int = 2) -> None:
        self.tp, self.ways = tp, ways
        self.specs = list(shapes(layers))
        self.state: dict[str, torch.Tensor] = {}
        for name, shape, cut in self.specs:
            mine = list(shape)
            if cut is not None:
                mine[cut] //= ways
            fused, _, of = self._place(name)
            self.state[fused] = torch.zeros([mine[0] * of, *mine[1:]], dtype=torch.bfloat16)
        self.nbytes = sum(t.nbytes for t in self.state.values())

    @staticmethod
    def _place(name: str) -> tuple[str, int, int]:
        layer, _, short = name.rpartition(".")
        fused, at, of = FUSED.get(short, (short, 0, 1))
        return (f"{layer}.{fused}" if layer else fused), at, of

    def slot(self, number: int) -> torch.Tensor:
        """Return where a tensor's slice goes."""
        fused, at, of = self._place(self.specs[number][0])
        return self.state[fused].chunk(of)[at]

    def cut(self, number: int, full: torch.Tensor) -> torch.Tensor:
        cut = self.specs[number][2]
        return full if cut is None else full.chunk(self.ways, cut)[self.tp]

    def wrong(self, step: int, only: str = "") -> list[str]:
        """Return the tensors that do not have a step's values."""
        out = []
        for i, (name, shape, _) in enumerate(self.specs):
            wanted = self.cut(i, whole(i, shape, step if name.endswith(only) else 1))
            if not torch.equal(wanted.view(torch.int16), self.slot(i).view(torch.int16)):
                out.append(name)
        return out


class Memory:
    """The most anonymous memory of this process above its start, in bytes."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._base = self.peak = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def _now() -> int:
        rows = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())
        return 1024 * int(rows["RssAnon"].split()[0])

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, self._now())

    def done(self) -> int:
        self._stop.set()
        self._thread.join()
        return max(self.peak, self._now()) - self._base


class Bench:
    """One process of the six."""

    def __init__(self, folder: str, layers: int) -> None:
        torch.set_num_threads(1)
        self.rank = dist.get_rank()
        self.folder = Path(folder)
        self.trains = self.rank < 4
        self.trainers = dist.new_group([0, 1, 2, 3])
        self.workers = dist.new_group([4, 5])
        self.broadcast = dist.new_group([0, 4, 5])
        self.trainer = Trainer(self.rank, layers) if self.trains else None
        self.worker = None if self.trains else Worker(self.rank - 4, layers)
        self.specs = list(shapes(layers))
        self.step = 0
        at = self.folder / "at"
        if self.trainer is not None:
            self.state = {"model": module_of(self.trainer.state)}
            self.publisher = ckptd.Publisher(
                f"# layout trainer\n{PROGRAM}", at, process_group=self.trainers
            )
        else:
            assert self.worker is not None
            self.subscriber = ckptd.Subscriber(
                f"# layout worker\n{PROGRAM}", module_of(self.worker.state), at, group=self.workers
            )

    def close(self) -> None:
        (self.publisher if self.trains else self.subscriber).close()

    # --- one case -------------------------------------------------------------------------------

    def run(self, case: str) -> dict[str, Any]:
        """Move the weights once, and compare them."""
        self.step += 1
        if self.trainer is not None:
            self.trainer.set(self.step)
        way = {"gather and broadcast": self.gathered, "memory": self.copied, "sockets": self.sent}
        memory = Memory()
        dist.barrier()
        begun = time.perf_counter()
        found = self.ours(case.endswith("sockets")) if "ckptd" in case else way[case]()
        dist.barrier()
        found = {"seconds": time.perf_counter() - begun} | found | {"memory": memory.done()}
        if self.worker is not None and case not in ("memory", "sockets"):
            wrong = self.worker.wrong(self.step)
            assert not wrong, (case, wrong[:3])
        return found

    def ours(self, far: bool, only: str = "") -> dict[str, Any]:
        if self.trainer is not None:
            begun = time.perf_counter()
            publication = self.publisher.publish(self.step, self.state)
            blocked = time.perf_counter() - begun
            assert publication.wait()
            dist.barrier()
            return {"blocked": blocked}
        if self.subscriber._far != far:
            self.subscriber._far = far
            self.subscriber._disconnect()
        if not only:
            self.subscriber._proofs.clear()  # nothing is left out
        dist.barrier()
        begun = time.perf_counter()
        report = self.subscriber.update(wait_s=60)
        assert report is not None
        assert report.version.step == self.step
        return {
            "update": time.perf_counter() - begun,
            "needed": report.bytes_needed,
            "moved": report.bytes_received + report.bytes_mapped,
            "staged": report.staged_bytes,
        }

    def gathered(self) -> dict[str, Any]:
        for i, (name, shape, cut) in enumerate(self.specs):
            full = torch.empty(shape, dtype=torch.bfloat16)
            if self.trainer is not None:
                mine = self.trainer.state[name]
                if self.rank:
                    dist.gather(mine, group=self.trainers, dst=0)
                    continue
                parts = [torch.empty_like(mine) for _ in range(4)]
                dist.gather(mine, parts, group=self.trainers, dst=0)
                if cut is None:
                    full = torch.cat([parts[0], parts[2]])
                else:
                    halves = [torch.cat([parts[tp], parts[2 + tp]]) for tp in (0, 1)]
                    full = torch.cat(halves, cut)
            dist.broadcast(full, 0, group=self.broadcast)
            if self.worker is not None:
                self.worker.slot(i).copy_(self.worker.cut(i, full))
        return {}

    def copied(self) -> dict[str, Any]:
        """Each worker copies what it needs out of memory that all share."""
        if self.worker is None:
            return {}
        fd = os.open(self.folder / "shared", os.O_RDONLY)
        source = np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8)
        os.close(fd)
        begun = time.perf_counter()
        at = 0
        for tensor in self.worker.state.values():
            target = tensor.view(torch.int16).numpy().reshape(-1).view(np.uint8)
            np.copyto(target, source[at : at + len(target)])
            at += len(target)
        return {"update": time.perf_counter() - begun}

    def sent(self) -> dict[str, Any]:
        """Each trainer sends each worker a quarter of what that one needs."""
        if self.trainer is not None:
            listening = socket.create_server(("127.0.0.1", 0))
            ports = [0] * 6
            dist.all_gather_object(ports, listening.getsockname()[1])
            links = [listening.accept()[0] for _ in range(2)]
            sizes = [int.from_bytes(link.recv(8), "little") for link in links]
            data = memoryview(bytearray(16 * MIB))
            dist.barrier()

            def send(link: socket.socket, size: int) -> None:
                for at in range(0, size, len(data)):
                    link.sendall(data[: min(len(data), size - at)])
                link.close()

            lanes = [threading.Thread(target=send, args=a) for a in zip(links, sizes, strict=True)]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
            listening.close()
            return {}
        assert self.worker is not None
        ports = [0] * 6
        dist.all_gather_object(ports, 0)
        links = [socket.create_connection(("127.0.0.1", port)) for port in ports[:4]]
        size = self.worker.nbytes // 4
        for link in links:
            link.sendall(size.to_bytes(8, "little"))
        into = memoryview(bytearray(4 * size))
        dist.barrier()
        begun = time.perf_counter()

        def receive(number: int) -> None:
            at, end = number * size, (number + 1) * size
            while at < end:
                at += links[number].recv_into(into[at:end])
            links[number].close()

        lanes = [threading.Thread(target=receive, args=(i,)) for i in range(4)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        return {"update": time.perf_counter() - begun}

    # --- further questions ----------------------------------------------------------------------

    def lora(self) -> dict[str, Any]:
        """One percent changes."""
        self.step = 1
        if self.trainer is not None:
            self.trainer.set(1)
        self.ours(False)
        dist.barrier()  # else a worker that asks late finds the next version
        for step in (2, 3):  # the first of them shows what stays as it is
            self.step = step
            if self.trainer is not None:
                self.trainer.set(step, ".lora")
            found = self.ours(False, ".lora")
            dist.barrier()
        if self.worker is not None:
            wrong = self.worker.wrong(3, ".lora")
            assert not wrong, wrong[:3]
            found["changed"] = sum(
                t.nbytes for n, t in self.worker.state.items() if n.endswith(".lora")
            )
        return found

    def train(self, pull: bool, steps: int) -> dict[str, Any]:
        """Train, publish every tenth step; workers pull, or do not."""
        flag = self.folder / f"trained-{pull}-{self.step}"
        dist.barrier()
        if self.trainer is not None:
            found = trained(self.publisher, self.state, steps, self.trainers)
            dist.barrier(group=self.trainers)
            flag.touch()
        else:
            found = {"versions": 0}
            ended = [False]
            while not ended[0]:  # for both workers alike
                if pull:
                    found["versions"] += self.subscriber.update(wait_s=0.05) is not None
                else:
                    time.sleep(0.05)
                ended = [flag.exists()]
                dist.broadcast_object_list(ended, 4, group=self.workers)
        dist.barrier()
        self.step += 1
        return found


def trained(
    publisher: ckptd.Publisher, state: dict[str, Any], steps: int, group: Any
) -> dict[str, Any]:
    """Train, and publish every tenth step."""
    a = torch.randn(512, 512)
    begun, cpu, skipped = time.perf_counter(), time.process_time(), 0
    for i in range(steps):
        for _ in range(4):
            a = (a @ a).clamp_(-1, 1)
        if i % 10 == 0:
            publication = publisher.publish(1000 + i, state)
            skipped += bool(publication.skipped)
        dist.all_reduce(a[:1], group=group)
    return {
        "step": (time.perf_counter() - begun) / steps,
        "cpu": (time.process_time() - cpu) / steps,
        "skipped": skipped,
    }


def run_on(core: int, pid: int = 0) -> None:
    """Have all threads of a process run on one core."""
    for task in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def apart(folder: str, layers: int, reps: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Train on one core, and pull on the other one."""
    torch.set_num_threads(1)
    rank, at = dist.get_rank(), Path(folder) / "apart"
    alone = [dist.new_group([r]) for r in range(2)][rank]
    program = PROGRAM.replace("dp:2 tp:2", "dp:1 tp:1").replace("mesh W = tp:2", "mesh W = tp:1")
    run_on(rank)
    state: dict[str, Any] = {}
    if rank == 0:
        state = {"model": module_of(Trainer(0, layers, 1).state)}
        publisher = ckptd.Publisher(f"# layout trainer\n{program}", at, process_group=alone)
        assert publisher.publish(0, state).wait()
    else:
        into = module_of(Worker(0, layers, 1).state)
        subscriber = ckptd.Subscriber(f"# layout worker\n{program}", into, at, group=alone)
        assert subscriber.update(wait_s=60)
    found: dict[str, list[dict[str, Any]]] = {}
    order = random.Random(1)
    for rep in range(reps):
        names = list(APART)
        order.shuffle(names)
        for name in names:
            flag = Path(folder) / f"apart-{rep}-{name}"
            if rank == 0:
                run_on(0 if name.endswith("that trains") else 1, publisher.server_pid)
            dist.barrier()
            if rank == 0:
                done = trained(publisher, state, steps, alone)
                flag.touch()
            else:
                done = {"versions": 0}
                subscriber._far = "sockets" in name
                subscriber._disconnect()
                while not flag.exists():
                    if "pulls" in name:
                        done["versions"] += subscriber.update(wait_s=0.05) is not None
                    else:
                        time.sleep(0.05)
            dist.barrier()
            found.setdefault(name, []).append(done)
            if rank == 0:
                print(name, done, file=sys.stderr, flush=True)
    (subscriber if rank else publisher).close()
    return found


def world(folder: str, layers: int, reps: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Run everything, alternating."""
    bench = Bench(folder, layers)
    found: dict[str, list[dict[str, Any]]] = {}
    order = random.Random(0)
    for _ in range(reps):
        names = [*CASES, "LoRA", *CROWDED]
        order.shuffle(names)
        for name in names:
            if name == "LoRA":
                kept = bench.step
                found.setdefault(name, []).append(bench.lora())
                bench.step = kept + 3
            elif name in CASES:
                found.setdefault(name, []).append(bench.run(name))
            else:
                found.setdefault(name, []).append(bench.train(name.endswith("pull"), steps))
            if bench.rank == 4:
                print(name, found[name][-1], file=sys.stderr, flush=True)
    bench.close()
    return found


ONE = "mesh O = x:1\nspace s { A[a b] }\nlayout one of s on O { a = A[a b] }\n"
PARTS = (0.0, 0.001, 0.01, 0.045, 0.3, 1.0)


def changed(old: np.ndarray[Any, Any], part: float, how: str) -> tuple[np.ndarray[Any, Any], int]:
    """Return other weights, and how many elements changed."""
    rng = np.random.default_rng(int(1e6 * part))
    at = np.flatnonzero(rng.random(len(old)) < part)
    lies = torch.from_numpy(old.view(np.int16)).clone()  # where a line begins, as slots do
    new = lies.numpy().view(np.uint16)
    new[at] ^= rng.integers(1, 1 << 16, len(at)).astype(np.uint16) if how == "any value" else 1
    return new, len(at)


def passes(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any], reps: int) -> tuple[float, float]:
    """Return processor seconds a GB of the digests alone, and with what changed beside them."""
    blocks = [
        tuple(x.view(np.uint8)[at : at + BLOCK_BYTES] for x in (old, new))
        for at in range(0, old.nbytes, BLOCK_BYTES)
    ]
    known = [digest(before.data) for before, _ in blocks]
    found = []
    for both in (False, True):
        best = math.inf
        for _ in range(reps):
            begun, resting = time.process_time(), True
            for (before, now), was in zip(blocks, known, strict=True):
                made = digest(now.data) if resting or not both else b""
                if both and made != was:
                    delta, also = element_change(before, now, 2)
                    made, resting = made or also or digest(now.data), delta == NOTHING
            best = min(best, time.process_time() - begun)
        found.append(best / old.nbytes * 1e9)
    return found[0], found[1]


def deltas(options: Any) -> None:
    """Measure what a change takes on the wire, and on the sender."""
    rows = int(options.gb * 1e9) // (2 * 4096)
    values = (torch.randn(rows * 4096) * 0.02).bfloat16().view(torch.int16).numpy().view(np.uint16)
    state = {"a": torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).view(rows, 4096)}
    into = {"a": torch.zeros_like(state["a"])}
    table, data = [], []
    with (
        ckptd.Publisher(ONE, f"{options.dir}/at") as publisher,
        ckptd.Subscriber(ONE, {"m": into}, f"{options.dir}/at") as subscriber,
    ):
        subscriber._far = True
        publisher.publish(0, {"m": state}).wait()
        assert subscriber.update(wait_s=60)
        for how in ("any value", "last bit"):
            for part in PARTS[how != "any value" :]:
                new, count = changed(values, part, how)
                alone, both = passes(values, new, options.reps)
                values[:] = new  # the state's memory
                publisher.publish(1, {"m": state}).wait()
                report = subscriber.update(wait_s=60)
                assert report is not None
                assert torch.equal(into["a"].view(torch.int16), state["a"].view(torch.int16))
                wire, bits = report.bytes_received, 16 if how == "any value" else 0
                rest = 1 - part
                each = -sum(p * math.log2(p) for p in (part, rest) if p)
                bound = max(1.0, len(values) * (each + bits * part) / 8)
                per = [wire / (2 * count), wire / bound] if count else 2 * [float("nan")]
                row = [how, 100 * part, wire / 1e6, *per]
                row += [wire / state["a"].nbytes, alone, both, both / alone]
                table.append(row if part < 1 or bits else [*row[:4], float("nan"), *row[5:]])
                data.append(row)
    head = ["change", "elements %", "on the wire MB", "wire / changed bytes"]
    head += ["wire / entropy (aim 1.6)", "wire / whole (aim 1.01)"]
    head += ["digest alone s/GB", "with what changed s/GB", "ratio (aim 1.3)"]
    text = f"{state['a'].nbytes / 1e9:.2f} GB of bfloat16.\n\n" + common.table(head, table)
    command = " ".join(["python", "bench/publish.py", *sys.argv[1:]])
    common.publish("publish_deltas", command, text, data)


def main() -> None:
    options = common.arguments(__doc__, gb=4.0, steps=60)
    if options.case == "deltas":
        deltas(options)
        return
    layers = layers_of(options.gb)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ckptd-bench-") as folder:
        needed = Worker(0, layers).nbytes
        with open(f"{folder}/shared", "wb") as shared:
            shared.writelines(os.urandom(MIB) * 16 for _ in range(0, needed, 16 * MIB))
        counts = options.reps, options.steps
        ranks = run_ranks(6, world, folder, layers, *counts, deadline_s=3000.0)
        half = layers_of(options.gb / 2)
        pair = run_ranks(2, apart, folder, half, *counts, deadline_s=3000.0)
    report(ranks, pair, needed, options)


Found = list[dict[str, list[dict[str, Any]]]]


class Medians:
    """Medians over repetitions, of the largest of some ranks."""

    def __init__(self, ranks: Found, reps: int) -> None:
        self.ranks, self.reps = ranks, reps

    def __call__(self, case: str, key: str, rows: slice) -> float:
        found = [max(r[case][i].get(key, 0) for r in self.ranks[rows]) for i in range(self.reps)]
        return float(np.median(found))


def report(ranks: Found, pair: Found, needed: int, options: Any) -> None:
    of = Medians(ranks, options.reps)
    trainers, workers = slice(0, 4), slice(4, 6)
    text = f"{2 * needed / 1e9:.2f} GB for two workers, {options.reps} repetitions, medians.\n\n"
    base = of("gather and broadcast", "seconds", workers)
    rows = []
    for case in CASES:
        limit = "sockets" if case.endswith("sockets") else "memory"
        seconds, update = of(case, "seconds", workers), of(case, "update", workers)
        moved = of(case, "moved", workers) / max(1.0, of(case, "needed", workers))
        ours = "ckptd" in case
        nothing = float("nan")
        rows.append(
            [
                case,
                seconds if case not in ("memory", "sockets") else nothing,
                update or nothing,
                base / seconds if ours else nothing,
                of(limit, "update", workers) / update if ours else nothing,
                moved if ours else nothing,
                of(case, "memory", workers) / MIB,
                of(case, "staged", workers) / MIB if ours else nothing,
                of(case, "blocked", trainers) if ours else nothing,
            ]
        )
    head = ["case", "publish to applied s", "update alone s", "baseline / it (aim 2)"]
    head += ["limit / update (aim 0.8)", "bytes moved / needed (aim 1)"]
    head += ["worker memory above the model MiB", "of it staged MiB", "trainer blocked s"]
    text += common.table(head, rows)
    changed = of("LoRA", "changed", workers)
    text += f"\n\nLoRA: {100 * changed / needed:.2f} % of the bytes changed, "
    text += f"moved {of('LoRA', 'moved', workers) / changed:.3f} times that (aim 1.02).\n\n"
    rows = []
    for all_, (trains, pulls), cases in (
        (ranks, (trainers, workers), CROWDED),
        (pair, (slice(0, 1), slice(1, 2)), APART),
    ):
        of = Medians(all_, options.reps)
        quiet = of(cases[0], "step", trains)
        for case in cases:
            step, cpu = (1000 * of(case, key, trains) for key in ("step", "cpu"))
            slower = 100 * (step / 1000 / quiet - 1)
            counts = int(of(case, "versions", pulls)), int(of(case, "skipped", trains))
            rows.append([case, step, slower, cpu, *counts])
    head = ["training", "step ms", "slower % (aim 5)", "processor ms of the rank's own process"]
    text += common.table([*head, "versions pulled", "skipped"], rows)
    command = " ".join(["python", "bench/publish.py", *sys.argv[1:]])
    common.publish("publish", command, text, {"ranks": ranks, "pair": pair, "needed": needed})


if __name__ == "__main__":
    main()
