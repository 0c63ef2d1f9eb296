"""docs/recover.py rebuilds any tensor from the files alone."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings

from ckptd.checkpoint.format import manifest as manifest_module
from ckptd.checkpoint.format.manifest import (
    FileEntry,
    GridEntry,
    Manifest,
    ObjectEntry,
    TensorEntry,
)
from ckptd.checkpoint.format.names import CommitName, data_folder, file_key
from ckptd.types import DTYPES
from tests.base.grids.strategies import Cut
from tests.checkpoint.format import handmade
from tests.checkpoint.format.strategies import Sample, manifests, walk, with_sizes
from tests.processes import PATIENCE_S

SCRIPT = Path(__file__).parents[2] / "docs/recover.py"
recover = runpy.run_path(str(SCRIPT))["recover"]


def as_bytes(found: np.ndarray, dtype: str) -> np.ndarray:
    """What `recover` gave, as bytes with one more dimension."""
    itemsize = DTYPES[dtype].itemsize
    raw = np.frombuffer(found.tobytes(), np.uint8)
    shape = (
        found.shape if found.dtype == np.uint8 and dtype != "uint8" else (*found.shape, itemsize)
    )
    return raw.reshape(shape)


def test_the_script_is_short_and_needs_little() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 60
    modules = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert modules - sys.stdlib_module_names == {"numpy", "safetensors"}


@settings(max_examples=60)
@given(manifests())
def test_every_tensor_of_any_manifest(sample: Sample) -> None:
    tensors = handmade.random_tensors(sample)
    with TemporaryDirectory() as root:
        commit = handmade.write(Path(root), sample, tensors)
        for t, wanted in zip(sample.manifest.tensors, tensors, strict=True):
            found = as_bytes(recover(commit, t.name), t.dtype)
            assert found.shape == wanted.shape
            assert (found == wanted).all()


def sharded() -> tuple[Sample, list[np.ndarray]]:
    """A float32 weight of 3 x 2 cells over two files, bfloat16 in flat ranges, per-rank bytes."""
    cuts = [Cut([[2, 1, 1], [3, 2]], None), Cut([[4]], [[1, 3]]), Cut([[2, 5]], None)]
    owners = [[0, 1, 0, 1, 0, 1], [1, 0], [0, 1]]
    kinds = [("model.w", "float32"), ("optim.w.exp_avg", "bfloat16"), ("rng", "uint8")]
    folder = data_folder(CommitName(12, 3), "a1")
    base = Manifest(
        step=12,
        generation=3,
        attempt="a1",
        world_size=2,
        files=tuple(FileEntry(file_key(folder, i), i) for i in range(2)),
        grids=tuple(GridEntry.of(c.grid) for c in cuts),
        owners=(((0, 1, 2), (0, 1, 2), (0, 1, 2)), ((1, -1, 2),), ((0, 1, 2),)),
        tensors=tuple(
            TensorEntry(n, d, cut.grid.shape, i, i, aliases=("model.tied",) if i == 0 else ())
            for i, ((n, d), cut) in enumerate(zip(kinds, cuts, strict=True))
        ),
        objects=(ObjectEntry("rng", tensor="rng", per_rank="reseed"),),
    )
    model = walk(base, cuts, owners)
    sample = Sample(with_sizes(base, model), cuts, owners, model)
    return sample, handmade.random_tensors(sample)


def test_as_a_stranger_runs_it(tmp_path: Path) -> None:
    sample, tensors = sharded()
    commit = handmade.write(tmp_path, sample, tensors)
    # Modules set to None cannot be imported: only what the script may use is there.
    program = (
        "import runpy, sys\n"
        "for m in ('ckptd', 'torch', 'ml_dtypes', 'msgspec', 'xxhash', 'zstandard'):\n"
        "    sys.modules[m] = None\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    for name, number in (("model.w", 0), ("model.tied", 0), ("optim.w.exp_avg", 1), ("rng", 2)):
        out = tmp_path / "out.npy"
        run = subprocess.run(
            [sys.executable, "-c", program, str(SCRIPT), str(commit), name, str(out)],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
        assert run.stdout.strip()
        dtype = sample.manifest.tensors[number].dtype
        assert (as_bytes(np.load(out), dtype) == tensors[number]).all()
    assert np.load(out).shape == (7,)


def test_a_compressed_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, tensors = sharded()
    monkeypatch.setattr(manifest_module, "COMPRESS_ABOVE_BYTES", 0)
    commit = handmade.write(tmp_path, sample, tensors)
    assert list(tmp_path.glob("data/*/manifest.json.zst"))
    assert (as_bytes(recover(commit, "model.w"), "float32") == tensors[0]).all()


def save_sharded(root: str) -> dict[str, np.ndarray]:
    """One rank of a job that saves a network under FSDP2 and tensor parallelism."""
    import ckptd
    from tests.checkpoint.torch.networks import build, step, whole

    model, optim = build("fsdp+tp", seed=1)
    step(model, optim)
    own = ckptd.PerRank([7], on_change="drop")
    with ckptd.Checkpointer(root) as ck:
        handle = ck.save(5, {"model": model, "optim": optim, "own": own})
        assert handle is not None
        handle.durable(200)
    return {name: value.numpy() for name, value in whole(model, optim).items()}


@pytest.mark.dist
@pytest.mark.timeout(400)
def test_a_checkpoint_that_a_job_saved(tmp_path: Path) -> None:
    from safetensors import safe_open

    from ckptd.testing.ranks import run_ranks

    wanted = run_ranks(4, save_sharded, str(tmp_path), deadline_s=300.0)[0]
    (commit,) = (tmp_path / "commits").iterdir()
    for name, value in wanted.items():
        fqn, _, state = name.partition("/")
        found = recover(commit, f"optim.{fqn}.{state}" if state else f"model.{fqn}")
        assert found.dtype == value.dtype
        assert np.array_equal(found, value), name
    assert np.array_equal(recover(commit, "model.head.weight"), wanted["embed.weight"])
    files = sorted(tmp_path.glob("data/*/*.safetensors"))
    assert len(files) == 4
    for rank, path in enumerate(files):
        with safe_open(path, framework="pt") as file:
            assert f"own@r{rank}" in set(file.keys())
            assert all(file.get_tensor(k).nbytes for k in file.keys())  # noqa: SIM118
