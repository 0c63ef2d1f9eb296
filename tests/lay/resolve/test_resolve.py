"""Programs to equations: lets, alternatives, use, default, aliases, followers, drops."""

from __future__ import annotations

import re

import pytest

from ckptd.errors import NotFoundError, UsageError
from ckptd.lay.matching import NameTemplates, ParsedName
from ckptd.lay.resolve import Equation, Resolved, resolve, resolve_all
from ckptd.lay.syntax import parse, show
from ckptd.lay.syntax.tree import File

SPACE = """
space llama {
  E[v h]
  nf[h]
  L{l}.q[kv rep hd h] .k[kv hd h] .v[kv hd h] .o[h kv rep hd] .g[f h] .u[f h] .d[h f] .n1[h]
  L{l}.X{e}.w[f h]
  follow m=exp_avg, s
}
mesh M = pp:2 dp:2 tp:4
"""
HF = """
layout hf of llama on none {
  model.embed.weight = E[v h]
  model.layers.{l}.attn.q_proj.weight = L{l}.q[(kv rep hd) h]
  model.layers.{l}.attn.{k,v}_proj.weight = L{l}.{k,v}[(kv hd) h]
  model.layers.{l}.mlp.gate.weight = L{l}.g[f h]
  model.layers.{l}.norm.weight = L{l}.n1[h]
  model.norm.weight = nf[h]
}
"""


def nothing(name: str) -> File:
    raise NotFoundError(f"no shipped {name}", hint="shipped: none")


def looked_up(text: str, layout: str = "x") -> Resolved:
    return resolve([parse(text, "x.lay")], layout, nothing)


def lines(resolved: Resolved) -> list[str]:
    return [line(e) for e in resolved.equations]


def line(equation: Equation) -> str:
    families = " ".join(f.name for f in equation.families.values())
    dims = " ".join(map(show, equation.dims))
    modifiers = "".join(f" {show(m)}" for m in equation.modifiers)
    pins = "".join(f" {a}={n}" for a, n in equation.pinned.items())
    return f"{show(equation.name)} = {families} [{dims}]{modifiers}{pins}"


def wrong(text: str, layout: str = "x") -> UsageError:
    with pytest.raises(UsageError) as caught:
        looked_up(text, layout)
    assert caught.value.kind == "lay-rule"
    return caught.value


def test_tags_lead_to_families() -> None:
    found = looked_up(SPACE + "layout x on M { a.{l} = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h] }")
    (equation,) = found.equations
    assert {t: f.name for t, f in equation.families.items()} == {
        ("q",): "L{l}.q",
        ("k",): "L{l}.k",
        ("v",): "L{l}.v",
    }
    assert equation.families["q",].axes == ("l", "kv", "rep", "hd", "h")
    assert equation.families["q",].indexes == 1
    assert (found.space, found.mesh.world if found.mesh else 0) == ("llama", 16)
    assert [(s.name, s.stored) for s in found.states] == [("m", "exp_avg"), ("s", "s")]


def test_lets_are_put_in() -> None:
    found = looked_up(
        SPACE
        + """
        let T = decoder.layers
        let D = T.{#l@pp}
        let hd = (two half)
        let rows = (q:rep|k:1|v:1)
        let wide = 32*4
        let kv = 8
        let h = size kv*rep*hd
        layout x on M {
          D.qkv = L{l}[(kv@tp rows hd) h]
          DD.w = E[pad(v, wide*tp)@tp/wide h]
        }"""
    )
    assert lines(found) == [
        "decoder.layers.{#l@pp}.qkv = L{l}.q L{l}.k L{l}.v [(kv@tp (q:rep|k:1|v:1) (two half)) h]",
        "DD.w = E [pad(v, 32*4*tp)@tp/(32*4) h]",
    ]
    assert found.families["L{l}.q"].axes == ("l", "kv", "rep", "two", "half", "h")
    assert {a: show(d) for a, d in found.refined.items()} == {"hd": "(two half)"}
    assert found.sizes == {"kv": 8}
    assert set(found.relations) == {"h"}
    assert found.equations[0].text == "D.qkv = L{l}[(kv@tp rows hd) h]"


def test_a_size_of_the_program_goes_before_that_of_a_file_it_uses() -> None:
    """What names begin with is each file's own."""
    there = "let n = 8; let D = theirs; space s { A[i j] B[i] }\n"
    there += "layout there of s on none { D.a = A[pad(i, n) j] }"
    mine = "let n = 4; let D = mine; layout x on none { use there; D.b = B[i] }"
    found = resolve([parse(mine)], "x", lambda name: parse(there, name))
    assert lines(found) == ["mine.b = B [i]", "theirs.a = A [pad(i, 4) j]"]


def test_alternatives_go_in_step() -> None:
    found = looked_up(SPACE + "layout x on none { {a,b}.{l} = L{l}.{g,u}[f h] }")
    assert lines(found) == ["a.{l} = L{l}.g [f h]", "b.{l} = L{l}.u [f h]"]
    assert "in step" in str(wrong(SPACE + "layout x on none { {a,b,c}.{l} = L{l}.{g,u}[f h] }"))


def test_globs_take_over_names_and_default_wraps_the_rest() -> None:
    found = looked_up(
        SPACE
        + HF
        + """layout x on M {
          use hf
          **.q_proj.weight = q[((kv rep)@tp hd)@dp:ceil h]
          model.norm.weight = nf[_] same
          default [_@dp:ceil ...] any
        }"""
    )
    assert lines(found) == [
        "model.layers.{l}.attn.q_proj.weight = L{l}.q [((kv rep)@tp hd)@dp:ceil h]",
        "model.norm.weight = nf [h] same",
        "model.embed.weight = E [v@dp:ceil h] any",
        "model.layers.{l}.attn.k_proj.weight = L{l}.k [(kv hd)@dp:ceil h] any",
        "model.layers.{l}.attn.v_proj.weight = L{l}.v [(kv hd)@dp:ceil h] any",
        "model.layers.{l}.mlp.gate.weight = L{l}.g [f@dp:ceil h] any",
        "model.layers.{l}.norm.weight = L{l}.n1 [h@dp:ceil] any",
    ]


def test_the_first_default_that_fits_wraps() -> None:
    text = "layout x on M { use hf; default [_ _@tp]; default [_@dp] }"
    found = lines(looked_up(SPACE + HF + text))
    assert "model.embed.weight = E [v h@tp]" in found
    assert "model.norm.weight = nf [h@dp]" in found


def test_a_glob_keeps_its_own_indexes() -> None:
    text = """
    layout lists of llama on none { model.layers.{l}.experts.{e}.w = L{l}.X{e}.w[f h] }
    mesh P = ep:4
    layout x on P { use lists; **.experts.{#e@ep}.w = w[f h] }"""
    assert lines(looked_up(SPACE + text)) == [
        "model.layers.{l}.experts.{#e@ep}.w = L{l}.X{e}.w [f h]"
    ]


def test_use_reaches_through_layouts_and_files() -> None:
    def load(name: str) -> File:
        return {"hf.llama": parse(SPACE + HF), "m": parse("mesh N = dp:3")}[name]

    text = "use m\nlayout y on N { use hf.llama; default [_@dp:ceil ...] }"
    text += "\nlayout x on N { use y; model.embed.weight = E[v h@dp:bal] }"
    found = resolve([parse(text)], "x", load)
    assert lines(found)[:2] == [
        "model.embed.weight = E [v h@dp:bal]",
        "model.layers.{l}.attn.q_proj.weight = L{l}.q [(kv rep hd)@dp:ceil h]",
    ]
    assert found.mesh is not None
    assert found.mesh.world == 3
    assert found.space == "llama"


def test_an_alias_takes_dimensions_from_the_rule_that_holds_the_tensor() -> None:
    found = looked_up(
        SPACE
        + """layout x on M {
          out = alias E on pp=last
          embedding = E[pad(v, 128*tp)@tp h] on pp=0
        }"""
    )
    assert lines(found)[0] == "out = E [pad(v, 128*tp)@tp h] alias on pp=last"


def test_followers_have_the_rows_of_the_rule_they_follow() -> None:
    found = looked_up(
        SPACE
        + """layout x on M {
          layers.{#l@pp}.qkv.weight = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]
          layers.{#l@pp}.qkv.norm = L{l}.n1[h]
          **.lora_B.weight = follow rows(qkv)
          layers.{#l@pp}.B = scale[_ r2] follow rows(qkv.norm)
        }"""
    )
    assert lines(found)[2:] == [
        (
            "layers.{#l@pp}.qkv.lora_B.weight = L{l}.q.lora_B L{l}.k.lora_B L{l}.v.lora_B "
            "[(kv@tp (q:rep|k:1|v:1) hd) r]"
        ),
        "layers.{#l@pp}.B = L{l}.n1.scale [h r2]",
    ]
    assert found.families["L{l}.q.lora_B"].axes == ("l", "kv", "rep", "hd", "r")
    assert found.families["L{l}.q.lora_B"].indexes == 1


def test_a_reference_can_fix_an_index() -> None:
    found = looked_up(SPACE + "layout x on none { a.{l} = L{l}.X{0}.w[f h]; b = L{1}.X{2}.w[f h] }")
    assert lines(found) == ["a.{l} = L{l}.X{e}.w [f h] e=0", "b = L{l}.X{e}.w [f h] l=1 e=2"]


def test_an_index_may_stand_in_a_dimension() -> None:
    found = looked_up(SPACE + "layout x on M { a.{l} = L{l}.X.w[(e@dp f) h]; b = w[(l e f) h] }")
    assert [f.name for e in found.equations for f in e.families.values()] == ["L{l}.X{e}.w"] * 2


def test_drops_keep_their_place() -> None:
    text = (
        "layout x on none { use hf; E.w = E[v h]; **.gate.weight = drop; a = nf[h]; **.b = drop }"
    )
    found = looked_up(SPACE + HF + text)
    assert "model.layers.{l}.mlp.gate.weight" not in " ".join(lines(found))
    shown = list(zip(map(show, found.drops), found.drop_places, strict=True))
    assert shown == [
        ("model.layers.{l}.mlp.gate.weight", 1),
        ("**.gate.weight", 1),
        ("**.b", 2),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layout x on M { a = Q[h] }", "no Q"),
        ("layout x on M { a.{l} = L{l}.qq[h] }", r"did you mean L\{l\}.q\?"),
        ("layout x on M { a.{l} = L{i}.q[h] }", "did you mean"),
        ("layout x on M { a = E[_ h] }", "repeat dimensions"),
        ("layout x on M { a = alias E }", "no rule holds E alone"),
        ("layout x on M { a = follow rows(nope) }", "no rule has such a name"),
        ("layout x on M { a.{l} = L{l}[(q:h|q:h)] }", "the tag q comes twice"),
        ("layout x on N { a = E[v h] }", "unknown mesh N"),
        ("layout x of y on M { a = E[v h] }", "unknown space y"),
        ("layout x on M { use y }", "unknown layout y"),
        ("layout x on M { use x }", "uses itself"),
        ("layout x on M { use y }\nlayout y on M { use x }", "uses itself"),
        ("layout x on M { use hf; default [v@dp ...] }" + HF, "has one '_'"),
        ("layout x on M { use hf; q.weight = E[v h]; a**b = nf[h] }" + HF, "whole components"),
        ("let hd = (a:b|c:d)\nlayout x on M { a = E[v h] }", "only a product of axes"),
        ("let a = [(a b)]\nlayout x on M { w = E[(a v) h] }", "in circles"),
        (
            "let a = [(b b)]\nlet b = [(c c)]\nlet c = [(a v)]\nlayout x on M { w = E[a h] }",
            "lets|circ",
        ),
        ("let D = D.x\nlayout x on M { D.w = E[v h] }", "in circles"),
        ("let kv = 8\nlet kv = 9\nlayout x on M { w = E[v h] }", "kv has another value"),
        ('layout x on M { w = E[v h]; pipe l@pp "Et|t|L" }', "3 stages over pp=2"),
    ],
)
def test_what_cannot_be_looked_up(text: str, says: str) -> None:
    error = wrong(SPACE + text)
    assert re.search(says, str(error)), str(error)


def test_all_wrong_rules_are_told_at_once() -> None:
    text = SPACE + "layout x on M {\n a = Q[h]\n b = nf[h]\n c = R[h]\n}"
    found, findings = resolve_all([parse(text, "x.lay")], "x", nothing)
    assert lines(found) == ["b = nf [h]"]
    assert [(f.at.line, f.rule) for f in findings] == [(11, "a = Q[h]"), (13, "c = R[h]")]


def test_an_overridden_override_is_told() -> None:
    text = (
        "layout x on M { use hf; **.norm.weight = n1[h]; model.layers.{l}.norm.weight = n1[h@tp] }"
    )
    _, findings = resolve_all([parse(SPACE + HF + text)], "x", nothing)
    assert [f.code for f in findings] == ["shadowed"]


def test_one_space_under_two_definitions_is_refused() -> None:
    files = [parse(SPACE, "a.lay"), parse("space llama { E[h v] }", "b.lay")]
    with pytest.raises(UsageError, match=r"defined in a\.lay:2 already"):
        resolve(files, "x", nothing)
    again = [parse(SPACE, "a.lay"), parse(SPACE + "layout x on M { a = nf[h] }", "b.lay")]
    assert lines(resolve(again, "x", nothing)) == ["a = nf [h]"]


def test_lets_that_nest_deeply_are_refused() -> None:
    lets = "".join(f"let a{i} = {'(' * 50}a{i + 1} v{')' * 50}\n" for i in range(10))
    assert "nest too deeply" in str(wrong(SPACE + lets + "layout x on M { w = E[a0 h] }"))


def test_lets_that_double_are_refused() -> None:
    lets = "".join(f"let a{i} = ({' '.join([f'a{i + 1}'] * 20)})\n" for i in range(10))
    assert "too large" in str(wrong(SPACE + lets + "layout x on M { w = E[a0 h] }"))


def test_defaults_of_defaults_are_refused_when_they_nest_deeply() -> None:
    layouts = "layout l0 of llama on M { w = E[v h] }\n" + "".join(
        f"layout l{i} on M {{ use l{i - 1}; default [{'(' * 20}_{')' * 20} ...] }}\n"
        for i in range(1, 8)
    )
    error = wrong(SPACE + layouts + "layout x on M { use l7 }")
    assert "nest too deeply" in str(error)


def test_a_layout_renames_states_of_its_space() -> None:
    program = """
space s {
  W[h]
  follow m=exp_avg, w=master
}
layout a of s on none {
  stored states "opt.{state}.{name}" with w=param
  x = W[h]
}
layout b of s on none {
  stored states "{name}.{state}" with z=param
  x = W[h]
}
"""
    file = parse(program, "t.lay")
    found = resolve([file], "a")
    assert [(s.name, s.stored) for s in found.states] == [("m", "exp_avg"), ("w", "param")]
    with pytest.raises(UsageError, match="the space has no state z"):
        resolve([file], "b")
    without = parse(program.replace("  follow m=exp_avg, w=master\n", ""), "t.lay")
    assert resolve([without], "a").states == ()


def test_states_of_some_rules_are_called_otherwise() -> None:
    """The first pattern that matches counts; a layout that says it says it for what it uses."""
    program = """
space s {
  W[h]
  L{l}.X{e}[h]
  follow m=exp_avg
  scalar step(param)
}
layout a of s on none {
  stored "p.{name}" states "opt.{state}.{name}"
  stored states "other.{state}.{name}" of layers.**.experts.**
  stored states "never.{state}.{name}" of **.experts.**
  w = W[h]
  layers.{l}.experts.{e} = L{l}.X{e}[h]
}
layout b of s on none { use a }
layout c of s on none { stored states "{name}.{state}"; use a }
"""
    file = parse(program, "t.lay")
    expert = "layers.3.experts.5"
    for name in ("a", "b"):
        found = resolve([file], name)
        assert found.state_name("w", "exp_avg") == "opt.exp_avg.w"
        assert found.state_name(expert, "step") == f"other.step.{expert}"
        templates = NameTemplates(found)
        assert templates.take("opt.exp_avg.w") == ParsedName("w", "m")
        assert templates.take(f"other.exp_avg.{expert}") == ParsedName(expert, "m")
        assert templates.take(f"other.step.{expert}") == ParsedName(expert, "step", scalar=True)
        # Names that nothing is called so.
        assert templates.take(f"opt.exp_avg.{expert}") is None
        assert templates.take("other.exp_avg.w") is None
    assert resolve([file], "c").state_name(expert, "exp_avg") == f"{expert}.exp_avg"
