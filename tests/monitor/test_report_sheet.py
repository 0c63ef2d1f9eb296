from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptd.errors import CorruptError
from ckptd.monitor.collectives import COLLECTIVE
from ckptd.monitor.report import (
    SUM,
    TABLES,
    AgentOrders,
    AgentState,
    EvidenceReport,
    GroupInfo,
    LinkProbe,
    NodeReport,
    ProbeResult,
    RankNote,
    ReportLimits,
    Stack,
    from_views,
    job_of,
    pack,
    unpack_evidence,
    unpack_orders,
    unpack_report,
)
from ckptd.monitor.ring import RecorderState
from ckptd_simulated.job import Fault, Mesh, Planted, play, views
from tests.monitor.jobs import call, calls, inside, view
from tests.monitor.watched import infos

MESH = Mesh(2, 2, 4)


def sheet_of(**other: Any) -> NodeReport:
    job = play(MESH, [Fault(Planted.HANG, 3, 1)], np.random.default_rng(0))
    usual: dict[str, Any] = {"job": "job", "source": "ab", "number": 5, "members": infos(MESH)}
    return from_views(views(job), **(usual | other))


def refused(sheet: NodeReport, limits: ReportLimits | None = None) -> CorruptError:
    with pytest.raises(CorruptError) as caught:
        unpack_report(pack(sheet), limits)
    assert "not a valid message between agent and daemon" in caught.value.message
    assert caught.value.wanted
    return caught.value


def changed_row(sheet: NodeReport, table: str, column: str, value: Any) -> NodeReport:
    rows = sheet.table(table).copy()
    rows[column][-1] = value
    return msgspec.structs.replace(sheet, **{table: rows.tobytes()})


def test_a_sheet_arrives_as_it_was_sent() -> None:
    sums = np.zeros(2, SUM)
    sums["value"] = [1 << 63, 3]
    sent = sheet_of(
        sums=sums,
        texts={7: "all_reduce"},
        agents={"n0": AgentState(address="h:1", cpu_s=1.5), "n9": AgentState(rings=2)},
        notes={3: RankNote(generation=2, recorder=RecorderState.ASIDE, lost=4)},
    )
    came = unpack_report(pack(sent))
    assert came == sent
    assert came.nodes == ("n0", "n1", "n9")
    assert came.agents[2].rings == 2
    assert came.table("sums")["value"].tolist() == [1 << 63, 3]
    row = came.table("ranks")[3]
    assert (row["generation"], row["recorder"], row["lost"]) == (2, RecorderState.ASIDE, 4)
    assert came.members[next(iter(infos(MESH)))].ranks()


def collectives(**changes: Any) -> bytes:
    row = np.zeros(1, COLLECTIVE)
    row["op"], row["kind"] = b"all_reduce", b"dp"
    for name, value in changes.items():
        row[name] = value
    return row.tobytes()


def test_what_collectives_add_up_to_is_taken() -> None:
    sent = NodeReport(job="j", source="s", number=9, after=8, collectives=collectives(values=1.0))
    assert unpack_report(pack(sent)) == sent


def test_large_ones_are_packed_and_small_ones_not() -> None:
    small, large = NodeReport(job="j", source="s", number=0), sheet_of()
    assert pack(small)[:1] == b"\x00"
    assert len(pack(large)) < len(msgspec.msgpack.encode(large)) / 2
    assert unpack_report(pack(small)) == small


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1, 5, 9), (7,), (3, 2, 1), (0, 1, 5), (4, 4)])
def test_members_of_a_group_are_told_whole(ranks: tuple[int, ...]) -> None:
    info = GroupInfo.of(ranks, "dp", "data")
    sent = NodeReport(job="j", source="s", number=0, members={9: info})
    assert tuple(unpack_report(pack(sent)).members[9].ranks()) == ranks


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ((), ""),
        ((3, 5), " of ranks 3, 5"),
        (range(8, 16), " of ranks 8-15"),
        (range(0, 4096, 8), " of ranks 0, 8, 16, 24, 32, 40, 48, 56, ..., 4088"),
    ],
)
def test_a_group_that_the_program_did_not_name_is_known_by_its_ranks(
    ranks: Sequence[int], shown: str
) -> None:
    assert GroupInfo.of(ranks, "1", "undefined").told() == ("", f"group 1{shown}")
    assert GroupInfo.of(ranks, "1", "mesh_dp").told() == ("mesh_dp", "1")


def test_ages_and_not_times_are_sent() -> None:
    seen = inside(0, 5, 3, age=2.5, size=4, calls=calls(call(5, 3, 997.5)))
    later = msgspec.structs.replace(
        seen,
        at=seen.at + 1e6,
        moved=seen.moved + 1e6,
        heartbeat=seen.heartbeat + 1e6,
        pending_since=seen.pending_since + 1e6,
        calls=calls(call(5, 3, 997.5 + 1e6)),
    )
    one, other = (from_views([v], job="j", source="s", number=0) for v in (seen, later))
    for column in ("heartbeat", "idle", "pending_age"):
        np.testing.assert_allclose(
            one.table("ranks")[column], other.table("ranks")[column], atol=1e-6
        )
    np.testing.assert_allclose(
        one.table("calls")["start"], other.table("calls")["start"], atol=1e-6
    )


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("ranks", "rank", -1),
        ("ranks", "rank", 16),
        ("ranks", "world", 1 << 40),
        ("ranks", "node", 2),
        ("ranks", "node", -1),
        ("ranks", "alive", 2),
        ("ranks", "answers", 3),
        ("ranks", "state", b"\xff"),
        ("ranks", "phase", 6),
        ("ranks", "heartbeat", np.inf),
        ("ranks", "idle", np.nan),
        ("ranks", "idle", -1.0),
        ("ranks", "pending_age", -np.inf),
        ("ranks", "steps_done", -1),
        ("ranks", "recorder", 9),
        ("groups", "row", 16),
        ("groups", "row", -1),
        ("groups", "group", 0),
        ("groups", "completed", -1),
        ("calls", "row", 16),
        ("calls", "row", 0),  # behind those of another rank
        ("calls", "start", 1.0),
        ("calls", "start", np.nan),
        ("calls", "end", -1e8),
        ("calls", "phase", 77),
        ("calls", "seq", -4),
    ],
)
def test_a_row_that_cannot_be_is_refused(table: str, column: str, value: Any) -> None:
    refused(changed_row(sheet_of(), table, column, value))


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2},
        {"job": ""},
        {"job": "x" * 1000},
        {"source": ""},
        {"number": -1},
        {"nodes": ("n0", "n0")},
        {"nodes": ("n0", "")},
        {"agents": ()},
        {"agents": (AgentState(), AgentState(cpu_s=float("nan")))},
        {"agents": (AgentState(), AgentState(age_s=-1.0))},
        {"ranks": b"x"},
        {"calls": b"x" * (TABLES["calls"].itemsize + 1)},
        {"members": {0: GroupInfo()}},
        {"members": {1: GroupInfo(first=0, stride=1, size=1 << 30)}},
        {"members": {1: GroupInfo(first=-1, stride=1, size=2)}},
        {"members": {1: GroupInfo(size=3, listed=b"1234")}},
        {"members": {1: GroupInfo(name="x" * 1000)}},
        {"texts": {1: "x" * 1000}},
        {"after": 9, "number": 9},
        {"agents": (AgentState(), AgentState(recorder_s=float("inf")))},
        {"collectives": collectives(op=b"")},
        {"collectives": collectives(op=b'a"}')},
        {"collectives": collectives(kind=b"a\0b")},
        {"collectives": collectives(size=99)},
        {"collectives": collectives(values=-1.0)},
        {"collectives": collectives(values=np.nan)},
        {"collectives": collectives() * 10000},
    ],
)
def test_a_head_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    refused(msgspec.structs.replace(sheet_of(), **fields))


@pytest.mark.parametrize(
    "limits",
    [
        ReportLimits(packed=100),
        ReportLimits(unpacked=1000),
        ReportLimits(ranks=15),
        ReportLimits(rows=3),
        ReportLimits(nodes=1),
        ReportLimits(world=8),
        ReportLimits(members=2),
    ],
)
def test_more_than_the_limits_is_refused(limits: ReportLimits) -> None:
    refused(sheet_of(), limits)


def test_a_bomb_costs_nothing() -> None:
    bomb = b"\x01" + zstandard.ZstdCompressor().compress(bytes(1 << 30))
    unstated = b"\x01" + zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    tracemalloc.start()
    try:
        for data in (bomb, unstated, b"\x00\xdf\xff\xff\xff\xff", b"\x00\xdd\xff\xff\xff\xff"):
            with pytest.raises(CorruptError):
                unpack_report(data)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x00")
@example(b"\x01")
@example(b"\x02abc")
@example(b"\x00" + b"\x91" * 100_000)
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for read in (unpack_report, unpack_evidence, unpack_orders):
        for prefix in (b"", b"\x00", b"\x01"):
            try:
                read(prefix + data)
            except CorruptError as error:
                if error.message != "not a valid message between agent and daemon":
                    raise


RAW = b"\x00" + msgspec.msgpack.encode(sheet_of())


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(RAW) - 1), st.integers(0, 255)), max_size=8),
    st.integers(0, len(RAW)),
)
def test_a_sheet_with_other_bytes_is_usable_or_refused(
    changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(RAW)
    for place, byte in changes:
        data[place] = byte
    for message in (bytes(data), bytes(data[:length])):
        try:
            sheet = unpack_report(message)
        except CorruptError as error:
            if error.message != "not a valid message between agent and daemon":
                raise
        else:
            job_of([sheet], {})


def test_a_damaged_ring_does_not_spoil_the_sheet() -> None:
    wild = call(5, -3, 2000.0, 1.0, bytes=-99, root=-7, step=-12)
    seen = view(0, heartbeat=5000.0, moved=9e99, calls=calls(wild), process_state="\xff")
    well = view(1)
    came = unpack_report(pack(from_views([seen, well], job="j", source="s", number=0)))
    assert came.table("ranks")["idle"].tolist() == [0.0, pytest.approx(0.1)]


def test_findings_and_orders_arrive() -> None:
    found = EvidenceReport(
        job="j",
        source="s",
        number=1,
        stacks={3: Stack(text="main", how="py-spy", taken_s=0.02)},
        probes=(ProbeResult(nonce=1, src="a", dst="b", seconds=float("inf"), error="no"),),
        logs={3: "Traceback"},
    )
    assert unpack_evidence(pack(found)) == found
    probe = LinkProbe(nonce=1, from_node="a", to_node="b", address="h:1")
    orders = AgentOrders(stacks=(1, 9), calls=(9,), probes=(probe,), tell=True)
    assert unpack_orders(pack(orders)) == orders
    part = orders.of_part(["b"], [9])
    assert (part.stacks, part.calls, part.probes, part.tell) == ((9,), (9,), (), True)


@pytest.mark.parametrize(
    "found",
    [
        EvidenceReport(job="", source="s", number=0),
        EvidenceReport(job="j", source="s", number=0, stacks={-1: Stack(text="")}),
        EvidenceReport(job="j", source="s", number=0, stacks={1: Stack(text="x" * (1 << 19))}),
        EvidenceReport(
            job="j",
            source="s",
            number=0,
            probes=(ProbeResult(nonce=1, src="a", dst="b", seconds=float("nan")),),
        ),
    ],
)
def test_findings_that_cannot_be_are_refused(found: EvidenceReport) -> None:
    with pytest.raises(CorruptError):
        unpack_evidence(pack(found))


@pytest.mark.parametrize(
    "orders",
    [
        AgentOrders(period_s=0.0),
        AgentOrders(period_s=float("nan")),
        AgentOrders(stacks=(-1,)),
        AgentOrders(
            probes=(LinkProbe(nonce=1, from_node="a", to_node="b", address="h:1", size=1 << 40),)
        ),
        AgentOrders(probes=(LinkProbe(nonce=-1, from_node="a", to_node="b", address="h:1"),)),
    ],
)
def test_orders_that_cannot_be_are_refused(orders: AgentOrders) -> None:
    with pytest.raises(CorruptError):
        unpack_orders(pack(orders))
