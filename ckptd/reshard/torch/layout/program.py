"""Layout program that a job gives, and how names of its state are spelled from it.

In it: layouts that a save refuses (quantized).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from ckptd.checkpoint.torch.layouts import LayoutSpec
from ckptd.errors import UsageError
from ckptd.lay.matching import Matcher
from ckptd.lay.resolve import Resolved
from ckptd.lay.syntax.tree import Average, File, Layout, Quantized
from ckptd.reshard.layouts import LayoutProgram, read_program, read_text

_PARAMS, _STATES = "{name}", "optim.{name}.{state}"
"""Names in checkpoints where a layout has no ``stored`` statement."""


def read_layout(spec: LayoutSpec, *, quantized: bool = False) -> LayoutProgram:
    """Read what a job gives as its layout.

    Parameters
    ----------
    spec
        The layout.
    quantized
        Whether it may have quantized tensors.

    Raises
    ------
    NotFoundError
        No such file.
    UsageError
        ``lay-syntax``, ``lay-rule``: not a program, or not clear which layout is meant. Kind
        ``lay-use``: a recipe, or rules that live ranks cannot be captured by.
    """
    program = _read(spec)
    if program.is_recipe:
        raise UsageError(
            "a recipe only says how to cut tensors and names none",
            kind="lay-use",
            where=program.layout,
            hint="FSDP2 and other DTensors need no layout, or a layout 'on none' that names whole "
            "tensors",
        )
    if not quantized:
        refuse_quantized(program.resolve())
    return program


def refuse_quantized(resolved: Resolved) -> None:
    """Raise `UsageError` (kind ``lay-use``) for a layout with quantized tensors."""
    for equation in resolved.equations:
        if any(isinstance(m, Quantized) for m in equation.modifiers):
            raise UsageError(
                "only a Subscriber can fill quantized tensors and their scales; they cannot be "
                "published, saved, loaded or moved by relayout",
                kind="lay-use",
                where=f"{equation.at.file}:{equation.at.line}  {equation.text}",
                hint="use the original tensors",
            )


def _read(spec: LayoutSpec) -> LayoutProgram:
    if isinstance(spec, File):
        layouts = [i for i in spec.items if isinstance(i, Layout)]
        if len(layouts) != 1:
            raise UsageError(
                "the program has several layouts: name one",
                kind="lay-rule",
                wanted="a program with one layout",
                found=", ".join(i.name for i in layouts) or "none",
            )
        return LayoutProgram(spec, layouts[0].name)
    text = os.fspath(cast("str | os.PathLike[str]", spec))
    if "\n" in text:
        return read_text(text, "layout")
    return read_program(text, "layout", lambda run: run.source)


@dataclass(frozen=True)
class Spelling:
    """Templates of names: ``{name}`` represents a rule's name, ``{state}`` a state's."""

    params: str = _PARAMS
    states: str = _STATES

    def put_into(self, resolved: Resolved) -> Resolved:
        """Return a layout with these templates."""
        return replace(resolved, params=self.params, state_names=self.states)

    def put_into_program(self, program: LayoutProgram) -> LayoutProgram:
        """Return a program whose layout says these templates."""
        if self == Spelling():
            return program
        return program.with_rules([f'stored "{self.params}" states "{self.states}"'])

    @property
    def groups(self) -> tuple[str, str]:
        """Name of the optimizer's groups, and what parameters begin with in them."""
        before = self.states.partition("{name}")[0]
        section, _, prefix = before.partition(".")
        return f"{section}.groups", prefix


def spelling_of(
    resolved: Resolved,
    names: Iterable[str],
    optimizers: Iterable[tuple[str, bool]] = (),
    *,
    stored: bool,
) -> Spelling | None:
    """Find out how names begin; None when no rule matches any.

    A layout that has a ``stored`` statement says it itself. Otherwise parameters are all in one
    section of the state (``model.``), or at its top, and states in another (``optim.``).

    Parameters
    ----------
    resolved
        The layout.
    names
        All names.
    optimizers
        Sections that optimizers are in, and whether they name parameters without the section of
        the module.
    stored
        Whether these are names in a checkpoint, or on a rank.

    Raises
    ------
    UsageError
        kind ``lay-use``: several sections fit alike.
    """
    own = Spelling(resolved.params, resolved.state_names)
    if own != Spelling():
        return own
    matcher = Matcher(resolved, stored)
    known = list(names)
    ends = [f".{s.stored}" for s in resolved.states] + [f".{s.name}" for s in resolved.scalars]
    counts: Counter[str] = Counter()
    for name in known:
        if not any(name.endswith(end) for end in ends):
            counts.update(p for p in ("", _first(name)) if _is_match(matcher, name, p))
    if not counts:
        return None
    prefix = _best(counts, "parameters", 'stored "model.{name}"')
    found: Counter[str] = Counter()
    for name in known:
        end = next((e for e in ends if name.endswith(e)), None)
        section = _first(name)
        if end is None or not section:
            continue
        inner = name.removesuffix(end)
        if _is_match(matcher, inner, section):
            found[section] += 1
        elif prefix and _is_match(matcher, inner, section + prefix):
            found[section + prefix] += 1
    if not found:
        found.update(f"{s}." if bare else f"{s}.{prefix}" for s, bare in optimizers)
    best = _best(found, "optimizer states", 'stored "model.{name}" states "optim.{name}.{state}"')
    return Spelling(prefix + "{name}", (best or "optim.") + "{name}.{state}")


def _first(name: str) -> str:
    """Return the section that a name begins with, and its dot."""
    section, dot, _ = name.partition(".")
    return section + dot if dot else ""


def _is_match(matcher: Matcher, name: str, prefix: str) -> bool:
    if not name.startswith(prefix):
        return False
    found = matcher.match(name.removeprefix(prefix))
    return found is not None and found.equation >= 0


def _best(counts: Counter[str], what: str, example: str) -> str:
    """Return the prefix that most names have; a shorter one wins where it has as many."""
    if not counts:
        return ""
    most = max(counts.values())
    best = [p for p, n in counts.items() if n == most]
    if "" in best:
        return ""
    if len(best) > 1:
        raise UsageError(
            f"several sections of the state could hold the layout's {what}",
            kind="lay-use",
            found=", ".join(sorted(best)),
            hint=f"say which in the layout: {example}",
        )
    return best[0]


def combined(resolved: Resolved) -> str | None:
    """Return the rule by which replicas are combined, if there is one."""
    for equation in resolved.equations:
        if any(isinstance(m, Average) for m in equation.modifiers):
            return equation.text or str(equation.at)
    return None
