"""Name patterns against names, and against each other."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import UsageError
from ckptd.lay.resolve import Lookup, covers, filled, found_regex
from ckptd.lay.resolve.pattern import encoded, rule_regex
from ckptd.lay.syntax import show
from ckptd.lay.syntax.tree import EVEN, Glob, Name, NameIndex, Text, join
from tests.lay.syntax.parts import parse_name


def groups(pattern: str, name: str) -> tuple[str, ...] | None:
    found = found_regex(parse_name(pattern)).fullmatch(name)
    return None if found is None else found.groups()


@pytest.mark.parametrize(
    ("pattern", "name", "wanted"),
    [
        ("layers.{l}.w", "layers.12.w", ("12",)),
        ("layers.{l}.w", "layers.012.w", None),
        ("layers.{l}.w", "layers.x.w", None),
        ("layers.{l}.w", "layers.1xw", None),
        ("w{e}", "w0", ("0",)),
        ("*.w", "a.w", ("a",)),
        ("*.w", "a.b.w", None),
        ("**.w", "a.b.w", ("a.b.",)),
        ("**.w", "w", ("",)),
        ("**.w", "aw", None),
        ("a.**.w", "a.w", ("",)),
        ("a.**.w", "a.b.c.w", ("b.c.",)),
        ("a.**", "a.b.c", ("b.c",)),
        ("a.**", "a.", None),
        ("**", "a.b", ("a.b",)),
        ("*{l}", "layer12", ("layer", "12")),
        ("*a*b*", "xaaybbz", ("x", "ay", "bz")),
        ("**.a*.b", "a1.c.a2.b", ("a1.c.", "2")),
        ("*.*", "a.b", ("a", "b")),
    ],
)
def test_what_a_pattern_matches(pattern: str, name: str, wanted: tuple[str, ...] | None) -> None:
    assert groups(pattern, name) == wanted


@pytest.mark.parametrize("pattern", ["a**", "**a", "{l}**.x", "**.a.**.b.**", "*a" * 9])
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(UsageError) as caught:
        found_regex(parse_name(pattern))
    assert caught.value.kind == "lay-rule"


def test_long_names_and_many_globs_take_no_time() -> None:
    """Backtracking over all places of seven stars would not come to an end."""
    assert groups("*a" * 7 + "*b", "a" * 3000) is None
    assert groups("**.a.**.b", ".".join("a" * 500)) is None


@given(
    st.lists(st.sampled_from(["a", "b", ".", "*"]), min_size=1, max_size=7).map("".join),
    st.text("ab.", max_size=8),
)
@settings(max_examples=200)
def test_stars_match_what_a_search_of_all_places_finds(pattern: str, name: str) -> None:
    if "**" in pattern:
        return
    parts = [Glob(deep=False) if p == "*" else Text(p) for p in re.split(r"(\*)", pattern) if p]
    plain = re.compile("".join("[^.]*" if c == "*" else re.escape(c) for c in pattern))
    found = found_regex(Name(join(parts))).fullmatch(name)
    assert (found is None) == (plain.fullmatch(name) is None)


def test_names_of_rules_are_matched_by_their_axes() -> None:
    name = parse_name("model.layers.{#l@pp}.x.{e}.w")
    match = rule_regex(parse_name("**.{e@ep}.w")).fullmatch(encoded(name))
    assert match is not None
    indexes = [p for p in name.parts if isinstance(p, NameIndex)]
    assert (
        show(filled(parse_name("**.{e@ep}.w"), match.groups(), indexes))
        == "model.layers.{#l@pp}.x.{e@ep}.w"
    )
    assert rule_regex(parse_name("**.{l}.w")).fullmatch(encoded(name)) is None


@pytest.mark.parametrize(
    ("first", "later", "wanted"),
    [
        ("a.{l}.w", "a.{i}.w", True),
        ("a.{l}.w", "a.3.w", True),
        ("a.3.w", "a.{l}.w", False),
        ("a.*.w", "a.{l}.w", True),
        ("a.*.w", "a.*.w", True),
        ("a.*.w", "a.**.w", False),
        ("a.**.w", "a.*.w", True),
        ("**.w", "a.{l}.b.w", True),
        ("a.{l}.w", "a.*.w", False),
        ("a.b*.w", "a.*.w", False),
    ],
)
def test_which_pattern_covers_which(first: str, later: str, wanted: bool) -> None:
    assert covers(parse_name(first), parse_name(later)) == wanted


# --- many names ---------------------------------------------------------------------------------

PARTS = st.one_of(
    st.sampled_from(["a", ".", "0", "1", "12", "w"]).map(Text),
    st.sampled_from([NameIndex("l"), NameIndex("e", (("ep", EVEN),), local=True)]),
    st.just(Glob(deep=False)),
)
NAMES = st.lists(PARTS, min_size=1, max_size=6).map(lambda parts: Name(join(parts)))


@given(st.lists(NAMES, min_size=1, max_size=12), NAMES)
def test_a_lookup_finds_all_that_can_have_a_name_in_common(names: list[Name], name: Name) -> None:
    lookup = Lookup()
    for k, one in enumerate(names[:-1]):
        lookup.add(k, one)
    found = lookup.find(name)
    # What is added after the first question is found as well.
    lookup.add(len(names) - 1, names[-1])
    assert lookup.find(name)[: len(found)] == found
    found = lookup.find(name)
    assert found == sorted(set(found))
    assert {k for k, one in enumerate(names) if covers(one, name)} <= set(found)
    seen = "".join(p.text if isinstance(p, Text) else "7" for p in name.parts)
    matching = {k for k, one in enumerate(names) if found_regex(one).fullmatch(seen)}
    assert matching <= set(lookup.find(seen))


def test_names_that_differ_in_a_number_are_not_compared() -> None:
    lookup = Lookup()
    for k in range(100):
        lookup.add(k, parse_name(f"layers.{{#l@pp}}.experts.{k}.w"))
    lookup.add(100, parse_name("layers.{l}.experts.{e}.w"))
    assert lookup.find(parse_name("layers.{l}.experts.7.w")) == [7, 100]
    assert lookup.find("layers.3.experts.7.w") == [7, 100]
    assert lookup.find(parse_name("layers.1.experts.{e}.w")) == list(range(101))
