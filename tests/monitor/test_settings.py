from __future__ import annotations

import pytest

from ckptd.errors import UsageError
from ckptd.monitor.job import Phase
from ckptd.monitor.settings import WatchSettings, changed, setting_names
from ckptd.monitor.verdict import VerdictKind


@pytest.mark.parametrize("name", setting_names())
def test_every_setting_can_be_changed(name: str) -> None:
    before = WatchSettings()
    after = changed(before, f"{name}={'ask' if name.startswith('policy') else 7}")
    assert after != before
    assert before == WatchSettings()


def test_floors_policies_and_parts() -> None:
    settings = changed(WatchSettings(), "floor.train=5")
    assert settings.limits.floors[Phase.TRAIN] == 5.0
    assert settings.limits.floors[Phase.CKPT] == 600.0
    assert changed(settings, "policy.slow-link=act").policy == {VerdictKind.SLOW_LINK: "act"}
    assert changed(settings, "slow.ratio=1.5").slow.ratio == 1.5
    assert changed(settings, "confirm=3").confirm == 3


@pytest.mark.parametrize(
    "wrong",
    ["", "=", "floor", "floor.train", "floor.train=x", "floor.train=-1", "floor.train=nan",
     "confirm=1.5", "limits=3", "policy.crash=", "policy.rain=log", "slow.=3", "floor.train=inf"],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError) as caught:
        changed(WatchSettings(), wrong)
    assert "invalid setting" in caught.value.message
