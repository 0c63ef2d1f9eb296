"""Files of ranks as a source: cut, fused, replicated and packed tensors under local names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.index import Index
from ckptd.errors import CorruptError, MismatchError, UsageError
from ckptd.readers.find import rank_files
from ckptd.reshard.execute import Budget
from ckptd.reshard.job import ReshardShare
from ckptd.reshard.layouts import LayoutProgram, read_program
from ckptd.reshard.prepare import prepare
from ckptd.reshard.ranks import open_ranks
from ckptd.store import open_store
from tests.checkpoint.load.builder import Array
from tests.cli.running import Cli
from tests.reshard.llama import everything, job_into, latest

LAYERS, KV, REP, HEAD, WIDTH, HIDDEN = 4, 4, 2, 3, 6, 10
SPACE = """
let kv = 4
let rep = 2
let hd = 3
space s { E[v h]  L{l}.q[kv rep hd h]  L{l}.k[kv hd h]  L{l}.v[kv hd h]
  L{l}.g[f h]  L{l}.u[f h]  L{l}.d[h f]  L{l}.n[h] }
layout whole of s on none {
  E = E[v h]
  l.{l}.q = L{l}.q[(kv rep hd) h]
  l.{l}.k = L{l}.k[(kv hd) h]
  l.{l}.v = L{l}.v[(kv hd) h]
  l.{l}.g = L{l}.g[f h]
  l.{l}.u = L{l}.u[f h]
  l.{l}.d = L{l}.d[h f]
  l.{l}.n = L{l}.n[h]
}
mesh M = pp:2 dp:2 tp:2
layout mg of s on M {
  files "mp_rank_{tp}_{pp}.safetensors"
  embed = E[v@tp:ceil h] on pp=0
  layers.{#l@pp}.qkv = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]
  layers.{#l@pp}.fc1 = L{l}[(g:f@tp|u:f@tp) h]
  layers.{#l@pp}.fc2 = L{l}.d[h f@tp]
  layers.{#l@pp}.norm = L{l}.n[h] NORM
}
"""


def logical() -> dict[str, Array]:
    rng = np.random.default_rng(2)

    def f32(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    out = {"E": f32(7, WIDTH)}
    for i in range(LAYERS):
        out |= {
            f"l.{i}.q": f32(KV * REP * HEAD, WIDTH),
            f"l.{i}.k": f32(KV * HEAD, WIDTH),
            f"l.{i}.v": f32(KV * HEAD, WIDTH),
            f"l.{i}.g": f32(HIDDEN, WIDTH),
            f"l.{i}.u": f32(HIDDEN, WIDTH),
            f"l.{i}.d": f32(WIDTH, HIDDEN),
            f"l.{i}.n": f32(WIDTH),
        }
    return out


def of_rank(data: Mapping[str, Array], pp: int, tp: int) -> dict[str, Array]:
    """Cut and fuse by hand what one rank holds."""
    half, groups = HIDDEN // 2, KV // 2
    out: dict[str, Array] = {}
    if pp == 0:
        out["embed"] = data["E"][4 * tp : 4 * tp + 4]
    for i in range(2):
        p = f"l.{2 * pp + i}."
        rows = []
        for kv in range(groups * tp, groups * tp + groups):
            rows.append(data[p + "q"][kv * REP * HEAD : (kv + 1) * REP * HEAD])
            rows.append(data[p + "k"][kv * HEAD : (kv + 1) * HEAD])
            rows.append(data[p + "v"][kv * HEAD : (kv + 1) * HEAD])
        cut = slice(half * tp, half * tp + half)
        out |= {
            f"layers.{i}.qkv": np.concatenate(rows),
            f"layers.{i}.fc1": np.concatenate([data[p + "g"][cut], data[p + "u"][cut]]),
            f"layers.{i}.fc2": np.ascontiguousarray(data[p + "d"][:, cut]),
            f"layers.{i}.norm": data[p + "n"],
        }
    return out


def write(folder: Path, data: Mapping[str, Array], drift: Callable[[int], float]) -> None:
    folder.mkdir()
    for pp in range(2):
        for tp in range(2):
            held = of_rank(data, pp, tp)
            for name in held:
                if name.endswith("norm"):
                    held[name] = held[name] + np.float32(drift(tp))
            save_file(held, folder / f"mp_rank_{tp}_{pp}.safetensors")


def program(tmp_path: Path, text: str, layout: str) -> LayoutProgram:
    path = tmp_path / "p.lay"
    path.write_text(text)
    return read_program(f"{path}:{layout}", "test", lambda run: run.source)


def reshard(
    tmp_path: Path, text: str, source: str, target: str, **options: bool
) -> dict[str, Array]:
    given, wanted = program(tmp_path, text, source), program(tmp_path, text, target)
    with open_store(tmp_path / "a") as store, open_store(tmp_path / "b") as out:
        stock = open_ranks(store, given.resolve(), 3)
        found = prepare(stock, given, wanted, **options)
        done = job_into(out, found).run(ReshardShare(), Budget.of(64 << 20, store))
        assert done.state == "committed"
    return everything(tmp_path / "b")


@pytest.mark.parametrize("norm", ["", "same", "any"])
def test_what_ranks_hold_becomes_whole(tmp_path: Path, norm: str) -> None:
    data = logical()
    write(tmp_path / "a", data, lambda tp: 0.5 * tp if norm == "any" else 0.0)
    found = reshard(tmp_path, SPACE.replace("NORM", norm), "mg", "whole")
    assert found.keys() == data.keys()
    for name, wanted in data.items():
        assert np.array_equal(found[name], wanted), name


def test_another_cut_of_what_ranks_hold(tmp_path: Path) -> None:
    data = logical()
    write(tmp_path / "a", data, lambda tp: 0.0)
    text = SPACE.replace("NORM", "") + (
        "mesh T = tp:4\nlayout raw of s on T { use whole\n"
        "  fused.{l} = L{l}[(g:f|u:f)@tp:ceil h]\n  turned.{l} = L{l}.d[f@tp:bal h]\n"
        "  l.{l}.g = drop\n  l.{l}.u = drop\n  l.{l}.d = drop\n}\n"
    )
    found = reshard(tmp_path, text, "mg", "raw", allow_lossy=True)
    for i in range(LAYERS):
        both = np.concatenate([data[f"l.{i}.g"], data[f"l.{i}.u"]])
        assert np.array_equal(found[f"fused.{i}"], both)
        assert np.array_equal(found[f"turned.{i}"], data[f"l.{i}.d"].T)


def test_replicas_that_differ_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a", logical(), lambda tp: 0.5 * tp)
    with pytest.raises(CorruptError) as caught:
        reshard(tmp_path, SPACE.replace("NORM", ""), "mg", "whole")
    assert caught.value.kind == "replicas-differ"
    assert "norm" in (caught.value.where or "")


@pytest.mark.parametrize(("kind", "factor"), [("avg", 1.0), ("sum", 2.0)])
def test_replicas_are_combined(tmp_path: Path, kind: str, factor: float) -> None:
    data = logical()
    write(tmp_path / "a", data, lambda tp: 1.0 - 2.0 * tp)
    text = SPACE.replace("NORM", f"{kind}(tp)")
    found = reshard(tmp_path, text, "mg", "whole", allow_lossy=True)
    for i in range(LAYERS):
        name = f"l.{i}.n"
        assert np.allclose(found[name], factor * data[name], atol=1e-5)
        assert np.array_equal(found[f"l.{i}.q"], data[f"l.{i}.q"])


@pytest.mark.parametrize("kind", ["avg", "sum"])
def test_replicas_that_are_no_real_numbers_are_not_combined(tmp_path: Path, kind: str) -> None:
    """Averages of integers would be cut term by term, complex numbers lose a half."""
    text = f"""
    let x = 4
    mesh Z = dp:2
    space s {{ A[x] }}
    layout z of s on Z {{ files "r{{dp}}.safetensors"
      a = A[x] {kind}(dp) }}
    layout whole of s on none {{ a = A[x] }}
    """
    (tmp_path / "a").mkdir()
    for dtype in ("int32", "uint8", "bool", "complex64", "float32"):
        for rank in range(2):
            save_file({"a": np.full(4, 3).astype(dtype)}, tmp_path / "a" / f"r{rank}.safetensors")
        if dtype == "float32":
            found = reshard(tmp_path, text, "z", "whole", allow_lossy=True)
            assert found["a"].tolist() == [3.0 if kind == "avg" else 6.0] * 4
        else:
            with pytest.raises(UsageError, match="cannot be combined"):
                reshard(tmp_path, text, "z", "whole", allow_lossy=True)


def test_a_missing_file_and_a_wrong_shape(tmp_path: Path) -> None:
    data = logical()
    write(tmp_path / "a", data, lambda tp: 0.0)
    (tmp_path / "a" / "mp_rank_1_1.safetensors").unlink()
    with pytest.raises(CorruptError) as caught:
        reshard(tmp_path, SPACE.replace("NORM", ""), "mg", "whole")
    assert (caught.value.message, caught.value.where) == (
        "the file of a rank is missing",
        "mp_rank_1_1.safetensors",
    )
    held = of_rank(data, 1, 1)
    held["layers.0.fc1"] = held["layers.0.fc1"][:-1]
    save_file(held, tmp_path / "a" / "mp_rank_1_1.safetensors")
    with pytest.raises(MismatchError):
        reshard(tmp_path, SPACE.replace("NORM", ""), "mg", "whole")


def test_the_order_in_buffers_is_not_verified(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save_file({"flat.0.params": np.arange(6.0)}, tmp_path / "a" / "r0.safetensors")
    for flat in ("group(**)", "bucket 100"):
        text = f"""
        let x = 2
        let y = 4
        mesh Z = dp:1
        space s {{ A[x] B[y] }}
        layout z of s on Z {{
          files "r{{dp}}.safetensors"
          a = A[x]
          b = B[y]
          flat {flat} @dp of params
        }}
        """
        with open_store(tmp_path / "a") as store:
            stock = open_ranks(store, program(tmp_path, text, "z").resolve(), 3)
        assert stock.witness_note.startswith("order not verified")
        assert stock.metadata == {"ckptd.order": "not verified"}


def test_buffers_of_flats_are_taken_apart(tmp_path: Path) -> None:
    """Two tensors in one buffer, cut over three ranks: pieces begin and end anywhere."""
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((5, 7)), rng.standard_normal((2, 3, 4))
    (tmp_path / "a").mkdir()
    buffer = np.concatenate([a.reshape(-1), b.reshape(-1), np.zeros(1)])
    for rank, part in enumerate(np.split(buffer, 3)):
        save_file({"flat.0.params": part.copy()}, tmp_path / "a" / f"r{rank}.safetensors")
    text = """
    let i = 5
    let j = 7
    let x = 2
    let y = 3
    let z = 4
    mesh Z = dp:3
    space s { A[i j]  B[x y z] }
    layout z of s on Z {
      files "r{dp}.safetensors"
      a = A[i j]
      b = B[x y z]
      flat group(*) @dp of params end/3
    }
    layout whole of s on none {
      a = A[j i]
      b = B[x y z]
    }
    """
    found = reshard(tmp_path, text, "z", "whole")
    assert np.array_equal(found["a"], a.T)
    assert np.array_equal(found["b"], b)


ZERO = """
mesh Z = dp:2
let v = 31
let h = 10
let f = 23
space net {
  embed[v h] head[v h] up.w[f h] up.b[f] down[h f] norm.w[h] norm.b[h]
  follow m=exp_avg, s=exp_avg_sq
}
# Two groups of the optimizer, matrices and the rest; in a rank's files only buffers have names.
layout zero of net on Z {
  files "zero_pp_rank_{dp}_mp_rank_00_optim_states.pt"
  stored "STATE.fp32_flat_groups.{name}" states "STATE.STATE.state.{name}.{state}"
  flat parts(matrix.**) 400 @dp of * end/dp as "{buffer}"
  flat parts 400 @dp of * end/dp as "{buffer}"
  matrix.embed = embed[v h]
  matrix.up = up.w[f h]
  up.bias = up.b[f]
  matrix.down = down[h f]
  matrix.head = head[v h]
  norm.{weight,bias} = norm.{w,b}[h]
  ** = drop
}
layout net of net on none {
  {embed,head}.weight = {embed,head}[v h]
  down.weight = down[h f]
  up.weight = up.w[f h]
  up.bias = up.b[f]
  norm.{weight,bias} = norm.{w,b}[h]
}
""".replace("STATE", "optimizer_state_dict")


def test_files_of_zero3_are_parts_end_to_end(foreign: Path, tmp_path: Path, cli: Cli) -> None:
    """Real ones, read by a layout; written again they hold the same buffers."""
    lay = tmp_path / "zero.lay"
    lay.write_text(ZERO)
    source = foreign / "deepspeed" / "zero3-fp32" / "global_step2"
    root, again = tmp_path / "root", tmp_path / "again"
    to = ("--to", f"{lay}:net", "--allow", "lossy")
    found = cli("reshard", str(source), str(root), "--from", f"{lay}:zero", *to)
    assert found.code == 0, found.err
    assert "order not verified" in found.err
    wanted = np.load(source.parent / "expected.npz")
    with open_store(root) as store:
        reader = latest(store)
        values = reader.tensors(reader.names)
    assert sorted(values) == sorted(wanted)
    assert all(values[n].tobytes() == wanted[n].tobytes() for n in wanted)
    back = cli("reshard", str(root), str(again), "--to", f"{lay}:zero", "--format", "ranks")
    assert back.code == 0, back.err
    files = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    held = []
    for folder in (again, source):
        ranks = rank_files(open_store(folder), files, 0)
        index = Index(ranks)
        reader = CkptdReader(index, index.commit(ranks.name), listed=False)
        held.append(reader.tensors(n for n in reader.names if not n.endswith(".step")))
    assert len(held[0]) == 12
    assert held[0].keys() == held[1].keys()
    assert all(held[0][n].tobytes() == held[1][n].tobytes() for n in held[0])


TIED = """
mesh P = pp:2 tp:2
space t { S[v h] }
layout stages of t on P {
  files "r{pp}_{tp}.safetensors"
  words = S[v@tp h] on pp=0
  words = alias S on pp=1
}
layout full of t on none { words = S[v h] }
"""


def test_a_copy_that_another_stage_has_under_the_same_name(tmp_path: Path) -> None:
    """It is compared with the tensor, and both layouts are written."""
    words = np.arange(12, dtype=np.float32).reshape(4, 3)
    (tmp_path / "a").mkdir()
    for pp in range(2):
        for tp in range(2):
            save_file({"words": words[2 * tp :][:2]}, tmp_path / "a" / f"r{pp}_{tp}.safetensors")
    assert np.array_equal(reshard(tmp_path, TIED, "stages", "full")["words"], words)
    (tmp_path / "b").rename(tmp_path / "whole")
    assert np.array_equal(reshard(tmp_path, TIED, "stages", "stages")["words"], words)
    save_file({"words": words[2:] + 1}, tmp_path / "a" / "r1_1.safetensors")
    with pytest.raises(CorruptError) as caught:
        reshard(tmp_path, TIED, "stages", "full")
    assert caught.value.kind == "replicas-differ"
    assert caught.value.where == "r1_1.safetensors: words, in it words[2:4, 0:3]"


def test_an_order_that_is_not_verified_is_said_until_a_diff_or_trust(
    tmp_path: Path, cli: Cli
) -> None:
    """Two tensors of one shape in a buffer: shapes fit, whichever comes first."""
    text = """
    let x = 6
    mesh Z = dp:1
    space s { A[x] B[x] }
    layout right of s on Z { files "r{dp}.safetensors"; a = A[x]; b = B[x]; use packed }
    layout wrong of s on Z { files "r{dp}.safetensors"; b = B[x]; a = A[x]; use packed }
    layout packed on Z { flat group(**) @dp of * }
    layout whole of s on none { a = A[x]; b = B[x] }
    """
    lay = tmp_path / "x.lay"
    lay.write_text(text)
    for name in ("ranks", "known"):
        (tmp_path / name).mkdir()
    save_file({"flat.0.params": np.arange(12.0)}, tmp_path / "ranks" / "r0.safetensors")
    wanted = {"a": np.arange(6.0), "b": np.arange(6.0) + 6}
    save_file(wanted, tmp_path / "known" / "model.safetensors")
    source, known = str(tmp_path / "ranks"), str(tmp_path / "known")
    to = ("--to", f"{lay}:whole")
    for name, order in (("right", "confirmed"), ("wrong", "not verified")):
        root = str(tmp_path / name)
        found = cli("reshard", source, root, "--from", f"{lay}:{name}", *to, "--json").document
        assert found["order"] == "not verified"
        assert cli("inspect", root, "--json").document["metadata"]["ckptd.order"] == "not verified"
        compared = cli("diff", root, known)
        assert ("is right: reshard --trust" in compared.err) == (order == "confirmed")
        assert cli("diff", root, known, "--json").document["order"] == order
        assert cli("diff", known, known, "--json").document["order"] == ""
    # The mark goes along until somebody says that the order is right.
    right, on, trusted = (str(tmp_path / n) for n in ("right", "on", "trusted"))
    assert "order not verified" in cli("reshard", right, on, "--to", "fsdp").err
    assert cli("diff", right, on, "--json").document["order"] == "not verified"
    said = cli("reshard", on, trusted, "--to", "fsdp", "--trust", "--json")
    assert said.document["order"] == ""
    assert "ckptd.order" not in cli("inspect", trusted, "--json").document["metadata"]
