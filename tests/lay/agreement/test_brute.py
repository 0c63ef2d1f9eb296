"""The brute force by cases that were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.lay.resolve import Bound, resolve
from ckptd.lay.syntax import parse
from tests.lay.agreement.brute import Brute, Numbering, Wrong, load, save

SPACE = """
space s {
  E[v h]
  L{l}.q[kv rep hd] .k[kv hd] .v[kv hd]
  L{l}.g[f] .u[f]
  X{e}.w[f]
  follow m
}
mesh M = pp:2 dp:2 tp:2
mesh N = pp:2 ep:4
mesh V = pp:2 local vpp:2
"""


def brute(layout: str, **sizes: int) -> Brute:
    resolved = resolve([parse(SPACE + layout)], "x")
    return Brute(Bound(resolved, sizes))


def shown(meaning: Brute, rank: int, name: str) -> list[str]:
    """Cells in words: family and indexes, or the fill."""
    out = []
    for cell in meaning.local(rank)[name][1].reshape(-1).tolist():
        if cell < 0:
            out.append(str(meaning.fills[-1 - cell]))
        else:
            family, _, axes = meaning.numbering.name(cell).partition("{l}.")
            word = (axes or family).replace("'", "")
            out.append(
                word.partition("{")[0] + "".join(c for c in word.partition("{")[2] if c.isdigit())
            )
    return out


def test_groups_of_heads() -> None:
    """kv = 2 over tp: rank 1 has the group 1, in it two q heads, then k, then v."""
    b = brute(
        "layout x of s on M { L.{l}.qkv = L{l}[(kv@tp (q:rep|k:1|v:1) hd)] }",
        l=1, kv=2, rep=2, hd=2,
    )  # fmt: skip
    # q{l kv rep hd}, k{l kv hd}
    assert shown(b, 1, "L.0.qkv") == [
        "q0100", "q0101", "q0110", "q0111", "k010", "k011", "v010", "v011",
    ]  # fmt: skip
    assert shown(b, 2, "L.0.qkv") == shown(b, 0, "L.0.qkv")
    assert shown(b, 2, "L.0.qkv")[0] == "q0000"


def test_raw_rows() -> None:
    b = brute(
        "layout x of s on M { L.{l}.qkv = L{l}[(kv (q:rep|k:1|v:1) hd)@tp] }",
        l=1, kv=1, rep=2, hd=1,
    )  # fmt: skip
    assert shown(b, 0, "L.0.qkv") == ["q0000", "q0010"]
    assert shown(b, 1, "L.0.qkv") == ["k000", "v000"]


def test_halves_and_whole() -> None:
    halves = brute("layout x of s on M { L.{l}.f = L{l}[(g:f@tp|u:f@tp)] }", l=1, f=4)
    assert shown(halves, 0, "L.0.f") == ["g00", "g01", "u00", "u01"]
    assert shown(halves, 1, "L.0.f") == ["g02", "g03", "u02", "u03"]
    whole = brute("layout x of s on M { L.{l}.f = L{l}[(g:f|u:f)@tp] }", l=1, f=4)
    assert shown(whole, 1, "L.0.f") == ["u00", "u01", "u02", "u03"]
    assert [s.shape for _, s in whole.stored().values()] == [(8,), (8,)]
    # Textual order: what tp left is cut by dp.
    twice = brute("layout x of s on M { L.{l}.f = L{l}.g[f@tp@dp] }", l=1, f=4)
    assert [shown(twice, r, "L.0.f") for r in range(4)] == [["g00"], ["g02"], ["g01"], ["g03"]]


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (":ceil", [3, 3, 3, 1]),
        (":bal", [3, 3, 2, 2]),
        (":[1 2 3 4]", [1, 2, 3, 4]),
        ("/3", [3, 3, 3, 1]),
        (":ceil/4", [4, 4, 2, 0]),
        (":bal/4", [4, 4, 2, 0]),
    ],
)
def test_ten_over_four(how: str, wanted: list[int]) -> None:
    b = brute(f"layout x of s on N {{ w.{{e}} = X{{e}}.w[f@ep{how}] }}", e=1, f=10)
    found = [b.local(r)["w.0"][1] for r in range(4)]
    assert [len(c) for c in found] == wanted
    assert np.concatenate(found).tolist() == list(range(10))


def test_what_does_not_divide() -> None:
    b = brute("layout x of s on N { w.{e} = X{e}.w[f@ep] }", e=1, f=10)
    with pytest.raises(Wrong, match="does not divide"):
        b.local(0)


def test_padding() -> None:
    b = brute("layout x of s on M { emb = E[pad(v, 2*tp, -1)@tp h] }", v=5, h=1)
    assert shown(b, 0, "emb") == ["E00", "E10", "E20", "E30"]
    assert shown(b, 1, "emb") == ["E40", "-1.0", "-1.0", "-1.0"]
    assert b.stored()["emb"][1].shape == (8, 1)
    inside = brute("layout x of s on M { emb = E[pad(v@tp:ceil, 4) h] }", v=5, h=1)
    assert shown(inside, 1, "emb") == ["E30", "E40", "0.0", "0.0"]
    assert inside.stored()["emb"][1].shape == (8, 1)


def test_stages_count_from_zero() -> None:
    b = brute("layout x of s on M { L.{#l@pp}.f = L{l}.g[f] }", l=4, f=1)
    assert list(b.local(0)) == ["L.0.f", "L.1.f", "optim.L.0.f.m", "optim.L.1.f.m"]
    assert shown(b, 4, "L.1.f") == ["g30"]
    assert list(b.stored())[::2] == [f"L.{i}.f" for i in range(4)]


def test_virtual_stages() -> None:
    """Stage number s lies on rank s % pp as its virtual stage s // pp."""
    b = brute(
        'layout x of s on V { pipe l@vpp@pp "Et|tt||t*2L"; V.{vpp}.L.{#l@vpp@pp}.f = L{l}.g[f] }',
        l=5, f=1,
    )  # fmt: skip
    assert [n for n in b.local(0) if n[0] == "V"] == ["V.0.L.0.f"]
    assert [n for n in b.local(1) if n[0] == "V"] == [
        "V.0.L.0.f", "V.0.L.1.f", "V.1.L.0.f", "V.1.L.1.f",
    ]  # fmt: skip
    assert shown(b, 1, "V.1.L.0.f") == ["g30"]
    assert shown(b, 1, "V.0.L.1.f") == ["g20"]


def test_experts_listed_and_stacked() -> None:
    listed = brute("layout x of s on N { e.{#e@ep} = X{e}.w[f] }", e=8, f=2)
    stacked = brute("layout x of s on N { e = X.w[(e@ep f)] }", e=8, f=2)
    assert stacked.local(2)["e"][1].tolist() == [8, 9, 10, 11]
    assert listed.local(2)["e.0"][1].tolist() == [8, 9]
    assert listed.local(2)["e.1"][1].tolist() == [10, 11]


def test_on() -> None:
    b = brute("layout x of s on M { emb = E[v h] on pp=last }", v=1, h=1)
    assert [bool(b.local(r)) for r in range(8)] == [False] * 4 + [True] * 4


def test_buckets() -> None:
    """g of 3 and u of 3 from multiples of 4, an end at 8; the next tensor opens a new one."""
    rules = "a.{l}.g = L{l}.g[f]; a.{l}.u = L{l}.u[f]"
    b = brute(f"layout x of s on M {{ {rules}; flat bucket 5 @dp of m start/4 end/8 }}", l=2, f=3)
    first, second = (
        [shown(b, r, f"flat.{i}.m") for r in (0, 2)] for i in range(2)
    )  # fmt: skip
    assert first == [["g00", "g01", "g02", "0.0"], ["u00", "u01", "u02", "0.0"]]
    assert second == [["g10", "g11", "g12", "0.0"], ["u10", "u11", "u12", "0.0"]]
    assert "optim.a.0.g.m" not in b.local(0)
    assert "a.0.g" in b.local(0)
    backwards = brute(
        f"layout x of s on M {{ {rules}; flat bucket 5 @dp of m order reverse }}", l=2, f=3
    )
    assert shown(backwards, 0, "flat.0.m") == ["u10", "u11", "u12"]


def test_flat_groups_and_each() -> None:
    rules = "a.{l}.g = L{l}.g[f]; a.{l}.u = L{l}.u[f]"
    groups = brute(f"layout x of s on M {{ {rules}; flat group(a.{{i}}.*) @dp of * }}", l=2, f=3)
    assert shown(groups, 2, "flat.1.params") == ["u10", "u11", "u12"]
    assert len(groups.local(0)) == 4
    each = brute(f"layout x of s on M {{ {rules}; flat each @dp:ceil of params,m }}", l=1, f=3)
    assert [shown(each, r, "a.0.u") for r in (0, 2)] == [["u00", "u01"], ["u02"]]
    padded = brute(f"layout x of s on M {{ {rules}; flat each @dp of * end/4 }}", l=1, f=3)
    assert shown(padded, 2, "optim.a.0.u.m") == ["u02", "0.0"]


def test_flats_leave_alone_what_their_axis_cuts() -> None:
    rules = "a.{l}.g = L{l}.g[f@dp]; a.{l}.u = L{l}.u[f@tp]"
    b = brute(f"layout x of s on M {{ {rules}; flat bucket 9 @dp of * }}", l=1, f=4)
    assert set(b.local(0)) == {"a.0.g", "optim.a.0.g.m", "flat.0.params", "flat.0.m"}
    assert shown(b, 3, "flat.0.m") == ["u03"]


def test_meanings_that_are_none() -> None:
    b = brute("layout x of s on M { L.{l}.f = L{l}.g[f (f 1)] }", l=1, f=2)
    with pytest.raises(Wrong, match="comes twice"):
        b.local(0)
    b = brute("layout x of s on M { L.{l}.f = L{l}.q[kv rep] }", l=1, kv=1, rep=1, hd=1)
    with pytest.raises(Wrong, match="nothing says"):
        b.local(0)
    b = brute("layout x of s on M { L.{#l@pp}.f = L.g[f l] }", l=4, f=1)
    with pytest.raises(Wrong, match="comes twice"):
        b.local(0)
    b = brute("layout x of s on V { L.{#l@vpp@pp} = L{l}.g[f] }", l=4, f=1)
    with pytest.raises(Wrong, match="two tensors"):
        b.local(0)


def test_save_and_load() -> None:
    b = brute(
        "layout x of s on M { emb = E[pad(v, 4, 7)@tp h]; e.{#e@pp} = X{e}.w[f@tp@dp:ceil];"
        " flat bucket 3 @dp of m end/2 }",
        v=5, h=1, e=2, f=4,
    )  # fmt: skip
    n = b.numbering.total
    values = {"": np.arange(n, dtype=np.float64) + 0.5, "m": -np.arange(n, dtype=np.float64)}
    held = save(b, values)
    assert held[1]["emb"].reshape(-1).tolist() == [4.5, 7, 7, 7]
    back = load(b, held)
    assert all(np.array_equal(back[s], values[s]) for s in values)
    held[7]["emb"][0, 0] += 1
    with pytest.raises(Wrong, match="another copy"):
        load(b, held)
    held[7]["emb"] = held[7]["emb"][:1]
    with pytest.raises(Wrong, match="shape"):
        load(b, held)


def test_layouts_of_one_space_share_numbers() -> None:
    bound = [
        Bound(resolve([parse(SPACE + text)], "x"), {"v": 2, "h": 3, "l": 1, "f": 2})
        for text in (
            "layout x of s on M { emb = E[v h]; L.{l} = L{l}[(g:f|u:f)] }",
            "layout x of s on none { emb = E[(h v)] }",
        )
    ]
    numbering = Numbering.of(*bound)
    assert numbering.total == 10
    a, b = (Brute(x, numbering) for x in bound)
    assert a.local(0)["emb"][1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert b.local(0)["emb"][1].tolist() == [0, 3, 1, 4, 2, 5]
