"""Each decoder that a stranger's bytes reach: what it reads, and good bytes to begin from.

A target reads as far as the product does. A checksum that a stranger computes as easily as we do
is put right first, else no mutation would ever get behind it. `CkptdError` is an answer; all else
is a finding, and so are more memory and time than `tests.fuzzing.guided` allows.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ckptd import decoding
from ckptd.base.digest import digest
from ckptd.base.grids.runs import decode_runs
from ckptd.base.net.address import parse_address, parse_server
from ckptd.base.net.connection import HELLO, Codec, Hello
from ckptd.base.net.tls import TlsSession, identity
from ckptd.base.signatures import opened, signed
from ckptd.checkpoint.save.commit import decode_plan
from ckptd.checkpoint.save.messages import RankPart
from ckptd.checkpoint.save.structure import SavePlan
from ckptd.decoding import Decoder
from ckptd.elastic.membership import Member, Record, decode_record
from ckptd.elastic.policy import Shape
from ckptd.errors import CkptdError
from ckptd.lay.syntax.formatter import format_text
from ckptd.lay.syntax.parser import parse
from ckptd.monitor import ring
from ckptd.monitor.recording import FENCING, FOUND, SHEET, JobRecording, RecordedFrame, encode
from ckptd.monitor.report import (
    AgentOrders,
    EvidenceReport,
    Fencing,
    from_views,
    pack,
    unpack_evidence,
    unpack_fencing,
    unpack_orders,
    unpack_report,
)
from ckptd.publish import deltas
from ckptd.publish import messages as publish
from ckptd.publish import server as publisher
from ckptd.publish.messages import ReadBytes
from ckptd.publish.passing import _PLACES, Passing, _Pulled, _Share
from ckptd.readers.pickles import read_pickle
from ckptd.readers.zips import open_zip
from ckptd.store.memory import MemoryStore, forget_memory
from ckptd.store.net import messages as store
from ckptd.store.net.rules import Rules
from ckptd.store.net.session import Limits, Session
from ckptd.store.pack import HEADER, encode_frame, load_table, table_bytes
from ckptd_nccl import plainpickle, ras
from tests.checkpoint.format.test_fuzz import CASES
from tests.checkpoint.save.saving import plan_of
from tests.fuzzing import cluster, doors
from tests.fuzzing.sessions import GAP, SCRATCH, asked, served
from tests.monitor.jobs import inside
from tests.readers.opening import reader_in

if TYPE_CHECKING:
    from tests.publish.deltaworld import DeltaServer

_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


class Target(NamedTuple):
    """One decoder."""

    read: Callable[[bytes], object]
    seeds: list[bytes]


def _in_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def found(raw: bytes) -> object:
        path = SCRATCH / f"fuzzed-{os.getpid()}"
        path.write_bytes(raw)
        return read(path)

    return found


def _ring(path: Path) -> None:
    with ring.RingReader(path) as reader:
        reader.view()
        reader.texts()
        reader.group_infos()


def _some_ring() -> bytes:
    path = SCRATCH / f"ring-{os.getpid()}"
    identity = ring.RingIdentity(rank=0, world=2, job="j", node="h")
    writer = ring.RingWriter(path, identity, ring.RingShape(slots=4, groups=2, members=8, texts=4))
    writer.text("train.py:3")
    writer.step(7)
    raw = path.read_bytes()
    path.unlink()
    return raw


def _recording(raw: bytes) -> None:
    """Read frames of which a stranger has computed the checks."""
    bodies = raw.split(b"\xff\xff")
    kinds = (SHEET, FOUND, FENCING)
    frames = [RecordedFrame(float(i), kinds[i % 3], body) for i, body in enumerate(bodies)]
    path = SCRATCH / f"recording-{os.getpid()}"
    path.write_bytes(encode("j", 0.0, frames))
    read = {SHEET: unpack_report, FOUND: unpack_evidence, FENCING: unpack_fencing}
    for frame in JobRecording(path).frames():
        with suppress(CkptdError):
            read[frame.kind](frame.body)


def _foreign(name: str) -> Callable[[bytes], object]:
    """Open a folder with this one file, and read all of it."""

    def read(raw: bytes) -> None:
        try:
            store = MemoryStore("fuzzed")
            store.put(name, raw)
            reader = reader_in(store)
            reader.tensors(reader.names)
            reader.objects()
        finally:
            forget_memory("fuzzed")

    return read


def _zip(raw: bytes) -> None:
    """Read a zip as torch.save writes them, its checksums right."""
    open_zip(lambda start, end: raw[start:end], 0, len(raw), "fuzzed.pt")


def _torch_zip(body: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as out:
        out.writestr("archive/data.pkl", body)
        out.writestr("archive/byteorder", "little")
        out.writestr("archive/data/0", bytes(16))
        out.writestr("archive/version", "3\n")
    return made.getvalue()


_TENSOR = (  # of torch.save({"w": torch.zeros(2, 2)}), protocol 2
    b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00"
    b"\x00storageq\x03ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K"
    b"\x04tq\x07QK\x00K\x02K\x02\x86q\x08K\x02K\x01\x86q\t\x89ccollections\nOrderedDict\nq\n)Rq\x0b"
    b"tq\x0cRq\rs."
)


def _delta(raw: bytes) -> None:
    """Apply a delta to a block of 512 bytes; the first byte says how wide an element is."""
    base = np.arange(512, dtype=np.uint8)
    deltas.apply(base, raw[1:], (1, 2, 4, 8)[raw[0] % 4] if raw else 1)


def _some_deltas() -> list[bytes]:
    rng = np.random.default_rng(0)
    old = np.arange(512, dtype=np.uint8)
    made = []
    for number, size in enumerate((1, 2, 4, 8)):
        for changed in (0, 2, 100, 512):
            new = old.copy()
            new[rng.choice(512, changed, replace=False)] ^= 5
            made.append(bytes([number]) + deltas.encode(old, new, size))
    return made


def _packed(raw: bytes) -> None:
    """Read a table of frames whose digest a stranger has computed."""
    trailer = struct.Struct("<IIQQQ16s8s")
    if len(raw) >= trailer.size:
        fields = trailer.unpack(raw[-trailer.size :])
        begin = len(raw) - trailer.size - fields[4] * 16
        if begin >= 0:
            summed = raw[begin : len(raw) - 24]
            raw = raw[:-24] + xxhash.xxh3_128_digest(summed) + raw[-8:]
    load_table("fuzzed", len(raw), 0.0, lambda start, end: raw[start:end])


def _some_packed() -> list[bytes]:
    frame = encode_frame(memoryview(bytes(64)), 1)
    row = (len(frame.data), frame.codec, frame.width, frame.check)
    return [HEADER + bytes(frame.data) + table_bytes(64, 0, [row])]


def _part(raw: bytes) -> None:
    """Read a rank's part whose digest a stranger has computed."""
    for part in RankPart.split(raw + digest(raw), "fuzzed"):
        part.encode()


def _plan(raw: bytes) -> None:
    """Read a plan that a stranger has stamped, and find its chunks."""
    try:
        plan = msgspec.msgpack.decode(raw, type=SavePlan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        decode_plan(raw, "fuzzed")
    else:
        good = decode_plan(msgspec.msgpack.encode(plan.stamped()), "fuzzed")
        if good.world <= 1 << 16:
            good.filemap.all_data_bytes(good.world)


def _reports() -> list[bytes]:
    views = [inside(rank, 7, 3, 1.0, 4) for rank in range(2)]
    return [pack(from_views(views, job="j", source="a", number=1, texts={5: "train.py:3"}))]


def _frames(raw: bytes) -> None:
    """Feed a connection's decoder with what a stranger sends before they are let in."""
    codec = Codec("stranger")
    codec.feed(raw)
    while codec.take(HELLO) is not None:
        pass


@lru_cache(maxsize=1)
def _declared() -> list[Decoder[Any]]:
    """Return the decoders of all messages and records that ckptd declares.

    What is imported here is not instrumented, which takes minutes: msgspec decodes, in C.
    """
    root = Path(decoding.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if "_decoder(" in path.read_text("utf-8"):
            import_module(".".join((root.name, *path.relative_to(root).with_suffix("").parts)))
    return [decoding._made[key] for key in sorted(decoding._made, key=repr)]


def _message(raw: bytes) -> None:
    """Decode one of all messages and records; the first two bytes say which."""
    known = _declared()
    found = known[int.from_bytes(raw[:2], "little") % len(known)]
    with suppress(msgspec.MsgspecError):
        found.decode(raw[2:])


def _shaken(raw: bytes) -> None:
    """Feed a server's handshake with what a stranger sends."""
    session = TlsSession(identity(b"s" * 32, "agent", "n"), server=True, where="stranger")
    session.feed(raw)
    session.shake()


def _first_of_tls() -> bytes:
    session = TlsSession(None, server=False, where="server")
    session.shake()
    return session.to_send()


def _store_session(raw: bytes) -> None:
    """Ask the server of a store that has one object."""
    try:
        held = MemoryStore("fuzzed")
        held.put("a", bytes(64))
        limits = Limits(idle_s=1.0, frame_s=1.0)
        served(lambda wire: Session(wire, held, Rules(), limits).run(), raw)
    finally:
        forget_memory("fuzzed")


@lru_cache(maxsize=1)
def _passing() -> Passing:
    return Passing(b"s" * 32, "127.0.0.1")


def _passed(raw: bytes) -> None:
    """Ask a worker that passes on two answers."""
    whole = _passing()
    answers = [(ReadBytes(b"d"), memoryview(bytes(9)))] * 2
    whole._pulled = [_Pulled({bytes(32): _Share(True, [bytes(32)] * 2, answers)})]
    served(whole._serve, raw)
    assert (whole._free, [s.users for s in whole._pulled[0].shares.values()]) == (_PLACES, [0])


@lru_cache(maxsize=1)
def _publisher() -> DeltaServer:
    from tests.publish.deltaworld import DeltaServer  # Lay and reshard are not instrumented

    arrays = {"w": np.arange(256, dtype=np.float32), "b": np.ones(7, np.float32)}
    server = DeltaServer(arrays, "float32")
    for number in (1, 2):
        arrays["w"][number] += 1
        server.publish(number, arrays)
        server.settle()
    return server


def _published(raw: bytes) -> None:
    """Ask a publisher that has two versions of two tensors."""
    server: publisher.PublishServer = _publisher().server
    served(server._serve, raw)
    assert not server._busy
    assert not any(slot.readers for slot in server._slots.values())


def _lay(raw: bytes) -> None:
    text = raw.decode("utf-8", "replace")
    parse(text)
    format_text(text)


def _addresses(raw: bytes) -> None:
    text = raw.decode("utf-8", "replace")
    for read in (parse_server, lambda t: parse_address(t, "an address")):
        with suppress(CkptdError):
            read(text)


def _typed(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """As its callers do, which know what a decoder of msgspec raises."""

    def found(raw: bytes) -> None:
        with suppress(msgspec.MsgspecError, ValueError, OverflowError):
            read(raw)

    return found


_RAS = (
    b'{"nccl_version":"2.29.1","timestamp":"","communicators":[{"hash":"1","size":2,"ranks":[]}]}'
)
_PART = RankPart(0, "plan", slots=bytes(4), values=bytes(8), metadata={"loss": 1.5})
_LAY = b"""mesh M = pp:2 tp:2
mesh D = dp:4
let kv = 2
space small {
  E[v h]
  L{l}.q[kv rep hd h] L{l}.k[kv hd h] L{l}.g[f h] L{l}.u[f h]
  follow m=exp_avg, s=exp_avg_sq
  scalar step(param)
}
layout mg of small on M {
  embedding.weight = E[v@tp h] on pp=0
  layers.{#l@pp}.qkv.weight = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]
  layers.{#l@pp}.fc1.weight = L{l}[(g:f@tp|u:f@tp) h]
}
"""
_RECORD = msgspec.json.encode(
    Record(
        generation=1,
        shape=Shape(1, 2, 1),
        members=tuple(Member("a", i, 0, i, 0) for i in range(2)),
        step=5,
        reason="",
        at=0.0,
        by="b",
    )
)
_HEADER = b'{"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
_DUMPED: list[Any] = [{"version": "2.10", "entries": [{"record_id": 0, "sizes": ([4],)}]}, (1, 2.5)]
_PICKLED: list[Any] = [{"a": [1, 2.5, None, "x"], (1, 2): b"y"}, {"entries": [{"id": 1}]}]

_PASSED = [publish.AskPassed(bytes(32), 0.1), publish.AskPart(0), publish.AskPart(1)]
_QUESTIONS = [
    publish.AskHold(2),
    publish.AskTensors(("w", "b")),
    publish.AskRead(
        2,
        (
            publish.BlockRead(0, 4, (2, 3), (8, 1), cast="bfloat16"),
            publish.BlockRead(1, 0, (7,), (1,), since=1),
        ),
    ),
    publish.AskChanged(1, 2, 0.1),
    publish.AskSource(bytes(32), publish.ServerEntry("h", "127.0.0.1:9", "", "e")),
    publish.AskProved(bytes(32), bytes(32)),
    publish.AskRelease(),
    publish.AskMap(2),
    publish.AskNewest(0, 0.1),
]
TARGETS: dict[str, Target] = {
    **{name: Target(case.read, case.seeds) for name, case in CASES.items()},
    "lay": Target(_lay, [_LAY]),
    "pickle": Target(
        lambda raw: read_pickle(raw, "fuzzed", storages=True),
        [_TENSOR, *(pickle.dumps(v, protocol=p) for v in _PICKLED for p in (2, 4, 5))],
    ),
    "torch zip": Target(_zip, [_torch_zip(_TENSOR)]),
    "safetensors": Target(
        _foreign("model.safetensors"),
        [struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(16)],
    ),
    "delta": Target(_delta, _some_deltas()),
    "packed table": Target(_packed, _some_packed()),
    "plan": Target(_plan, [msgspec.msgpack.encode(plan_of({"w": (8, 8)}, world=4))]),
    "part": Target(_part, [msgspec.msgpack.encode(p) for p in (_PART, [_PART, _PART])]),
    "runs": Target(_typed(decode_runs), [b"\x92\x01\x02"]),
    "signature": Target(
        lambda raw: opened(raw, [_KEY.public_key()], "fuzzed"),
        [signed("a root", {"data/x": "00" * 32}, _KEY)],
    ),
    "membership": Target(lambda raw: decode_record(raw, "fuzzed"), [_RECORD]),
    "frame": Target(_frames, [Codec("x").pack(Hello(1, "store"))]),
    "message": Target(_message, [b"\0\0\x80", b"\1\0{}"]),
    "tls": Target(_shaken, [_first_of_tls()]),
    "store session": Target(
        _store_session,
        [
            asked(store.Get("a"), store.Read("a", 3, 9), store.Stat("a"), store.List("")),
            asked(store.Put("b", 3, True)) + GAP + b"\xc1\3abc" + asked(store.ObjectPiece()),
            asked(store.BeginWriter("c", 3), store.CommitWriter(), store.Delete(("c",))),
            asked(store.Sweep("", 1.0, False), store.Children(""), store.Open("a")),
        ],
    ),
    "passing": Target(_passed, [asked(*_PASSED)]),
    "publisher": Target(_published, [asked(*_QUESTIONS[:4]), asked(*_QUESTIONS[4:])]),
    "http": Target(doors.http, doors.HTTP_SEEDS),
    "access": Target(doors.access, doors.ACCESS_SEEDS),
    "metrics": Target(doors.metrics, doors.METRICS_SEEDS),
    "board": Target(doors.board, doors.BOARD_SEEDS),
    "controller": Target(doors.controller, doors.CONTROLLER_SEEDS),
    "node": Target(doors.node, doors.NODE_SEEDS),
    "probed": Target(cluster.probed, cluster.PROBED_SEEDS),
    "prober": Target(cluster.prober, cluster.PROBER_SEEDS),
    "coordinator": Target(cluster.coordinator, cluster.COORDINATOR_SEEDS),
    "member": Target(cluster.member, cluster.MEMBER_SEEDS),
    "status": Target(cluster.status, cluster.STATUS_SEEDS),
    "address": Target(_addresses, [b"ckptd://host:80/a", b"[::1]:80", b"unix:/a/b"]),
    "report": Target(unpack_report, _reports()),
    "evidence": Target(unpack_evidence, [pack(EvidenceReport(job="j", source="a", number=1))]),
    "orders": Target(unpack_orders, [pack(AgentOrders())]),
    "recording": Target(
        _recording,
        [
            b"\xff\xff".join(
                [
                    *_reports(),
                    pack(EvidenceReport(job="j", source="a", number=1)),
                    pack(Fencing(below=1)),
                ]
            )
        ],
    ),
    "ring": Target(_in_file(_ring), [_some_ring()]),
    "flight recorder": Target(
        lambda raw: plainpickle.loads(raw, "fuzzed"), [pickle.dumps(v, protocol=2) for v in _DUMPED]
    ),
    "ras": Target(ras.parse, [_RAS]),
}
