"""What Python builds is what the text says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptd.errors import UsageError
from ckptd.lay import build as b
from ckptd.lay.syntax import parse, parse_dim, parse_name, parse_value, show
from ckptd.lay.syntax.parser import parse_rule

TEXT = """\
mesh M = pp:2 dp:2 tp:8=(tk:4 tr:2) local vpp:2
let D = decoder.layers.{#l@vpp@pp}
let hd = (two half)
let kv = 8
let f = size h*4
space llama {
  E[v h]
  L{l}.q[kv rep hd h]
  follow m=exp_avg, s
  scalar step(group)
  let two = 2
}
layout mg of llama on M {
  embed.weight = E[pad(v, 128*tp)@tp h] on pp=0
  D.qkv.weight = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h@dp:[3 1]] same
  D.gate.weight = L{l}.g[f@tp:bal/128 h] q(int8, [128 128], scale={name}_scale) cast(float16)
  D.norm.weight = nf[h] any avg(tp) affine(1, -1)
  D.bias = B[h] sum(dp)
  head.weight = alias E on pp=last
  **.lora_B = follow rows(linear_qkv)
  **.extra = drop
  use hf.llama
  default [_@dp:ceil ...] same
  flat bucket 40e6 @dp of m,s order reverse start/64 end/lcm(dp, 128)
  flat group(layers.{u}.**) @dp:ceil of * same
  flat each @dp of params
  pipe l@vpp@pp "Ett|tt|tt|L"
  obj rng[pp tp] on-change reseed
  obj data[dp] on-change reduce=sum_consumed
  files "mp {tp}.safetensors"
  stored "model.{name}"
}
layout whole on none {
}
reshard mg -> whole via peer budget 1KiB
use hf.llama
"""


def test_all_forms() -> None:
    mesh = b.mesh(
        "M",
        [b.axis("pp", 2), b.axis("dp", 2), b.axis("tp", 8, b.axis("tk", 4), b.axis("tr", 2))],
        local={"vpp": 2},
    )
    space = b.space(
        "llama",
        b.tensor("E", "v", "h"),
        b.tensor("L{l}.q", "kv", "rep", "hd", "h"),
        b.state("m", "exp_avg"),
        b.state("s"),
        b.scalar("step", "group"),
        b.let("two", 2),
    )
    fused = b.prod(b.split("kv", "tp"), b.cat(q="rep", k=1, v=1), "hd")
    layout = b.layout(
        "mg",
        b.rule("embed.weight", "E", b.split(b.pad("v", "128*tp"), "tp"), "h", b.on("pp", 0)),
        b.rule("D.qkv.weight", "L{l}", fused, b.split("h", "dp", b.widths(3, 1)), b.same()),
        b.rule(
            "D.gate.weight",
            "L{l}.g",
            b.split("f", "tp", b.even("bal", 128)),
            "h",
            b.quantized("int8", [128, 128], "{name}_scale"),
            b.cast("float16"),
        ),
        b.rule("D.norm.weight", "nf", "h", b.any_of(), b.average("tp"), b.affine(1, -1)),
        b.rule("D.bias", "B", "h", b.total("dp")),
        b.rule("head.weight", "E", b.alias(), b.on("pp", "last")),
        b.rule("**.lora_B", None, b.follow_rows("linear_qkv")),
        b.rule("**.extra", None, b.drop()),
        b.use("hf.llama"),
        b.default(b.split(b.wild(), "dp", "ceil"), b.rest(), b.same()),
        b.flat("dp", states="ms", bucket=40_000_000, order="reverse", start=64, end="lcm(dp,128)"),
        b.flat("dp", b.same(), how="ceil", group="layers.{u}.**"),
        b.flat("dp", states=["params"]),
        b.pipe("l", ["vpp", "pp"], "Ett|tt|tt|L"),
        b.obj("rng", "pp", "tp", on_change="reseed"),
        b.obj("data", "dp", on_change="reduce", reduce="sum_consumed"),
        b.files("mp {tp}.safetensors"),
        b.stored("model.{name}"),
        of="llama",
        on="M",
    )
    built = b.file(
        mesh,
        b.let("D", parse_name("decoder.layers.{#l@vpp@pp}")),
        b.let("hd", parse_dim("(two half)")),
        b.let("kv", 8),
        b.let("f", parse_value("h*4")),
        space,
        layout,
        b.layout("whole"),
        b.reshard("mg", "whole", "peer", 1024),
        b.use("hf.llama"),
    )
    assert built == parse(TEXT)
    assert show(built) == show(parse(TEXT))


def test_the_rule_of_the_module() -> None:
    fused = b.prod(b.split("kv", "tp"), b.cat(q="rep", k=1, v=1), "hd")
    built = b.rule("decoder.layers.{#l@pp}.qkv.weight", "L{l}", fused, "h", b.same())
    text = "decoder.layers.{#l@pp}.qkv.weight = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h] same"
    assert built == parse_rule(text)


def test_texts_stand_for_nodes() -> None:
    assert b.rule("a", "E", "(kv@tp hd)", 1) == parse_rule("a = E[(kv@tp hd) 1]")
    assert b.mesh("M", {"pp": 2, "tp": 4}) == parse("mesh M = pp:2 tp:4").items[0]


@pytest.mark.parametrize(
    "build",
    [
        lambda: b.rule("a b", "E", "h"),
        lambda: b.rule("a", "E", "h", b.same(), "h"),
        lambda: b.rule("a", "E", 2),
        lambda: b.rule("a", "E", "h]"),
        lambda: b.split("h", "a b"),
        lambda: b.pad("h", -1),
        lambda: b.mesh("a.b", {"pp": 2}),
        lambda: b.tensor("E", "a b"),
        lambda: b.layout("a b"),
        lambda: b.use("a;b"),
        lambda: b.obj("x", "dp", on_change="reduce"),
        lambda: b.obj("x", "dp", on_change="drop", reduce="mean"),
        lambda: b.files('a"b'),
        lambda: b.flat("dp", states=["m", "*"]),
    ],
)
def test_what_no_text_could_say_is_refused(build: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as caught:
        build()
    assert caught.value.kind == "lay-syntax"


def test_sizes_as_ends_of_for() -> None:
    assert show(b.only("l", slice("dense", None))) == "for l=(dense).."
    assert show(b.only("l", slice(0, "dense"), 9)) == "for l=[0..(dense - 1) 9]"


def test_parts_and_names_of_buffers() -> None:
    found = b.flat("dp", parts=400, end="dp", called="{buffer}")
    assert show(found) == 'flat parts 400 @dp of * end/dp as "{buffer}"'
    assert show(b.flat("dp", parts=0, group="**.n")) == "flat parts(**.n) @dp of *"
    named = b.flat("dp", group="layers.{u}.**", called="layers.{u}.flat")
    assert show(named) == 'flat group(layers.{u}.**) @dp of * as "layers.{u}.flat"'


def test_other_names_of_states() -> None:
    found = b.stored(states="optimizer.state.{state}.{name}", w="param")
    assert show(found) == 'stored states "optimizer.state.{state}.{name}" with w=param'
    some = b.stored(states="x.{state}.{name}", names="**.experts.**")
    assert show(some) == 'stored states "x.{state}.{name}" of **.experts.**'
    assert show(b.stored(m="momentum")) == 'stored states "optim.{name}.{state}" with m=momentum'
