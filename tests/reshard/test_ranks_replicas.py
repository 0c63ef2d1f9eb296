"""Replicas in files of ranks: whole tensors, parts of fused ones, ranges of buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptd.errors import CkptdError
from ckptd.lay.resolve import Bound, MeshShape, Resolved, resolve
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax import parse
from ckptd.lay.syntax.tree import Name, NameIndex, Text
from ckptd.reshard.ranks import open_ranks
from ckptd.store import open_store
from tests.checkpoint.load.builder import Array
from tests.lay.agreement.brute import Brute
from tests.lay.agreement.brute_holders import drawn_layouts

PROGRAMS = 12


def refusal(folder: Path, layout: Resolved) -> CkptdError | None:
    """Return what is said of a folder, or None: it is read."""
    try:
        with open_store(folder) as store:
            open_ranks(store, layout, 3)
    except CkptdError as error:
        return error
    return None


def in_files(bound: Bound) -> Resolved:
    """Return a layout with its sizes, one file a rank."""
    mesh = bound.layout.mesh or MeshShape(1, {}, {})
    world = mesh.world
    files = Name((Text("r"), NameIndex("rank"), Text(".safetensors")))
    extents, strides = {**mesh.extents, "rank": world}, {**mesh.strides, "rank": 1}
    mesh = replace(mesh, extents=extents, strides=strides)
    sizes = {**bound.layout.sizes, **bound.sizes}
    return replace(bound.layout, mesh=mesh, sizes=sizes, files=files)


def write_rank(folder: Path, rank: int, tensors: Mapping[str, Array]) -> None:
    save_file(dict(tensors), folder / f"r{rank}.safetensors")


def flipped(array: Array, position: int, byte: int) -> Array:
    """Return an array with another byte in one of its elements."""
    out = array.copy()
    out.reshape(-1).view(np.uint8)[position * array.itemsize + byte] ^= 1
    return out


@pytest.mark.slow
def test_no_byte_of_one_replica_is_changed_unseen(tmp_path: Path) -> None:
    """Random programs; each byte that is flipped is one of some element that other ranks hold."""
    for number, drawn in enumerate(drawn_layouts(PROGRAMS, least=4)):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        brute = Brute(drawn.bound)
        ranks = [
            {n: c.astype(np.float32) for n, (_, c) in brute.local(r).items()}
            for r in range(StoredForm(drawn.bound).mesh.world)
        ]
        for rank, tensors in enumerate(ranks):
            write_rank(folder, rank, tensors)
        layout = in_files(drawn.bound)
        assert refusal(folder, layout) is None, drawn.what
        for one in drawn.chosen():
            tensors, name = ranks[one.rank], one.tensor.name
            position = drawn.rng.choice(one.common)
            wrong = flipped(tensors[name], position, drawn.rng.randrange(4))
            write_rank(folder, one.rank, {**tensors, name: wrong})
            said = refusal(folder, layout)
            assert said is not None, f"{name} of rank {one.rank}, {drawn.what}"
            assert said.kind == "replicas-differ", said.message
            assert name in (said.where or "") or one.rank == min(one.holders[position])
            write_rank(folder, one.rank, tensors)


HEADS = """
mesh M = tp:4=(tk:2 tr:2)
let kv = 2
let rep = 2
let hd = 2
space s { a.q[kv rep hd h] a.k[kv hd h]  w[f h] }
layout rows of s on M {
  files "r{tp}.safetensors"
  qk = a[(q:((kv rep)@tp hd)|k:(kv@tk hd)) h]
  w = w[f@tp h]
}
layout columns of s on M {
  files "r{tp}.safetensors"
  qk = a[h (q:((kv rep)@tp hd)|k:(kv@tk hd))]
  w = w[f@tp h]
}
"""


def heads(turned: bool) -> list[dict[str, Array]]:
    """Return what four ranks hold: of the two key heads each is on two ranks."""
    rng = np.random.default_rng(0)
    q, k, w = (rng.standard_normal(s).astype(np.float32) for s in ((8, 3), (4, 3), (4, 3)))
    out = []
    for tp in range(4):
        mine = np.concatenate([q[2 * tp : 2 * tp + 2], k[2 * (tp // 2) : 2 * (tp // 2) + 2]])
        fused = np.ascontiguousarray(mine.T) if turned else mine
        out.append({"qk": fused, "w": w[tp : tp + 1].copy()})
    return out


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_a_head_that_two_ranks_hold_in_a_fused_tensor(tmp_path: Path, name: str) -> None:
    layout = resolve([parse(HEADS)], name)
    ranks = heads(turned=name == "columns")
    for rank, tensors in enumerate(ranks):
        write_rank(tmp_path, rank, tensors)
    assert refusal(tmp_path, layout) is None
    at = (2, 1) if name == "rows" else (1, 2)
    ranks[3]["qk"][at] += 1
    write_rank(tmp_path, 3, ranks[3])
    said = refusal(tmp_path, layout)
    assert said is not None
    assert said.kind == "replicas-differ"
    inside = "10:12, 0:3" if name == "rows" else "0:3, 10:12"
    assert said.where == f"r3.safetensors: qk, in it qk[{inside}]"
    assert (said.wanted, said.found) == ("what rank 2 holds", "other values on rank 3")


@pytest.mark.parametrize("name", ["qk", "w", "n"])
def test_a_tensor_that_one_file_lacks(tmp_path: Path, name: str) -> None:
    """Cut or replicated: it is named, with the file and the rank; one that no file has is not."""
    text = HEADS.replace("w[f h] }", "w[f h] n[h] b[h] }").replace("  w =", "  n = n[h]\n  w =")
    layout = resolve([parse(text)], "rows")
    for rank, tensors in enumerate(heads(turned=False)):
        held = {**tensors, "n": np.zeros(3, dtype=np.float32)}
        if rank == 2:
            del held[name]
        write_rank(tmp_path, rank, held)
    said = refusal(tmp_path, layout)
    assert said is not None
    assert said.kind == "lay-cover"
    assert said.where == f"r2.safetensors: {name}"
    assert said.wanted is not None
    assert "rank 2" in said.wanted
