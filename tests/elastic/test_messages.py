"""Every message of the controller's protocol survives the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ckptd.elastic.messages import (
    Announce,
    Answer,
    Ask,
    Beat,
    Begin,
    Broken,
    DaemonAt,
    Ended,
    Envelope,
    Fenced,
    FenceNow,
    FromNode,
    FromOperator,
    Hosting,
    LeaseRenewal,
    Left,
    Loaded,
    NodeRow,
    NodeUp,
    Notice,
    OperatorCommand,
    Order,
    OrderKind,
    Progress,
    RankAssignment,
    Recovery,
    SaidEvent,
    Saved,
    SaveNow,
    Shutdown,
    Status,
    StoreAt,
    Subscribe,
    Suspected,
    Tell,
    Timed,
    ToNode,
    ToOperator,
    exit_code,
)
from ckptd.elastic.policy import Shape

EVENTS: list[SaidEvent] = [
    Left(node="a"),
    Ended(node="a", generation=1, code=-9),
    Fenced(node="a", generation=1),
    Loaded(node="a", generation=1),
    Progress(generation=1, step=2),
    Saved(generation=1, step=2),
    Broken(node="a", generation=1, reason="reset"),
    Notice(node="a", seconds=30.0),
]
FROM_NODE = [
    Beat(number=1, up=NodeUp(node="a", life="l", slots=8, running=1, sessions=True, host="h")),
    *[Envelope(event=event, number=k) for k, event in enumerate(EVENTS)],
    Hosting(generation=1, host="h", port=1),
    Timed(generation=1, node="a", marks={"spawned": 0.1}),
]
TO_NODE = [
    LeaseRenewal(number=1, heard=2),
    FenceNow(generation=2, level=0),
    Begin(
        generation=2,
        level=0,
        shape=Shape(1, 2, 1),
        step=3,
        reason="r",
        nodes=2,
        node_rank=1,
        seats=(RankAssignment(0, 1, 0, 1, 0),),
        world=2,
    ),
    StoreAt(generation=2, host="h", port=65535),
    SaveNow(generation=2),
    DaemonAt("http://10.0.0.1:8400"),
    Tell(text="node b is left out", aloud=True, nodes=("b",), command="ckptd ctl add b"),
    Shutdown(kind="done", text="", code=0),
]
FROM_OPERATOR = [
    Ask(number=1),
    Subscribe(number=2),
    OperatorCommand(number=3, event=Order(kind=OrderKind.EXCLUDE, nodes=("a",))),
    OperatorCommand(number=4, event=Suspected(nodes=(), reason="slow")),
    OperatorCommand(number=5, event=Notice(node="a", seconds=1.0)),
    Announce(number=6, url="http://[fd00::1]:8400"),
]
TO_OPERATOR = [
    Answer(number=1, ok=False, kind="k", text="t"),
    Status(
        job="j",
        state="running",
        reason="",
        since=1.0,
        at=2.0,
        generation=1,
        step=0,
        shape=None,
        world=0,
        planned=Shape(),
        nodes=(NodeRow(name="a", up=True, slots=1, out_until_s=None),),
        recoveries=(
            Recovery(at=1.5, cause="x", planned=False, before=1, after=2, level=1, import_=0.5),
        ),
        goodput={"useful": 1.0},
    ),
]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        *[(m, FromNode) for m in FROM_NODE],
        *[(m, ToNode) for m in TO_NODE],
        *[(m, FromOperator) for m in FROM_OPERATOR],
        *[(m, ToOperator) for m in TO_OPERATOR],
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else "",
)
def test_a_message_survives(message: Any, kind: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (Hosting(generation=1, host="h", port=0), FromNode),
        (Hosting(generation=1, host="", port=1), FromNode),
        (Beat(number=-1, up=NodeUp(node="a", life="l", slots=1)), FromNode),
        (Beat(number=1, up=NodeUp(node="a", life="l", slots=-1)), FromNode),
        (Beat(number=1, up=NodeUp(node="a", life="l", slots=1 << 40)), FromNode),
        (Beat(number=1, up=NodeUp(node="a", life="l", slots=1, fenced=1 << 62)), FromNode),
        (Beat(number=1, up=NodeUp(node="a", life="l", slots=1, host="h" * 999)), FromNode),
        (Envelope(event=Progress(generation=1, step=1 << 62)), FromNode),
        (Envelope(event=Loaded(node="a", generation=1, step=-2)), FromNode),
        (LeaseRenewal(number=1), FromNode),
        (Envelope(event=Left(node="a")), FromOperator),
        (DaemonAt("http://head:8400"), FromNode),
        (DaemonAt("head:8400"), ToNode),
        (Announce(number=1, url=""), FromOperator),
        (Announce(number=1, url="http://head:8400/?token=secret"), FromOperator),
        (Announce(number=1, url="http://user:word@head:8400"), FromOperator),
        (Announce(number=1, url="http://head"), FromOperator),
        (Announce(number=1, url="http://head:8400\n"), FromOperator),
        (Announce(number=1, url="file://head:8400"), FromOperator),
        (Announce(number=1, url=f"http://{'h' * 300}:8400"), FromOperator),
    ],
)
def test_impossible_values_and_wrong_directions_do_not_decode(message: Any, kind: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def test_exit_codes() -> None:
    assert [exit_code(kind) for kind in ("done", "requeue", "no-nodes", "no-progress")] == [
        0,
        75,
        76,
        77,
    ]
    assert exit_code("max-restarts", 3) == 3
    assert exit_code("max-restarts") == 1
