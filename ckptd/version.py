"""The version of this package: here, so that what the package imports can name it."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.2.0"
