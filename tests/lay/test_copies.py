from __future__ import annotations

import pytest

from ckptd.base.grids.grid import whole
from ckptd.errors import MismatchError, UsageError
from ckptd.lay.bind import bind_sizes
from ckptd.lay.copies import Composition, compose
from ckptd.lay.proving import prove
from ckptd.lay.resolve import Bound, resolve
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax import parse
from ckptd.lay.syntax.tree import Affine
from tests.lay.agreement.brute_judge import Judge
from tests.lay.world import bound, execute, local_elements, piece_elements

SPACE = """
space llama { E[v h] head[v h] nf[h]
  L{l}.q[kv rep hd h] L{l}.k[kv hd h] L{l}.v[kv hd h] L{l}.o[h kv rep hd]
  L{l}.g[f h] L{l}.u[f h] L{l}.d[h f] L{l}.n1[h]
  follow m }
"""
SIZES = {"l": 3, "v": 10, "h": 4, "kv": 4, "rep": 2, "hd": 4, "f": 6}

MEGATRON = """
mesh M = pp:2 dp:2 tp:2
let D = decoder.layers.{#l@pp:ceil}
layout mg of llama on M {
  embedding.weight = E[pad(v,3*tp)@tp h] on pp=0
  D.qkv.weight = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]
  D.proj.weight = L{l}.o[h (kv@tp rep hd)]
  D.fc1.weight = L{l}[(g:f@tp|u:f@tp) h]
  D.fc2.weight = L{l}.d[h f@tp]
  D.norm.weight = L{l}.n1[h] same
  output.weight = head[pad(v,3*tp)@tp h] on pp=last
  norm.weight = nf[h] same on pp=last
  FLAT
}
"""
RAW_ROWS = """
mesh R = tp:6
layout raw of llama on R {
  emb = E[v@tp:ceil h]
  out = head[v h@tp:ceil]
  norm = nf[h]
  layers.{l}.qkv = L{l}[(kv (q:rep|k:1|v:1) hd)@tp:ceil h]
  layers.{l}.o = L{l}.o[h (kv rep hd)@tp:bal]
  layers.{l}.gu = L{l}[(g:f|u:f)@tp h]
  layers.{l}.d = L{l}.d[h f@tp]
  layers.{l}.n = L{l}.n1[h@tp:ceil]
}
"""
FSDP_OVER_TP = """
mesh T = dp:3 tp:2
layout tf of llama on T {
  emb.weight = E[v@tp@dp:ceil h]
  head.weight = head[v@tp@dp:ceil h]
  norm.weight = nf[h@dp:ceil]
  l.{l}.q.weight = L{l}.q[((kv rep)@tp hd)@dp:ceil h]
  l.{l}.k.weight = L{l}.k[(kv@tp hd)@dp:bal h]
  l.{l}.v.weight = L{l}.v[(kv@tp hd)@dp:ceil h]
  l.{l}.o.weight = L{l}.o[h@dp:ceil ((kv rep)@tp hd)]
  l.{l}.g.weight = L{l}.g[f@tp@dp h]
  l.{l}.u.weight = L{l}.u[f@tp@dp h]
  l.{l}.d.weight = L{l}.d[h@dp:ceil f@tp]
  l.{l}.n.weight = L{l}.n1[h@dp:[1 0 3]]
}
"""
HF = """
layout hf of llama on none {
  emb.weight = E[v h]
  head.weight = head[v h]
  norm.weight = nf[h]
  layers.{l}.q = L{l}.q[(kv rep two half) h]
  layers.{l}.k = L{l}.k[(kv half two) h]
  layers.{l}.v = L{l}.v[(kv hd) h]
  layers.{l}.o = L{l}.o[h (kv rep hd)]
  gate = L.g[(l f) h]
  layers.{l}.u = L{l}.u[h f]
  layers.{l}.d = L{l}.d[h f]
  layers.{l}.n = L{l}.n1[h]
}
let hd = (two half)
"""
ZERO = """
mesh Z = dp:5
layout z3 of llama on Z {
  emb.weight = E[v h]
  head.weight = head[v h]
  norm.weight = nf[h]
  layers.{l}.q = L{l}.q[(kv rep hd) h]
  layers.{l}.k = L{l}.k[(kv hd) h]
  layers.{l}.v = L{l}.v[(kv hd) h]
  layers.{l}.o = L{l}.o[h (kv rep hd)]
  layers.{l}.gu = L{l}[(g:f|u:f) h]
  layers.{l}.d = L{l}.d[h f]
  layers.{l}.n = L{l}.n1[h]
  FLAT
}
"""
NONE, EACH = "", "flat each @dp:ceil of params,m"
BUCKET = "flat bucket 100 @dp of m order reverse start/8 end/lcm(dp,16)"
GROUP = "flat group(layers.{l}.**) @dp:ceil of * order module start/3"
LAYOUTS = {
    "mg": (MEGATRON.replace("FLAT", NONE), "mg"),
    "mg-bucket": (MEGATRON.replace("FLAT", BUCKET), "mg"),
    "raw": (RAW_ROWS, "raw"),
    "tf": (FSDP_OVER_TP, "tf"),
    "hf": (HF, "hf"),
    "z3": (ZERO.replace("FLAT", EACH), "z3"),
    "fsdp1": (ZERO.replace("FLAT", GROUP), "z3"),
}
PARTS = {"two": 2, "half": 2}


def made(name: str) -> StoredForm:
    text, layout = LAYOUTS[name]
    return StoredForm(bound(SPACE + text, layout, **SIZES, **PARTS))


def composed(source: str, target: str) -> Composition:
    return compose(made(source).bound, made(target).bound)


NAMES = list(LAYOUTS)
PAIRS = [(a, NAMES[(i + k) % len(NAMES)]) for i, a in enumerate(NAMES) for k in (1, 2, 4)]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_pairs(source: str, target: str) -> None:
    c = composed(source, target)
    for rank in range(c.target.mesh.world):
        for tensor, plan in c.local(rank):
            wanted = local_elements(c.target, tensor, rank)
            assert execute(plan, c.source).tolist() == wanted.tolist(), tensor.name
            prove(plan)
    for stored in c.target.tensors():
        for piece in range(stored.grid.npieces):
            plan = c.piece((stored.rule, stored.indexes, stored.state), piece)
            wanted = piece_elements(c.target, stored, piece)
            assert execute(plan, c.source).tolist() == wanted.tolist(), stored.name


def test_layers_and_states_share_their_blocks() -> None:
    c = composed("mg", "tf")
    plans = dict(c.local(0))
    by_name = {t.name: p for t, p in plans.items()}
    first = by_name["l.0.q.weight"].sources
    for name in ("l.1.q.weight", "optim.l.0.q.weight.m"):
        assert all(a.pieces is b.pieces for a, b in zip(first, by_name[name].sources, strict=True))
    sources = {p.copies[0].source.name for n, p in by_name.items() if n.endswith("q.weight")}
    assert sources == {f"decoder.layers.{i}.qkv.weight" for i in range(3)}


def test_fused_rows_are_one_block() -> None:
    # A query of four heads out of a fused tensor: heads are apart, rows within them are not.
    c = composed("mg", "tf")
    (plan,) = [p for t, p in c.local(0) if t.name == "l.0.k.weight"]
    (copy,) = plan.copies
    (block,) = copy.blocks
    assert (block.shape, block.source_start) == ((12,), 32)
    assert (block.source_strides, block.target_strides) == ((1,), (1,))


def test_a_reader_may_have_other_pieces() -> None:
    # The same tensors, as somebody stored them who knows nothing of layouts.
    source, target = made("mg").bound, made("tf").bound
    grids = {t.name: whole(t.shape) for t in made("mg").tensors()}
    c = compose(source, target, grids.__getitem__)
    for tensor, plan in c.local(3):
        wanted = local_elements(c.target, tensor, 3)
        assert execute(plan, c.source).tolist() == wanted.tolist()
        assert {copy.piece for copy in plan.copies} <= {0}
    wrong = compose(source, target, lambda _: whole((1,)))
    with pytest.raises(MismatchError, match="another shape"):
        list(wrong.local(0))


FAMILIES = "space s { a[x y] b[x] L{l}.c[x] follow m }\n"


def pair(
    source: str, target: str, sizes: dict[str, int] | None = None, space: str = FAMILIES
) -> Composition:
    known = {"x": 4, "y": 3, "l": 2}
    one = bound(f"mesh A = p:2\n{FAMILIES}layout a of s on A {{\n{source}\n}}", "a", **known)
    text = f"mesh B = q:2\n{space}layout b of s on B {{\n{target}\n}}"
    return compose(one, bound(text, "b", **(known | (sizes or {}))))


def check(c: Composition) -> None:
    for rank in range(c.target.mesh.world):
        for tensor, plan in c.local(rank):
            wanted = local_elements(c.target, tensor, rank)
            assert execute(plan, c.source).tolist() == wanted.tolist(), tensor.name


def test_layouts_that_disagree() -> None:
    with pytest.raises(MismatchError, match="axis x has different lengths"):
        pair("w = b[x]", "w = b[x]", {"x": 5})
    with pytest.raises(MismatchError, match="different axes"):
        pair("w = b[x]", "w = b[y]", space=FAMILIES.replace("b[x]", "b[y]"))


def test_what_the_source_does_not_hold() -> None:
    with pytest.raises(MismatchError, match="the source lacks this tensor") as error:
        check(pair("w = b[x]", "w = a[x y]"))
    assert error.value.kind == "lay-cover"
    assert error.value.where == "a"
    with pytest.raises(MismatchError, match="or a part of it"):
        check(pair("w = L{0}.c[x]", "w.{l} = L{l}.c[x]"))
    with pytest.raises(MismatchError, match="no state n"):
        check(pair("w = b[x]", "w = b[x]", space=FAMILIES.replace("follow m", "follow n")))


def test_references_to_one_index() -> None:
    first = "first = L{0}.c[x@p]\nw.{l} = L{l}.c[x]"
    check(pair(first, "w = L.c[(l x)@q]"))
    check(pair("w = L.c[(l x)@p]", first.replace("@p", "@q")))
    (tensor, plan), *_ = pair(first, "w = L.c[(l x)@q]").local(0)
    assert tensor.name == "w"
    assert [c.source.name for c in plan.copies] == ["first", "first"]


def test_another_copy_of_a_tensor() -> None:
    tied = "emb = a[x@q y]\nout = alias a"
    check(pair("w = a[x y@p:ceil]", tied))
    c = pair(tied.replace("@q", "@p"), "w = a[x y]")
    assert [t.name for t in c.source.tensors()] == ["emb", "optim.emb.m"]
    check(c)


def test_values() -> None:
    c = pair("w = a[x y] cast(float32) avg(p)", "w = a[x@q y] affine(1, -1)")
    found = {t.state: p.copies[0].values for t, p in c.local(0)}
    (kept,) = [v for v in found.values() if v is not None]
    assert [type(m).__name__ for m in kept.source + kept.target] == ["Cast", "Affine"]
    assert found["m"] is None


def scaled(follow: str, stored: str = "") -> list[tuple[str, object]]:
    """Return what happens to each state of a tensor that one layout holds twice as large."""
    text = f"""
    space t {{ a[x]  follow {follow} }}
    layout one of t on none {{ w = a[x] {stored} }}
    layout two of t on none {{ w = a[x] affine(2, 1) }}
    """
    c = compose(*(Bound(resolve([parse(text)], name), {"x": 4}) for name in ("one", "two")))
    rules = c.source.rules[0], c.target.rules[0]
    found = [(s, c.values(*rules, s)) for s in c.target.states]
    out: list[tuple[str, object]] = []
    for state, change in found:
        assert change is not None
        assert change.source == ()
        affine = [m for m in change.target if isinstance(m, Affine)]
        out.append((state, [(m.scale, m.shift) for m in affine]))
    return out


def test_states_follow_a_scale_by_what_they_are() -> None:
    wanted = [(2.0, 1.0)], [(0.5, 0.0)], [(0.25, 0.0)], [(2.0, 1.0)]
    assert scaled("m, s, w") == list(zip(["", "m", "s", "w"], wanted, strict=True))
    found = scaled("a1=exp_avg, a2=exp_avg_sq, fp32=master")
    assert found == list(zip(["", "a1", "a2", "fp32"], wanted, strict=True))
    renamed = 'stored states "o.{name}.{state}" with fp32=other'
    assert scaled("fp32=master", f"; {renamed}")[1] == ("fp32", [(2.0, 1.0)])


def test_a_state_of_which_nothing_is_known_does_not_follow_a_scale() -> None:
    with pytest.raises(UsageError) as caught:
        scaled("z=velocity")
    assert caught.value.kind == "lay-rule"
    assert "state z" in (caught.value.where or "")


def test_empty_axes() -> None:
    check(pair("w = a[x y@p:ceil]", "w = a[x@q y]", {}))
    c = pair("w = b[x]", "w = b[x]")
    assert [p.numel for _, p in c.local(0)] == [4, 4]


def test_copies_under_several_numbers() -> None:
    """A tensor without layers may have a copy in each layer's fused tensor."""
    program = parse("""
        mesh M = tp:2
        space s { L{l}.X.q[o h]; L.X.k[o h] }
        layout a of s on M {
          layers.{l}.qk = alias X[(q:o@tp|k:o@tp) h]
          k = L.X.k[o h]
          q.{l} = X.q[o h]
        }
        layout b of s on M { k = L.X.k[o@tp h]; q = X.q[l o h] }
    """)
    one, two = (
        bind_sizes(resolve([program], name), {"l": 2, "o": 4, "h": 3}) for name in ("a", "b")
    )
    for source, target in ((one, two), (two, one), (one, one)):
        Judge(source, target).check()
