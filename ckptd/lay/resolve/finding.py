"""`Finding`: errors and warnings of checks, and their text with place and caret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptd.errors import MismatchError, UsageError
from ckptd.lay.syntax.tree import NOWHERE, Position


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a program, or may be.

    Attributes
    ----------
    code
        Stable and machine-readable: ``indivisible``.
    message
        One sentence or two.
    at, rule
        Where, and the rule as it was written; empty for what concerns no rule.
    notes
        Further lines: rules that would fit, other rules concerned, what to write.
    severity
        A program with an error cannot be used; a warning may be meant.
    fit
        Whether the program is fine by itself and does not fit what was observed.
    """

    code: str
    message: str
    at: Position = NOWHERE
    rule: str = ""
    notes: tuple[str, ...] = ()
    severity: Literal["error", "warning"] = "error"
    fit: bool = False

    @property
    def where(self) -> str:
        """File and line, and the rule."""
        place = f"{self.at.file}:{self.at.line}" if self.at.line else ""
        return "  ".join(p for p in (place, self.rule) if p)

    def as_warning(self) -> Finding:
        """Return the same as something that may be meant."""
        return replace(self, severity="warning")

    def render(self) -> str:
        """Return the finding as text: where, what, and the notes, each on its line."""
        mark = "warning: " if self.severity == "warning" else ""
        lines = [self.where] if self.where else []
        lines.append(f"  {mark}{self.message}")
        lines += [f"    {note}" for note in self.notes]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return the finding as plain data."""
        return {
            "severity": self.severity,
            "code": self.code,
            "file": self.at.file,
            "line": self.at.line,
            "column": self.at.column,
            "rule": self.rule,
            "message": self.message,
            "notes": list(self.notes),
        }


def render(findings: Sequence[Finding]) -> str:
    """Return findings as text, the errors first."""
    errors = [f for f in findings if f.severity == "error"]
    warnings = [f for f in findings if f.severity == "warning"]
    return "\n".join(f.render() for f in (*errors, *warnings))


def raise_first(findings: Sequence[Finding]) -> None:
    """Raise the first error among some findings, if there is one.

    Raises
    ------
    UsageError
        ``lay-rule``: the program is wrong.
    MismatchError
        ``lay-fit``: it does not fit what was observed.
    """
    errors = [f for f in findings if f.severity == "error"]
    if not errors:
        return
    first = errors[0]
    more = f" (and {len(errors) - 1} more errors)" if len(errors) > 1 else ""
    cls, kind = (MismatchError, "lay-fit") if first.fit else (UsageError, "lay-rule")
    raise cls(
        first.message + more,
        kind=kind,
        where=first.where or None,
        hint="\n".join(first.notes) or None,
    )
