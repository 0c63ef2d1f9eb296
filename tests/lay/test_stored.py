from __future__ import annotations

import pytest

from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import Owners
from ckptd.errors import MismatchError, UsageError
from ckptd.lay.local import local_tensors
from ckptd.lay.stored import StoredForm
from tests.lay.world import Elements, bound, local_elements, piece_elements

SPACE = """
space s { E[v h] L{l}.q[kv rep hd h] L{l}.k[kv hd h] L{l}.v[kv hd h] L{l}.g[f h] L{l}.u[f h]
  L{l}.X{e}.g[f h] L{l}.X{e}.u[f h] L{l}.n[h]  follow m }
"""
SIZES = {"l": 3, "v": 5, "h": 4, "kv": 4, "rep": 2, "hd": 2, "f": 6, "e": 4, "two": 2, "half": 1}


def form(statements: str, mesh: str = "mesh M = pp:2 dp:3 tp:2", **sizes: int) -> StoredForm:
    on = mesh.split()[1]
    on += ", X" if "mesh X" in mesh else ""
    text = f"{mesh}\n{SPACE}\nlayout a of s on {on} {{\n{statements}\n}}\n"
    return StoredForm(bound(text, "a", **(SIZES | sizes)))


def holdings(found: StoredForm) -> list[set[object]]:
    """What each rank holds, by looking at every element of it."""
    out: list[set[object]] = []
    for rank in range(found.mesh.world):
        mine: set[object] = set()
        for tensor in local_tensors(found, rank):
            mine |= set(local_elements(found, tensor, rank).tolist())
        out.append(mine)
    return out


def real(elements: Elements) -> set[object]:
    return {e for e in elements.tolist() if not isinstance(e, float)}


RULES = {
    "tensor parallel": "w.{#l@pp:ceil} = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]",
    "raw rows": "w.{#l@pp:bal} = L{l}[(kv (q:rep|k:1|v:1) hd)@tp h]",
    "gate and up": "w.{l} = L{l}[(g:f@tp|u:f@tp) h] on pp=last",
    "padded": "w = E[pad(v,4*tp,7)@tp h] on pp=0",
    "padded on each rank": "w = E[pad(v@tp:ceil,2) h] on pp=0",
    "strided": "w.{#l@pp:ceil} = L{l}.g[f@tp@dp h]",
    "uneven": "w.{#l@pp:ceil} = L{l}.g[f@dp:[1 0 5] h@tp:[3 1]]",
    "replicated": "w.{l} = L{l}.n[h]",
    "replicated keys": "w.{l} = L{l}[(q:((kv rep)@tp hd)|k:(kv hd)|v:(kv hd)) h]",
    "two dimensions of one": "w.{#l@pp:ceil} = L{l}.g[(f h)@tp:ceil]",
    "flat": "w.{#l@pp:ceil} = L{l}.g[f@tp h]\n flat each @dp:ceil of *",
    "flat of halves": "w.{#l@pp:ceil} = L{l}[h (g:f@tp|u:f@tp)]\n flat each @dp:ceil of m",
    "bucket": """w.{#l@pp:ceil} = L{l}.g[h f@tp]
      x.{#l@pp:ceil} = L{l}[(g:f@tp|u:f@tp) h]
      flat bucket 30 @dp of m order reverse start/4 end/lcm(dp,8)""".replace("x.{", "n.{").replace(
        "L{l}[(g:f@tp|u:f@tp) h]", "L{l}.n[h]"
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_pieces_belong_to_the_lowest_rank_that_holds_them(name: str) -> None:
    found = form(RULES[name])
    held = holdings(found)
    for tensor in found.tensors():
        assert tensor.owners.npieces == tensor.grid.npieces
        for piece in range(tensor.grid.npieces):
            wanted = real(piece_elements(found, tensor, piece))
            owner = tensor.owners.owner(piece, tensor.base)
            ranks = [r for r, mine in enumerate(held) if wanted <= mine]
            assert owner == min(ranks) if wanted else 0 <= owner < found.mesh.world


FOLDED = """mesh M = pp:2 dp:3 tp:2
mesh X = pp:2 edp:1 ep:3 etp:2"""


def test_experts_are_folded_over_other_ranks() -> None:
    rules = """
      a.{#l@pp:ceil} = L{l}.g[f@tp h]
      b.{#l@pp:ceil}.{#e@ep:ceil} = L{l}.X{e}[(g:f@etp|u:f@etp) h]
      c.{#l@pp:ceil} = L{l}.n[h]
      flat bucket 20 @dp of m end/dp
      flat bucket 20 @edp of m end/edp
    """
    found = form(rules, FOLDED)
    held = holdings(found)
    for tensor in found.tensors():
        for piece in range(tensor.grid.npieces):
            wanted = real(piece_elements(found, tensor, piece))
            owner = tensor.owners.owner(piece, tensor.base)
            assert owner == min(r for r, mine in enumerate(held) if wanted <= mine)
    names = [t.name for t in local_tensors(found, 1)]
    # Two of dense tensors, then one for each of two experts in two layers.
    assert [n for n in names if n.startswith("flat")] == [f"flat.{i}.m" for i in range(6)]


def test_axes_that_share_no_digits_but_ranks() -> None:
    found = form("w = E[v@a:ceil h@b:ceil]", "mesh M = x:3 a:2\nmesh X = y:2 b:3")
    assert not found.rules[0].plain
    held = holdings(found)
    (tensor,) = [t for t in found.tensors() if not t.state]
    for piece in range(tensor.grid.npieces):
        wanted = real(piece_elements(found, tensor, piece))
        owner = tensor.owners.owner(piece, tensor.base)
        assert owner == min(r for r, mine in enumerate(held) if wanted <= mine)


def test_names_and_grids() -> None:
    found = form(RULES["tensor parallel"])
    tensors = list(found.tensors())
    assert [t.name for t in tensors] == [
        "w.0",
        "optim.w.0.m",
        "w.1",
        "optim.w.1.m",
        "w.2",
        "optim.w.2.m",
    ]
    assert tensors[0].grid == Grid((Axis(((16, 2),)), Axis(((4, 1),))))
    assert tensors[0].owners == Owners(((0, 1, 2),))
    assert [t.base for t in tensors] == [0, 0, 0, 0, 6, 6]
    assert [t.name for t in local_tensors(found, 0)] == ["w.0", "w.1", "optim.w.0.m", "optim.w.1.m"]
    assert [t.name for t in local_tensors(found, 7)] == ["w.0", "optim.w.0.m"]


def test_layers_share_grids_and_owners() -> None:
    found = form(RULES["gate and up"])
    tensors = list(found.tensors())
    assert all(t.grid is tensors[0].grid for t in tensors)
    assert all(t.owners is tensors[0].owners for t in tensors)


def test_stage_strings() -> None:
    mesh = "mesh M = pp:2 tp:2 local vpp:2"
    rules = 'model{vpp}.w.{#l@vpp@pp} = L{l}.n[h]\n pipe l@vpp@pp "Et|t||tL"'
    found = form(rules, mesh)
    tensors = [t for t in found.tensors() if not t.state]
    assert [t.name for t in tensors] == ["model.w.0", "model.w.1", "model.w.2"]
    assert [t.base for t in tensors] == [0, 2, 2]
    local = [[t.name for t in local_tensors(found, r) if not t.state] for r in range(4)]
    assert local == [["model0.w.0"], ["model0.w.0"], *[["model0.w.0", "model1.w.0"]] * 2]
    with pytest.raises(MismatchError, match="number of layers"):
        list(form(rules, mesh, l=4).tensors())


def test_names_of_a_checkpoint() -> None:
    found = form('w.{l} = L{l}.n[h]\n stored "model.{name}" states "opt.{state}.{name}"')
    assert [t.name for t in found.tensors()][:2] == ["model.w.0", "opt.m.w.0"]
    assert found.by_name["opt.m.w.2"] == (0, (2,), "m")


def test_two_tensors_of_one_name() -> None:
    with pytest.raises(UsageError, match="one name"):
        _ = form("w.1 = L{1}.n[h]\n w.{l} = L{l}.n[h]").by_name


def test_nobody_holds_it() -> None:
    with pytest.raises(MismatchError, match="no rank holds") as error:
        list(form("w = E[v@tp:ceil h@tp:ceil]").tensors())
    assert error.value.kind == "lay-fit"
    with pytest.raises(UsageError, match="no rank holds"):
        list(form("w.{#l@pp:ceil} = L{l}.n[h] on pp=0").tensors())


def test_empty_tensor() -> None:
    found = form(RULES["gate and up"], f=0)
    assert {t.shape for t in found.tensors()} == {(0, 4)}
    assert all(t.owners.npieces == t.grid.npieces == 1 for t in found.tensors())


def test_absurd_numbers() -> None:
    with pytest.raises(UsageError, match="too many tensors"):
        next(form(RULES["replicated"], l=2**40).tensors())
    with pytest.raises(UsageError, match="too many segments"):
        next(form("w = E[(v h@tp)]", v=2**40).tensors())
    huge = "w = E[v@tp h]"
    with pytest.raises(UsageError, match="longer"):
        next(form(huge.replace("v@tp h", "(v h)@tp"), v=2**62, h=2**62).tensors())


def test_a_virtual_stage_behind_the_number_of_a_layer() -> None:
    found = form("w.{#l@vpp@pp}.v{vpp} = L{l}.n[h]", "mesh M = pp:2 local vpp:2", l=8)
    names = [t.name for t in local_tensors(found, 1) if not t.state]
    assert names == ["w.0.v0", "w.1.v0", "w.0.v1", "w.1.v1"]
    assert found.packing.on_rank(1) == ((0, (2,)), (0, (3,)), (0, (6,)), (0, (7,)))
