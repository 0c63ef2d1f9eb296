"""All that goes into a conversion comes out of it, or is named, counted and asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckptd
from ckptd.checkpoint.cli.address import opened
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.lay.syntax import parse_statement, show
from tests.checkpoint.load.builder import Array
from tests.cli.running import Cli

pytestmark = pytest.mark.usefixtures("writing_thread")

RNG = np.random.default_rng(11)
E = RNG.standard_normal((12, 4)).astype(np.float32)
A = RNG.standard_normal((6, 4)).astype(np.float32)
SPACE = """
space s {
  E[v h]
  L.q[a h]
  L.k[b h]
  n[w]
  follow m=exp_avg
  scalar step(param)
  let a = 2
  let b = 4
}
layout both of s on none {
  wte = E[v h]
  head = alias E
  qkv = L[(q:a|k:b) h]
  norm = n[w]
}
layout apart of s on none {
  embed = E[v h]
  out.embed = alias E
  q = L.q[a h]
  k = L.k[b h]
  norm.w = n[w]
}
layout less of s on none {
  embed = E[v h]
  q = L.q[a h]
  norm.w = n[w]
}
"""
BOTH: dict[str, Array] = {
    "wte": E,
    "head": E,
    "qkv": A,
    "norm": np.ones(3, np.float32),
    "optim.qkv.exp_avg": A * 2,
    "optim.qkv.step": np.full((), 7, np.float32),
}
APART: dict[str, Array] = {
    "embed": E,
    "out.embed": E,
    "q": A[:2],
    "k": A[2:],
    "norm.w": np.ones(3, np.float32),
}


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "p.lay").write_text(SPACE)
    return str(tmp_path / "p.lay")


def folder(path: Path, tensors: Mapping[str, Array], **metadata: str) -> str:
    path.mkdir(parents=True)
    found = {n: np.array(v, order="C") for n, v in tensors.items()}
    save_file(found, path / "model.safetensors", {"format": "pt", **metadata})
    return str(path)


def loaded(path: Path) -> dict[str, Array]:
    return {n: v for f in path.glob("*.safetensors") for n, v in load_file(f).items()}


def in_root(root: Path) -> dict[str, Array]:
    """Read every tensor of a root under each of its names."""
    with opened(str(root)) as catalogue:
        reader = CkptdReader(catalogue, catalogue.line()[-1])
        names = [n for t in reader.names for n in (t, *reader.info(t).aliases)]
        return reader.tensors(names)


def same(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert np.array_equal(found[name], array), name


def live(root: Path, state: object) -> str:
    with ckptd.Checkpointer(str(root)) as ck:
        ck.save(1, state)
    return str(root)


# --- aliases ------------------------------------------------------------------------------------


def test_an_alias_is_written_into_a_folder(cli: Cli, program: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "a", BOTH)
    args = ("--from", f"{program}:both", "--to", f"{program}:apart")
    assert cli("reshard", source, str(tmp_path / "r"), *args).code == 0
    same({n: v for n, v in in_root(tmp_path / "r").items() if n[:5] != "optim"}, APART)
    to_hf = ("reshard", str(tmp_path / "r"), "--to", f"{program}:apart", "--format", "hf")
    assert cli(*to_hf[:2], str(tmp_path / "hf"), *to_hf[2:]).code == 0
    same(loaded(tmp_path / "hf"), APART)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == APART.keys()
    done = cli(*to_hf[:2], str(tmp_path / "once"), *to_hf[2:], "--no-untie")
    assert "out.embed" in done.err
    once = {n: v for n, v in APART.items() if n != "out.embed"}
    same(loaded(tmp_path / "once"), once)
    # What was not written again is in the header, and comes back from there.
    cli("reshard", str(tmp_path / "once"), str(tmp_path / "back"), "--to", "ddp")
    same(in_root(tmp_path / "back"), APART)


def test_a_copy_in_the_source_is_compared(cli: Cli, program: str, tmp_path: Path) -> None:
    args = ("--from", f"{program}:both", "--to", f"{program}:both")
    source = folder(tmp_path / "a", BOTH)
    assert cli("reshard", source, str(tmp_path / "r"), *args).code == 0
    same(in_root(tmp_path / "r"), BOTH)
    other = E.copy()
    other[7, 2] += 1
    wrong = folder(tmp_path / "b", {**BOTH, "head": other})
    result = cli("reshard", wrong, str(tmp_path / "r2"), *args, "--json")
    assert (result.code, result.error["kind"]) == (3, "replicas-differ")
    assert result.error["where"] == "head"
    assert "element 30" in result.error["found"]
    assert not (tmp_path / "r2" / "commits").exists()
    alone = folder(tmp_path / "c", {n: v for n, v in BOTH.items() if n != "wte"})
    result = cli("reshard", alone, str(tmp_path / "r3"), *args, "--json")
    assert result.code != 0


def test_a_copy_that_is_larger_than_memory_for_it(
    cli: Cli, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.reshard.reading._ROUND_BYTES", 1 << 20)
    big = RNG.standard_normal((3 << 18, 4)).astype(np.float32)
    other = big.copy()
    other[-1, -1] += 1
    args = ("--from", f"{program}:both", "--to", f"{program}:both")
    good = folder(tmp_path / "a", {**BOTH, "wte": big, "head": big})
    assert cli("reshard", good, str(tmp_path / "r"), *args).code == 0
    bad = folder(tmp_path / "b", {**BOTH, "wte": big, "head": other})
    result = cli("reshard", bad, str(tmp_path / "r2"), *args, "--json")
    assert (result.code, result.error["kind"]) == (3, "replicas-differ")
    assert f"element {big.size - 1}" in result.error["found"]


def test_a_copy_without_a_name_in_the_target_is_told(
    cli: Cli, program: str, tmp_path: Path
) -> None:
    (tmp_path / "q.lay").write_text(SPACE.replace("  out.embed = alias E\n", ""))
    args = ("--from", f"{program}:both", "--to", f"{tmp_path}/q.lay:apart")
    result = cli("reshard", folder(tmp_path / "a", BOTH), str(tmp_path / "r"), *args)
    assert result.code == 0
    assert "copies that are not written again: head (1 in all)" in result.err


def test_further_names_of_a_job_that_nobody_speaks_of(cli: Cli, tmp_path: Path) -> None:
    import torch

    weight = torch.arange(8.0).reshape(4, 2)
    root = live(tmp_path / "live", {"model": {"a": weight, "b": weight, "c": torch.zeros(2)}})
    same(
        {n: v for n, v in in_root(tmp_path / "live").items() if n == "model.b"},
        {"model.b": weight.numpy()},
    )
    # Without a program all names stay; with one that renames, each needs a rule.
    assert cli("reshard", root, str(tmp_path / "r"), "--to", "ddp").code == 0
    assert in_root(tmp_path / "r").keys() == {"model.a", "model.b", "model.c"}
    (tmp_path / "j.lay").write_text("""
    space s { A[x y] C[z] }
    layout j of s on none {
      stored "model.{name}"
      a = A[x y]
      c = C[z]
    }
    layout k of s on none {
      stored "model.{name}"
      new.a = A[x y]
      new.c = C[z]
    }
    """)
    args = ("--from", f"{tmp_path}/j.lay:j", "--to", f"{tmp_path}/j.lay:k")
    refused = cli("reshard", root, str(tmp_path / "s"), *args, "--json")
    assert (refused.code, refused.error["message"]) == (5, "values would change or be dropped")
    assert "model.b" in refused.error["where"]
    # A rule of its own makes a tensor of the further name.
    both = ("-e", "from: b = B[x y]", "-e", "new.b = B[x y]")
    more = ("-e", "space s { A[x y] B[x y] C[z] }", "-e", "from: space s { A[x y] B[x y] C[z] }")
    assert cli("reshard", root, str(tmp_path / "t"), *args, *both, *more).code == 0
    same(
        in_root(tmp_path / "t"),
        {
            f"model.new.{n}": v
            for n, v in (
                ("a", weight.numpy()),
                ("b", weight.numpy()),
                ("c", np.zeros(2, np.float32)),
            )
        },
    )


# --- parts, counters, files, tensors without a place --------------------------------------------


def test_a_part_of_a_fused_tensor_is_not_left_out(cli: Cli, program: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "a", BOTH)
    args = ("--from", f"{program}:both", "--to", f"{program}:less")
    result = cli("reshard", source, str(tmp_path / "r"), *args, "--json")
    assert (result.code, result.error["message"]) == (5, "values would change or be dropped")
    assert "L.k in qkv" in result.error["where"]
    allowed = cli("reshard", source, str(tmp_path / "r"), *args, "--allow", "lossy")
    assert allowed.code == 0
    assert "left out: L.k in qkv" in allowed.err


def test_a_counter_of_no_parameter_is_not_left_out(cli: Cli, program: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "a", {**BOTH, "optim.gone.step": np.zeros((), np.float32)})
    args = ("--from", f"{program}:both", "--to", f"{program}:apart")
    result = cli("reshard", source, str(tmp_path / "r"), *args, "--json")
    assert (result.code, result.error["kind"]) == (1, "lay-cover")
    assert result.error["where"] == "optim.gone.step"


RANKS = """
mesh M = pp:1 tp:TP
space s { W[v h] }
layout src of s on M {
  w = W[v@tp h]
  copy = alias W
  files "mp_rank_{tp:02}_{pp:03}/model.safetensors"
}
layout dst of s on none {
  w = W[v h]
}
"""


def ranks(tmp_path: Path, tp: int, extra: Mapping[int, Mapping[str, Array]]) -> None:
    for rank in range(4):
        held = {"w": E[3 * rank : 3 * rank + 3], **extra.get(rank, {})}
        folder(tmp_path / "ranks" / f"mp_rank_{rank:02}_000", held)
    (tmp_path / "r.lay").write_text(RANKS.replace("TP", str(tp)))


def reshard_ranks(cli: Cli, tmp_path: Path, *more: str) -> tuple[int, str]:
    args = ("--from", f"{tmp_path}/r.lay:src", "--to", f"{tmp_path}/r.lay:dst", *more)
    result = cli("reshard", str(tmp_path / "ranks"), str(tmp_path / "out"), *args)
    return result.code, result.err


def test_files_of_ranks_in_folders(cli: Cli, tmp_path: Path) -> None:
    ranks(tmp_path, 4, {})
    assert reshard_ranks(cli, tmp_path)[0] == 0
    same(in_root(tmp_path / "out"), {"w": E})


def test_digits_of_a_file_name_are_kept_in_every_form() -> None:
    text = 'files "r{tp:02}/{pp:03}.safetensors"'
    assert show(parse_statement(text)) == text
    assert show(parse_statement('files "{tp:02d}"')) == 'files "{tp:02}"'


def test_a_mesh_that_is_too_small_leaves_no_file_out(cli: Cli, tmp_path: Path) -> None:
    ranks(tmp_path, 2, {})
    code, error = reshard_ranks(cli, tmp_path)
    assert code == 1
    assert "mp_rank_02_000/model.safetensors, mp_rank_03_000/model.safetensors" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("equal", [True, False])
def test_copies_that_ranks_hold_are_compared(cli: Cli, tmp_path: Path, equal: bool) -> None:
    copies = {
        r: {"copy": E[3 * r : 3 * r + 3] + np.float32(r == 2 and not equal)} for r in range(4)
    }
    ranks(tmp_path, 4, copies)
    code, error = reshard_ranks(cli, tmp_path)
    assert code == (0 if equal else 3)
    assert equal or "a copy of a tensor is not equal to it" in error


# --- folders ------------------------------------------------------------------------------------


def test_an_index_that_names_what_no_file_has(cli: Cli, tmp_path: Path) -> None:
    source = tmp_path / "a"
    folder(source, {"x": E})
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys("xy", "model.safetensors")}))
    result = cli("reshard", str(source), str(tmp_path / "r"), "--to", "ddp", "--json")
    assert (result.code, result.error["message"]) == (
        3,
        "an index names a tensor that its file lacks",
    )
    assert result.error["where"].endswith(": y")
    index.write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    save_file({"x": E + 1}, source / "consolidated.safetensors")
    result = cli("reshard", str(source), str(tmp_path / "r"), "--to", "ddp")
    assert result.code == 0
    assert "not read: consolidated.safetensors (1 in all)" in result.err


@pytest.mark.parametrize("by_ranks", [False, True])
def test_an_empty_source_is_an_error(cli: Cli, tmp_path: Path, by_ranks: bool) -> None:
    source = folder(tmp_path / "a", {})
    args = ("--to", "ddp")
    if by_ranks:
        text = RANKS.replace("TP", "1").replace("mp_rank_{tp:02}_{pp:03}/", "")
        (tmp_path / "r.lay").write_text(text)
        args = ("--to", f"{tmp_path}/r.lay:dst", "--from", f"{tmp_path}/r.lay:src")
    result = cli("reshard", source, str(tmp_path / "r"), *args, "--json")
    assert (result.code, result.error["message"]) == (
        4,
        "the files of the checkpoint hold no tensor",
    )
    assert not (tmp_path / "r").exists()


def test_an_encoder_and_a_decoder_of_other_depth(cli: Cli, tmp_path: Path) -> None:
    """As T5 has: numbers at one place of the names that run to different ends."""
    names = [
        f"{side}.block.{i}.layer.{k}.w"
        for side, n, m in (("enc", 2, 2), ("dec", 3, 3))
        for i in range(n)
        for k in range(m)
    ]
    names += [f"dec.block.{i}.layer.0.bias" for i in range(3)]
    tensors = {n: RNG.standard_normal(3).astype(np.float32) for n in names}
    source = folder(tmp_path / "a", tensors)
    assert cli("reshard", source, str(tmp_path / "r"), "--to", "ddp").code == 0
    same(in_root(tmp_path / "r"), tensors)


# --- export -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_there_and_back_of_hugging_face_names(cli: Cli, tmp_path: Path, tied: bool) -> None:
    tensors = {
        "model.embed.weight": E,
        "model.layers.0.w": A,
        "model.empty": np.zeros((0, 3), "f4"),
    }
    if not tied:
        tensors |= {"lm_head.weight": E + 1, "scale": np.full((), 2, np.float16)}
    source = folder(tmp_path / "a", tensors)
    cli("reshard", source, str(tmp_path / "r"), "--to", "ddp")
    document = cli.json("export", str(tmp_path / "r"), str(tmp_path / "b"))
    assert (document["tensors"], document["left_out"]) == (len(tensors), [])
    same(loaded(tmp_path / "b"), tensors)
    again = ("reshard", str(tmp_path / "r"), str(tmp_path / "c"), "--to", "ddp", "--format", "hf")
    assert cli(*again).code == 0
    same(loaded(tmp_path / "c"), tensors)


def test_export_leaves_no_weight_out_unasked(cli: Cli, tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    ema = {n: v + 1 for n, v in model.state_dict().items()}
    root = live(tmp_path / "r", {"model": model, "optim": optim, "ema": ema, "epoch": 3})
    refused = cli("export", root, str(tmp_path / "a"), "--json")
    assert refused.code == 5
    assert "weights outside of the section model would be left out" in refused.error["message"]
    assert refused.error["found"] == "2: ema.weight, ema.bias"
    assert not (tmp_path / "a").exists()
    document = cli.json("export", root, str(tmp_path / "a"), "--section", "model")
    assert {n for n in document["left_out"] if n.startswith("ema.")} == {"ema.bias", "ema.weight"}
    assert loaded(tmp_path / "a").keys() == {"weight", "bias"}
    cli.good("export", root, str(tmp_path / "b"), "--section", ".")
    assert len(loaded(tmp_path / "b")) == 10
    plain = live(tmp_path / "p", {"model": model, "optim": optim, "epoch": 3})
    said = cli.good("export", plain, str(tmp_path / "c")).out
    assert "left out: 6 tensors: optim." in said
    assert "values: epoch" in said
    # And the same behind a conversion, with and without optimizer.
    for name, state in (("d", {"model": model, "optim": optim}), ("e", {"model": model})):
        root = live(tmp_path / f"{name}0", state)
        cli("reshard", root, str(tmp_path / name), "--to", "ddp")
        cli.good("export", str(tmp_path / name), str(tmp_path / f"{name}1"))
        assert loaded(tmp_path / f"{name}1").keys() == {"weight", "bias"}


def test_scales_of_quantized_tensors_are_in_the_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "q.lay").write_text("""
    space s { W[v h] }
    layout src of s on none { w = W[v h] }
    layout dst of s on none {
      w = W[v h] q(float8_e4m3fn, [4 4], scale={name}_scale_inv)
    }
    """)
    source = folder(tmp_path / "a", {"w": E})
    args = ("--from", f"{tmp_path}/q.lay:src", "--to", f"{tmp_path}/q.lay:dst", "--allow", "lossy")
    assert cli("reshard", source, str(tmp_path / "hf"), *args, "--format", "hf").code == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {"w", "w_scale_inv"}


def test_a_layout_overrides_by_what_its_rules_hold(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "o.lay").write_text(
        SPACE
        + """
    layout mine of s on none {
      use both
      tokens.weight = E[v h]
      q.w = L.q[a h]
      k.w = L.k[b h]
    }
    """
    )
    args = ("--from", f"{tmp_path}/o.lay:both", "--to", f"{tmp_path}/o.lay:mine")
    assert cli("reshard", folder(tmp_path / "a", BOTH), str(tmp_path / "r"), *args).code == 0
    found = {n: v for n, v in in_root(tmp_path / "r").items() if n[:5] != "optim"}
    same(
        found,
        {"tokens.weight": E, "head": E, "q.w": A[:2], "k.w": A[2:], "norm": BOTH["norm"]},
    )


UPCYCLED = """
space dense {
  L{l}.w1[f h]
  L{l}.w2[h f]
}
layout one of dense on none {
  layers.{l}.w1 = L{l}.w1[f h]
  layers.{l}.w2 = L{l}.w2[h f]
}
layout experts of dense on none {
  layers.{l}.experts.0.w1 = L{l}.w1[f h]
  layers.{l}.experts.0.w2 = L{l}.w2[h f]
  layers.{l}.experts.{1,2,3}.w1 = alias L{l}.w1
  layers.{l}.experts.{1,2,3}.w2 = alias L{l}.w2
}
"""


def test_a_dense_layer_becomes_several_experts(cli: Cli, tmp_path: Path) -> None:
    """Upcycling, as the reference describes it: files have each copy, and a root has it once."""
    shapes = {"w1": (6, 4), "w2": (4, 6)}
    dense = {
        f"layers.{n}.{w}": np.random.default_rng(n).standard_normal(shape).astype(np.float32)
        for n in range(2)
        for w, shape in shapes.items()
    }
    (tmp_path / "dense").mkdir()
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    (tmp_path / "p.lay").write_text(UPCYCLED)
    source, files, root = (str(tmp_path / n) for n in ("dense", "files", "root"))
    said = ("--from", f"{tmp_path}/p.lay:one", "--to", f"{tmp_path}/p.lay:experts")
    for target, more in ((files, ("--format", "hf")), (root, ())):
        found = cli("reshard", source, target, *said, *more)
        assert found.code == 0, found.err
    values = load_file(tmp_path / "files" / "model.safetensors")
    names = {f"layers.{n}.experts.{e}.{w}" for n in range(2) for e in range(4) for w in shapes}
    assert values.keys() == names
    cli.good("export", root, str(tmp_path / "again"), "--section", ".")
    for written in (values, load_file(tmp_path / "again" / "model.safetensors")):
        for n, value in dense.items():
            before, _, w = n.rpartition(".")
            assert all(
                np.array_equal(written[f"{before}.experts.{e}.{w}"], value) for e in range(4)
            )
