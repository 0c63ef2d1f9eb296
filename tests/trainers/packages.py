"""Packages that only these tests need: the extra ``trainers``."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

__all__ = ["needs"]


def needs(module: str) -> Any:
    """Import a module, or skip the test and say how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # torchtitan is in no extra: it wants many packages, and nightly builds of torch.
        titan = module.startswith("torchtitan")
        how = "pip install torchtitan==0.3.0" if titan else "scripts/install trainers"
        pytest.skip(f"{error.name} is not installed: {how}")
