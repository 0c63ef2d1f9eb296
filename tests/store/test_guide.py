"""The example of the guide for store authors keeps the contract, as it stands in the text."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.store import StoreSpec, base, register_store
from ckptd.testing.store import StoreContract

_GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "store-authors.md"


@pytest.fixture(scope="module")
def guide(request: pytest.FixtureRequest) -> Iterator[None]:
    blocks = re.findall(r"^```python\n(.*?)^```", _GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = (b for b in blocks if "class SqliteStore" in b)
    module = types.ModuleType("store_of_the_guide")
    sys.modules[module.__name__] = module
    before = dict(base._openers)
    exec(compile(code, str(_GUIDE), "exec"), vars(module))
    register_store("sqlite", module.open_sqlite)
    yield
    base._openers.clear()
    base._openers.update(before)
    del sys.modules[module.__name__]


class TestExample(StoreContract):
    long_listing = 50
    race_processes = 1

    @pytest.fixture
    def spec(self, tmp_path: Path, guide: None) -> StoreSpec:
        return StoreSpec(f"sqlite://{tmp_path}/objects.db")

    def test_racing_processes_have_one_winner(self, *_: object) -> None:
        pytest.skip("other processes do not know a store that is only in a text")
