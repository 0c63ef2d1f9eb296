"""What is said about a layout: of the program alone, with sizes, and with what was observed."""

from __future__ import annotations

import pytest

from ckptd.errors import NotFoundError
from ckptd.lay.check import check, check_bound, check_program
from ckptd.lay.check.layouts import Observation
from ckptd.lay.resolve import Bound, Finding, resolve
from ckptd.lay.syntax import parse
from ckptd.lay.syntax.tree import File

SPACE = """
space s {
  E[v h]
  nf[h]
  L{l}.q[kv rep hd h] .k[kv hd h] .v[kv hd h] .g[f h] .u[f h]
  X{e}.w[f h]
  follow m, s
  scalar step
}
mesh M = pp:2 dp:2 tp:4=(tk:2 tr:2)
mesh P = ep:16 local vpp:2
"""


def nothing(name: str) -> File:
    raise NotFoundError(name)


def static(rules: str, on: str = "M") -> list[Finding]:
    program = parse(f"{SPACE}layout x of s on {on} {{ {rules} }}", "x.lay")
    found = check(resolve([program], "x", nothing))
    return [f for f in found if f.severity == "error"]


def program(
    rules: str,
    observed: Observation | None = None,
    sizes: dict[str, int] | None = None,
    on: str = "M",
) -> list[Finding]:
    files = [parse(f"{SPACE}layout x of s on {on} {{ {rules} }}", "x.lay")]
    found = check_program(files, "x", observed, sizes)
    return [f for f in found if f.severity == "error"]


@pytest.mark.parametrize(
    ("rules", "code", "says"),
    [
        ("a = E[v]", "missing-axis", "leaves out h of E[v h]"),
        ("a = E[v h f]", "unknown-axis", "f is not an axis of E[v h]"),
        ("a = E[(v h) h]", "axis-twice", "h of E[v h] occurs 2 times"),
        ("a.{l} = L{l}[(kv (q:1|k:1) hd) h]", "missing-axis", "leaves out rep of L{l}.q"),
        ("a.{l} = L{l}[(kv (k:rep|q:1) hd) h]", "tag-order", "the order q|k"),
        ("a.{l} = E[v h]", "index", "the name has the index {l}, which is not an axis of E[v h]"),
        ("a.{l}.{l} = L{l}.g[f h]", "axis-twice", "l of L{l}.g[f h] occurs 2 times"),
        ("a.{l} = L{3}.g[f h]", "axis-twice", "l of L{l}.g[f h] occurs 2 times"),
        ("a = E[v@tpp h]", "mesh-axis", "unknown mesh axis tpp; did you mean tp?"),
        ("a = E[v@tp h@tp]", "cut-twice", "@tp cuts dimension 0 and dimension 1"),
        ("a = E[v@tp@tp h]", "cut-twice", "@tp cuts dimension 0 twice"),
        ("a = E[v@tp h@tk]", "cut-twice", "@tp and @tk cut over the same ranks"),
        ("a.{l@pp} = L{l}.g[f@pp h]", "cut-twice", "@pp cuts the name and dimension 0"),
        ("a = E[v@pp h] on pp=0", "uncovered", "'on pp' keeps one part only"),
        ("a = E[v@tp h] on tk=1", "uncovered", "'on tk' keeps one part only"),
        ("a = E[v h] on pp=2", "on", "'on pp=2' matches no rank"),
        ("a = E[v h] on pp=0 on pp=1", "on", "no rank has both"),
        ("a = E[v h] on xx=0", "mesh-axis", "unknown mesh axis xx"),
        ("a = E[v@tp:[1 2] h]", "mesh-axis", "2 widths for @tp, which has 4 parts"),
        ("a = E[v h] avg(tq)", "mesh-axis", "unknown mesh axis tq"),
        ("a = E[v@tp h] sum(tp)", "average", "combines replicas"),
        ("a = E[v h] q(int8, [4], scale={name}_s)", "block", "one length above 0"),
        ("a = E[v h] q(int8, [4 4], scale=one)", "block", "lacks {name}"),
        ("a = E[pad(v, 8*zz) h]", "value", "zz is neither an axis"),
        ("a = E[v h]; b = E[v h]", "duplicate", "E is already held by an earlier rule"),
        ("{a,b} = X{1}.w[f h]", "duplicate", "X{e}.w is already held by an earlier rule"),
        ("a.{e} = X{e}.w[f h]; b = X{1}.w[f h]", "duplicate", "held by an earlier rule"),
        ("a.{l} = L{l}.g[f h]; a.{l} = L{l}.u[f h]", "shadowed", "never used"),
        ("a.* = drop; a.w = E[v h]", "shadowed", "never used"),
        ("a = E[v h] on pp=0; a = alias E on pp=0", "shadowed", "never used"),
        ("a = E[v h]; flat each @dq of m", "statement", "unknown mesh axis dq"),
        ("a = E[v h]; flat each @dp of w", "statement", "unknown state w"),
        ("a = E[v h]; flat each @dp of m as x", "statement", "keeps its name"),
        ('a = E[v h]; flat group(**) @dp of m as "x.{l}"', "statement", "use {buffer}"),
        ('a = E[v h]; flat parts @dp of m as "x.*"', "statement", "use {buffer}"),
        ("a = E[v h]; obj r[zz] on-change drop", "statement", "unknown mesh axis zz"),
        ('a = E[v h]; stored "x"', "stored", "lacks {name}"),
        ('a = E[v h]; stored states "{name}"', "stored", "lacks {state}"),
    ],
)
def test_what_is_wrong_with_a_program(rules: str, code: str, says: str) -> None:
    found = static(rules)
    assert [f.code for f in found] == [code], [f.render() for f in found]
    text = found[0].render()
    assert says in text
    if code != "stored":
        assert text.startswith("x.lay:12  ")


@pytest.mark.parametrize(
    "rules",
    [
        "a = E[v@tk@dp h@tr]",
        "a.{l@pp} = L{l}[((q:((kv rep)@tp hd)|k:(kv@tk hd)|v:(kv@tk hd))) h]",
        "a = E[v@tp h] on pp=0; b = alias E on pp=last",
        "a = E[v@tp h] any; b = E[v h] any",
        "a.0 = X{0}.w[f h]; a.{e} = X{e}.w[f h]",
        "a.w = E[v h]; a.* = drop",
        "a = E[v h] on pp=0; a = alias E on pp=1",
        "a = E[v h] avg(tp)",
        "{a,b,c} = X{0}.w[f h] alias",
    ],
)
def test_what_is_right(rules: str) -> None:
    assert not static(rules)


def test_two_views_of_the_ranks_cannot_both_cut() -> None:
    assert [f.code for f in static("a = X.w[(e@ep f@tp) h]", "M, P")] == ["cut-twice"]
    assert not static("a = X.w[(e@ep f) h]", "M, P")


def test_local_axes_stand_in_names() -> None:
    assert not static("m{vpp}.a.{#l@vpp@ep} = L{l}.g[f h]", "P")
    assert not static("a.{l@vpp@ep} = L{l}.g[f h]", "P")
    assert not static("m{vpp}.a = E[v h] on vpp=0", "P")


@pytest.mark.parametrize(
    ("rules", "code", "says"),
    [
        ("m{vpp}.a = E[v h]", "index", "on vpp=0"),
        ("a = E[v@vpp h]", "mesh-axis", "vpp is a local axis"),
        ("a.{#l@vpp@ep} = L{l}.g[f h]", "index", "write {vpp} in the name too"),
    ],
)
def test_local_axes_where_they_say_nothing(rules: str, code: str, says: str) -> None:
    found = static(rules, "P")
    assert [f.code for f in found] == [code]
    assert says in found[0].render()


def test_families_that_nobody_holds_are_a_warning() -> None:
    found = check(resolve([parse(SPACE + "layout x on M { a = E[v h] }")], "x", nothing))
    assert [(f.code, f.severity) for f in found] == [("uncovered", "warning")]
    assert "nf, L{l}.q" in found[0].message


def test_a_pipe_that_no_name_follows_is_a_warning() -> None:
    text = SPACE + 'layout x on M { a.{#l@pp} = L{l}.g[f h]; pipe l@dp "Et|tL" }'
    found = check(resolve([parse(text)], "x", nothing))
    assert "names have {l@pp}" in next(f.message for f in found if f.code == "pipe")


# --- with sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "sizes", "code", "says"),
    [
        ("a = E[v@tp h]", {"v": 10, "h": 4}, "indivisible", "v=10 does not divide over tp=4"),
        ("a = E[v@tp/4 h]", {"v": 20, "h": 4}, "indivisible", "in 5 units of 4"),
        ("a = E[v@tp:ceil@dp h]", {"v": 9, "h": 4}, "indivisible", "v@tp:ceil, which is 3 long,"),
        ("a = E[v@dp:[3 4] h]", {"v": 8, "h": 4}, "uncovered", "the last one is on no rank"),
        ("a = E[v@dp:[3 6] h]", {"v": 8, "h": 4}, "uncovered", "the widths hold 1 too many"),
        ("a.{#l@pp} = L{l}.g[f h]", {"l": 3, "f": 2, "h": 1}, "indivisible", "{#l@pp:ceil}"),
        ("a = X{0}.w[f h]; b = X{2}.w[f h]", {"e": 3, "f": 1, "h": 1}, "uncovered", "e=1"),
        (
            "a = X{0}.w[f h]; b = X{1}.w[f h]",
            {"e": 3, "f": 1, "h": 1},
            "uncovered",
            "no rule holds X{e}.w at e=2",
        ),
        (
            "a = E[v@tp h] q(int8, [4 4], scale={name}_s)",
            {"v": 24, "h": 8},
            "block",
            "cuts v@tp at 6, inside of a block of 4",
        ),
        ("a = E[v h]", {"v": 3}, "unsolved", "no shape determines the length of h"),
        ("a = E[v h]; flat each @dp of m", {"v": 3, "h": 1}, "flat", "found: 3"),
        ("a = E[v h]; flat group(**) @dp:[1 2] of m", {"v": 2, "h": 2}, "flat", "add up to 4"),
        ("a = E[v h]; flat each @dp:ceil of m start/0", {"v": 2, "h": 2}, "flat", "start 0"),
        ("a = E[v h]; flat parts @dp of m", {"v": 3, "h": 1}, "flat", "found: 3"),
        (
            "a = E[v h]; b = nf[h]; flat bucket 1 @dp:ceil of m as x",
            {"v": 2, "h": 2},
            "flat",
            "one name",
        ),
    ],
)
def test_what_is_wrong_with_sizes(rules: str, sizes: dict[str, int], code: str, says: str) -> None:
    found = program(rules, None, sizes)
    assert [f.code for f in found] == [code], [f.render() for f in found]
    assert says in found[0].render()


@pytest.mark.parametrize(
    ("rules", "sizes"),
    [
        ("a = E[v@tp/4 h]", {"v": 15, "h": 4}),
        ("a = E[v@tp:ceil@dp:ceil h]", {"v": 9, "h": 4}),
        ("a = E[v@tp/4 h] q(int8, [4 4], scale={name}_s)", {"v": 32, "h": 8}),
        ("a = E[v@tp/4 h] q(int8, [4 4], scale={name}_s)", {"v": 30, "h": 8}),
        ("a = X{0}.w[f h]; b.{e} = X{e}.w[f h] any", {"e": 3, "f": 1, "h": 1}),
        ("a = X{0}.w[f h]; b = X{1}.w[f h]", {"e": 2, "f": 1, "h": 1}),
    ],
)
def test_sizes_that_are_right(rules: str, sizes: dict[str, int]) -> None:
    assert not program(rules, None, sizes)


def test_many_experts_by_hand_are_compared_by_number() -> None:
    rules = "; ".join(f"a{i} = X{{{i}}}.w[f h]" for i in range(300))
    found = program(rules, None, {"e": 301, "f": 1, "h": 1})
    assert [f.message for f in found] == ["no rule holds X{e}.w at e=300"]


# --- with what was observed ---------------------------------------------------------------------


def ranks(*shapes: tuple[int, ...], name: str = "a") -> dict[int, dict[str, tuple[int, ...]]]:
    return {rank: {name: shape} for rank, shape in enumerate(shapes)}


def test_rules_that_fit_are_proposed_and_do_fit() -> None:
    """Of a shape that the rule does not make: each proposal is put in and checked again."""
    sizes = {"v": 24, "h": 12}
    observed = {r: {"a": (24, 3)} for r in range(16)}
    (found,) = program("a = E[v@tp h]", observed, sizes)
    assert found.code == "shape"
    assert "a is [24,3] on rank 0, and this rule makes it [6,12]" in found.message
    assert found.notes[-1] == "this rule's shape is with v=24 h=12"
    assert len(found.notes) > 1
    for note in found.notes[:-1]:
        dims = note.partition("   ")[0]
        assert not program(f"a = E{dims}", observed, sizes), note


def test_a_transposed_tensor_is_told() -> None:
    (found,) = program("a = E[v h]", {"a": (12, 24)}, {"v": 24, "h": 12}, "none")
    assert [n.split("   ")[-1] for n in found.notes[:-1]] == ["transposed"]


def test_few_heads() -> None:
    observed = {r: {"a.0": (10, 8)} for r in range(16)}
    rules = "a.{l} = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]"
    heads = {"kv": 2, "rep": 2, "hd": 5, "h": 8}
    found = program(rules, observed, heads)
    assert [f.code for f in found] == ["indivisible"]
    notes = "\n".join(found[0].notes)
    assert "(kv (q:rep|k:1|v:1) hd)@tp" in notes
    assert "raw rows, as Megatron does when kv < tp" in notes
    assert "replicated heads, as vLLM does: needs [15,8], rejected" in notes
    replicated = {r: {"a.0": (15, 8)} for r in range(16)}
    (found_too,) = program(rules, replicated, heads)
    assert found_too.notes[0].endswith("replicated heads, as vLLM does")
    dims = found_too.notes[0].partition("   ")[0]
    assert not program(f"a.{{l}} = L{{l}}[{dims} h]", replicated, heads)


def test_names_without_a_rule_are_told_by_kind() -> None:
    observed = {f"a.{i}": (4, 2) for i in range(30)} | {f"b.{i}.bias": (4,) for i in range(30)}
    (found,) = program("a.{l} = L{l}.g[f h]", observed, on="none")
    assert found.code == "unmatched"
    assert "b.0.bias [4] (nor 29 more names like it)" in found.message
    assert found.notes[-1] == "to leave it out, write: b.*.bias = drop"
    assert not program("a.{l} = L{l}.g[f h]; b.*.bias = drop", observed, on="none")


def test_a_tensor_on_a_rank_that_the_rule_is_not_for() -> None:
    found = program("a = E[v h] on pp=0", {r: {"a": (4, 2)} for r in range(16)})
    assert [f.code for f in found] == ["unmatched"]
    assert "which is only for ranks on pp=0" in found[0].notes
    missing = program("a = E[v h]", {r: {"a": (4, 2)} if r < 8 else {} for r in range(16)})
    assert [f.code for f in missing] == ["missing"]
    assert "a is missing on ranks 8, 9, 10, 11, 12, 13 and 2 more" in missing[0].message


def test_check_bound_takes_a_bound_layout() -> None:
    resolved = resolve([parse(SPACE + "layout x on M { a = E[v@tp h] }")], "x", nothing)
    assert not check_bound(Bound(resolved, {"v": 8, "h": 2}), ranks((2, 2)))
    found = check_bound(Bound(resolved, {"v": 8, "h": 2}), ranks((2, 3)))
    assert [f.code for f in found] == ["shape"]


def test_all_findings_come_at_once_and_in_order() -> None:
    found = program("b = E[v@tp]; a = nf[h@tpp]; c = R[h]", {"d": (1,)}, on="M")
    assert [f.code for f in found if f.at.line] == ["missing-axis", "mesh-axis", "rule"]
    assert "unmatched" in {f.code for f in found}


# --- rules and tensors for some numbers -----------------------------------------------------------

KINDS = """
mesh M = pp:2
space s {
  L{l}.n[h]
  L{l}.g[f h] for l=0..1
  L{l}.X{e}.g[f h] for l=2..
}
layout a of s on M {
  layers.{#l@pp}.n = L{l}.n[h]
  layers.{#l@pp}.fc = L{l}.g[f h]
  layers.{#l@pp}.experts.{e}.fc = L{l}.X{e}.g[f h]
}
"""


def of_kinds(text: str, ranks: dict[int, dict[str, tuple[int, ...]]] | None = None) -> list[str]:
    found = check_program([parse(text)], "a", ranks, {"l": 4, "e": 1, "f": 2, "h": 3})
    return [f.message for f in found]


def ranks_of_kinds() -> dict[int, dict[str, tuple[int, ...]]]:
    norms: dict[str, tuple[int, ...]] = {f"layers.{i}.n": (3,) for i in range(2)}
    return {
        0: norms | {f"layers.{i}.fc": (2, 3) for i in range(2)},
        1: norms | {f"layers.{i}.experts.0.fc": (2, 3) for i in range(2)},
    }


def test_layers_of_kinds_are_good() -> None:
    assert of_kinds(KINDS) == of_kinds(KINDS, ranks_of_kinds()) == []


def test_a_dense_layer_where_experts_should_be() -> None:
    ranks = ranks_of_kinds()
    ranks[1]["layers.0.fc"] = (2, 3)
    (message,) = of_kinds(KINDS, ranks)
    assert message == "no rule matches layers.0.fc [2,3] on rank 1"


def test_a_layer_without_its_experts() -> None:
    ranks = ranks_of_kinds()
    del ranks[1]["layers.1.experts.0.fc"]
    (message,) = of_kinds(KINDS, ranks)
    assert message.startswith("l 1 is missing at pp=1")


def test_a_layer_of_no_kind_is_uncovered() -> None:
    text = KINDS.replace("L{l}.n[h]\n  layers", "L{l}.n[h] for l=0..2\n  layers")
    assert of_kinds(text) == ["no rule holds L{l}.n at l=3"]


def test_numbers_of_two_rules_that_meet() -> None:
    text = KINDS.replace(
        "  layers.{#l@pp}.fc", "  a.{#l@pp} = L{l}.n[h] for l=1..2\n  layers.{#l@pp}.fc"
    )
    assert of_kinds(text) == ["L{l}.n is already held by an earlier rule"]


def test_some_layers_cannot_be_a_dimension() -> None:
    text = KINDS.replace("layers.{#l@pp}.fc = L{l}.g[f h]", "fc = L.g[l f h]")
    message = "L{l}.g does not exist for every l, so l must be an index of the name: {l}"
    assert of_kinds(text)[-1] == message


def test_a_condition_without_an_index() -> None:
    text = KINDS.replace("L{l}.g[f h]\n  layers", "L{l}.g[f h] for f=1\n  layers")
    assert of_kinds(text)[-1] == "'for f' leaves out names, and the name has no index {f}"


FLAT = "flat group(**) @dp of m"


@pytest.mark.parametrize(
    ("second", "flat", "count"),
    [
        ("a.0.b = L{0}.g[f h]", FLAT, 1),
        ("a.{l}.b = L{l}.g[f h] for l=0", FLAT, 0),
        ("a.0.b = L{0}.g[f h]", "flat each @dp of m", 0),
        ("a.x.b = L{0}.g[f h]", FLAT, 0),
        ("b.0.b = L{0}.g[f h]", FLAT, 0),
    ],
)
def test_a_number_that_parts_a_module_of_a_flat(second: str, flat: str, count: int) -> None:
    """What is behind it would be packed after all layers of what is before it."""
    rules = f"a.{{l}}.a = L{{l}}.q[(kv rep hd) h]; {second}; a.{{l}}.c = L{{l}}.u[f h]; {flat}"
    files = [parse(f"{SPACE}layout x of s on M {{ {rules} }}", "x.lay")]
    found = [f for f in check_program(files, "x") if f.code == "order"]
    assert len(found) == count
    assert all(f.severity == "warning" and f.rule == second for f in found)


def test_a_name_to_drop_takes_nothing_from_a_rule() -> None:
    """A layer that has not the tensor has one: with a star its rule would lose all of them."""
    rules = "a.{l}.g = L{l}.g[f h] for l=0; a.{l}.u = L{l}.u[f h]"
    observed = {"a.0.g": (4, 2), "a.1.g": (4, 2), "a.0.u": (4, 2), "a.1.u": (4, 2)}
    (found,) = [f for f in program(rules, observed) if f.code == "unmatched"]
    assert found.notes[-1] == "to leave it out, write: a.1.g = drop"
    assert found.notes[-2] == "which has names for some numbers of l only: see for l=..."
    (other,) = [f for f in program(rules, {**observed, "b.1.c": (4,)}) if "b.1" in f.message]
    assert other.notes[-1] == "to leave it out, write: b.*.c = drop"
