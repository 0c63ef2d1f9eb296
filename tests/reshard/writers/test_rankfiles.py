"""Files of ranks that were written: by hand the same, and read back bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ckptd.errors import UsageError
from ckptd.reshard.execute import Budget
from ckptd.reshard.job import ReshardShare
from ckptd.reshard.layouts import LayoutProgram, read_text
from ckptd.reshard.prepare import Prepared, prepare, prove_target
from ckptd.reshard.ranks import open_ranks
from ckptd.reshard.reports import Resharded
from ckptd.reshard.writers.folder import FolderJob
from ckptd.reshard.writers.rankfiles import RanksPlace
from ckptd.store import open_store
from tests.checkpoint.load.builder import Array
from tests.reshard import test_ranks as by_hand
from tests.reshard.llama import (
    HF,
    SIZES,
    everything,
    job_into,
    prepared,
    program,
    save,
    values,
)


def write(
    source: Path, folder: Path, to: LayoutProgram, own: LayoutProgram | None = None
) -> tuple[Prepared, RanksPlace, Resharded]:
    with open_store(source) as store:
        found = prepared(store, to, own)
        place = RanksPlace(found.assembled, found.expected)
        job = FolderJob(found.stock.source, place, folder, identity=found.identity)
        done = job.run(ReshardShare(), Budget.of(64 << 20, store))
    return found, place, done


def back(folder: Path, root: Path, found: Prepared, to: LayoutProgram) -> dict[str, Array]:
    """Reshard files of ranks into a root, read by the layout that wrote them."""
    own = read_text(found.assembled.target.lay, "the target's program")
    with open_store(folder) as store, open_store(root) as out:
        stock = open_ranks(store, own.resolve(), 3)
        again = prepare(stock, own, to)
        job_into(out, again).run(ReshardShare(), Budget.of(64 << 20, store))
    return everything(root)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Array]]:
    folder, data = tmp_path_factory.mktemp("source"), values()
    with open_store(folder) as store:
        save(store, data)
    return folder, {n: v for n, v in data.items() if not n.endswith(".step")}


FILES = {
    "megatron.gpt": 'files "mp_rank_{tp:02}_{pp:03}/model_optim_rng.pt"',
    "vllm.llama": 'files "rank{tp}.safetensors"',
    "fsdp": 'files "of{dp}.pt"',
    "zero1": 'files "of{dp}.safetensors"',
    "zero2": 'files "zero/of_{dp:02}.bin"',
    "zero3": 'files "of{dp}.pt"',
}
MESHES = {
    "megatron.gpt": ("megatron_gpt", "pp", "dp", "tp"),
    "vllm.llama": ("vllm_llama", "tp"),
    "fsdp": ("fsdp", "dp"),
    "zero1": ("zero1", "dp"),
    "zero2": ("zero2", "dp"),
    "zero3": ("zero3", "dp"),
}


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_what_was_written_is_read_back(
    data: Any, source: tuple[Path, dict[str, Array]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Shipped layouts over meshes of any size: cut, padded, fused, packed into buffers."""
    name = data.draw(st.sampled_from(sorted(FILES)))
    mesh, *axes = MESHES[name]
    free = st.integers(1, 5) if axes == ["dp"] else st.sampled_from([1, 2, 4])
    extents = " ".join(f"{a}:{data.draw(free)}" for a in axes)
    to = program(name, f"mesh {mesh} = {extents}", FILES[name], *SIZES)
    own = program(*HF)
    folder = tmp_path_factory.mktemp("ranks")
    found, place, done = write(source[0], folder / "out", to, own)
    assert done.state == "committed"
    assert done.witness_values > 10_000
    target = place.target
    proved = prove_target(found.assembled.composed, target, ReshardShare().files(target))
    assert proved.elements == sum((t.shape and int(np.prod(t.shape))) or 1 for t in target.tensors)
    assert sorted(place.left_out) == sorted(
        t.name for t in found.assembled.target.tensors if t.name.endswith(".step")
    )
    again = back(folder / "out", folder / "root", found, own)
    assert again.keys() == source[1].keys()
    assert all(np.array_equal(again[n], v) for n, v in source[1].items())


@pytest.mark.parametrize("end", ["safetensors", "pt"])
def test_files_are_what_a_hand_cuts(tmp_path: Path, end: str) -> None:
    data = by_hand.logical()
    with open_store(tmp_path / "source") as store:
        save(store, data)
    text = by_hand.SPACE.replace("NORM", "").replace(".safetensors", f".{end}")
    to = by_hand.program(tmp_path, text, "mg")
    own = by_hand.program(tmp_path, text, "whole")
    _, place, _ = write(tmp_path / "source", tmp_path / "out", to, own)
    assert place.files.keys() == {f"mp_rank_{t}_{p}.{end}" for t in range(2) for p in range(2)}
    for pp in range(2):
        for tp in range(2):
            path = tmp_path / "out" / f"mp_rank_{tp}_{pp}.{end}"
            wanted = by_hand.of_rank(data, pp, tp)
            held: dict[str, Array]
            if end == "pt":
                held = {n: t.numpy() for n, t in torch.load(path, weights_only=True).items()}
            else:
                held = load_file(path)
            if tp == 1 and pp == 0:  # 7 rows over two ranks of 4: the last one has 3
                assert len(held["embed"]) == 3
            assert held.keys() == wanted.keys()
            assert all(np.array_equal(held[n], v) for n, v in wanted.items())


def test_sections_and_tied_names_of_a_torch_file(tmp_path: Path) -> None:
    """A copy in the same file shares its storage, one of another rank is a tensor of its own."""
    program_text = """
    space s { E[v h] B[v] follow exp_avg }
    layout whole of s on none { embed = E[v h]; bias = B[v] }
    mesh M = pp:PP
    layout ranks of s on M {
      files "r{pp}.pt"
      stored "model.{name}" states "optim.state.{name}.{state}"
      embed = E[v h] on pp=0
      bias = B[v] on pp=0
      head = E[v h] on pp=last alias
    }
    """
    rng = np.random.default_rng(1)
    data = {"embed": rng.standard_normal((6, 4)), "bias": rng.standard_normal(6)}
    data |= {f"optim.{n}.exp_avg": v + 1 for n, v in list(data.items())}
    with open_store(tmp_path / "source") as store:
        save(store, data)
    for pp in (1, 2):
        text = program_text.replace("PP", str(pp))
        to = by_hand.program(tmp_path, text, "ranks")
        own = by_hand.program(tmp_path, text, "whole")
        out = tmp_path / f"out{pp}"
        found, _, _ = write(tmp_path / "source", out, to, own)
        first = torch.load(out / "r0.pt", weights_only=True)
        last = first if pp == 1 else torch.load(out / "r1.pt", weights_only=True)
        assert np.array_equal(last["model"]["head"].numpy(), data["embed"])
        state = first["optim"]["state"]["embed"]["exp_avg"]
        assert np.array_equal(state.numpy(), data["optim.embed.exp_avg"])
        shared = first["model"]["embed"].data_ptr() == last["model"]["head"].data_ptr()
        assert shared == (pp == 1)
        again = back(out, tmp_path / f"root{pp}", found, own)
        assert again.keys() == data.keys()
        assert all(np.array_equal(again[n], v) for n, v in data.items())


def test_what_is_refused(source: tuple[Path, dict[str, Array]], tmp_path: Path) -> None:
    own = program(*HF)

    def refused(*rules: str, name: str = "zero1") -> UsageError:
        with pytest.raises(UsageError) as caught:
            write(source[0], tmp_path / "out", program(name, *rules, *SIZES), own)
        return caught.value

    error = refused("mesh zero1 = dp:2")
    assert (error.kind, error.hint is not None) == ("lay-rule", True)
    # Two ranks in one file, which hold different parts of the states.
    error = refused("mesh zero1 = dp:2", 'files "all.pt"')
    assert (error.kind, str(error.found)) == ("lay-rule", "ranks 0 and 1")
    error = refused("mesh zero1 = dp:2", 'files "../of{dp}.pt"')
    assert error.kind == "bad-key"
    assert not list(tmp_path.glob("of*"))
    odd = tmp_path / "odd"
    with open_store(odd) as store:
        save(store, {"a": np.zeros((2, 2), dtype=np.complex128)})
    with pytest.raises(UsageError) as caught:
        to = program("fsdp", "mesh fsdp = dp:2", 'files "r{dp}.safetensors"')
        write(odd, tmp_path / "out", to)
    assert "safetensors has no such type" in caught.value.message
