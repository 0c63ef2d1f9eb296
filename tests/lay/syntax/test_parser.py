"""What is written, as a tree; what is no program, as an error that helps."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import UsageError
from ckptd.lay.syntax import format_text, parse, parse_statement, show
from ckptd.lay.syntax.tree import (
    EVEN,
    Alias,
    Alternatives,
    Arithmetic,
    Assigned,
    Atom,
    Branch,
    Drop,
    Even,
    Flat,
    FollowedState,
    FollowRows,
    Glob,
    Layout,
    Let,
    Mesh,
    MeshAxis,
    Name,
    NameIndex,
    Number,
    On,
    One,
    Pad,
    Position,
    Product,
    Reshard,
    Rule,
    Size,
    Space,
    Split,
    Sum,
    Text,
    Use,
    Widths,
)
from tests.lay.syntax.parts import parse_dim, parse_item, parse_name, parse_rule


def parse_space(text: str) -> Space:
    found = parse_item(f"space s {{\n{text}\n}}")
    assert isinstance(found, Space)
    return found


PROGRAMS = sorted((Path(__file__).parents[1] / "programs").glob("*.lay"))

PROGRAM = """\
mesh M = pp:2 dp:2 tp:8=(tk:4 tr:2) local vpp:2
let D = decoder.layers.{#l@vpp@pp}
let hd = (two half)
space llama {
  E[v h]
  L{l}.q[kv rep hd h] .k[kv hd h]
  follow m=exp_avg, s
  scalar step(group)
}
layout mg of llama on M {
  D.linear_qkv.weight = L{l}[(kv@tp (q:rep|k:1) hd) pad(h, 128*tp)@dp:ceil/2]  # one
  **.{k,v}_proj.weight = {k,v}[(kv@tp:[3 5] hd)@dp h] q(int8, [128 128], scale={name}_s) same
  "odd #name" = alias E on pp=last
  use hf.llama; default [_@dp:ceil ...]
  flat bucket 40e6 @dp of m,s order reverse start/64 end/lcm(dp,128)
  pipe l@vpp@pp "Et*3|(tt|)*29,m|L"
  obj rng[pp tp] on-change reduce=mean
  files "mp_{tp}.safetensors"
  stored "model.{name}" states "o.{name}.{state}"
}
reshard mg -> fs via peer budget 4GiB
"""


def layout(body: str) -> Layout:
    found = parse_item(f"layout x on M {{\n{body}\n}}")
    assert isinstance(found, Layout)
    return found


# --- trees --------------------------------------------------------------------------------------


def test_a_fused_tensor() -> None:
    rule = parse_rule("decoder.layers.{#l@pp}.qkv = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]")
    fused = Sum((Branch("q", Atom("rep")), Branch("k", One()), Branch("v", One())))
    assert rule == Rule(
        Name((Text("decoder.layers."), NameIndex("l", (("pp", EVEN),), local=True), Text(".qkv"))),
        Name((Text("L"), NameIndex("l"))),
        (Product((Split(Atom("kv"), "tp"), fused, Atom("hd"))), Atom("h")),
    )


def test_splits_nest_in_textual_order() -> None:
    inner = Split(Atom("f"), "tp", Even("ceil", Number(128)))
    assert parse_dim("f@tp:ceil/128@dp:[3 1]") == Split(inner, "dp", Widths((3, 1)))
    assert parse_dim("f@tp:ceil/128@dp:at[1 0]") == Split(inner, "dp", Assigned((1, 0)))


def test_values() -> None:
    product = Arithmetic("*", Arithmetic("-", Size("a"), Number(1)), Number(40_000_000))
    assert parse_dim("pad(v, (a-1)*40e6, -1.5)") == Pad(Atom("v"), product, -1.5)


def test_names() -> None:
    assert parse_name("**.{k,v}_*.{e@ep:bal}") == Name(
        (
            Glob(deep=True),
            Text("."),
            Alternatives(("k", "v")),
            Text("_"),
            Glob(deep=False),
            Text("."),
            NameIndex("e", (("ep", Even("bal")),)),
        )
    )
    assert parse_name(r'"a b\{\n{l}"') == Name((Text("a b{\n"), NameIndex("l")))
    assert parse_name("X{0}") == Name((Text("X"), NameIndex("0")))


def test_the_local_mark_is_no_comment() -> None:
    found = layout("x.{#l@pp} = E[h]# comment\n#{ all of it\n")
    assert [show(s) for s in found.statements] == ["x.{#l@pp} = E[h]"]


def test_a_family_goes_on_from_the_one_before() -> None:
    found = parse_space("L{l}.X{e}.g[f h] .u[f h]\n\n.d[h f] head[v h]")
    names = [show(f) for f in found.families]
    assert names == ["L{l}.X{e}.g[f h]", "L{l}.X{e}.u[f h]", "L{l}.X{e}.d[h f]", "head[v h]"]


def test_states_without_a_stored_name_keep_their_own() -> None:
    found = parse_space("follow m=exp_avg, s\nfollow w=master.copy")
    assert found.states == (
        FollowedState("m", "exp_avg"),
        FollowedState("s", "s"),
        FollowedState("w", "master.copy"),
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("let kv = 8", Number(8)),
        ("let x = lcm(a, 2)", Arithmetic("lcm", Size("a"), Number(2))),
        ("let x = size a", Size("a")),
        ("let x = (a+1)*2", Arithmetic("*", Arithmetic("+", Size("a"), Number(1)), Number(2))),
        ("let hd = (two half)", Product((Atom("two"), Atom("half")))),
        ("let z = v@tp", Split(Atom("v"), "tp")),
        ("let z = [v]", Atom("v")),
        ("let z = [1]", One()),
        ("let z = pad(v, 8)", Pad(Atom("v"), Number(8))),
        ("let D = decoder", Name((Text("decoder"),))),
        ("let D = size", Name((Text("size"),))),
        ("let D = a.{l}.*", Name((Text("a."), NameIndex("l"), Text("."), Glob(deep=False)))),
        ('let D = "0.x"', Name((Text("0.x"),))),
    ],
)
def test_a_let_says_what_it_is_by_its_beginning(text: str, value: object) -> None:
    found = parse_item(text)
    assert isinstance(found, Let)
    assert found.value == value


def test_keywords_are_names_where_a_rule_stands() -> None:
    found = layout("flat = E[h]\nuse = drop[h]\npipe.x = alias[h] same\ndefault.y = follow[q]")
    assert all(isinstance(s, Rule) for s in found.statements)
    assert show(parse_space("let[h] follow.x[h] scalar[v]")).count("[") == 3


def test_drop_alias_and_follow_stand_without_dimensions() -> None:
    found = layout("a = drop\nb = alias E on pp=last\nc = B[_ r] follow rows(**.qkv)\n")
    drop, alias, rows = found.statements
    assert drop == Rule(Name((Text("a"),)), None, (), (Drop(),))
    assert isinstance(alias, Rule)
    assert isinstance(rows, Rule)
    assert alias.modifiers == (Alias(), On("pp", "last"))
    assert isinstance(rows.modifiers[0], FollowRows)


def test_meshes_have_finer_and_local_axes() -> None:
    assert parse_item("mesh M = pp:2 tp:8=(tk:4 tr:2) local vpp:3") == Mesh(
        "M",
        (MeshAxis("pp", 2), MeshAxis("tp", 8, (MeshAxis("tk", 4), MeshAxis("tr", 2)))),
        (MeshAxis("vpp", 3),),
    )


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("1.5KiB", 1536), ("2MB", 2_000_000), ("7", 7)]
)
def test_budgets_are_in_bytes(text: str, size: int) -> None:
    assert parse_item(f"reshard a -> b budget {text}") == Reshard("a", "b", budget=size)


def test_defaults_of_a_flat() -> None:
    found = parse_statement("flat each @dp of *")
    assert isinstance(found, Flat)
    assert (found.order, found.start, found.end) == ("module", Number(1), Number(1))


def test_statements_end_at_a_line_end_or_semicolon() -> None:
    found = parse("use a; use b\n;;\n\nuse c")
    assert found.items == (Use("a"), Use("b"), Use("c"))


def test_positions() -> None:
    found = parse(PROGRAM, "mg.lay").items[4]
    assert isinstance(found, Layout)
    rule = found.statements[0]
    assert isinstance(rule, Rule)
    assert rule.at == Position("mg.lay", 11, 3, 75)
    assert rule.dims[1].at == Position("mg.lay", 11, 53, 24)


# --- programs -----------------------------------------------------------------------------------


def test_the_ten_programs_are_there() -> None:
    assert [p.name[:2] for p in PROGRAMS] == [f"{n:02}" for n in range(1, 11)]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.name)
def test_programs_parse_and_are_complete(path: Path) -> None:
    found = parse(path.read_text(), path.name)
    layouts = {i.name: i for i in found.items if isinstance(i, Layout)}
    meshes = {i.name for i in found.items if isinstance(i, Mesh)}
    spaces = {i.name for i in found.items if isinstance(i, Space)}
    reshards = [i for i in found.items if isinstance(i, Reshard)]
    assert reshards
    assert all(r.source in layouts and r.target in layouts for r in reshards)
    for one in layouts.values():
        assert set(one.meshes) <= meshes
        assert not one.space or one.space in spaces
        assert all(s.name in layouts for s in one.statements if isinstance(s, Use))
    assert format_text(path.read_text()) == path.read_text()


# --- what is no program -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "wanted"),
    [
        ("lay x", "1:1", "mesh, let"),
        ("mesh M = pp", "1:12", "':' and the length"),
        ("mesh none = pp:2", "1:6", "'none' means"),
        ("mesh M = pp:99999999999999999999", "1:13", "length of the axis"),
        ("mesh M = pp:1e999999999999", "1:13", "length of the axis"),
        ("let x = -1", "1:9", "a name, a value or a dimension"),
        ("let x = a*b", "1:9", "a name, a value or a dimension"),
        ("let x = a + b", "1:9", "a name, a value or a dimension"),
        ("let x = (a b", "1:13", "a dimension"),
        ("let x = (a+b", "1:13", "')' after the value"),
        ("space s { .k[h] }", "1:11", "the whole name"),
        ("space s { E[h @tp] }", "1:15", "an axis"),
        ("space s { E[pad] }", "1:13", "an axis"),
        ("space s { E[h]", "1:15", "'}' at the end of the space"),
        ("layout x on M {\n a = E[h]", "2:10", "the end of the layout|end of the line"),
        ("layout x { }", "1:10", "'on' and a mesh"),
        ("layout x on M { a E[h] }", "1:19", "'=' after the name"),
        ("layout x on M { a = E }", "1:23", "'[' and the dimensions"),
        ("layout x on M { a = E[h] b = E[h] }", "1:26", "the end of the line"),
        ("layout x on M { a = E[h,v] }", "1:24", "a dimension"),
        ("layout x on M { a = E[3] }", "1:23", "a dimension"),
        ("layout x on M { a = E[(p|q)] }", "1:25", "')'"),
        ("layout x on M { a = E[(p:q r)] }", "1:28", "')' or '|'"),
        ("layout x on M { a = E[()] }", "1:24", "a dimension"),
        ("layout x on M { a = E[h@tp:odd] }", "1:28", "even, ceil, bal"),
        ("layout x on M { a = E[h@tp:[]] }", "1:29", "widths"),
        ("layout x on M { a = E[h] on pp }", "1:32", "'=' and a coordinate"),
        ("layout x on M { a = E[h] on pp=x }", "1:32", "last"),
        ("layout x on M { a{b c} = E[h] }", "1:18", "alternatives"),
        ("layout x on M { a{#0} = E[h] }", "1:18", "alternatives|an axis"),
        ("layout x on M { a*** = E[h] }", "1:18", "'*' or '**'"),
        ("layout x on M { flat each of m }", "1:27", "one mesh axis"),
        ("layout x on M { flat each @dp:at[0 1] of m }", "1:27", "follow each other"),
        ("layout x on M { a = E[h@tp:at] }", "1:30", "'['"),
        ("layout x on M { flat each @dp of m start/16B }", "1:42", "a whole number"),
        ("layout x on M { falt each @dp of m }", "1:17", "a statement"),
        ('layout x on M { files "" }', "1:23", "a file"),
        ('layout x on M { files "a }', "1:23", "a file"),
        ('layout x on M { "a}" = E[h] }', "1:19", "}"),
        ("layout x on M { obj a[] on-change stay }", "1:35", "error, drop"),
        ('layout x on M { pipe l "tt" }', "1:24", "'@'"),
        ("layout x on M { stored }", "1:24", "names in checkpoints"),
        ("reshard a -> b budget 4.3B", "1:23", "a size in bytes"),
        ("reshard a -> b via tape", "1:20", "'disk'"),
        ("layout é on M {}", "1:8", "name of a layout"),
    ],
)
def test_errors(text: str, where: str, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "t.lay")
    error = caught.value
    assert error.kind == "lay-syntax"
    assert error.where == f"t.lay:{where}"
    assert any(w in f"{error.wanted} {error.hint}" for w in wanted.split("|"))
    assert "^" in error.message


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000,
        "(q:" * 100_000,
        "pad(" * 100_000,
        "a" + "@b" * 100_000,
        "pad(a, " + "1+" * 100_000 + "1)",
        "pad(a, " + "lcm(1," * 100_000,
        "a@b/" + "(" * 100_000,
    ],
)
def test_deep_nesting_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="levels of nesting"):
        parse_dim(text)


def test_deep_meshes_are_refused() -> None:
    with pytest.raises(UsageError, match="levels of nesting"):
        parse_item("mesh M = " + "a:1=(" * 10_000)


def test_long_names_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 256 parts"):
        parse_name("{l}." * 1000)


def failure(text: str) -> UsageError | None:
    """The error of a text, or None if it is a program; anything else that is raised goes on."""
    try:
        parse(text)
    except UsageError as error:
        return error
    return None


@given(st.data())
def test_damaged_programs_parse_or_fail_with_a_usage_error(data: st.DataObject) -> None:
    """No edit of a program gives a traceback; what still parses still prints."""
    text = PROGRAM
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 4)))
        piece = data.draw(st.sampled_from([*'{}[]()@:|,=/*"#.\\\n; 1a_é', "(q:", "let ", '"{']))
        text = text[:start] + piece + text[end:]
    error = failure(text)
    if error is None:
        tree = parse(text)
        assert parse(show(tree)) == tree
        assert parse(format_text(text)) == tree
    else:
        assert error.kind == "lay-syntax"
        assert error.where


def test_every_beginning_of_a_program_parses_or_fails_with_a_usage_error() -> None:
    errors = [failure(PROGRAM[:end]) for end in range(len(PROGRAM))]
    whole = errors.count(None)
    assert 0 < whole < len(PROGRAM) // 2
    assert all(e.where for e in errors if e)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("layout x on M { model.my-layer.{l}.weight = W[o i] }", "model.my-layer.{l}.weight"),
        ("layout x on M { a.weight = my-W[o i] }", "my-W"),
        ("layout x on M { a-b-c = drop }", "a-b-c"),
        ("space s { my-W[o i] }", "my-W"),
    ],
)
def test_a_name_with_a_hyphen_is_told_to_stand_in_quotes(text: str, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "x.lay")
    assert caught.value.hint == f'a name with a hyphen stands in quotes: "{name}"'


@pytest.mark.parametrize(
    "text", ["layout x on M { a = W[a - b] }", "reshard a-> ", "mesh M = - a:2"]
)
def test_a_hyphen_elsewhere_is_no_part_of_a_name(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "x.lay")
    assert "quotes" not in str(caught.value.hint)
