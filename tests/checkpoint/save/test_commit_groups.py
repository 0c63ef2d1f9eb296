"""The groups of an optimizer that stages report are joined: each parameter keeps its own values."""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.save.commit import merge_objects
from ckptd.checkpoint.save.messages import RankPart
from ckptd.errors import SaveError

Groups = list[dict[str, Any]]


def group(lr: float, *params: str) -> dict[str, Any]:
    return {"lr": lr, "params": list(params)}


def merged(*stages: Groups) -> Groups:
    parts = [
        RankPart(rank, "plan", objects=(ObjectEntry("optim.groups", groups, kind="groups"),))
        for rank, groups in enumerate(stages)
    ]
    found: Groups = merge_objects(parts)["optim.groups"].value
    return found


def test_groups_with_the_same_values_become_one() -> None:
    first, second = [group(0.1, "b", "a"), group(0.2, "c")], [group(0.2, "e"), group(0.1, "d")]
    assert merged(first, second) == [group(0.1, "a", "b", "d"), group(0.2, "c", "e")]


def test_a_group_that_only_a_later_stage_has_stays_apart() -> None:
    stages = [group(0.1, "a")], [group(0.1, "b")], [group(0.3, "c")], [group(0.3, "d")]
    assert merged(*stages) == [group(0.1, "a", "b"), group(0.3, "c", "d")]


def test_what_two_stages_share_is_there_once() -> None:
    assert merged([group(0.1, "a", "tied")], [group(0.1, "b", "tied")]) == [
        group(0.1, "a", "b", "tied")
    ]


def test_groups_of_one_rank_stay_as_they_are() -> None:
    """They may be alike and yet be several; what is in none of them comes to the first."""
    first = [group(0.1, "a"), group(0.1, "b")]
    assert merged(first) == first
    assert merged(first, [group(0.1, "b", "c")]) == [group(0.1, "a", "c"), group(0.1, "b")]


@pytest.mark.parametrize(
    "other",
    [[group(0.2, "tied")], [group(0.1, "b"), group(0.2, "tied")], [group(0.3, "tied", "c")]],
)
def test_one_parameter_under_two_rates_is_refused_by_name(other: Groups) -> None:
    with pytest.raises(SaveError) as caught:
        merged([group(0.1, "a", "tied"), group(0.2, "d")], other)
    assert caught.value.kind == "replicas-differ"
    assert caught.value.where == "optim.groups: tied"
    rate = next(g["lr"] for g in other if "tied" in g["params"])
    assert (caught.value.wanted, caught.value.found) == ("lr=0.1", f"lr={rate} on rank 1")


def test_a_parameter_that_a_third_stage_has_otherwise_is_refused() -> None:
    with pytest.raises(SaveError) as caught:
        merged([group(0.1, "a")], [group(0.3, "c")], [group(0.1, "c")])
    assert caught.value.where == "optim.groups: c"
    assert caught.value.found == "lr=0.1 on rank 2"


@pytest.mark.parametrize(
    ("one", "other"), [(0, 0.0), (0, False), (0.0, -0.0), (None, float("nan"))]
)
def test_values_that_python_calls_equal_are_not_taken_for_one_another(one: Any, other: Any) -> None:
    def part(rank: int, value: Any) -> RankPart:
        return RankPart(rank, "plan", objects=(ObjectEntry("meter", value),))

    assert merge_objects([part(0, other), part(1, other)])["meter"].value is other
    with pytest.raises(SaveError, match="different values of a replicated object"):
        merge_objects([part(0, one), part(1, other)])
    with pytest.raises(SaveError, match="different hyperparameters"):
        merged([{"x": one, "params": ["a"]}], [{"x": other, "params": ["a"]}])
