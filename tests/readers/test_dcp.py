"""Checkpoints of torch.distributed.checkpoint, read without torch."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from ckptd.base.digest import BLOCK_BYTES
from ckptd.errors import CkptdError
from ckptd.store.local import LocalStore
from ckptd.types import ByteRange
from tests.processes import PATIENCE_S
from tests.readers.opening import fails, open_reader, reader_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAMPLES = ["dcp-fsdp2-tp", "dcp-per-thread-files", "dcp-safetensors", "fsdp1-sharded"]
ODD: dict[str, Any] = {
    "bf": torch.arange(33.0).reshape(3, 11).to(torch.bfloat16),
    "zero_d": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "ints": torch.arange(5),
    "bool": torch.tensor([True, False]),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "cut": torch.arange(30.0).reshape(5, 6)[1:4, 2:5],
    "f8": torch.arange(8.0).to(torch.float8_e4m3fn),
    "c": torch.complex(torch.ones(2), torch.zeros(2)),
    "large": torch.arange(40_000.0),
    "nested": {"lr": 0.1, "betas": (0.9, 0.99), "names": ["a", {"b": None}]},
    "note": "x",
    "step": 7,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_read_bit_by_bit(foreign: Path, name: str) -> None:
    reader = open_reader(foreign / "dcp" / name)
    wanted = dict(np.load(foreign / "dcp" / name / "expected.npz"))
    assert sorted(wanted) == sorted(reader.names)
    found = reader.tensors(reader.names)
    assert all(found[n].tobytes() == wanted[n].tobytes() for n in wanted)
    assert all(found[n].shape == wanted[n].shape for n in wanted)


def test_what_ranks_wrote_is_seen(foreign: Path) -> None:
    reader = open_reader(foreign / "dcp" / "dcp-fsdp2-tp")
    assert reader.layout("model.layers.0.down.weight").words == "grid 2 x 2"
    assert reader.layout("model.layers.0.up.weight").words == "rows / 4 (6+5+6+5)"
    objects = reader.objects()
    assert objects["step"] == 2
    assert objects["optim.param_groups.0.lr"] == 0.01
    assert objects["optim.param_groups.0.betas"] == (0.9, 0.999)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    dcp.save(ODD, checkpoint_id=str(folder), no_dist=True)
    return folder


def bits(t: torch.Tensor) -> bytes:
    return bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def test_odd_types(odd: Path) -> None:
    reader = open_reader(odd)
    tensors = {n: t for n, t in ODD.items() if isinstance(t, torch.Tensor)}
    found = reader.tensors(reader.names)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape), name
        assert found[name].tobytes() == bits(tensor), name
    assert reader.info("bf").dtype.name == "bfloat16"
    assert reader.info("f8").dtype.name == "float8_e4m3fn"
    objects = reader.objects()
    assert objects["note"] == "x"
    assert objects["step"] == 7
    assert objects["nested.betas"] == (0.9, 0.99)


def test_views_that_change_values(tmp_path: Path) -> None:
    dcp.save({"a": torch.tensor([1 + 2j]).conj()}, checkpoint_id=str(tmp_path), no_dist=True)
    error = fails(tmp_path)
    assert error.kind == "unreadable-format"
    assert str(error.where).startswith("__0_0.distcp: a")


def test_parts_of_strided_tensors(odd: Path) -> None:
    reader = open_reader(odd)
    for name in ("strided", "cut", "large"):
        whole = reader.tensor(name)
        for box, part in reader.slabs(name, max(20, reader.info(name).nbytes // 61)):
            cut = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            assert np.array_equal(whole[cut], part)


def test_no_torch_is_imported(foreign: Path) -> None:
    code = (
        "import sys; from ckptd.cli.main import run;"
        f"code = run(['inspect', {str(foreign / 'dcp' / SAMPLES[0])!r}]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """To open a folder reads its metadata; to read a tensor, its item and what shares a block."""
    state = {f"w{n}": torch.full((BLOCK_BYTES // 4,), float(n)) for n in range(6)}
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    reads: list[tuple[str, int]] = []

    class Noting(LocalStore):
        def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
            raw = super().get(key, byte_range)
            reads.append((key, len(raw)))
            return raw

        def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
            super().read_into(key, offset, buffer)
            reads.append((key, buffer.nbytes))

    reader = reader_in(Noting(tmp_path))
    assert {key for key, _ in reads} == {".metadata"}
    reads.clear()
    assert set(reader.tensor("w3").tolist()) == {3}
    assert sum(size for _, size in reads) < BLOCK_BYTES + 4096
    assert (tmp_path / "__0_0.distcp").stat().st_size > 6 * BLOCK_BYTES


@pytest.fixture
def flattened(tmp_path: Path) -> Path:
    """Write a tensor as Megatron-core 0.14 does: parts of it, flattened and cut over ranks.

    It is [4, 6], of which two ranks of tensor parallelism have two rows each; of these, two ranks
    have the first 5 and the last 7 elements.
    """
    whole = torch.arange(24.0)
    cuts = [(0, 0, 5), (0, 5, 12), (1, 0, 5), (1, 5, 12)]
    parts = {f"p{i}": whole[12 * t + a : 12 * t + b] for i, (t, a, b) in enumerate(cuts)}
    parts = {name: part.clone().reshape(1, 1, -1) for name, part in parts.items()}
    dcp.save(parts, checkpoint_id=str(tmp_path), no_dist=True)
    path = tmp_path / ".metadata"
    saved = pickle.loads(path.read_bytes())
    items = {index.fqn: info for index, info in saved.storage_data.items()}
    one = saved.state_dict_metadata["p0"]
    offsets = [torch.Size((t, 0, a)) for t, a, _ in cuts]
    one.chunks = [
        ChunkStorageMetadata(offset, torch.Size((1, 1, b - a)))
        for offset, (_, a, b) in zip(offsets, cuts, strict=True)
    ]
    one.size = torch.Size((2, 1, 12))
    saved.state_dict_metadata = {"w": one}
    saved.storage_data = {
        MetadataIndex("w", offset): items[f"p{i}"] for i, offset in enumerate(offsets)
    }
    saved.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (4, 6)}, "other": {}}
    path.write_bytes(pickle.dumps(saved))
    return tmp_path


def test_flattened_ranges_of_older_megatron(flattened: Path) -> None:
    reader = open_reader(flattened)
    assert reader.tensor("w").tolist() == np.arange(24.0).reshape(4, 6).tolist()
    assert reader.layout("w").words == "rows / 2, then flat ranges / 4"


@pytest.mark.parametrize("shape", [(4, 7), (3, 8), (24,), (2, 2, 6), "x", (-4, 6)])
def test_flattened_ranges_of_another_shape(flattened: Path, shape: object) -> None:
    path = flattened / ".metadata"
    saved = pickle.loads(path.read_bytes())
    saved.mcore_data = {"w": {"nd_reformulated_orig_global_shape": shape}}
    path.write_bytes(pickle.dumps(saved))
    assert "invalid metadata of a distributed checkpoint" in fails(flattened).message


# -- bad input -------------------------------------------------------------------------------------


def test_compressed_items_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    writer = dcp.FileSystemWriter(str(tmp_path), _extensions=[ZStandard()])
    try:
        dcp.save({"a": torch.ones(4)}, storage_writer=writer, no_dist=True)
    except (ImportError, AttributeError):
        pytest.skip("no zstd of torch's here")
    error = fails(tmp_path)
    assert error.kind == "unreadable-format"


@pytest.fixture
def broken(foreign: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(foreign / "dcp" / "dcp-fsdp2-tp", tmp_path / "broken"))


def edit(folder: Path, change: Any) -> None:
    path = folder / ".metadata"
    metadata: Any = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_a_missing_file(broken: Path) -> None:
    (broken / "__2_0.distcp").unlink()
    error = fails(broken)
    assert (error.message, error.where) == ("a file of the checkpoint is missing", "__2_0.distcp")


def test_a_short_file(broken: Path) -> None:
    path = broken / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])
    assert fails(broken).kind == "truncated"


def test_a_part_that_lies_nowhere(broken: Path) -> None:
    edit(broken, lambda m: m.storage_data.pop(next(k for k in m.storage_data if k.offset)))
    assert "the metadata does not say where a part of a tensor lies" in fails(broken).message


def test_one_item_for_two_parts(broken: Path) -> None:
    def change(m: Any) -> None:
        name = "model.layers.0.down.weight"
        found = [k for k in m.storage_data if k.fqn == name]
        info = [m.storage_data.pop(k) for k in found]
        m.storage_data[type(found[0])(name, None)] = info[0]

    edit(broken, change)
    assert "the metadata does not say where a part of a tensor lies" in fails(broken).message


@pytest.mark.parametrize("field", ["fqn", "relative_path", "offset", "length", "dtype"])
def test_values_that_laugh(broken: Path, field: str) -> None:
    laugh: Any = 1
    for _ in range(5 if field == "fqn" else 60):  # a key that is hashed here
        laugh = laugh, laugh

    def change(m: Any) -> None:
        key = next(k for k in m.storage_data if k.fqn == "model.head.weight")
        if field == "fqn":
            m.storage_data[type(key)(laugh, None)] = m.storage_data[key]
        elif field == "dtype":
            object.__setattr__(m.state_dict_metadata[key.fqn], "properties", Laughing(laugh))
        else:
            m.storage_data[key].__dict__[field] = laugh

    edit(broken, change)
    assert "invalid metadata of a distributed checkpoint" in fails(broken).message


class Laughing:
    def __init__(self, state: Any) -> None:
        self.dtype = state


def test_holes_and_overlaps(broken: Path) -> None:
    name = "model.layers.0.down.weight"

    def shift(m: Any, by: int) -> None:
        chunk = m.state_dict_metadata[name].chunks[0]
        key = next(k for k in m.storage_data if k.fqn == name and k.offset == chunk.offsets)
        chunk.offsets = torch.Size([chunk.offsets[0], chunk.offsets[1] + by])
        info = m.storage_data.pop(key)
        m.storage_data[type(key)(name, chunk.offsets)] = info

    edit(broken, lambda m: m.state_dict_metadata[name].chunks.pop())
    assert "the parts of a tensor do not form a grid, or leave holes" in fails(broken).message
    edit(broken, lambda m: shift(m, 1))
    assert "the parts of a tensor do not form a grid, or leave holes" in fails(broken).message


def test_a_box_outside_of_its_tensor(broken: Path) -> None:
    def grow(m: Any) -> None:
        m.state_dict_metadata["model.head.weight"].size = torch.Size([20, 10])

    edit(broken, grow)
    assert "a part of a tensor lies outside" in fails(broken).message


def test_an_item_of_another_type(broken: Path) -> None:
    def change(m: Any) -> None:
        m.state_dict_metadata["model.head.weight"].properties.dtype = torch.int32

    edit(broken, change)
    error = fails(broken)
    assert (error.message, error.found) == (
        "an item holds another tensor than the metadata says",
        "float32 (16, 10)",
    )


def test_a_tensor_of_a_terabyte(broken: Path) -> None:
    def change(m: Any) -> None:
        entry = m.state_dict_metadata["model.head.weight"]
        entry.size = torch.Size([1 << 36, 10])
        entry.chunks[-1].sizes = torch.Size([(1 << 36) - 16, 10])

    edit(broken, change)
    assert fails(broken).kind == "truncated"


def test_no_metadata(broken: Path) -> None:
    (broken / ".metadata").write_bytes(b"rubbish")
    assert "invalid pickle" in fails(broken).message
    (broken / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    assert "invalid metadata of a distributed checkpoint" in fails(broken).message


def test_a_file_that_changes_under_our_hands(broken: Path) -> None:
    reader = open_reader(broken)
    path = broken / "__1_0.distcp"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CkptdError) as caught:
        reader.tensors(reader.names)
    assert "a file has changed while it was read" in caught.value.message


def test_parts_as_megatron_fsdp_cuts_them(foreign: Path) -> None:
    """Ranks have any rows of a parameter, or none."""
    folder = foreign / "megatron-fsdp"
    wanted = dict(np.load(folder / "expected.npz"))
    reader = open_reader(folder)
    assert {*reader.names} == {*wanted}
    assert all(reader.tensor(n).tobytes() == wanted[n].tobytes() for n in wanted)
    uneven = "model.module.decoder.layers.1.mlp.linear_fc2.weight"
    assert reader.layout(uneven).words == "rows / 2 (5+3)"
