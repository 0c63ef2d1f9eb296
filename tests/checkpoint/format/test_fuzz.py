"""Nothing that a file says crashes, hangs, leads out of the root, or takes memory without cause.

Each mutation of a good file must end in a typed error or in a valid value. Memory is measured
for each one and compared with the length of what was given; the time-out of the test is the
guard against hangs.
"""

from __future__ import annotations

import random
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.digest import DigestIndex
from ckptd.checkpoint.format.codec import decode, encode
from ckptd.checkpoint.format.container import FileMap, build_header, header_bytes, parse_header
from ckptd.checkpoint.format.invariants import (
    check_coverage,
    check_files,
    check_index,
    check_manifest,
)
from ckptd.checkpoint.format.manifest import (
    GridEntry,
    Manifest,
    decode_json,
    decode_manifest,
    encode_manifest,
)
from ckptd.checkpoint.format.names import parse_chunk_name
from ckptd.checkpoint.format.records import (
    Commit,
    Generation,
    Lease,
    Pin,
    RootMarker,
    decode_record,
    encode_record,
)
from ckptd.checkpoint.format.witness import Witness, WitnessPlan, blind, compare
from ckptd.errors import CkptdError
from ckptd.store.base import check_key
from ckptd.types import DTYPES
from tests.checkpoint.format import mutate
from tests.checkpoint.format.strategies import Colour, Point
from tests.checkpoint.format.test_invariants import GOOD
from tests.checkpoint.format.test_records import RECORDS

MIB = 1 << 20


@dataclass
class Case:
    """One kind of file.

    Attributes
    ----------
    seeds
        Good files.
    change
        Makes a hostile one.
    read
        Decodes and uses it; raises a `CkptdError`, or returns.
    share
        How many of the mutations are of this kind.
    free, per_byte
        Memory that a mutation may take: `free` bytes, and so many more for each of its own.
    """

    seeds: list[bytes]
    change: mutate.Change
    read: Callable[[bytes], None]
    share: float
    free: int
    per_byte: int


# --- reading each kind as far as readers do ------------------------------------------------------


def read_manifest(raw: bytes, name: str = "manifest.json") -> None:
    manifest = decode_manifest(raw, name)
    check_manifest(manifest, name, len(raw))
    for file in manifest.files:
        assert check_key(file.path).startswith("data/")
    assert decode_manifest(*reversed(encode_manifest(manifest))).tensors == manifest.tensors


def read_packed(raw: bytes) -> None:
    read_manifest(raw, "manifest.json.zst")


def use_manifest(raw: bytes) -> None:
    """Do as a load does after the checks: places of chunks, objects, the witness's plan."""
    manifest = decode_manifest(raw, "manifest.json")
    filemap = check_manifest(manifest, "manifest.json", len(raw))
    plan = WitnessPlan.of(manifest)
    for number in range(min(3, len(manifest.tensors))):
        grid = filemap.grid_of(number)
        plan.positions(number)
        for piece in {0, grid.npieces // 2, grid.npieces - 1}:
            file, start, end = filemap.locate(number, piece)
            assert file < len(manifest.files)
            assert 0 <= start <= end
            assert end <= filemap.data_bytes(file) or file < 0
    for entry in manifest.objects:
        with suppress(CkptdError):
            decode(entry.value, entry.name)
    check_coverage(manifest, filemap)
    check_files(manifest, filemap)
    for number in range(len(manifest.files)):
        assert filemap.data_bytes(number) <= manifest.files[number].data_bytes


def read_header(raw: bytes) -> None:
    head = header_bytes(raw[:8], "r00000.safetensors", len(raw))
    chunks, _ = parse_header(raw[:head], "r00000.safetensors", len(raw) - head)
    assert sum(c.end - c.start for c in chunks.values()) == len(raw) - head
    for name in chunks:
        with suppress(CkptdError):
            parse_chunk_name(name)


def read_record(kind: type[Any]) -> Callable[[bytes], None]:
    def read(raw: bytes) -> None:
        record = decode_record(raw, kind, "x.json")
        assert decode_record(encode_record(record), kind, "x.json") == record
        for folder in getattr(record, "folders", ()):
            assert check_key(folder[:-1]).startswith("data/")

    return read


def read_index(raw: bytes) -> None:
    index = DigestIndex.decode(raw, "r00000.digests")
    assert index.encode() == raw
    if index.data_bytes != 5 * MIB:
        check_index(GOOD.files[0], index, 2)


def read_witness(raw: bytes) -> None:
    witness = Witness.decode(raw, "witness", PLAN)
    compare(PLAN, witness, witness)
    blind(PLAN, witness)


def read_object(raw: bytes) -> None:
    encode(decode(decode_json(b'{"v":' + raw + b"}", "object")["v"]))


# --- good files ----------------------------------------------------------------------------------


def manifests() -> list[bytes]:
    full = msgspec.structs.replace(
        GOOD,
        metadata={"loss": 1.5, "tags": ["best", None], "deep": {"er": [1, {"x": 2}]}},
        objects=(*GOOD.objects, *(o for o in OBJECTS_IN)),
        lay="mesh F = dp:2",
    )
    flat = msgspec.structs.replace(
        GOOD,
        grids=(msgspec.structs.replace(GOOD.grids[0], flat=(((4, 1), (2, 1)),)), GOOD.grids[1]),
        owners=(((0, 1, 2), (1, -1, 2)), ((-1, 0, 1), (0, 0, 1))),
        tensors=(
            GOOD.tensors[0],
            msgspec.structs.replace(GOOD.tensors[1], owners=1),
            msgspec.structs.replace(GOOD.tensors[0], name="m", aliases=(), dtype="complex128"),
        ),
        objects=(),
        witness=None,
    )
    empty = Manifest(0, 0, "a", 1, (), (), (), ())
    return [encode_manifest(filled(m))[1] for m in (full, flat, empty)]


def wide() -> bytes:
    """A few hundred bytes that speak of as many pieces as they may."""
    count = 1 << 19
    tensors = tuple(
        msgspec.structs.replace(t, name=f"t{i}", shape=(count,), grid=0, owners=i, aliases=())
        for i, t in enumerate(GOOD.tensors)
    )
    manifest = msgspec.structs.replace(
        GOOD,
        grids=(GridEntry((((1, count),),)),),
        owners=(((0, 0, count),), ((0, 0, count // 2), (1, 0, count // 2))),
        tensors=tensors,
        objects=(),
        witness=None,
    )
    return encode_manifest(filled(manifest))[1]


def filled(manifest: Manifest) -> Manifest:
    """Give the files the lengths that follow from the tables."""
    nbytes = FileMap.of(manifest, "m").all_data_bytes(len(manifest.files))
    files = [
        msgspec.structs.replace(f, data_bytes=int(n))
        for f, n in zip(manifest.files, nbytes, strict=True)
    ]
    return msgspec.structs.replace(manifest, files=tuple(files))


VALUES: list[Any] = [
    {"lr": 0.1, "betas": (0.9, 0.95), "steps": {1: "a", "b": {2, 3}}, "raw": b"\x00\xff"},
    [Point(Colour.RED, [float("inf"), 2**80, 1 + 2j]), "\ud800", frozenset({(1, "x")}), None],
]
OBJECTS_IN = [
    msgspec.structs.replace(GOOD.objects[1], name=f"o{i}", value=encode(v))
    for i, v in enumerate(VALUES)
]
FILEMAP = check_manifest(GOOD, "manifest.json", 1000)
PLAN = WitnessPlan([("a", (3, 2), 4, True), ("b", (2000,), 8, True), ("c", (), 1, False)])


def good_files() -> list[bytes]:
    entries = [("x", DTYPES["complex64"], (2, 3)), ("y@0,1", DTYPES["bool"], (4,))]
    tables = [FILEMAP.header_entries(0), entries, []]
    made = [build_header(t, {"rank": "0"}) for t in tables]
    return [header + bytes(nbytes) for header, nbytes in made]


def good_index() -> bytes:
    return DigestIndex.build(29, [b"b" * 16], [b"c" * 16] * 2).encode()


def cases() -> dict[str, Case]:
    good = manifests()
    packer = mutate.zstandard.ZstdCompressor()
    index = [good_index(), DigestIndex.build(5 * MIB, [b"b" * 16] * 5, []).encode()]
    objects = [msgspec.json.encode(encode(v)) for v in VALUES]
    table = {
        "manifest": Case(good, mutate.change_json, read_manifest, 0.28, 2 * MIB, 300),
        # What is allocated for pieces is in proportion to their limit: 2^20 + 64 a byte.
        "manifest in use": Case(
            [*good, *good, wide()], mutate.change_json, use_manifest, 0.14, 80 * MIB, 3000
        ),
        "manifest.zst": Case(
            [packer.compress(m) for m in good],
            mutate.change_packed,
            read_packed,
            0.06,
            4 * MIB,
            20_000,
        ),
        "header": Case(good_files(), mutate.change_prefixed, read_header, 0.15, 2 * MIB, 300),
        "digest index": Case(index, mutate.change_bytes, read_index, 0.08, MIB, 10),
        "witness": Case(
            [Witness.empty(PLAN).encode()], mutate.change_prefixed, read_witness, 0.06, MIB, 100
        ),
        "object": Case(objects, mutate.change_json, read_object, 0.06, MIB, 300),
    }
    for kind in (Commit, Generation, RootMarker, Lease, Pin):
        seeds = [encode_record(r) for r in RECORDS if type(r) is kind]
        share = 0.06 if kind in (Commit, Generation) else 0.02
        table[kind.__name__.lower()] = Case(
            seeds, mutate.change_json, read_record(kind), share, MIB, 300
        )
    return table


CASES = cases()


# --- the campaign --------------------------------------------------------------------------------


def outcome(case: Case, raw: bytes) -> str:
    """Read one mutation: the error's class and message, or ``valid``; all else fails the test."""
    try:
        case.read(raw)
    except CkptdError as error:
        text, said = str(error), f"{type(error).__name__} {error.message}"
    else:
        return "valid"
    assert len(text) < 4000, "an error repeats what the file says"
    return said


def campaign(name: str, count: int, seed: int, report: Callable[[str], None]) -> None:
    case = CASES[name]
    for raw in case.seeds:
        case.read(raw)
    found: Counter[str] = Counter()
    worst_bytes, worst_s = 0, 0.0
    tracemalloc.start()
    try:
        for number in range(count):
            rng = random.Random(f"{seed}-{name}-{number}")
            raw = case.change(rng.choice(case.seeds), rng)
            tracemalloc.reset_peak()
            before, began = tracemalloc.get_traced_memory()[0], time.perf_counter()
            try:
                found[outcome(case, raw)] += 1
            except BaseException as error:
                error.add_note(f"{name}, seed {seed}, mutation {number}: {raw[:2000]!r}")
                raise
            peak = tracemalloc.get_traced_memory()[1] - before
            allowed = case.free + case.per_byte * len(raw)
            assert peak <= allowed, (
                f"{name}, seed {seed}, mutation {number}: {peak} bytes for {len(raw)}"
            )
            worst_bytes = max(worst_bytes, peak)
            worst_s = max(worst_s, time.perf_counter() - began)
    finally:
        tracemalloc.stop()
    errors = sum(n for k, n in found.items() if k != "valid")
    report(
        f"fuzz {name}: {count} mutations, {errors} typed errors, "
        f"{found['valid']} valid, nothing else; seed {seed}, "
        f"at most {worst_bytes / MIB:.1f} MiB and {worst_s:.2f} s each"
    )
    assert errors


SHORT, LONG = 2500, 400_000


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_short_campaign(name: str, report: Callable[[str], None]) -> None:
    campaign(name, int(SHORT * CASES[name].share), 1, report)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", CASES)
def test_long_campaign(name: str, report: Callable[[str], None]) -> None:
    campaign(name, int(LONG * CASES[name].share), time.time_ns() % 2**32, report)


@pytest.mark.slow
def test_mutations_reach_every_check() -> None:
    """A campaign that meets one error only tests one check."""
    met: list[str] = []
    for name in ("manifest", "manifest in use", "header"):
        for number in range(1500):
            rng = random.Random(f"reach-{name}-{number}")
            case = CASES[name]
            met.append(outcome(case, case.change(rng.choice(case.seeds), rng)))
    wanted = ("not JSON", "not a ckptd manifest", "not a Manifest", "a mesh breaks a rule")
    wanted += ("manifest breaks a rule", "not one owner for each piece", "invalid name")
    wanted += (
        "impossible sizes, rank or digest",
        "not in a 1-d uint8 tensor",
        "too many dimensions",
    )
    wanted += ("bad dtype, shape or offsets of chunk", "written by a newer ckptd")
    assert [w for w in wanted if not any(w in each for each in met)] == []


@given(st.binary(max_size=200), st.sampled_from(sorted(CASES)))
def test_any_bytes(raw: bytes, name: str) -> None:
    outcome(CASES[name], raw)


def test_the_same_seed_gives_the_same_mutations() -> None:
    sums = set()
    for _ in range(2):
        total = 0
        for name, case in CASES.items():
            rng = random.Random(f"same-{name}")
            total = zlib.crc32(b"".join(case.change(case.seeds[0], rng) for _ in range(20)), total)
        sums.add(total)
    assert len(sums) == 1
