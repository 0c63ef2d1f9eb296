"""What nodes say to each other once they were let in: probes, the check before a job, statuses."""

from __future__ import annotations

import contextlib
import io
import socket
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import msgspec

from ckptd.base.net.connection import Connection
from ckptd.elastic.cli.ctl import _show as show_status
from ckptd.elastic.messages import Answer, NodeRow, Recovery, Status
from ckptd.elastic.policy import Shape
from ckptd.errors import CkptdError
from ckptd.monitor.agent import preflight, probes
from ckptd.monitor.agent.preflight import (
    ClockReading,
    NodeHello,
    PairOrder,
    PreflightNode,
    PreflightOutcome,
    PreflightPlan,
    Probed,
    ReadClock,
    Test,
    Tested,
)
from ckptd.monitor.agent.probes import Answerer
from ckptd.monitor.cli.cluster import _show as show_preflight
from ckptd.monitor.daemon.metrics import _elastic_families
from ckptd.monitor.daemon.response import Responder
from ckptd.monitor.preflight import PairProbe, PreflightFinding
from tests.fuzzing.sessions import GAP, asked, served
from tests.monitor.test_preflight_machines import GOOD, H

_SECRET = b"s" * 32
_NODES = 5


# --- probes ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _answerer() -> Answerer:
    return Answerer("127.0.0.1", _SECRET)


def probed(raw: bytes) -> None:
    """Probe a node."""
    with mock.patch.object(probes, "MOST_PROBE_BYTES", 1 << 16):
        served(_answerer()._serve, raw)


def prober(raw: bytes) -> None:
    """Answer a node that probes."""
    measures = (probes._small, probes._out(64), probes._back(64))

    def measure(wire: Connection) -> None:
        for one in measures:
            taken, of_link = one(wire)
            assert taken >= 0 or not of_link

    served(measure, raw)


PROBED_SEEDS = [
    asked(probes._Ping(), probes._Give(9), probes._Ping()),
    b"\xc1\3abc" + asked(probes._Take(), probes._Ping()),
]
PROBER_SEEDS = [asked(*[probes._Pong(1e-9)] * 90), b"\xc1\3abc" + asked(probes._Pong())]


# --- the check before a job -----------------------------------------------------------------------


def _sent(bodies: list[bytes], until: contextlib.ExitStack) -> Connection:
    """Return a connection on which this has come, and then the end."""
    here, there = socket.socketpair()
    until.enter_context(there)
    for body in bodies:
        there.sendall(struct.pack("<II", len(body), 0) + body)
    there.shutdown(socket.SHUT_WR)
    wire = Connection(here, "node", 1.0)
    until.callback(wire.release)
    wire.codec.let_in()
    return wire


def coordinator(raw: bytes) -> None:
    """Have a coordinator take what five nodes say; the first byte of a message tells which."""
    bodies: list[list[bytes]] = [[] for _ in range(_NODES)]
    for body in raw.split(GAP):
        bodies[body[0] % _NODES if body else 0].append(body[1:])
    gathered = preflight._Gathered()
    plan = PreflightPlan(nodes=_NODES, limit_s=1.0)
    with contextlib.ExitStack() as until:
        for said in bodies:
            wire = _sent(said, until)
            with contextlib.suppress(CkptdError):
                hello, _ = wire.receive(preflight._HELLO, 1.0)
                gathered.nodes.append(preflight._Connected(wire, hello, "10.0.0.9"))
        preflight._name(gathered)
        found = preflight._Check(gathered, plan, lambda _: None, 0.0).run()
    known = {f"{a}>{b}" for a in found.nodes for b in found.nodes} | set(found.nodes)
    assert all(f.name in known for f in found.findings if f.what not in ("absent", "extra"))
    assert all(p.source != p.to for p in found.probes)
    msgspec.json.encode(found)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        show_preflight(found, plan)
    assert shown.getvalue().replace("\n", "").isprintable()


def member(raw: bytes) -> None:
    """Have a node do what a coordinator orders."""
    node = PreflightNode("n", 0, Path())

    def obey(wire: Connection) -> NoReturn:
        while True:
            order, _ = wire.receive(preflight._ORDER, 1.0)
            if not isinstance(order, PreflightOutcome):
                msgspec.msgpack.encode(preflight._done(order, node, _SECRET))

    def probe(source: int, to: int, address: tuple[str, int], _: bytes, size: int) -> PairProbe:
        assert size <= probes.MOST_PROBE_BYTES
        return PairProbe(source=source, to=to, latency_s=1.0, out_s=1.0, in_s=1.0)

    with (
        mock.patch.object(preflight, "self_test", return_value=GOOD),
        mock.patch.object(preflight, "probe_pair", probe),
    ):
        served(obey, raw)


def _node(number: int, *, slow: float = 1.0) -> bytes:
    machine = msgspec.structs.replace(GOOD, compute_s=slow * GOOD.compute_s, gpus=(H,))
    others = [k for k in range(_NODES) if k != number]
    said = [
        NodeHello(f"n{number}", number, "10.0.0.1", 1),
        Tested(machine),
        *[ClockReading(1.8e9 + number)] * 3,
        *[
            Probed(PairProbe(source=number, to=to, latency_s=1e-4 * slow, out_s=1e-3, in_s=1e-3))
            for to in others
        ],
        *[Tested(machine)] * 3,
    ]
    return GAP.join(bytes([number]) + msgspec.msgpack.encode(one) for one in said)


COORDINATOR_SEEDS = [
    GAP.join(map(_node, range(_NODES))),
    GAP.join([*map(_node, range(_NODES - 1)), _node(_NODES - 1, slow=9.0)]),
]
MEMBER_SEEDS = [
    asked(Test(1.0), ReadClock(), PairOrder(0, 1, "h", 1, 1 << 40)),
    asked(
        PreflightOutcome(
            False,
            (PreflightFinding(status="fail", target="node", name="n", what="lost", message="m"),),
        )
    ),
]


# --- statuses of the controller -------------------------------------------------------------------


class _Rounds:
    """Takes work for the watch, and has none done."""

    def call(self, work: object) -> None:
        assert callable(work)


def status(raw: bytes) -> None:
    """Have a daemon, and the command line, take what a controller says."""
    idle: Any = _Rounds()
    settings: Any = None
    shown: list[Status] = []
    responder = Responder(
        str, "j", _SECRET, settings,
        rounds=idle, tape=idle, answered=idle.call,
        changed=lambda: shown.extend(filter(None, [responder.controller.status])),
    )  # fmt: skip

    def follow(wire: Connection) -> None:
        with mock.patch.object(responder.controller._calls, "_dial", return_value=wire):
            responder.controller._follow()

    served(follow, raw)
    msgspec.json.encode(responder.document())
    assert all(one.job == "j" for one in shown)
    list(_elastic_families(responder.counts, True))
    for one in shown:
        with contextlib.redirect_stdout(io.StringIO()):
            show_status(one)


_RECOVERY = Recovery(at=1.0, cause="c", planned=False, before=1, after=2, level=1, total=3.0)
_STATUS = Status(
    job="j",
    state="running",
    reason="r",
    since=1.0,
    at=9.0,
    generation=3,
    step=4,
    shape=Shape(1, 2, 1),
    world=2,
    planned=Shape(1, 2, 1),
    nodes=(
        NodeRow(name="n", up=True, slots=1, sick=("s",)),
        NodeRow(name="m", up=False, slots=1, out_until_s=None),
    ),
    recoveries=(_RECOVERY,),
    goodput={"useful": 1.0, "lost": 2.0},
    told=("t",),
)
STATUS_SEEDS = [
    asked(_STATUS, Answer(number=2, ok=True)),
    asked(msgspec.structs.replace(_STATUS, ended="done", shape=None)),
]
