"""Replicas under a layout, compared at a save: whole tensors, parts of fused ones, buffers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.checkpoint.save.structure import ReplicaHolders, Shared
from ckptd.checkpoint.torch.replicas import Samples
from ckptd.checkpoint.torch.state.leaves import Leaves, TensorLeaf
from ckptd.errors import SaveError
from ckptd.lay.replicated import ReplicatedParts
from ckptd.lay.stored import StoredForm
from ckptd.reshard.layouts import LayoutProgram
from ckptd.reshard.torch.layout.binder import JobLayout
from ckptd.reshard.torch.layout.program import Spelling
from ckptd.reshard.torch.layout.saving import laid_leaves
from ckptd.testing.ranks import run_ranks
from tests.lay.agreement.brute import Brute
from tests.lay.agreement.brute_holders import drawn_layouts

pytestmark = pytest.mark.usefixtures("writing_thread")

PROGRAMS = 30
Tables = dict[tuple[str, str], str]


class AllHold:
    """Holders by the structure: all ranks, of each name."""

    def tensor(self, name: str) -> Shared:
        return Shared("all", first=False, alone=False)


def job_of(form: StoredForm, rank: int) -> JobLayout:
    return JobLayout(cast("LayoutProgram", None), form, Spelling(), rank)


def tables(job: JobLayout, tensors: dict[str, torch.Tensor]) -> Tables:
    """Return the digests of what a rank of a job holds in common with others."""
    leaves = Leaves({n: TensorLeaf(n, t := tensors[n], t, "", "tensor", "", t) for n in job.local})
    laid = laid_leaves(job, leaves)
    holders = cast("ReplicaHolders", AllHold())
    try:
        found_tables = laid.replica_tables(holders, Samples(views=laid.views(holders)))
    except SaveError as error:
        return {("own", "differ"): error.message}
    return {(s.key, n): d for s, table in found_tables.items() for n, d in table.items()}


def apart(ranks: list[Tables]) -> bool:
    """Whether ranks of one group say different things."""
    seen: dict[str, set[tuple[tuple[str, str], ...]]] = defaultdict(set)
    for table in ranks:
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for (group, name), digest in table.items():
            groups[group].append((name, digest))
        for group, found in groups.items():
            seen[group].add(tuple(sorted(found)))
    return any(len(found) > 1 for found in seen.values())


@pytest.mark.slow
def test_no_element_of_one_replica_is_changed_unseen() -> None:
    kept = 0
    for drawn in drawn_layouts(PROGRAMS, least=4):
        form, brute = StoredForm(drawn.bound), Brute(drawn.bound)
        copies = set(ReplicatedParts(form).originals)
        compared = form.stored_numbers | copies
        ranks = [
            {n: torch.tensor(c, dtype=torch.float32) for n, (_, c) in brute.local(r).items()}
            for r in range(form.mesh.world)
        ]
        jobs = [job_of(form, r) for r in range(form.mesh.world)]
        kept += sum(map(found_once, jobs))
        good = [tables(job, tensors) for job, tensors in zip(jobs, ranks, strict=True)]
        assert not apart(good), drawn.what
        chosen = [h for h in drawn.chosen() if h.piece.rule in compared]
        for one in (*chosen, *(h for h in drawn.common if h.piece.rule in copies)):
            name = one.tensor.name
            wrong = ranks[one.rank][name].clone()
            wrong.view(-1)[drawn.rng.choice(one.common)] += 0.5
            changed = tables(jobs[one.rank], {**ranks[one.rank], name: wrong})
            mixed = [changed if r == one.rank else t for r, t in enumerate(good)]
            seen = apart(mixed) or ("own", "differ") in changed
            assert seen, f"{name} of rank {one.rank}, {drawn.what}"
    assert kept


def found_once(job: JobLayout) -> int:
    """Return of how many tensors something is common, which is kept for all saves."""
    held = [(p, t.state) for t in job.local.values() for p in t.pieces]
    first = [job.common.of(*one) for one in held]
    assert all(job.common.of(*o) is f for o, f in zip(held, first, strict=True))
    return sum(map(bool, first))


PROGRAM = """
mesh A = tp:4=(tk:2 tr:2)
mesh B = dp:2 sp:2
let kv = 2
let rep = 2
let hd = 50
space s {
  a.q[kv rep hd h] a.k[kv hd h] n[h] w[f h]
  follow m=exp_avg
}
layout columns of s on A {
  qk = a[h (q:((kv rep)@tp hd)|k:(kv@tk hd))]
  n = n[h]
  w = w[f@tp h]
}
layout tied of s on A {
  qk = a[(q:(kv rep hd)|k:(kv hd)) h] on tk=0
  head = alias a[(q:(kv rep hd)|k:(kv hd)) h] on tk=1
  n = n[h]
  w = w[f@tp h]
}
layout packed of s on B {
  qk = a[(q:(kv rep hd)|k:(kv hd)) h]
  n = n[h]
  w = w[f@sp h]
  flat bucket 100000 @dp of m end/dp
}
"""
WIDTH = 60


def fused(rank: int, drift: float) -> dict[str, object]:
    k = torch.full((50, WIDTH), float(rank // 2) + drift)
    qk = torch.cat([torch.ones(50, WIDTH), k]).t()
    w = torch.full((1, WIDTH), float(rank))
    return {"model": {"qk": qk, "n": torch.ones(WIDTH), "w": w}}


def tied(rank: int, drift: float) -> dict[str, object]:
    name = "qk" if rank < 2 else "head"
    w = torch.full((1, WIDTH), float(rank))
    qk = torch.full((300, WIDTH), 1.0 + drift)
    return {"model": {name: qk, "n": torch.ones(WIDTH), "w": w}}


def packed(rank: int, drift: float) -> dict[str, object]:
    dp, sp = divmod(rank, 2)
    qk, w = torch.ones(300, WIDTH), torch.full((2, WIDTH), float(sp))
    n = torch.full((WIDTH,), drift)
    m = torch.cat([t.reshape(-1) for t in (qk, n, w)]).view(2, -1)[dp].clone()
    return {"model": {"qk": qk, "n": torch.ones(WIDTH), "w": w}, "optim": {"flat.0.m": m}}


def save_drifted(root: str) -> list[str]:
    """Save a state, and then one with another value of what another rank holds too."""
    rank = dist.get_rank()
    said = []
    cases = (("columns", fused, [3]), ("tied", tied, [2, 3]), ("packed", packed, [3]))
    for layout, make, wrong in cases:
        text = f"# layout {layout}\n{PROGRAM}"
        with ckptd.Checkpointer(f"{root}/{layout}", layout=text, timeout_s=60.0) as ck:
            for step, drift in ((1, 0.0), (2, float(rank in wrong))):
                handle = ck.save(step, make(rank, drift))
                assert handle is not None
                try:
                    handle.durable(100)
                    said.append("")
                except SaveError as error:
                    hint = "any" if "write `any` in" in (error.hint or "") else ""
                    said.append(f"{layout}: {error.kind} {error.where} {hint}")
    return said


@pytest.mark.dist
def test_what_differs_in_parts_of_tensors_is_named(tmp_path: Path) -> None:
    """A head in a fused tensor, and a norm in a buffer that has other tensors too."""
    for said in run_ranks(4, save_drifted, str(tmp_path), deadline_s=200.0):
        wrong = ["columns: replicas-differ model.qk any", "tied: replicas-differ model.qk any"]
        last = "packed: replicas-differ optim.n.exp_avg any"
        assert said == ["", wrong[0], "", wrong[1], "", last]
