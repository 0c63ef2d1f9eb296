"""Bytes that conversions of foreign checkpoints read: what is wanted, and little beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

from ckptd.base.grids.grid import strides_of
from ckptd.checkpoint.load.direct import DirectReader
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.tools.copy import Transfer
from ckptd.errors import CorruptError
from ckptd.readers.find import find_foreign
from ckptd.reshard.execute import Budget
from ckptd.reshard.job import ReshardShare
from ckptd.reshard.prepare import costs_of, prepare, source_program
from ckptd.reshard.writers.dcp import DcpPlace
from ckptd.reshard.writers.folder import FolderJob, OutputFormat
from ckptd.reshard.writers.hf import HfPlace
from ckptd.store.local import LocalStore
from ckptd.types import Box, ByteRange
from tests.checkpoint.load.builder import Array
from tests.readers.opening import foreign_stock, open_reader, reader_in
from tests.reshard.llama import program

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

AIM = 1.05
HEADS = 4096
"""What a piece may cost beside its bytes: the ends of a zip."""
SHAPES = {"embed": (500, 601), "big": (1201, 1100), "norm": (33,)}
SHAPES |= {f"layers.{i}.{n}": s for i in range(3) for n, s in {"up": (700, 411), "b": (5,)}.items()}


class Counting(LocalStore):
    """Adds up the bytes that are asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.seen = 0

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        raw = super().get(key, byte_range)
        self.seen += len(raw)
        return raw

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        super().read_into(key, offset, buffer)
        self.seen += buffer.nbytes


def weights() -> dict[str, Array]:
    draw = np.random.default_rng(1)
    return {f"model.{n}": draw.standard_normal(s, np.float32) for n, s in SHAPES.items()}


def with_moments() -> dict[str, torch.Tensor]:
    """Return weights, each with its moments behind it, as a trainer saves them."""
    state: dict[str, torch.Tensor] = {}
    for name, value in weights().items():
        state[name] = torch.from_numpy(value)
        for number, kind in enumerate(("exp_avg", "exp_avg_sq")):
            state[f"optim.state.{name.removeprefix('model.')}.{kind}"] = torch.from_numpy(
                value * 0 + number
            )
    return state


def write_dcp(folder: Path) -> None:
    dcp.save(with_moments(), checkpoint_id=str(folder), no_dist=True)


def write_torch(folder: Path) -> None:
    torch.save(with_moments(), folder / "state.pt")


def write_hf(folder: Path) -> None:
    state = {n: np.ascontiguousarray(t.numpy()) for n, t in with_moments().items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def to_hf(found: Any) -> OutputFormat:
    return HfPlace(found.assembled, found.expected, 1 << 40)


def to_dcp(found: Any) -> OutputFormat:
    return DcpPlace(found.assembled, found.expected)


@pytest.mark.parametrize("write", [write_dcp, write_torch, write_hf])
@pytest.mark.parametrize(("place", "states"), [(to_hf, False), (to_dcp, True)])
def test_what_nobody_wants_is_not_read(
    tmp_path: Path,
    write: Callable[[Path], None],
    place: Callable[[Any], OutputFormat],
    states: bool,
) -> None:
    (tmp_path / "source").mkdir()
    write(tmp_path / "source")
    store = Counting(tmp_path / "source")
    with store:
        stock = foreign_stock(store)
        found = prepare(stock, source_program(stock, None), program("names.dcp"))
        made = place(found)
        needed = sum(made.target.sizes)
        files = ReshardShare().files(made.target)
        costs = costs_of(found, made.target, files, Budget.of(64 << 20, store))
        store.seen = 0
        job = FolderJob(stock.source, made, tmp_path / "out", identity=found.identity)
        done = job.run(ReshardShare(), Budget.of(64 << 20, store))
    assert done.bytes_needed == done.bytes_written == needed
    assert needed == sum(v.nbytes for v in weights().values()) * (3 if states else 1)
    pieces = len(made.target.tensors)
    assert done.bytes_read <= AIM * needed
    assert costs.bytes_read == done.bytes_read
    assert store.seen <= AIM * needed + HEADS * pieces
    read = open_reader(tmp_path / "out")
    for name, value in with_moments().items():
        if states or name.startswith("model."):
            assert np.array_equal(read.tensor(name), value.numpy())


class Overwritten(LocalStore):
    """Writes files anew, of the same sizes, when so many reads were made.

    Parameters
    ----------
    only
        The name of the one file; all of them when left out. Its time is kept, as by ``rsync -t``.
    """

    def __init__(self, root: Path, only: str = "") -> None:
        super().__init__(root)
        self.folder = root
        self.only = only
        self.reads_left = -1

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        super().read_into(key, offset, buffer)
        self._count()

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        raw = super().get(key, byte_range)
        self._count()
        return raw

    def _count(self) -> None:
        self.reads_left -= 1
        if not self.reads_left:
            self.overwrite()

    def overwrite(self) -> None:
        for path in [self.folder / self.only] if self.only else list(self.folder.iterdir()):
            new = self.folder / "new"
            new.write_bytes(path.read_bytes())
            if self.only:
                shutil.copystat(path, new)
            new.replace(path)


@pytest.mark.parametrize("write", [write_dcp, write_torch, write_hf])
def test_a_source_that_is_written_anew_is_not_mixed(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    """A trainer that writes its newest checkpoint under one name does so at any time."""
    (tmp_path / "source").mkdir()
    write(tmp_path / "source")
    with Overwritten(tmp_path / "source") as store:
        stock = foreign_stock(store)
        found = prepare(stock, source_program(stock, None), program("names.dcp"))
        job = FolderJob(stock.source, to_dcp(found), tmp_path / "out", identity=found.identity)
        store.reads_left = 3
        with pytest.raises(CorruptError) as caught:
            job.run(ReshardShare(), Budget.of(64 << 20, store))
    assert caught.value.kind == "replaced"
    assert not (tmp_path / "out" / ".metadata").exists()


@pytest.mark.parametrize(
    ("write", "when"), [(write_torch, "headers"), (write_torch, "tensors"), (write_hf, "headers")]
)
def test_a_file_that_is_written_anew_is_not_loaded(
    tmp_path: Path, write: Callable[[Path], None], when: str
) -> None:
    write(tmp_path)
    with Overwritten(tmp_path) as store:
        if when == "headers":
            store.reads_left = 1
        reader = reader_in(store)
        if when == "tensors":
            store.reads_left = 3
        with pytest.raises(CorruptError) as caught:
            reader.tensors(reader.names)
    assert (caught.value.kind, caught.value.state_corrupted) == ("replaced", False)


def write_indexed(folder: Path) -> None:
    """Write safetensors with an index, and the configuration that says what they are."""
    write_hf(folder)
    names = dict.fromkeys(with_moments(), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text("{}")


TELLING = [
    (write_dcp, ".metadata"),
    (write_indexed, "model.safetensors.index.json"),
    (write_indexed, "config.json"),
]


def refused_copy(store: Overwritten, folder: Path) -> CorruptError:
    """Copy a checkpoint that is written anew meanwhile; return why that was refused."""
    with LocalStore(folder) as copy:
        root = find_foreign(store)
        assert root is not None
        source = Catalogue(root)
        source.open()
        transfer = Transfer(source, Catalogue(copy))
        store.reads_left = 3
        with pytest.raises(CorruptError) as caught:
            transfer.copy(source.commit(root.name))
        transfer.close()
        assert not Catalogue(copy).line()
    return caught.value


@pytest.mark.parametrize(("write", "file"), TELLING)
def test_a_file_that_says_where_tensors_lie_is_looked_at_again(
    tmp_path: Path, write: Callable[[Path], None], file: str
) -> None:
    """Only that one is written anew: of the same size, at the same time, another file."""
    (tmp_path / "source").mkdir()
    write(tmp_path / "source")
    with Overwritten(tmp_path / "source", file) as store:
        reader = reader_in(store)
        reader.tensors(reader.names[:1])
        store.overwrite()
        with pytest.raises(CorruptError) as loaded:
            reader.tensors(reader.names)
        copied = refused_copy(store, tmp_path / "copy")
        stock = foreign_stock(store)
        found = prepare(stock, source_program(stock, None), program("names.dcp"))
        job = FolderJob(stock.source, to_dcp(found), tmp_path / "out", identity=found.identity)
        store.reads_left = 3
        with pytest.raises(CorruptError) as converted:
            job.run(ReshardShare(), Budget.of(64 << 20, store))
    for error in (loaded.value, copied, converted.value):
        assert (error.kind, error.where) == ("replaced", file)
    assert not (tmp_path / "out" / ".metadata").exists()


def test_a_box_of_a_file_that_is_written_anew_is_not_read(tmp_path: Path) -> None:
    write_torch(tmp_path)
    with Overwritten(tmp_path) as store:
        reader = reader_in(store)
        with DirectReader(reader) as direct:
            number = next(n for n, t in enumerate(reader.manifest.tensors) if t.shape)
            box = Box.whole(reader.manifest.tensors[number].shape)
            out, strides = np.zeros(8 * box.numel, dtype=np.uint8), strides_of(box.shape)
            direct.read_into(number, box, out, strides)
            store.reads_left = 1
            with pytest.raises(CorruptError) as caught:
                direct.read_into(number, box, out, strides)
    assert caught.value.kind == "replaced"


def test_a_source_that_is_written_anew_is_not_copied(tmp_path: Path) -> None:
    """A copy has digests: of bytes of two checkpoints they would say that all is well."""
    (tmp_path / "source").mkdir()
    write_torch(tmp_path / "source")
    with Overwritten(tmp_path / "source") as store:
        assert refused_copy(store, tmp_path / "copy").kind == "replaced"


def read_directly(reader: CkptdReader, name: str) -> Array:
    out = np.zeros(1024, dtype=np.uint8)
    with DirectReader(reader) as direct:
        direct.read_into(reader.number(name), Box((0,), (256,)), out, (1,))
    return out.view(np.float32)


@pytest.mark.parametrize("read", [read_directly, CkptdReader.tensor])
def test_a_small_tensor_costs_its_own_bytes(
    tmp_path: Path, read: Callable[[CkptdReader, str], Array]
) -> None:
    """Whatever lies around it: of a folder of small items the head of one is read."""
    state = {f"w{n}": torch.full((256,), float(n)) for n in range(200)}
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    store = Counting(tmp_path)
    reader = reader_in(store)
    store.seen = 0
    assert (read(reader, "w77") == 77).all()
    assert store.seen < 1024 + HEADS
