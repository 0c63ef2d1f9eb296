"""Layouts bound to names and shapes: of checkpoints, of all ranks, of some ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import MismatchError, NotFoundError, UsageError
from ckptd.lay.bind import bind_ranks, bind_sizes, bind_stored
from ckptd.lay.check import check_bound
from ckptd.lay.local import local_tensors
from ckptd.lay.resolve import Bound, Equation, Resolved, ValueScope, resolve
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax import parse, show
from ckptd.lay.syntax.tree import Atom, Dim, File, NameIndex, On, Split, Text
from tests.lay.meaning import seq

Shape = tuple[int, ...]
Sizes = dict[str, int]

LLAMA = """
space llama {
  E[v h]
  nf[h]
  L{l}.q[kv rep hd h] .k[kv hd h] .v[kv hd h] .o[h kv rep hd] .g[f h] .u[f h] .d[h f]
  L{l}.X{e}.w[f h]
  follow m=exp_avg, s=exp_avg_sq
  scalar step
}
"""
HF = """
layout x of llama on none {
  embed = E[v h]
  layers.{l}.q = L{l}.q[(kv rep hd) h]
  layers.{l}.{k,v} = L{l}.{k,v}[(kv hd) h]
  layers.{l}.o = L{l}.o[h (kv rep hd)]
  layers.{l}.{g,u} = L{l}.{g,u}[f h]
  layers.{l}.d = L{l}.d[h f]
  norm = nf[h]
}
"""
MEGATRON = """
mesh M = pp:2 dp:2 tp:4
layout x of llama on M {
  embed = E[pad(v, 8*tp)@tp h] on pp=0
  layers.{#l@pp}.qkv = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]
  layers.{#l@pp}.o = L{l}.o[h (kv@tp rep hd)]
  layers.{#l@pp}.fc1 = L{l}[(g:f@tp:ceil|u:f@tp:ceil) h]
  layers.{#l@pp}.fc2 = L{l}.d[h f@tp:ceil]
  norm = nf[h] on pp=last
  out = alias E on pp=last
}
"""
SIZES = {"v": 37, "h": 12, "kv": 4, "rep": 2, "hd": 3, "f": 10, "l": 4}


def nothing(name: str) -> File:
    raise NotFoundError(name)


def looked_up(text: str) -> Resolved:
    return resolve([parse(text, "x.lay")], "x", nothing)


def length_of(index: NameIndex, scope: ValueScope, at: Mapping[str, int] | None) -> range:
    """The numbers of an index: of the whole, or of the part at some coordinates."""
    dim: Dim = Atom(index.axis)
    for axis, how in index.splits:
        dim = Split(dim, axis, how)
    found = [e[1][index.axis] for e in seq(dim, scope, at) if not isinstance(e, float)]
    if index.local and at is not None:
        return range(len(found))
    return range(found[0], found[-1] + 1) if found else range(0)


def tensors(
    equation: Equation, scope: ValueScope, at: Mapping[str, int] | None
) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of a rule's tensors, element by element; at None as they are stored."""
    indexes = [p for p in equation.name.parts if isinstance(p, NameIndex)]
    for numbers in itertools.product(*(length_of(i, scope, at) for i in indexes)):
        left = list(numbers)
        name = "".join(
            p.text if isinstance(p, Text) else str(left.pop(0)) for p in equation.name.parts
        )
        yield name, tuple(len(seq(d, scope, at)) for d in equation.dims)


def stored(resolved: Resolved, sizes: Sizes) -> dict[str, Shape]:
    extents = resolved.mesh.extents if resolved.mesh else {}
    scope = ValueScope(sizes, extents)
    return {n: s for e in resolved.equations for n, s in tensors(e, scope, None)}


def local(resolved: Resolved, sizes: Sizes) -> dict[int, dict[str, Shape]]:
    mesh = resolved.mesh
    assert mesh is not None
    scope = ValueScope(sizes, mesh.extents)
    out: dict[int, dict[str, Shape]] = {}
    for rank in range(mesh.world):
        at = mesh.coordinates(rank)
        mine = [e for e in resolved.equations if is_on(e, at, mesh.extents)]
        out[rank] = {n: s for e in mine for n, s in tensors(e, scope, at)}
    return out


def is_on(equation: Equation, at: Mapping[str, int], extents: Mapping[str, int]) -> bool:
    wanted = {m.axis: m.coordinate for m in equation.modifiers if isinstance(m, On)}
    return all(at[a] == (extents[a] - 1 if c == "last" else c) for a, c in wanted.items())


def wrong(text: str, observed: dict[str, Shape], **sizes: int) -> MismatchError:
    with pytest.raises(MismatchError) as caught:
        bind_stored(looked_up(text), observed, sizes)
    assert caught.value.kind == "lay-fit"
    return caught.value


# --- checkpoints --------------------------------------------------------------------------------


def test_sizes_follow_from_stored_shapes() -> None:
    resolved = looked_up(LLAMA + HF)
    bound = bind_stored(resolved, stored(resolved, SIZES), {"kv": 4})
    assert bound.sizes == SIZES
    assert bound.layout == resolved


def test_splits_are_taken_out_and_numbers_are_global() -> None:
    resolved = looked_up(LLAMA + MEGATRON)
    bound = bind_stored(resolved, stored(resolved, SIZES), {"v": 37, "kv": 4})
    assert bound.sizes == SIZES


def test_states_are_understood_and_scalars_passed_over() -> None:
    resolved = looked_up(LLAMA + HF)
    found = stored(resolved, SIZES)
    states = {f"optim.{n}.exp_avg": s for n, s in found.items()}
    steps: dict[str, Shape] = {f"optim.{n}.step": () for n in found}
    assert bind_stored(resolved, found | states | steps, {"kv": 4}).sizes == SIZES
    assert bind_stored(resolved, states, {"kv": 4}).sizes == SIZES


def test_names_in_checkpoints_are_as_the_layout_says() -> None:
    text = LLAMA + HF.replace("norm =", 'stored "model.{name}" states "o/{state}/{name}"\n norm =')
    resolved = looked_up(text)
    found = {f"model.{n}": s for n, s in stored(resolved, SIZES).items()}
    found |= {f"o/exp_avg_sq/{n}": s for n, s in stored(resolved, SIZES).items()}
    assert bind_stored(resolved, found, {"kv": 4}).sizes == SIZES
    assert "no rule matches norm" in str(wrong(text, {"norm": (3,)}))


def test_rules_without_tensors_are_left_out() -> None:
    bound = bind_stored(looked_up(LLAMA + HF), {"norm": (5,)})
    assert [show(e.name) for e in bound.layout.equations] == ["norm"]
    assert bound.sizes == {"h": 5}


def test_globs_are_replaced_by_what_was_found() -> None:
    text = LLAMA + "layout x on none { **.norm.* = drop; **.experts.{e}.* = L{0}.X{e}.w[f h] }"
    found: dict[str, Shape] = {f"m.experts.{e}.weight": (3, 2) for e in range(4)}
    bound = bind_stored(looked_up(text), found | {"m.norm.w": (9,)})
    assert [show(e.name) for e in bound.layout.equations] == ["m.experts.{e}.weight"]
    assert bound.sizes == {"l": 1, "e": 4, "f": 3, "h": 2}
    with pytest.raises(UsageError, match="matches no known tensors"):
        bind_sizes(looked_up(text), {"e": 4, "f": 3, "h": 2, "l": 1})


def test_a_rule_may_have_some_of_the_layers() -> None:
    text = LLAMA + "layout x on none { d.{l} = L{l}.d[h f]; x.{l}.{e} = L{l}.X{e}.w[f h] }"
    found: dict[str, Shape] = {f"d.{i}": (2, 3) for i in range(4)}
    found |= {f"x.{i}.{e}": (3, 2) for i in (2, 3) for e in range(2)}
    bound = bind_stored(looked_up(text), found)
    assert [(show(e.name), dict(e.pinned)) for e in bound.layout.equations] == [
        ("d.{l}", {}),
        ("x.2.{e}", {"l": 2}),
        ("x.3.{e}", {"l": 3}),
    ]
    assert bound.sizes == {"l": 4, "e": 2, "h": 2, "f": 3}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers.2.q": None, "layers.2.k": None}, "layers.{l}"),
        ({"layers.9.q": (24, 12)}, "l 4, 5, 6, 7, 8 is missing"),
        ({"layers.1.q": (25, 12)}, "tensors of this rule differ in shape"),
        ({"norm": (3, 4)}, "norm [3,4] has 2 dimensions, and this rule has 1"),
        ({"norm": (13,)}, "norm [13] has length 13, and h=12 make it 12"),
        ({"layers.0.bias": (3,)}, "no rule matches layers.0.bias [3]"),
        ({"layers.01.q": (24, 12)}, "no rule matches layers.01.q"),
    ],
)
def test_what_does_not_fit(change: dict[str, Shape | None], says: str) -> None:
    resolved = looked_up(LLAMA + HF)
    found: dict[str, Shape] = stored(resolved, SIZES)
    for name, shape in change.items():
        if shape is None:
            del found[name]
        else:
            found[name] = shape
    if all(v is None for v in change.values()):
        bound = bind_stored(resolved, found, {"kv": 4})
        names = [show(e.name) for e in bound.layout.equations]
        assert "layers.{l}.q" not in names
        assert {"layers.0.q", "layers.3.q"} <= set(names)
        return
    assert says in str(wrong(LLAMA + HF, found, kv=4))


def test_a_hole_in_two_indexes_is_told() -> None:
    text = LLAMA + "layout x on none { x.{l}.{e} = L{l}.X{e}.w[f h] }"
    found: dict[str, Shape] = {f"x.{i}.{e}": (3, 2) for i in range(3) for e in range(3)}
    del found["x.1.2"]
    assert "the tensor of l=1 e=2 is missing" in str(wrong(text, found))


def test_a_huge_number_in_a_name_is_told_and_costs_nothing() -> None:
    found: dict[str, Shape] = {"layers.0.d": (12, 10), "layers.999999999.d": (12, 10)}
    assert "l 1, 2, 3, 4, 5 ... is missing" in str(wrong(LLAMA + HF, found))
    text = LLAMA + "mesh P = ep:1\nlayout x on P { a.{e@ep} = L{0}.X{e}.w[f h] }"
    with pytest.raises(MismatchError, match=r"e 1, 2, 3, 4, 5 \.\.\. is missing"):
        bind_ranks(looked_up(text), {0: {"a.0": (3, 2), "a.999999999": (3, 2)}})


def test_contradictions_name_both_rules() -> None:
    text = LLAMA + "layout x on none { a = E[v h]\n b = nf[h]\n}"
    error = str(wrong(text, {"a": (3, 4), "b": (5,)}))
    assert "dimension 0 of b [5] has length 5, and h=4 make it 4" in error
    assert "x.lay:11  b = nf[h]" in error
    assert "h = 4 by x.lay:10  a = E[v h]  dimension 1 of a [3,4]" in error


def test_products_alone_are_told() -> None:
    resolved = looked_up(LLAMA + HF)
    error = str(wrong(LLAMA + HF, stored(resolved, SIZES)))
    assert (
        "the shapes do not determine the lengths of kv and hd; they give only kv*hd = 12" in error
    )
    assert "declare one of them: let kv = <a divisor of 12>" in error


def test_padding_leaves_a_size_open() -> None:
    resolved = looked_up(LLAMA + MEGATRON)
    error = str(wrong(LLAMA + MEGATRON, stored(resolved, SIZES), kv=4))
    assert "padding hides the length of v: 33 to 64" in error


def test_relations_count() -> None:
    text = "let hd = 3\nlet h = size kv*rep*hd//2\n" + LLAMA + HF
    resolved = looked_up(text)
    assert bind_stored(resolved, stored(resolved, SIZES)).sizes == SIZES
    text = "let h = size 2*hd\n" + LLAMA + HF
    assert "make it" in str(wrong(text, stored(resolved, SIZES), kv=4))


def test_refined_atoms_have_sizes_too() -> None:
    text = "let hd = (two half)\nlet two = 2\n" + LLAMA + HF
    resolved = looked_up(text)
    sizes = {k: n for k, n in SIZES.items() if k != "hd"} | {"two": 2, "half": 5}
    assert bind_stored(resolved, stored(resolved, sizes), {"kv": 4}).sizes == sizes
    assert bind_stored(resolved, stored(resolved, sizes), {"hd": 10}).sizes == sizes | {"hd": 10}


# --- ranks --------------------------------------------------------------------------------------


def test_sizes_follow_from_all_ranks() -> None:
    """Uneven parts add up; even ones of any rank do."""
    resolved = looked_up(LLAMA + MEGATRON)
    bound = bind_ranks(resolved, local(resolved, SIZES), {"v": 37, "kv": 4})
    assert bound.sizes == SIZES


def test_one_rank_and_the_sizes_that_it_cannot_know() -> None:
    resolved = looked_up(LLAMA + MEGATRON)
    shapes = local(resolved, SIZES)
    given_sizes = {"v": 37, "kv": 4, "f": 10, "l": 4}
    assert bind_ranks(resolved, {15: shapes[15]}, given_sizes).sizes == SIZES
    with pytest.raises(MismatchError, match="no shape determines the length of f"):
        bind_ranks(resolved, {15: shapes[15]}, {"v": 37, "kv": 4})
    with pytest.raises(MismatchError, match="this rule's shape is with f=20 h=12"):
        bind_ranks(resolved, {0: shapes[0]}, given_sizes | {"f": 20})


def test_uneven_pipelines_add_up() -> None:
    text = LLAMA + MEGATRON.replace("{#l@pp}", "{#l@pp:ceil}")
    resolved = looked_up(text)
    sizes = SIZES | {"l": 5}
    shapes = local(resolved, sizes)
    assert {len([n for n in s if n.endswith("fc2")]) for s in shapes.values()} == {3, 2}
    assert bind_ranks(resolved, shapes, {"v": 37, "kv": 4}).sizes == sizes


def test_virtual_stages() -> None:
    text = LLAMA + (
        "mesh V = pp:2 local vpp:2\n"
        'layout x on V { m{vpp}.{#l@vpp@pp} = L{l}.g[f h]; pipe l@vpp@pp "Et*2|t|tt|L"\n'
        "m{vpp}.norm = nf[h] on vpp=last on pp=last }"
    )
    ranks: dict[int, dict[str, Shape]] = {
        0: {"m0.0": (3, 2), "m0.1": (3, 2), "m1.0": (3, 2), "m1.1": (3, 2)},
        1: {"m0.0": (3, 2), "m1.norm": (2,)},
    }
    assert bind_ranks(looked_up(text), ranks).sizes == {"l": 5, "f": 3, "h": 2}
    ranks[1]["m0.norm"] = (2,)
    with pytest.raises(MismatchError, match=r"no rule matches m0\.norm"):
        bind_ranks(looked_up(text), ranks)


def test_expert_numbers_may_be_global_or_local() -> None:
    for index, start in (("{#e@ep:ceil}", 0), ("{e@ep:ceil}", 1)):
        text = LLAMA + f"mesh P = ep:3\nlayout x on P {{ a.{index} = L{{0}}.X{{e}}.w[f h] }}"
        ranks: dict[int, dict[str, Shape]] = {
            r: {f"a.{start * 2 * r + i}": (3, 2) for i in range(n)} for r, n in enumerate((2, 2, 1))
        }
        assert bind_ranks(looked_up(text), ranks).sizes == {"l": 1, "e": 5, "f": 3, "h": 2}
        ranks[1]["a.9"] = (3, 2)
        with pytest.raises(MismatchError, match="numbers in names run"):
            bind_ranks(looked_up(text), ranks)


def test_packed_states_say_nothing_by_their_shape() -> None:
    text = LLAMA + "mesh P = dp:2\nlayout x on P { a = E[v h]; flat each @dp of m }"
    shapes = {r: {"a": (4, 3), "optim.a.exp_avg": (6,), "flat.0.exp_avg_sq": (7,)} for r in (0, 1)}
    assert bind_ranks(looked_up(text), shapes).sizes == {"v": 4, "h": 3}


def test_scales_of_quantized_tensors_have_names() -> None:
    text = LLAMA + "layout x on none { a = E[v h] q(int8, [4 4], scale={name}_scale) }"
    assert bind_stored(looked_up(text), {"a": (8, 8), "a_scale": (2, 2)}).sizes == {"v": 8, "h": 8}


def test_sizes_alone() -> None:
    bound = bind_sizes(looked_up(LLAMA + HF), SIZES)
    assert bound.sizes == SIZES
    with pytest.raises(MismatchError, match="no shape determines the length of f"):
        bind_sizes(looked_up(LLAMA + HF), {k: n for k, n in SIZES.items() if k != "f"})
    with pytest.raises(
        MismatchError,
        match=r"kv = 8, but a config\.json, or the layout that it is compared with, says 4",
    ):
        bind_sizes(looked_up("let kv = 8\n" + LLAMA + HF), SIZES)


def test_the_first_rule_of_a_name_wins() -> None:
    """A later rule keeps the numbers that no earlier rule or drop has."""
    text = (
        LLAMA
        + """layout x on none {
      a.0 = L{0}.X{0}.w[h f]
      b.1.* = drop
      a.{e} = L{0}.X{e}.w[f h]
      b.{e}.w = L{1}.X{e}.w[f h]
      b.{e}.v = L{2}.X{e}.w[f h]
    }"""
    )
    bound = bind_sizes(looked_up(text), {"l": 3, "e": 3, "f": 2, "h": 5})
    assert [(show(e.name), dict(e.pinned)) for e in bound.layout.equations] == [
        ("a.0", {"l": 0, "e": 0}),
        ("a.1", {"l": 0, "e": 1}),
        ("a.2", {"l": 0, "e": 2}),
        ("b.0.w", {"l": 1, "e": 0}),
        ("b.2.w", {"l": 1, "e": 2}),
        ("b.0.v", {"l": 2, "e": 0}),
        ("b.2.v", {"l": 2, "e": 2}),
    ]
    assert bound.layout.drop_places == (1,)
    found: dict[str, Shape] = {"a.0": (5, 2), "a.1": (2, 5), "a.2": (2, 5)}
    again = bind_stored(looked_up(text), found)
    assert [show(e.name) for e in again.layout.equations] == ["a.0", "a.1", "a.2"]


# --- at random ----------------------------------------------------------------------------------

HOWS = ["", ":ceil", ":bal", "/2", ":ceil/3"]


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, Sizes]:
    """A layout of three fused and cut rules on two axes, and sizes."""
    how = [draw(st.sampled_from(HOWS)) for _ in range(4)]
    one, two = draw(st.permutations(["a", "b"]))
    first = draw(
        st.sampled_from(
            [
                f"[(x@{one}{how[0]} (p:y|q:1) z) w@{two}{how[1]}]",
                f"[(p:(x y)@{one}{how[0]}|q:x@{two}{how[1]}) z w]",
                f"[(x (p:y|q:1) z)@{one}{how[0]}@{two}{how[1]} w]",
                f"[pad(w, 3)@{one}{how[2]} (x (p:y|q:1)@{two}{how[1]} z)]",
            ]
        )
    )
    rules = f"n = F{first}; g = G[w@{two}{how[2]} v@{one}{how[3]}]; h.{{i@b{how[0]}}} = H{{i}}[v]"
    space = "space s { F.p[x y z w] F.q[x z w] G[w v] H{i}[v] }"
    sizes = {a: draw(st.integers(1, 4)) for a in "xyz"}
    sizes |= {a: 2 * draw(st.integers(1, 6)) for a in "wv"} | {"i": 2 * draw(st.integers(1, 3))}
    return f"mesh M = a:2 b:2\n{space}\nlayout x on M {{ {rules} }}", sizes


@given(programs(), st.sets(st.sampled_from("xyzwvi"), max_size=6))
@settings(max_examples=60, deadline=None)
def test_what_is_found_makes_the_same_shapes(case: tuple[str, Sizes], told: set[str]) -> None:
    """Sizes that follow are right, and all sizes given are never refused."""
    text, sizes = case
    resolved = looked_up(text)
    shapes = local(resolved, sizes)
    if not divides(resolved, sizes):
        return
    assert bind_ranks(resolved, shapes, sizes).sizes == sizes
    try:
        bound = bind_ranks(resolved, shapes, {k: n for k, n in sizes.items() if k in told})
    except MismatchError as error:
        if "the length" not in str(error):
            raise
        return
    assert local(resolved, dict(bound.sizes)) == shapes


@pytest.mark.parametrize("how", HOWS)
def test_on_an_axis_of_one_rank_every_cut_is_the_whole(how: str) -> None:
    resolved = looked_up(
        f"mesh M = a:1 b:1\nspace s {{ G[w v] }}\nlayout x on M {{ g = G[w@a{how} v@b@a{how}] }}"
    )
    assert bind_ranks(resolved, {0: {"g": (6, 4)}}).sizes == {"w": 6, "v": 4}


def divides(resolved: Resolved, sizes: Sizes) -> bool:
    """Whether all even splits of a layout divide."""
    return not [f for f in check_bound(Bound(resolved, sizes)) if f.code == "indivisible"]


# --- everything in buffers ------------------------------------------------------------------------

PACKED = """
mesh M = dp:2
space s {
  W[o i]
  b[o]
  L{l}.n[o]
}
layout a of s on M {
  w = W[o i]
  b = b[o]
  layers.{l}.n = L{l}.n[o]
  flat group(**) @dp:ceil of *
}
"""


def in_buffers(text: str, length: int, **sizes: int) -> Bound:
    ranks = {r: {"flat.0.params": (length,)} for r in range(2)}
    return bind_ranks(resolve([parse(text)], "a"), ranks, sizes)


def test_rules_whose_tensors_are_all_in_buffers_are_kept() -> None:
    found = in_buffers(PACKED, 14, o=4, i=3, l=3)
    assert [e.text.split()[0] for e in found.layout.equations] == ["w", "b", "layers.{l}.n"]
    assert found.sizes == {"o": 4, "i": 3, "l": 3}


def test_buffers_alone_do_not_say_sizes() -> None:
    with pytest.raises(MismatchError, match="no shape determines the length of i"):
        in_buffers(PACKED, 14, o=4)


def test_buffers_of_another_length_than_the_rules_make() -> None:
    message = "flat.0.params of rank 0 has 14 elements, and the rules make 16"
    text = PACKED.replace("  b[o]\n", "  b[o]\n  c[i]\n").replace(
        "b = b[o]", "b = b[o]\n  c = c[i]"
    )
    with pytest.raises(MismatchError, match=message):
        in_buffers(text, 14, o=4, i=3, l=3)


def test_globs_cannot_be_filled_from_buffers() -> None:
    with pytest.raises(UsageError, match=r"write it without '\*'"):
        in_buffers(PACKED.replace("  w = ", "  *.w = "), 13, o=4, i=3, l=3)


def test_a_layout_of_which_nothing_is_there() -> None:
    text = PACKED.replace("  flat group(**) @dp:ceil of *\n", "")
    with pytest.raises(MismatchError, match="no rule of this layout matches an observed tensor"):
        bind_ranks(resolve([parse(text)], "a"), {0: {}}, {"o": 4, "i": 3, "l": 3})


SPELLED = """
mesh M = dp:2
space s { A[x] L{l}.n[x] follow m=exp_avg, s=exp_avg_sq }
layout a of s on M {
  stored "p.{name}"
  stored states "other.{name}.{state}" of **.experts.**
  a = A[x]
  layers.{l}.n = L{l}.n[x]
  flat group(a) @dp of m as "g.experts.{buffer}"
  flat group(layers.**) @dp of * as "g.rest.{buffer}"
}
"""


def test_a_layout_knows_its_buffers_by_all_names_that_it_gives_them() -> None:
    layout = resolve([parse(SPELLED)], "a")
    sizes = {"x": 4, "l": 3}
    form = StoredForm(Bound(layout, sizes))
    ranks = {r: {t.name: t.shape for t in local_tensors(form, r)} for r in range(2)}
    buffers = {n: s for n, s in ranks[0].items() if ".g." in n}
    assert buffers == {
        "other.g.experts.0.exp_avg": (2,),
        "p.g.rest.0": (6,),
        "optim.g.rest.1.exp_avg": (6,),
        "optim.g.rest.0.exp_avg_sq": (6,),
    }
    assert bind_ranks(layout, ranks, sizes).sizes == sizes
    # The first flat has no buffers of that state.
    ranks[0]["other.g.experts.0.exp_avg_sq"] = (2,)
    with pytest.raises(MismatchError, match=r"no rule matches other\.g\.experts\.0\.exp_avg_sq"):
        bind_ranks(layout, ranks, sizes)
