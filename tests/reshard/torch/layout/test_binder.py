"""Layouts of live states: what is kept, what is refused, what a wrong rule leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import CkptdError, CorruptError, MismatchError, UsageError
from ckptd.store import open_store
from ckptd.testing.ranks import run_ranks
from tests.reshard.torch.layout.jobs import PROGRAM, Tree, contents, differing, whole, whole_job

pytestmark = pytest.mark.usefixtures("writing_thread")

WHOLE = f"# layout hf\n{PROGRAM}"
FUSED = (
    "# layout one\n"
    + PROGRAM
    + """
mesh O = x:1
layout one of llama on O {
  embed.weight = E[v h]
  layers.{l}.qkv.weight = L{l}[(kv (q:rep|k:1|v:1) hd) h]
  layers.{l}.o.weight = L{l}.o[h (kv rep hd)]
  layers.{l}.gu.weight = L{l}[(g:f|u:f) h]
  layers.{l}.down.weight = L{l}.d[h f]
  layers.{l}.norm.weight = L{l}.n1[h]
  norm.weight = nf[h]
  head.weight = head[v h]
}
"""
)


def fused(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole tensors as the layout `one` has them."""
    out = {n: t for n, t in full.items() if n.split(".")[-2] not in ("q", "k", "v", "gate", "up")}
    for i in range(3):
        old = f"layers.{i}"
        q = full[f"{old}.q.weight"].view(2, 8, 16)
        k, v = (full[f"{old}.{n}.weight"].view(2, 4, 16) for n in ("k", "v"))
        out[f"{old}.qkv.weight"] = torch.cat([q, k, v], 1).reshape(32, 16)
        out[f"{old}.gu.weight"] = torch.cat([full[f"{old}.gate.weight"], full[f"{old}.up.weight"]])
    return out


def save(root: Path, layout: str, state: dict[str, Any], step: int = 1) -> None:
    with ckptd.Checkpointer(str(root), layout=layout) as ck:
        ck.save(step, state)


def load(root: Path, layout: str | None, state: dict[str, Any], **options: Any) -> Any:
    with ckptd.Checkpointer(str(root), layout=layout) as ck:
        ck.load(state, **options)
        return ck.last_load


def test_other_names_and_shapes_with_the_optimizer(tmp_path: Path) -> None:
    module, optim = whole_job(1, 2)
    save(tmp_path, WHOLE, {"model": module, "optim": optim, "n": 4})
    new = Tree(fused(whole(2)))
    new_optim = torch.optim.AdamW(new.parameters(), lr=0.5)
    state = {"model": new, "optim": new_optim, "n": 0}
    load(tmp_path, FUSED, state)
    assert state["n"] == 4
    assert new_optim.param_groups[0]["lr"] == 0.01
    own = contents(module, optim)
    wanted: dict[str, torch.Tensor] = {}
    for suffix in ("", "/exp_avg", "/exp_avg_sq"):
        part = {n.removesuffix(suffix): t for n, t in own.items() if n.endswith("weight" + suffix)}
        wanted |= {n + suffix: t for n, t in fused(part).items()}
    found = contents(new, new_optim)
    steps = {n: t for n, t in found.items() if n.endswith("/step")}
    assert steps
    assert all(t == 2 for t in steps.values())
    assert differing({n: t for n, t in found.items() if n not in steps}, wanted) == []


def test_a_checkpoint_without_a_program_needs_one_to_be_given(tmp_path: Path) -> None:
    module, _ = whole_job(1, 0)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, {"model": module})
    new = Tree(fused(whole(2)))
    with pytest.raises(CkptdError) as caught:
        load(tmp_path, FUSED, {"model": new})
    assert caught.value.kind in ("lay-use", "lay-fit")
    load(tmp_path, FUSED, {"model": new}, source_layout=WHOLE)
    assert differing(dict(new.state_dict()), fused(dict(module.state_dict()))) == []


def test_the_program_that_is_given_for_a_checkpoint_is_believed(tmp_path: Path) -> None:
    module, _ = whole_job(1, 0)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, {"model": module})
    wrong = WHOLE.replace(
        "layers.{l}.{k,v}.weight = L{l}.{k,v}", "layers.{l}.{k,v}.weight = L{l}.{v,k}"
    )
    assert wrong != WHOLE
    # Nothing can tell: which of two tensors of one shape is k is for the rules to say.
    new = Tree(fused(whole(2)))
    load(tmp_path, FUSED, {"model": new}, source_layout=wrong)
    expected = dict(module.state_dict())
    for i in range(3):
        k, v = f"layers.{i}.k.weight", f"layers.{i}.v.weight"
        expected[k], expected[v] = expected[v], expected[k]
    assert differing(dict(new.state_dict()), fused(expected)) == []


def test_a_program_that_contradicts_the_kept_one_is_refused(tmp_path: Path) -> None:
    module, _ = whole_job(1, 0)
    save(tmp_path, WHOLE, {"model": module})
    wrong = WHOLE.replace("L{l}.{k,v}[(kv hd) h]", "L{l}.{v,k}[(kv hd) h]")
    assert wrong != WHOLE
    new = Tree(fused(whole(2)))
    before = {n: t.clone() for n, t in new.state_dict().items()}
    with pytest.raises(MismatchError) as caught:
        load(tmp_path, FUSED, {"model": new}, source_layout=wrong)
    assert caught.value.kind == "lay-fit"
    assert str(caught.value.where) == "model.layers.0.k.weight[0, 0]"
    assert differing(dict(new.state_dict()), before) == []
    load(tmp_path, FUSED, {"model": new}, source_layout=WHOLE)
    assert differing(dict(new.state_dict()), fused(dict(module.state_dict()))) == []
    load(tmp_path, FUSED, {"model": new}, source_layout=wrong, allow="layout")
    assert differing(dict(new.state_dict()), fused(dict(module.state_dict()))) != []


def test_a_save_keeps_the_sizes_that_it_found(tmp_path: Path) -> None:
    module, _ = whole_job(1, 0)
    save(tmp_path, WHOLE, {"model": module})
    with open_store(tmp_path) as store:
        catalogue = Catalogue(store)
        name = catalogue.latest()
        assert name is not None
        kept = CkptdReader(catalogue, name).manifest.lay
    for size in ("h = 16", "rep = 2", "hd = 4", "f = 12", "kv = 2", "v = 20"):
        assert kept.count(f"\nlet {size}\n") == 1


def test_the_witness_is_followed_to_where_values_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that puts rows at wrong places, made by turning one copy around."""
    from ckptd.base.grids.block import Block
    from ckptd.checkpoint.load.plan import Want
    from ckptd.reshard.torch.layout import loading

    module, _ = whole_job(1, 0)
    save(tmp_path, WHOLE, {"model": module})

    def shifted(number: int, regions: Any, target: Any, pieces: Any = (), *more: Any) -> Want:
        def moved(b: Block) -> Block:
            end = b.target_span[1] * 4
            start = b.target_start + 16 if end + 64 <= len(target) else b.target_start - 16
            start = max(0, start)
            return Block(b.shape, b.source_start, b.source_strides, start, b.target_strides)

        found = tuple((p, tuple(map(moved, bs))) for p, bs in pieces)
        return Want(number, regions, target, found or None, *more)

    monkeypatch.setattr(loading, "Want", shifted)
    with pytest.raises(CorruptError) as caught:
        load(tmp_path, FUSED, {"model": Tree(fused(whole(2)))})
    assert "values arrived at the wrong places" in caught.value.message
    assert caught.value.state_corrupted
    assert "qkv" in str(caught.value)


def test_a_cast_of_the_job_changes_types(tmp_path: Path) -> None:
    module, _ = whole_job(1, 0)
    save(tmp_path, WHOLE, {"model": module})
    half = FUSED.replace("d[h f]\n  layers.{l}.norm", "d[h f] cast(bfloat16)\n  layers.{l}.norm")
    new = Tree(fused(whole(2)))
    with pytest.raises(MismatchError):
        load(tmp_path, half, {"model": new})
    for i in range(3):
        getattr(new.layers, str(i)).down.to(torch.bfloat16)
    with pytest.raises(MismatchError):
        load(tmp_path, FUSED, {"model": new})
    load(tmp_path, half, {"model": new})
    wanted = module.state_dict()["layers.1.down.weight"].to(torch.bfloat16)
    assert torch.equal(new.state_dict()["layers.1.down.weight"], wanted)


def test_a_value_that_does_not_fit_the_type_of_a_cast_poisons_the_state(tmp_path: Path) -> None:
    module, _ = whole_job(1, 0)
    with torch.no_grad():
        getattr(module.layers, "1").down.weight[0, 0] = 1e6
    save(tmp_path, WHOLE, {"model": module})
    half = FUSED.replace("d[h f]\n  layers.{l}.norm", "d[h f] cast(float16)\n  layers.{l}.norm")
    new = Tree(fused(whole(2)))
    for i in range(3):
        getattr(new.layers, str(i)).down.to(torch.float16)
    with pytest.raises(UsageError) as caught:
        load(tmp_path, half, {"model": new})
    assert "a value does not fit the type it is cast" in caught.value.message
    assert caught.value.state_corrupted
    assert "layers.1.down.weight" in (caught.value.where or "")


def test_what_is_missing_or_not_wanted_is_said(tmp_path: Path) -> None:
    module, optim = whole_job(1, 1)
    save(tmp_path, WHOLE, {"model": module, "optim": optim})
    new = Tree(fused(whole(2)))
    with pytest.raises(MismatchError) as caught:
        load(tmp_path, FUSED, {"model": new})
    assert "optim" in caught.value.message
    report = load(tmp_path, FUSED, {"model": new}, strict=False)
    assert any("exp_avg" in n for n in report.unexpected)
    before = new.state_dict()["norm.weight"].clone()
    new.state_dict()["norm.weight"].zero_()
    load(tmp_path, FUSED, {"model": new}, only="model.layers.*")
    assert not new.state_dict()["norm.weight"].any()
    load(tmp_path, FUSED, {"model": new}, weights_only=True)
    assert torch.equal(new.state_dict()["norm.weight"], before)


def test_what_a_layout_leaves_out_keeps_its_value(tmp_path: Path) -> None:
    layout = FUSED.replace("norm.weight = nf[h]\n", "norm.weight = drop\n").replace(
        "  layers.{l}.norm.weight = drop", "  layers.{l}.norm.weight = L{l}.n1[h]"
    )
    tensors = fused(whole(1))
    save(tmp_path, layout, {"model": dict(tensors)})
    with open_store(tmp_path) as store:
        names = CkptdReader(Catalogue(store), Catalogue(store).find(1)).manifest.tensors
    assert "model.norm.weight" not in {t.name for t in names}


def test_mistakes_are_told(tmp_path: Path) -> None:
    module = Tree(whole(1))
    with pytest.raises(UsageError) as caught:
        ckptd.Checkpointer(str(tmp_path), layout=f"# layout mg\n{PROGRAM}")
    assert "4 ranks" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        ckptd.Checkpointer(str(tmp_path), layout="fsdp")
    assert caught.value.kind == "lay-use"
    for state, kind in (
        ({"model": module, "ema": Tree(whole(2))}, "lay-use"),
        ({"other": torch.ones(3)}, "lay-fit"),
    ):
        with (
            pytest.raises(CkptdError) as found,
            ckptd.Checkpointer(str(tmp_path), layout=FUSED) as ck,
        ):
            ck.save(1, state)
        assert found.value.kind == kind
    with pytest.raises(UsageError) as caught:
        load(tmp_path, None, {"model": module}, source_layout=WHOLE)
    assert caught.value.kind == "lay-use"


def test_a_state_that_the_space_does_not_know(tmp_path: Path) -> None:
    module = Tree(fused(whole(1)))
    optim = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    with (
        pytest.raises(MismatchError) as caught,
        ckptd.Checkpointer(str(tmp_path), layout=FUSED) as ck,
    ):
        ck.save(1, {"model": module, "optim": optim})
    assert caught.value.kind == "lay-fit"
    assert "momentum_buffer" in str(caught.value)


# --- real ranks -----------------------------------------------------------------------------------

RANKS = """
mesh R = dp:2 ep:2
space moe { n[h] r[e h] X{e}.g[f h] follow m=exp_avg }
layout lists of moe on R {
  norm = n[h]
  router = r[e h]
  experts.{#e@ep}.gate = X{e}.g[f h]
}
mesh S = t:2
layout stacked of moe on S {
  norm = n[h]
  router = r[e h]
  experts = X.g[e f@t h]
}
layout z of moe on R {
  norm = n[h]
  router = r[e h]
  experts.{#e@ep}.gate = X{e}.g[f h]
  flat group(**) @dp of m end/4
}
"""


def expert_values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"norm": (8,), "router": (4, 8)} | {f"x{i}": (6, 8) for i in range(4)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def expert_lists(values: dict[str, torch.Tensor], drift: float = 0.0) -> dict[str, torch.Tensor]:
    ep = dist.get_rank() % 2
    out = {"norm": values["norm"].clone(), "router": values["router"].clone()}
    out |= {f"experts.{i}.gate": values[f"x{2 * ep + i}"].clone() for i in range(2)}
    out["experts.1.gate"] += drift * dist.get_rank()
    return out


def save_lists(root: str) -> list[str]:
    kinds = []
    with ckptd.Checkpointer(root, layout=f"# layout lists\n{RANKS}", timeout_s=60.0) as ck:
        ck.save(1, {"model": expert_lists(expert_values(1))})
        ck.wait()
        drifted = expert_lists(expert_values(1), drift=0.5)
        other = {
            "model": expert_lists(expert_values(1)) | {"extra": torch.ones(2) * dist.get_rank()}
        }
        for step, state in ((2, {"model": drifted}), (3, other)):
            handle = ck.save(step, state)
            assert handle is not None
            try:
                handle.durable(100)
            except CkptdError as error:
                kinds.append(f"{error.kind} {error.where}")
    return kinds


def load_stacked(root: str) -> bool:
    t = dist.get_rank()
    state = {"norm": torch.zeros(8), "router": torch.zeros(4, 8), "experts": torch.zeros(4, 3, 8)}
    with ckptd.Checkpointer(root, layout=f"# layout stacked\n{RANKS}", timeout_s=60.0) as ck:
        ck.load({"model": state})
    values = expert_values(1)
    stacked = torch.stack([values[f"x{i}"] for i in range(4)])[:, 3 * t : 3 * t + 3]
    return torch.equal(state["experts"], stacked) and torch.equal(state["norm"], values["norm"])


@pytest.mark.dist
def test_expert_lists_become_stacked_and_drift_is_named(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    for kinds in run_ranks(4, save_lists, root, deadline_s=200.0):
        first, second = kinds
        assert first.startswith("replicas-differ model.experts.")
        assert second == "replicas-differ model.extra"
    assert run_ranks(2, load_stacked, root, deadline_s=200.0) == [True, True]


def buffers(values: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the part of this rank of the moments that are packed over the data ranks."""
    dp, ep = divmod(dist.get_rank(), 2)
    packed = [values["norm"], values["router"], values[f"x{2 * ep}"], values[f"x{2 * ep + 1}"]]
    flat = torch.cat([t.reshape(-1) for t in packed])
    return flat.view(2, -1)[dp].clone()


def save_flats(root: str) -> bool:
    layout = f"# layout z\n{RANKS}"
    model, moments = expert_lists(expert_values(1)), buffers(expert_values(2))
    with ckptd.Checkpointer(root, layout=layout, timeout_s=60.0) as ck:
        ck.save(1, {"model": model, "optim": {"flat.0.m": moments}})
        ck.wait()
        new = {"flat.0.m": torch.zeros_like(moments)}
        ck.load({"model": expert_lists(expert_values(5)), "optim": new})
    return torch.equal(new["flat.0.m"], moments)


@pytest.mark.dist
def test_moments_in_buffers_keep_their_own_names_in_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert run_ranks(4, save_flats, str(root), deadline_s=200.0) == [True] * 4
    values = expert_values(2)
    with open_store(root) as store:
        reader = CkptdReader(Catalogue(store), Catalogue(store).find(1))
        found = reader.tensors(["optim.experts.3.gate.exp_avg", "optim.router.exp_avg"])
    assert np.array_equal(found["optim.experts.3.gate.exp_avg"], values["x3"].numpy())
    assert np.array_equal(found["optim.router.exp_avg"], values["router"].numpy())
