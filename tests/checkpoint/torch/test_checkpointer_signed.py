"""With ``sign`` each commit is signed; with ``trust`` nothing is loaded but what was signed."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("blake3")

import numpy as np
import torch
import xxhash
from blake3 import blake3

import ckptd
from ckptd.base.digest import Digester, digest_hex
from ckptd.checkpoint.format.manifest import decode_manifest, encode_manifest
from ckptd.checkpoint.format.records import Commit, decode_record, encode_record
from ckptd.checkpoint.load.direct import open_direct
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.opening import root_spec, trusting
from ckptd.checkpoint.save import BoxRoot
from ckptd.checkpoint.save.messages import RankPart
from ckptd.errors import CkptdError, CorruptError, NotFoundError, RefusedError, UsageError
from ckptd.store.base import Store, Wrapper
from ckptd.store.memory import MemoryStore
from ckptd.store.signed import FileHash, windows_key
from ckptd.testing.ranks import run_ranks
from tests.checkpoint.crash.life import End, Life, live
from tests.keys import forged, key_pair
from tests.processes import PATIENCE_S

COUNT = 1 << 20
STEPS = (10, 20)


def state(step: int) -> dict[str, torch.Tensor]:
    big = torch.arange(COUNT, dtype=torch.float32) + step
    return {"big": big, "small": torch.full((4,), float(step))}


@dataclass(frozen=True)
class Place:
    """A root whose steps are signed, and the keys."""

    root: Path
    private: str
    public: str

    def folder(self, step: int) -> Path:
        (found,) = self.root.glob(f"data/{step:012d}-*")
        return found

    def file(self, name: str, step: int = 20) -> Path:
        (found,) = self.folder(step).glob(name)
        return found

    def record(self, step: int = 20) -> Path:
        (found,) = self.root.glob(f"commits/{step:012d}-*")
        return found

    def load(self, step: int | None = 20, *trust: str) -> int:
        """Load; the state is a saved one, or as it was before."""
        found = {name: torch.full_like(value, -1) for name, value in state(0).items()}
        trust = trust or (self.public,)
        with ckptd.Checkpointer(str(self.root), trust=trust, timeout_s=PATIENCE_S) as ck:
            try:
                loaded = ck.load(found, step=step)
            except CkptdError:
                assert all((value == -1).all() for value in found.values())
                raise
        assert all(torch.equal(found[n], v) for n, v in state(loaded).items())
        return loaded


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("signed")
    private, public = key_pair(folder, "release")
    root = folder / "root"
    with ckptd.Checkpointer(str(root), sign=private, timeout_s=PATIENCE_S) as ck:
        for step in STEPS:
            ck.save(step, state(step), metadata={"loss": 1.5}).durable(PATIENCE_S)
    return Place(root, private, public)


@pytest.fixture
def place(made: Place, tmp_path: Path) -> Place:
    shutil.copytree(made.root, tmp_path / "root")
    return Place(tmp_path / "root", made.private, made.public)


def test_what_is_saved_with_a_key_is_loaded(place: Place, tmp_path: Path) -> None:
    other = key_pair(tmp_path, "other")[1]
    assert place.load(None) == 20
    assert place.load(20, other, place.public) == 20, "any one of several keys"
    with pytest.raises(RefusedError, match="no trusted key has signed"):
        place.load(20, other)
    (place.folder(20) / "more.safetensors").write_bytes(b"what nobody has signed is not read")
    assert place.load(20) == 20
    with ckptd.Checkpointer(str(place.root), trust=place.public) as ck:
        assert ck.latest() == 20


def test_what_is_saved_without_a_key_is_refused(place: Place) -> None:
    with ckptd.Checkpointer(str(place.root), timeout_s=PATIENCE_S) as ck:
        ck.load(state(0))
        ck.save(30, state(30)).durable(PATIENCE_S)
    for step in (None, 30):
        with pytest.raises(RefusedError, match="no trusted key has signed"):
            place.load(step)
    with ckptd.Checkpointer(str(place.root), trust=place.public) as ck:
        with pytest.raises(RefusedError, match="no trusted key has signed"):
            ck.latest()
        with pytest.raises(RefusedError, match="no trusted key has signed"):
            ck.load(state(0), source=str(place.root))
    assert place.load(20) == 20


def digested_again(place: Place, data: bytes) -> None:
    """Put other data into step 20, and recompute each digest on the way to the record."""
    path, index = place.file("r00000.safetensors"), place.file("r00000.digests")
    record = decode_record(place.record().read_bytes(), Commit, "")
    manifest = decode_manifest(place.file("manifest.json").read_bytes(), "")
    (entry,) = manifest.files
    header = json.loads(data[8 : entry.data_start])
    ends = sorted(v["data_offsets"][1] for k, v in header.items() if k != "__metadata__")
    digester = Digester(tuple(ends))
    digester.update(memoryview(data)[entry.data_start :])
    raw = digester.index().encode()
    path.write_bytes(data)
    index.write_bytes(raw)
    place.file("witness").unlink()
    entry = msgspec.structs.replace(entry, index=digest_hex(raw))
    manifest = msgspec.structs.replace(manifest, files=(entry,), witness=None)
    name, raw = encode_manifest(manifest)
    place.file(name).write_bytes(raw)
    record = msgspec.structs.replace(
        record, manifest_digest=digest_hex(raw), manifest_bytes=len(raw)
    )
    place.record().write_bytes(encode_record(record))


def same_xxh3(place: Place) -> None:
    path = place.file("r00000.safetensors")
    raw = path.read_bytes()
    start = raw.index(state(20)["big"].numpy().tobytes())
    data = forged(raw[start:])
    assert data != raw[start:]
    assert xxhash.xxh3_128(data).digest() == xxhash.xxh3_128(raw[start:]).digest()
    path.write_bytes(raw[:start] + data)


def all_digests(place: Place) -> None:
    raw = bytearray(place.file("r00000.safetensors").read_bytes())
    raw[-4:] = np.float32(666).tobytes()
    digested_again(place, bytes(raw))


def metadata(place: Place) -> None:
    record = decode_record(place.record().read_bytes(), Commit, "")
    record = msgspec.structs.replace(record, metadata={"loss": 0.0})
    place.record().write_bytes(encode_record(record))


def older_data(place: Place) -> None:
    shutil.copy(place.file("r00000.safetensors", 10), place.file("r00000.safetensors"))
    shutil.copy(place.file("r00000.digests", 10), place.file("r00000.digests"))


def older_folder(place: Place) -> None:
    new = place.folder(20)
    shutil.rmtree(new)
    shutil.copytree(place.folder(10), new)


def older_as_newer(place: Place) -> None:
    """Show step 10 as step 20: its manifest and record are written again for that."""
    old, new = place.folder(10), place.folder(20)
    shutil.rmtree(new)
    shutil.copytree(old, new)
    text = place.file("manifest.json").read_text().replace(old.name, new.name)
    manifest = decode_manifest(text.encode(), "")
    attempt = new.name.rpartition("-")[2]
    manifest = msgspec.structs.replace(manifest, step=20, attempt=attempt)
    name, raw = encode_manifest(manifest)
    place.file(name).write_bytes(raw)
    record = decode_record(place.record(10).read_bytes(), Commit, "")
    folder = f"data/{new.name}/"
    record = msgspec.structs.replace(
        record,
        step=20,
        attempt=attempt,
        folder=folder,
        folders=(folder,),
        manifest_digest=digest_hex(raw),
        manifest_bytes=len(raw),
    )
    place.record().write_bytes(encode_record(record))


def no_signature(place: Place) -> None:
    place.file("signature-*").unlink()


def older_signature(place: Place) -> None:
    place.file("signature-*").write_bytes(place.file("signature-*", 10).read_bytes())


def turned_signature(place: Place) -> None:
    path = place.file("signature-*")
    bundle = json.loads(path.read_bytes())
    signature = bundle["dsseEnvelope"]["signatures"][0]
    raw = bytearray(base64.b64decode(signature["sig"]))
    raw[9] ^= 1
    signature["sig"] = base64.b64encode(raw).decode()
    path.write_text(json.dumps(bundle))


def another_key(place: Place) -> None:
    """Sign other weights with a key of one's own, under the name of the trusted one."""
    all_digests(place)
    path = place.file("signature-*")
    own = key_pair(place.root.parent, "own")[0]
    from ckptd.cli.main import run

    assert run(["sign", f"{place.root}@20", "--key", own]) == 0
    (made,) = [p for p in place.folder(20).glob("signature-*") if p != path]
    made.rename(path)


def without(pattern: str) -> Callable[[Place], None]:
    def drop(place: Place) -> None:
        place.file(pattern).unlink()

    drop.__name__ = f"without {pattern}"
    return drop


ATTACKS: dict[Callable[[Place], None], tuple[type[CkptdError], str]] = {
    same_xxh3: (CorruptError, "not what was signed"),
    all_digests: (CorruptError, "not what was signed"),
    metadata: (CorruptError, "not what was signed"),
    older_data: (CorruptError, "not what was signed"),
    older_folder: (RefusedError, "no trusted key has signed"),
    older_as_newer: (CorruptError, "not what was signed"),
    no_signature: (RefusedError, "no trusted key has signed"),
    older_signature: (CorruptError, "not what was signed"),
    turned_signature: (RefusedError, "not what its key made"),
    another_key: (RefusedError, "not by a trusted key"),
    without("r00000.safetensors"): (CorruptError, "missing"),
    without("r00000.digests"): (CorruptError, "missing"),
    without("manifest.json"): (CorruptError, "missing"),
    without("*.blake3"): (CorruptError, "hashes of a signed file are missing"),
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_what_an_attacker_changes_is_refused_by_name(
    place: Place, attack: Callable[[Place], None]
) -> None:
    attack(place)
    kind, words = ATTACKS[attack]
    with pytest.raises(kind, match=words):
        place.load(20)
    assert place.load(10) == 10


def test_without_trust_the_same_is_loaded(place: Place) -> None:
    """Digests are against accidents: each of these attacks changes weights silently."""
    for attack in (same_xxh3, all_digests):
        attack(place)
        found = {name: torch.full_like(value, -1) for name, value in state(0).items()}
        with ckptd.Checkpointer(str(place.root), timeout_s=PATIENCE_S) as ck:
            assert ck.load(found) == 20
        assert not torch.equal(found["big"], state(20)["big"])


def test_a_newer_step_may_be_hidden_and_one_that_is_named_may_not(place: Place) -> None:
    place.record(20).unlink()
    shutil.rmtree(place.folder(20))
    assert place.load(None) == 10
    with pytest.raises(NotFoundError, match="no checkpoint of step 20"):
        place.load(20)


def test_a_step_of_another_root_is_refused(place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with ckptd.Checkpointer(str(other), sign=place.private, timeout_s=PATIENCE_S) as ck:
        ck.save(5, state(5)).durable(PATIENCE_S)
    shutil.rmtree(place.root / "data")
    shutil.rmtree(place.root / "commits")
    shutil.rmtree(place.root / "generations")
    for name in ("data", "commits", "generations"):
        shutil.copytree(other / name, place.root / name)
    with pytest.raises(CorruptError, match="not what was signed"):
        place.load(5)
    shutil.copy(other / "ckptd.json", place.root)
    assert place.load(5) == 5, "a whole root may be elsewhere"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_edit_of_any_file_changes_nothing_or_is_refused(
    made: Place, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.getbasetemp() / "edited"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(made.root, root)
    files = sorted(p for p in root.rglob("*") if p.is_file())
    if data.draw(st.booleans()):  # as somebody who recomputes each digest on the way
        place = Place(root, made.private, made.public)
        raw = bytearray(place.file("r00000.safetensors").read_bytes())
        raw[data.draw(st.integers(len(raw) - 4 * COUNT, len(raw) - 1))] ^= 1
        digested_again(place, bytes(raw))
        files.remove(root / "data" / place.folder(20).name / "witness")
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(files))
        raw = bytearray(path.read_bytes())
        where = data.draw(st.integers(0, max(0, len(raw) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "swap"])):
            case "flip":
                raw[where : where + 1] = bytes(
                    [(raw or b"\0")[where] ^ data.draw(st.integers(1, 255))]
                )
            case "cut":
                del raw[where:]
            case "insert":
                raw[where:where] = data.draw(st.binary(min_size=1, max_size=9))
            case "swap":
                raw = bytearray(data.draw(st.sampled_from(files)).read_bytes())
        path.write_bytes(raw)
    with trusting(root_spec(str(root)), made.public).open() as store:
        for step in STEPS:
            try:
                catalogue = Catalogue(store)
                catalogue.open()
                reader = CkptdReader(catalogue, catalogue.find(step))
                found = reader.tensors(["big", "small"])
                assert reader.metadata == {"loss": 1.5}
            except CkptdError:
                continue
            for name, value in state(step).items():
                assert np.array_equal(found[name], value.numpy()), (step, name)


def test_every_way_in_asks_for_a_signature(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_signature(place)
    monkeypatch.setenv("CKPTD_TRUST", place.public)
    with pytest.raises(RefusedError, match="no trusted key"), open_direct(str(place.root)):
        pass
    with open_direct(str(place.root), 10) as direct:
        assert (direct.reader.tensor("small") == 10).all()
    with pytest.raises(RefusedError, match="no trusted key"):
        ckptd.Checkpointer(str(place.root)).load(state(0))
    with BoxRoot(str(place.root)) as boxes, pytest.raises(RefusedError, match="no trusted key"):
        boxes.latest()
    with BoxRoot(str(place.root)) as boxes, boxes.open(10) as reader:
        assert (reader.tensor("small") == 10).all()
    torch.save(state(1), tmp_path / "foreign.pt")
    with pytest.raises(NotFoundError, match="no root"), open_direct(str(tmp_path / "foreign.pt")):
        pass
    with pytest.raises(UsageError, match="near tiers are not signed"):
        ckptd.Checkpointer(str(place.root), tiers=[ckptd.Memory()])
    from ckptd.cli.main import run

    for verb in (["cp", f"{place.root}@20", str(tmp_path / "copy")], ["inspect", str(place.root)]):
        assert run(verb) == RefusedError.exit_code
        assert not (tmp_path / "copy" / "commits").exists()


def test_keys_that_cannot_sign(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "release")
    for bad in (public, str(tmp_path / "none.pem")):
        with pytest.raises(CkptdError, match="key"):
            ckptd.Checkpointer(str(tmp_path / "root"), sign=bad)
    Path(private).chmod(0o644)
    with pytest.raises(UsageError, match="others may read this private key"):
        ckptd.Checkpointer(str(tmp_path / "root"), sign=private)


def test_a_key_that_is_gone_fails_the_save_by_name(tmp_path: Path) -> None:
    private, _ = key_pair(tmp_path, "release")
    with ckptd.Checkpointer(str(tmp_path / "root"), sign=private, timeout_s=PATIENCE_S) as ck:
        Path(private).unlink()
        with pytest.raises(CkptdError, match="file of the key is not there"):
            ck.save(1, state(1)).durable(PATIENCE_S)
        assert ck.latest() is None


@pytest.mark.parametrize("how", ["plain", "packed", "small", "memory", "near"])
def test_each_way_of_saving_is_signed(tmp_path: Path, how: str) -> None:
    private, public = key_pair(tmp_path, "release")
    root = "memory://signed" if how == "memory" else str(tmp_path / "root")
    storage = ckptd.Storage(compress=1 if how == "packed" else None)
    saved = {"x": torch.arange(9.0)} if how == "small" else state(1)
    options: dict[str, Any] = {"timeout_s": PATIENCE_S, "storage": storage}
    if how == "near":
        options |= {"tiers": [ckptd.Memory(every=1, agent_ttl_s=1.0)]}
    with ckptd.Checkpointer(root, sign=private, **options) as ck:
        for step in (1, 2):  # of what did not change, too, each has all
            ck.save(step, saved).durable(PATIENCE_S)
    options.pop("tiers", None)
    if how == "plain":
        shutil.rmtree(next(Path(root).glob("data/000000000001-*")))
    with ckptd.Checkpointer(root, trust=[public], **options) as ck:
        found = {name: torch.zeros_like(value) for name, value in saved.items()}
        assert ck.load(found) == 2
    assert all(torch.equal(found[n], v) for n, v in saved.items())
    with ckptd.Checkpointer(root, trust=key_pair(tmp_path, "other")[1], **options) as ck:
        with pytest.raises(RefusedError, match="no trusted key has signed"):
            ck.load(found)


def on_ranks(root: str, sign: str | None, trust: tuple[str, ...]) -> list[float]:
    """Save, or load, the parts of a tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    rank, rows = torch.distributed.get_rank(), (6 << 18) // world
    local = torch.arange(float(6 << 18))[rank * rows :][:rows].clone()
    if trust:
        local.zero_()
    saved = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
    with ckptd.Checkpointer(root, sign=sign, trust=trust, timeout_s=PATIENCE_S) as ck:
        if trust:
            ck.load(saved)
        else:
            ck.save(10, saved).durable(PATIENCE_S)
    return [float(local.sum()), float(local[0])]


@pytest.mark.dist
def test_ranks_sign_together(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "release")
    root = str(tmp_path / "root")
    run_ranks(2, on_ranks, root, private, ())
    total = float(torch.arange(float(6 << 18), dtype=torch.float64).sum())
    for world in (1, 3):
        found = run_ranks(world, on_ranks, root, None, (public,))
        assert sum(part for part, _ in found) == pytest.approx(total)
        assert [first for _, first in found] == [r * ((6 << 18) // world) for r in range(world)]
    (data,) = Path(root).glob("data/*/r00001.safetensors")
    raw = data.read_bytes()
    data.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CorruptError, match="not what was"):
        run_ranks(3, on_ranks, root, None, (public,))


class Forger(Wrapper):
    """Somebody who writes to the root: puts other weights, and has rank 1 report them."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.url, self.options = inner, inner.url, inner.options
        self.capabilities, self.forged = inner.capabilities, list[str]()

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        if key.endswith("/parts/r00001"):
            part = msgspec.msgpack.decode(data[: -16 - 32], type=RankPart)
            (path,) = [p for p in part.hashes if p.endswith("r00001.safetensors")]
            raw = bytearray(self.inner.get(path))
            raw[-4:] = np.float32(666).tobytes()
            self.inner.put(path, bytes(raw))
            hashing = FileHash()
            hashing.update(memoryview(raw))
            whole, windows = hashing.end()
            self.inner.put(where := windows_key(path[:41], path), windows)
            hashes = part.hashes | {path: whole, where: blake3(windows).hexdigest()}
            data = msgspec.structs.replace(part, hashes=hashes).encode() + data[-32:]
            self.forged.append(path)
        self.inner.put(key, data, create_only=create_only)


def test_what_nobody_with_the_key_has_reported_is_not_signed(tmp_path: Path) -> None:
    """A process that wrote to the root during a save had other weights signed."""
    sign = key_pair(tmp_path, "release")[0]
    inner = MemoryStore("forged report")
    catalogue = Catalogue(inner)
    catalogue.create_or_open()
    generation = catalogue.claim(None, 2, "start").generation
    store = Forger(inner)

    def one(rank: int) -> End:
        more: dict[str, Any] = {"rank": rank, "world": 2, "board": str(tmp_path)}
        return live(Life(inner.describe(), 1, generation, "0001", sign=sign, **more), store)

    with ThreadPoolExecutor(2) as pool:
        ends = [*pool.map(one, range(2))]
    assert store.forged
    assert all("not from a process that has the key" in end.error["message"] for end in ends)
    assert Catalogue(store).latest() is None
