"""``ckptd export``: what strangers read, and that a folder is never half a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from ckptd.checkpoint.cli.address import opened
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.cli.options import size_of
from ckptd.errors import UsageError
from ckptd.reshard import export as engine
from ckptd.reshard.export import plan_export
from tests.checkpoint.load.builder import Saved
from tests.cli.roots import absent_rows, by_columns, cut, flip, make_root, rank_file, values
from tests.cli.running import Cli

INDEX = "model.safetensors.index.json"


def wanted(seed: int = 20, *, untied: bool = True) -> dict[str, Any]:
    found = {n[6:]: v for n, v in values(seed).items() if n.startswith("model.")}
    return {**found, "head.weight": found["embed.weight"]} if untied else found


def index_of(folder: Path) -> Any:
    return json.loads((folder / INDEX).read_text())


def load(folder: Path) -> dict[str, Any]:
    """Read an export as its index says, bytes of types that numpy lacks viewed."""
    import torch
    from safetensors.torch import load_file as load_torch

    out = {}
    loaded = {}
    for name, file in index_of(folder)["weight_map"].items():
        if file not in loaded:
            loaded[file] = load_torch(folder / file)
        tensor = loaded[file][name]
        if tensor.dtype == torch.bfloat16:
            out[name] = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            out[name] = tensor.numpy()
    assert sum(map(len, loaded.values())) == len(out), "the index names every tensor"
    return out


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def test_the_model_section(cli: Cli, root: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    document = cli.json("export", root, str(folder))
    assert sorted(os.listdir(folder)) == ["model.safetensors", INDEX]
    assert_equal(load(folder), wanted())
    total = sum(v.nbytes for v in wanted().values())
    assert index_of(folder)["metadata"] == {"total_size": total}
    assert (document["bytes"], document["tensors"]) == (total, len(wanted()))
    assert document["tied"] == {}
    assert set(document["left_out"]) == {n for n in values(20) if not n.startswith("model.")}
    assert document["files"] == [
        {"name": "model.safetensors", "tensors": len(wanted()), "bytes": total}
    ]
    text = cli.good("export", f"{root}@10", str(tmp_path / "other"), "--no-untie").out
    assert "head.weight is tied to embed.weight" in text
    assert "left out: 1 tensor: optim." in text
    assert_equal(load(tmp_path / "other"), wanted(10, untied=False))


def test_the_header_is_for_pytorch(cli: Cli, root: str, tmp_path: Path) -> None:
    cli.good("export", root, str(tmp_path), "--no-untie")
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_tied_weights_load_into_a_tied_model(cli: Cli, root: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_model
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 6)
            self.head = nn.Linear(6, 20, bias=False)
            self.head.weight = self.embed.weight

    rule = ("--rename", "^(layers|scale|empty).*=dropped.")
    assert cli("export", root, str(tmp_path / "x"), *rule).code == 2, "names collide"
    array = values(20)["model.embed.weight"]
    small = make_root(
        tmp_path / "small", (1,), tensors={"model.embed.weight": Saved.rows(array, 3)}
    )
    # load_model takes the names of tied weights from the header, and refuses them as tensors.
    cli.good("export", small, str(tmp_path / "hf"), "--no-untie")
    model = Model()
    missing, unexpected = load_model(model, tmp_path / "hf" / "model.safetensors")
    assert (set(missing), unexpected) == (set(), [])
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, torch.from_numpy(array))


def test_tied_weights_are_written_under_each_name(cli: Cli, root: str, tmp_path: Path) -> None:
    cli.good("export", root, str(tmp_path), "--untie")
    assert_equal(load(tmp_path), wanted())


def test_shards(cli: Cli, root: str, tmp_path: Path) -> None:
    cli.good("export", root, str(tmp_path), "--max-shard-size", "450B")
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert_equal(load(tmp_path), wanted())
    for name in files:
        tensors = [n for n, f in index_of(tmp_path)["weight_map"].items() if f == name]
        size = sum(wanted()[n].nbytes for n in tensors)
        assert size <= 450 or len(tensors) == 1


def test_every_tensor_is_aligned_to_its_type(cli: Cli, tmp_path: Path) -> None:
    arrays = {f"model.{kind}": np.ones(3, kind) for kind in ("uint8", "float16", "float64")}
    root = make_root(tmp_path / "r", (1,), tensors={n: Saved.whole(v) for n, v in arrays.items()})
    cli.good("export", root, str(tmp_path))
    raw = (tmp_path / "model.safetensors").read_bytes()
    head = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    for name, array in arrays.items():
        assert head[name[6:]]["data_offsets"][0] % array.dtype.itemsize == 0
    assert_equal(load(tmp_path), {n[6:]: v for n, v in arrays.items()})


def test_cast(cli: Cli, root: str, tmp_path: Path) -> None:
    cli.good("export", root, str(tmp_path), "--dtype", "bfloat16")
    assert_equal(load(tmp_path), {n: v.astype(ml_dtypes.bfloat16) for n, v in wanted().items()})


def test_a_cast_that_overflows(cli: Cli, tmp_path: Path) -> None:
    big = np.array([1.0, 1e6, np.inf, np.nan], np.float32)
    root = make_root(
        tmp_path / "r",
        (1,),
        tensors={"model.x": Saved.whole(big), "model.n": Saved.whole(np.arange(3))},
    )
    result = cli("export", root, str(tmp_path / "hf"), "--dtype", "float16", "--json")
    assert (result.code, result.error["message"], result.error["where"]) == (
        2,
        "a value does not fit the type it is cast to",
        "x",
    )
    assert list((tmp_path / "hf").iterdir()) == []
    cli.good("export", root, str(tmp_path / "hf"), "--dtype", "bfloat16")
    found = load(tmp_path / "hf")
    assert found["n"].dtype == np.int64
    assert np.isinf(found["x"][2])


def test_sections_and_names(cli: Cli, root: str, tmp_path: Path) -> None:
    cli.good("export", root, str(tmp_path / "a"), "--section", "optim.layers")
    assert list(load(tmp_path / "a")) == ["0.mlp.weight.exp_avg"]
    cli.good("export", root, str(tmp_path / "b"), "--section", ".")
    everything = {**values(20), "model.head.weight": values(20)["model.embed.weight"]}
    assert_equal(load(tmp_path / "b"), everything)
    rules = ("--rename", r"^layers\.(\d+)=blocks.\1", "--rename", "embed=wte")
    document = cli.json("export", root, str(tmp_path / "c"), *rules, "--no-untie")
    assert document["tied"] == {"head.weight": "wte.weight"}
    assert "blocks.0.mlp.weight" in load(tmp_path / "c")
    result = cli("export", root, str(tmp_path / "d"), "--section", "modl", "--json")
    assert (result.code, result.error["message"]) == (4, "the checkpoint has no section 'modl'")
    assert result.error["found"] == "sections model, optim"


def test_escaped_names_are_the_modules_own(cli: Cli, tmp_path: Path) -> None:
    tensors = {"model.a%2Fb": Saved.whole(np.ones(2, np.float32))}
    root = make_root(tmp_path / "r", (1,), tensors=tensors)
    cli.good("export", root, str(tmp_path / "hf"))
    assert list(load(tmp_path / "hf")) == ["a/b"]


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("--rename", "nothing"), 2),
        (("--rename", "(=x"), 2),
        (("--rename", r"a=\9"), 2),
        (("--rename", ".*=same"), 2),
        (("--max-shard-size", "large"), 2),
        (("--dtype", "int8"), 2),
    ],
)
def test_bad_arguments(
    cli: Cli, root: str, tmp_path: Path, args: tuple[str, ...], code: int
) -> None:
    assert cli("export", root, str(tmp_path / "hf"), *args).code == code
    assert not (tmp_path / "hf").exists()


def test_what_cannot_be_exported(cli: Cli, tmp_path: Path) -> None:
    root = make_root(tmp_path / "a", (1,), tensors={"model.x": absent_rows(np.ones((4, 2)))})
    result = cli("export", root, str(tmp_path / "hf"), "--json")
    assert (result.code, result.error["class"]) == (1, "MismatchError")
    assert "leaves out" in result.error["message"]
    assert not (tmp_path / "hf").exists(), "found before anything is written"
    odd = Saved.whole(np.ones(2, np.complex128))
    root = make_root(tmp_path / "b", (1,), tensors={"model.x": odd})
    result = cli("export", root, str(tmp_path / "hf"), "--json")
    assert (result.code, result.error["message"]) == (2, "safetensors has no such type")


def test_a_model_that_is_there_is_not_replaced_unasked(cli: Cli, root: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    cli.good("export", f"{root}@10", str(folder), "--max-shard-size", "450B")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    result = cli("export", root, str(folder), "--json")
    assert (result.code, result.error["kind"]) == (5, "exists")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    cli.good("export", root, str(folder), "--force")
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", INDEX]
    assert_equal(load(folder), wanted())


def test_a_damaged_checkpoint_leaves_the_folder_as_it_was(
    cli: Cli, root: str, tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    cli.good("export", f"{root}@10", str(folder))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    flip(rank_file(root, 20, 3), -1)
    assert cli("export", root, str(folder), "--force").code == 3
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize("slab", [16, 100, 1 << 20])
def test_tensors_larger_than_the_memory_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab: int
) -> None:
    monkeypatch.setattr(engine, "_SLAB_BYTES", slab)
    arrays = values(3)
    arrays["model.columns"] = np.arange(96, dtype=np.float32).reshape(2, 6, 8)
    tensors = cut(arrays)
    tensors["model.embed.weight"] = by_columns(arrays["model.embed.weight"])
    root = make_root(tmp_path / "r", (1,), tensors=tensors)
    with opened(root) as catalogue:
        reader = CkptdReader(catalogue, CommitName(1, 1))
        most = 0

        def batches(items: Any) -> Any:
            nonlocal most
            for item, found in real(reader, items):
                most = max(most, found.nbytes)
                yield item, found

        real = engine._values
        monkeypatch.setattr(engine, "_values", lambda _, items: batches(items))
        engine.run_export(reader, plan_export(reader), tmp_path / "hf")
    assert most <= max(slab, 16)
    wanted = {n[6:]: v for n, v in arrays.items() if n[:6] == "model."}
    assert_equal(load(tmp_path / "hf"), {**wanted, "head.weight": wanted["embed.weight"]})


def test_numpy_reads_it_too(cli: Cli, tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    root = make_root(
        tmp_path / "r", (1,), tensors={"model.x": by_columns(np.hstack([array, array]))}
    )
    cli.good("export", root, str(tmp_path / "hf"))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert np.array_equal(found["x"], np.hstack([array, array]))


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2 << 30), ("1.5K", 1500), ("7", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_of(text, "x") == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "5 PB", "5gb", "0.1B", "9" * 400])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError):
        size_of(text, "--max-shard-size")
