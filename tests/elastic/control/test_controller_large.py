"""A controller with 1,000 nodes: what a beat costs, and that a restart of all of them goes well."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from ckptd.base.net.address import parse_address
from ckptd.base.net.connection import VERSION, Admitted, Codec, Hello
from ckptd.base.net.tls import TlsSession, identity
from ckptd.decoding import msgpack_decoder
from ckptd.elastic.dial import PURPOSE
from ckptd.elastic.messages import (
    Beat,
    Begin,
    Envelope,
    Fenced,
    FenceNow,
    LeaseRenewal,
    NodeUp,
    Order,
    OrderKind,
    Progress,
    Saved,
    SaveNow,
    StoreAt,
    ToNode,
)
from tests.elastic.controlled import SECRET, controlled
from tests.processes import PATIENCE_S

NODES = 1000
BEAT_S = 0.5
WATCHED_S = 10.0
WELCOME = msgpack_decoder(Admitted)
TO_NODE = msgpack_decoder(ToNode)


class SmallNode(asyncio.Protocol):
    """A node as small as can be: 1,000 of them live in one thread."""

    def __init__(self, name: str, counts: dict[str, int]) -> None:
        self.name, self.counts = name, counts
        self.codec = Codec(name)
        own = identity(SECRET.encode(), "agent", name, "j")
        self.tls = TlsSession(own, server=False, where="controller")
        self.greeted = self.met = False
        self.running = self.fenced = self.number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.tls.shake()
        transport.write(self.tls.to_send())

    def write(self, message: object) -> None:
        self.tls.write(memoryview(self.codec.pack(msgspec.msgpack.encode(message))))
        self.transport.write(self.tls.to_send())

    def data_received(self, data: bytes) -> None:
        self.tls.feed(data)
        if not self.tls.shake():
            return
        self.codec.feed(self.tls.read())
        if not self.greeted:
            self.greeted = True
            self.write(Hello(VERSION, PURPOSE, {"job": "j"}))
        if not self.met:
            if self.codec.take(WELCOME) is None:
                return
            self.codec.let_in()
            self.met = True
            self.beat()
        while self.met and (message := self.codec.take(TO_NODE)) is not None:
            self.take(message)

    def take(self, message: ToNode) -> None:
        if isinstance(message, LeaseRenewal):
            self.counts["echoes"] += 1
        elif isinstance(message, FenceNow):
            self.fenced, self.running = message.generation, 0
            self.say(Fenced(node=self.name, generation=message.generation))
        elif isinstance(message, Begin):
            self.running = message.generation
            self.counts["begins"] += 1
            self.beat()
            if message.node_rank == 0:
                self.say(Progress(generation=message.generation, step=message.step + 1))
        elif isinstance(message, SaveNow):
            self.say(Saved(generation=message.generation, step=1))
        else:
            assert isinstance(message, StoreAt)

    def say(self, event: Fenced | Progress | Saved) -> None:
        assert self.met
        self.write(Envelope(event=event))

    def beat(self) -> None:
        if self.met:
            self.number += 1
            up = NodeUp(node=self.name, life="l", slots=8, fenced=self.fenced, running=self.running)
            self.write(Beat(number=self.number, up=up))

    async def beats(self, later_s: float) -> None:
        await asyncio.sleep(later_s)
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)


async def _crowd(address: str, script: asyncio.Future[None], counts: dict[str, int]) -> None:
    loop = asyncio.get_running_loop()
    host, port = parse_address(address)
    tasks = []
    for k in range(NODES):
        node = SmallNode(f"n{k:04}", counts)
        await loop.create_connection(lambda node=node: node, host, port)  # type: ignore[misc]
        tasks.append(asyncio.ensure_future(node.beats(BEAT_S * k / NODES)))
    try:
        await script
    finally:
        for task in tasks:
            task.cancel()


@pytest.mark.long
def test_1000_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--nodes", f"{NODES}", "--slots", "8", "--set", "silent_s=30")
    with controlled(tmp_path, *options) as c, c.operator() as operator:
        assert c.process is not None
        process = psutil.Process(c.process.pid)
        counts = {"echoes": 0, "begins": 0}

        def reached(generation: int) -> None:
            end = time.monotonic() + 2 * PATIENCE_S
            while (s := operator.status()).state != "running" or s.generation < generation:
                assert time.monotonic() < end, (s.state, s.reason, s.generation)
                time.sleep(0.2)
            assert s.world == 8 * NODES

        def play() -> tuple[float, int]:
            reached(1)
            before, echoes = process.cpu_times(), counts["echoes"]
            time.sleep(WATCHED_S)
            after = process.cpu_times()
            spent = after.user + after.system - before.user - before.system
            beats = counts["echoes"] - echoes
            assert operator.order(Order(kind=OrderKind.RESTART)).ok
            reached(2)
            return spent, beats

        async def main() -> tuple[float, int]:
            script: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            crowd = asyncio.ensure_future(_crowd(c.address, script, counts))
            try:
                return await asyncio.to_thread(play)
            finally:
                script.set_result(None)
                await crowd

        spent, beats = asyncio.run(main())
        memory = process.memory_info().rss / 2**20
    assert counts["begins"] == 2 * NODES
    assert beats > 0
    with capsys.disabled():
        print(
            f"\n{NODES} nodes of 8 ranks: {1000 * spent / beats:.3f} CPU ms a beat, "
            f"{100 * spent / WATCHED_S:.0f} % of a core, {memory:.0f} MiB"
        )
