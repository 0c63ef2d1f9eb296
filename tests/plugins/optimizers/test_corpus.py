"""All optimizers of the libraries that are here; the last counts: docs/reference/campaigns.md."""

from __future__ import annotations

import importlib.util

import pytest

from tests.checkpoint.torch.optimizers import LIBRARIES, classes, play

pytestmark = [pytest.mark.plugins, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("library", [name for name in LIBRARIES if name != "torch"])
def test_none_comes_back_as_another(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: docs/reference/campaigns.md has the command")
    results = [play(name, kind) for name, kind in classes(library).items()]
    assert not [r for r in results if r.outcome == "wrong"]
    assert [r for r in results if r.outcome in ("exact", "refused")]
