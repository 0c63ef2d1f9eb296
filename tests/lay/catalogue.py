"""The programs of ``docs/reference/lay-catalogue``: what their head says, and their layouts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ckptd.lay.bind import bind_sizes
from ckptd.lay.resolve import Bound, resolve
from ckptd.lay.syntax import parse
from ckptd.lay.syntax.tree import File, Layout

__all__ = ["CATALOGUE", "Program"]

FOLDER = Path(__file__).parents[2] / "docs" / "reference" / "lay-catalogue"


@dataclass(frozen=True)
class Program:
    """One row of the catalogue."""

    path: Path

    @property
    def name(self) -> str:
        """Number and name."""
        return self.path.stem

    @cached_property
    def text(self) -> str:
        """The program."""
        return self.path.read_text()

    @cached_property
    def file(self) -> File:
        """The program, parsed."""
        return parse(self.text, self.path.name)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes for a trial, from the head."""
        return {a: int(n) for a, n in re.findall(r"(\w+)=(\d+)", self._line("sizes"))}

    @property
    def promise(self) -> str:
        """What the worst rule of both layouts promises, from the head."""
        return self._line("promise")

    def _line(self, key: str) -> str:
        found = re.search(rf"^# {key}: (.*)$", self.text, re.MULTILINE)
        assert found is not None, f"{self.path.name} does not say its {key}"
        return found[1]

    @property
    def layouts(self) -> list[str]:
        """Names of its layouts, source and target first."""
        return [i.name for i in self.file.items if isinstance(i, Layout)]

    def bound(self, layout: str) -> Bound:
        """Return one of its layouts with the sizes of the head."""
        return bind_sizes(resolve([self.file], layout), self.sizes)


CATALOGUE = [Program(p) for p in sorted(FOLDER.glob("*.lay"))]
