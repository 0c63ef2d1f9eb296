"""Puts the pages that docstrings and messages name into the wheel: docs/... is ckptd/docs/..."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PAGES = ("*.md", "design/*.md", "guide/*.md", "reference/*.md", "spec/*.md")


class Pages(BuildHookInterface[Any]):
    """The text of the pages, without pictures and the changes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the pages, but not to an editable install: a clone has them."""
        docs = Path(self.root, "docs")
        for pattern in PAGES if version == "standard" else ():
            for page in docs.glob(pattern):
                if page.name != "README.md":
                    to = f"ckptd/docs/{page.relative_to(docs)}"
                    build_data["force_include"][str(page)] = to
