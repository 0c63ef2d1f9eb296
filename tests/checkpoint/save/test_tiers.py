"""Tiers as a user gives them, and as the agent gets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptd.checkpoint.save.tiers import Local, Memory, Peer, tier_specs
from ckptd.errors import UsageError


def test_the_nearest_comes_first(tmp_path: Path) -> None:
    specs = tier_specs([Local(str(tmp_path), keep=3, throttle=1e6), Peer(), Memory(every=2)])
    assert [s.name for s in specs] == ["memory", "peer", "local"]
    assert [s.store is None for s in specs] == [True, True, False]
    assert specs[2].keep == 3
    assert specs[2].store is not None
    assert specs[2].store.url == str(tmp_path)


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ([Memory(), Memory(every=3)], "memory tier given twice"),
        (["memory"], "invalid tier"),
        ([Memory], "invalid tier"),
    ],
)
def test_what_is_no_list_of_tiers_is_refused(tiers: list[Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        tier_specs(tiers)
    assert words in caught.value.message


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_a_folder_keeps_at_least_one(keep: Any) -> None:
    with pytest.raises(UsageError):
        Local("x", keep=keep)
