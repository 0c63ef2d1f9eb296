"""``pipe``: stage strings of Megatron's pipelines, their letters, layers by stage.

In it: limits of repetition and nesting.

The strings are those of Megatron-LM's ``--pipeline-model-parallel-layout``: ``E`` is the
embedding, ``t`` a decoder layer, ``m`` a multi-token-prediction layer, ``L`` the loss. ``|`` parts
stages, which may be empty, ``t*3`` and ``(tt|)*29`` repeat, commas and spaces mean nothing. Stage
number s lies on pipeline rank ``s % pp`` as its virtual stage ``s // pp``, so in
``l@vpp@pp`` the virtual stage comes first, as the outer one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ckptd.errors import UsageError
from ckptd.lay.resolve.equation import MeshShape
from ckptd.lay.syntax.tree import Pipe

_MAX_SYMBOLS = 100_000
_MAX_DEPTH = 16
_LETTERS = "EtmL"


class Stage(NamedTuple):
    """The layers of one stage: number of the first, how many."""

    start: int
    size: int


def stages(text: str) -> tuple[str, ...]:
    """Return the letters of each stage of a stage string.

    Raises
    ------
    UsageError
        ``lay-rule``: it is no stage string, or absurdly long.
    """
    symbols, end = _sequence(text, 0, 0)
    if end != len(text):
        raise _wrong(text, f"')' at position {end + 1} closes nothing")
    return tuple(symbols.split("|"))


def stage_parts(pipe: Pipe, mesh: MeshShape) -> tuple[Stage, ...]:
    """Return the decoder layers of each stage, row-major over the mesh axes of ``pipe.splits``.

    Raises
    ------
    UsageError
        ``lay-rule``: the string is wrong, or there are more or fewer stages than coordinates.
    """
    unknown = [a for a in pipe.splits if a not in mesh.extents]
    if unknown:
        raise _wrong(pipe.stages, f"pipe over {unknown[0]}, which is not an axis of the mesh", pipe)
    found = stages(pipe.stages)
    wanted = math.prod(mesh.extents[a] for a in pipe.splits)
    if len(found) != wanted:
        over = " x ".join(f"{a}={mesh.extents[a]}" for a in pipe.splits)
        raise _wrong(pipe.stages, f"{len(found)} stages over {over}, which has {wanted}", pipe)
    parts = []
    start = 0
    for letters in found:
        parts.append(Stage(start, letters.count("t")))
        start += letters.count("t")
    return tuple(parts)


def _sequence(text: str, at: int, depth: int) -> tuple[str, int]:
    """Read up to a closing parenthesis or the end; return the symbols and where it stopped."""
    out = ""
    while at < len(text) and text[at] != ")":
        letter = text[at]
        at += 1
        if letter in ", ":
            continue
        if letter == "(":
            if depth == _MAX_DEPTH:
                raise _wrong(text, f"parentheses deeper than {_MAX_DEPTH}")
            unit, at = _sequence(text, at, depth + 1)
            if at == len(text):
                raise _wrong(text, "a parenthesis is not closed")
            at += 1
        elif letter in _LETTERS or letter == "|":
            unit = letter
        else:
            raise _wrong(text, f"{letter!r} at position {at} is not a letter of a stage string")
        times, at = _times(text, at)
        if len(out) + len(unit) * times > _MAX_SYMBOLS:
            raise _wrong(text, f"more than {_MAX_SYMBOLS} layers and stages")
        out += unit * times
    return out, at


def _times(text: str, at: int) -> tuple[int, int]:
    """Read ``*n``, if it is there; return n and where it ends."""
    if at == len(text) or text[at] != "*":
        return 1, at
    end = at + 1
    while end < len(text) and text[end] in "0123456789":
        end += 1
    if not 0 < end - at - 1 <= 6:
        raise _wrong(text, f"'*' at position {at + 1} without a number, or a huge one")
    return int(text[at + 1 : end]), end


def _wrong(text: str, message: str, pipe: Pipe | None = None) -> UsageError:
    where = f'pipe "{text[:200]}"'
    if pipe is not None and pipe.at.line:
        where = f"{pipe.at.file}:{pipe.at.line}  {where}"
    wanted = "E, t, m, L, '|' between stages, '*n' and parentheses to repeat"
    return UsageError(message, kind="lay-rule", where=where, wanted=wanted)
