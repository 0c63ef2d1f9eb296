"""A package that only these tests need and no extra has."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

__all__ = ["needs"]


def needs(module: str, get: str = "torchtitan==0.3.0") -> Any:
    """Import a module, or skip the test and say what to install: what no extra has."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # These are in no extra: they want many packages, and builds of torch of their own.
        pytest.skip(f"{error.name} is not installed: pip install {get}")
