"""Every node's snapshots lie with another one, of another domain wherever that can be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.save.peers import partners

DOMAINS = st.dictionaries(
    st.text("nodexyz0123456789", min_size=1, max_size=4), st.sampled_from("abcde"), max_size=40
)


@given(DOMAINS)
def test_every_node_has_another_one(domains: dict[str, str]) -> None:
    found = partners(domains)
    assert found.keys() == (domains.keys() if len(domains) > 1 else set())
    assert all(node != other and other in domains for node, other in found.items())


@given(DOMAINS)
def test_of_another_domain_where_there_is_one(domains: dict[str, str]) -> None:
    if len(set(domains.values())) > 1:
        for node, other in partners(domains).items():
            assert domains[node] != domains[other]


@given(DOMAINS)
def test_the_load_is_even(domains: dict[str, str]) -> None:
    load = Counter(partners(domains).values())
    if not load:
        return
    largest, count = Counter(domains.values()).most_common(1)[0]
    others = len(domains) - count
    if not others or count <= others:
        assert set(load.values()) == {1}
        return
    for node in domains:
        if domains[node] == largest:
            assert load[node] <= 1
        else:
            assert load[node] in (count // others, -(-count // others))


@given(DOMAINS, st.randoms())
def test_the_order_of_nodes_says_nothing(domains: dict[str, str], random: object) -> None:
    names = list(domains)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert partners({name: domains[name] for name in names}) == partners(domains)


def test_two_nodes_keep_one_anothers() -> None:
    assert partners({"a": "x", "b": "y"}) == {"a": "b", "b": "a"}
    assert partners({"a": "x", "b": "x"}) == {"a": "b", "b": "a"}
    assert partners({"a": "x"}) == {}
