"""Sizes from lengths: single unknowns, joint systems, padding, contradictions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.lay.bind.lengths import Lengths, Monomial, Polynomial, of_value, summable
from ckptd.lay.bind.sizes import Constraint, Origin, Solution, solve
from ckptd.lay.bind.system import linear, ratios
from ckptd.lay.resolve import ValueScope
from ckptd.lay.syntax.tree import Position
from tests.lay.meaning import seq
from tests.lay.syntax.parts import parse_dim, parse_value

EXTENTS = {"tp": 4, "dp": 2}


def solved(
    *lengths: tuple[str, int], relations: str = "", declared: dict[str, int] | None = None
) -> Solution:
    made = Lengths(EXTENTS)
    constraints = [
        Constraint(made.stored(parse_dim(text)), n, Origin(Position("x.lay", k), text, f"r{k}"))
        for k, (text, n) in enumerate(lengths, 1)
    ]
    stated = dict(part.split("=") for part in relations.split())
    return solve(constraints, made, declared or {}, {k: parse_value(v) for k, v in stated.items()})


def atoms(solution: Solution) -> dict[str, int]:
    return {n: size for n, size in solution.sizes.items() if not n.startswith("#")}


@pytest.mark.parametrize(
    ("lengths", "declared", "wanted"),
    [
        ([("a", 5)], {}, {"a": 5}),
        ([("(a b)", 15), ("b", 3)], {}, {"a": 5, "b": 3}),
        ([("(p:a|q:(a b))", 20), ("b", 3)], {}, {"a": 5, "b": 3}),
        ([("(p:a|q:1|r:1)", 7)], {}, {"a": 5}),
        # Two unknown products together: q and fused qkv give kv*hd, and their ratio rep.
        (
            [("(kv rep hd)", 24), ("(kv (q:rep|k:1|v:1) hd)", 48)],
            {"kv": 4},
            {"kv": 4, "rep": 2, "hd": 3},
        ),
        ([("(kv rep hd)", 24), ("(kv hd)", 12)], {"hd": 3}, {"kv": 4, "rep": 2, "hd": 3}),
        ([("(a b)", 6), ("(b c)", 10), ("(a c)", 15)], {"a": 3}, {"a": 3, "b": 2, "c": 5}),
        ([("(p:a|q:b)", 7), ("(p:a|q:b|r:b)", 10)], {}, {"a": 4, "b": 3}),
        ([("pad(v, 8)", 16)], {"v": 10}, {"v": 10}),
        ([("(pad(v, 8) h)", 48), ("h", 3)], {"v": 10}, {"v": 10, "h": 3}),
        ([("a@tp:[1 2 3 4]", 10)], {}, {"a": 10}),
        ([("a", 0), ("(a b)", 0)], {}, {"a": 0}),
    ],
)
def test_sizes_that_follow(
    lengths: list[tuple[str, int]], declared: dict[str, int], wanted: dict[str, int]
) -> None:
    solution = solved(*lengths, declared=declared)
    assert not solution.findings
    assert atoms(solution) == wanted


@pytest.mark.parametrize(
    ("lengths", "declared", "says"),
    [
        ([("a", 5), ("a", 6)], {}, "r2 has length 6, and a=5 make it 5"),
        ([("a", 5)], {"a": 6}, "r1 has length 5, and a=6 make it 6"),
        ([("(a b)", 15), ("b", 4)], {}, "r1 would make a = 3.75, which is not a length"),
        ([("(p:a|q:b)", 3), ("b", 4)], {}, "r1 would make a = -1, which is not a length"),
        ([("(a b)", 6), ("(b a)", 7)], {}, "contradicts what other rules lead to"),
        ([("pad(v, 8)", 20)], {}, "20 is not a multiple of 8, to which this rule pads"),
        ([("pad(v, 8)", 16)], {"v": 20}, "v=20: 20 padded gives 24, and 16 was observed"),
    ],
)
def test_contradictions(
    lengths: list[tuple[str, int]], declared: dict[str, int], says: str
) -> None:
    (finding,) = solved(*lengths, declared=declared).findings
    assert says in finding.message
    assert finding.fit


def test_a_contradiction_names_where_the_sizes_are_from() -> None:
    (finding,) = solved(("a", 5), ("b", 2), ("(a b)", 11)).findings
    assert finding.at.line == 3
    assert finding.notes == ("a = 5 by x.lay:1  a  r1", "b = 2 by x.lay:2  b  r2")


def test_relations() -> None:
    heads = {"kv": 4, "hd": 3}
    found = atoms(solved(("h", 24), relations="h=kv*rep*hd", declared=heads))
    assert found == heads | {"h": 24, "rep": 2}
    found = atoms(solved(relations="p=lcm(a,6) q=p//4+1", declared={"a": 4}))
    assert found == {"a": 4, "p": 12, "q": 4}
    assert solved(("h", 25), relations="h=kv*5", declared={"kv": 4}).findings


def test_what_is_known_of_what_is_not() -> None:
    solution = solved(("(a b)", 12), ("pad(v, 8)", 16))
    assert solution.products == {("a", "b"): Fraction(12)}
    assert solution.bounds == {"v": (9, 16)}


def test_systems() -> None:
    one, two = frozenset([1]), frozenset([2])
    x: Monomial = ("x",)
    y: Monomial = ("y",)
    rows: list[tuple[Polynomial, Fraction, frozenset[int]]] = [
        ({x: Fraction(1), y: Fraction(1)}, Fraction(3), one),
        ({y: Fraction(2)}, Fraction(4), two),
    ]
    assert linear(rows) == ({x: (Fraction(1), one | two), y: (Fraction(2), two)}, [])
    both = [*rows, ({x: Fraction(2), y: Fraction(2)}, Fraction(7), frozenset([3]))]
    assert linear(both)[1]
    assert ratios({("a", "b", "c"): Fraction(24), ("a", "c"): Fraction(6)}) == {"b": Fraction(4)}
    assert ratios({("a", "b"): Fraction(0), ("a",): Fraction(0)}) == {}


@pytest.mark.parametrize(
    "text",
    [
        "a@tp:ceil@dp",
        "(a@tp:bal b@dp:ceil)",
        "(p:a@tp:ceil|q:b@tp:bal|r:1)",
        "(a (p:b@tp|q:1)@dp:ceil)",
        "pad(a, 4)@tp:bal",
        "(p:a@tp:ceil|q:(b@dp:bal a))",
    ],
)
@given(st.integers(0, 9), st.integers(0, 5))
@settings(max_examples=15)
def test_parts_add_up(text: str, a: int, b: int) -> None:
    """The sum over all coordinates, element by element, is the polynomial's."""
    dim = parse_dim(text)
    sizes = {"a": a, "b": b}
    scope = ValueScope(sizes, EXTENTS)
    total = sum(len(seq(dim, scope, {"tp": t, "dp": d})) for t in range(4) for d in range(2))
    made = Lengths(EXTENTS)
    assert summable(dim)
    polynomial = made.summed(dim, frozenset(EXTENTS))
    known = sizes | dict.fromkeys(made.derived, -(-a // 4) * 4)
    value = Fraction(0)
    for monomial, factor in polynomial.items():
        for name in monomial:
            factor *= known[name]
        value += factor
    assert value == total


def test_padding_around_a_split_does_not_add_up() -> None:
    assert not summable(parse_dim("(a pad(b@tp, 4))"))


def test_values_as_polynomials() -> None:
    found = of_value(parse_value("2*a*tp + 3 - a"), EXTENTS)
    assert found == {("a",): Fraction(7), (): Fraction(3)}
    assert of_value(parse_value("a//2"), EXTENTS) is None
    assert of_value(parse_value("lcm(a, 2)*3"), EXTENTS) is None
