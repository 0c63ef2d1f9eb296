"""A package that only these tests need and no extra has."""

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
        pytest.skip(f"{error.name} is not installed: pip install torchtitan==0.3.0")
