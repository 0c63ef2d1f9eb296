"""Recipes: layouts that cut and name no tensor (``fsdp``, ``zero3``).

In it: limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckptd.errors import UsageError
from ckptd.lay.syntax.tree import Layout, Rule, Statement, Use

_MAX_MORE = 4096
_MAX_DEPTH = 64


def is_recipe(layout: Layout, find: Callable[[Use], Layout] | None = None) -> bool:
    """Whether a layout names no tensors, neither by rules nor by layouts that it uses.

    Parameters
    ----------
    layout
        Any layout.
    find
        Returns the layout that a ``use`` names; without it a layout that uses any is none.

    Raises
    ------
    UsageError
        ``lay-rule``: recipes use each other too deeply, or put in too many statements.
    """
    return _is_recipe(layout, find, {}, ())


def with_recipes(
    layout: Layout, find: Callable[[Use], Layout], known: dict[str, Layout | None] | None = None
) -> Layout:
    """Return a layout with the statements of each recipe in place of its ``use``.

    So ``use hf.llama; use fsdp`` means what ``use hf.llama; default [_@dp:ceil ...]`` means. The
    meshes and the space of a recipe do not count.

    Parameters
    ----------
    layout
        Any layout.
    find
        Returns the layout that a ``use`` names.
    known
        What was found so far with the same `find`, by name: a recipe with those that it uses put
        in, or None for a layout that names tensors.

    Raises
    ------
    UsageError
        ``lay-rule``: as `is_recipe`.
    """
    return _with_recipes(layout, find, {} if known is None else known, ())


def _is_recipe(
    layout: Layout,
    find: Callable[[Use], Layout] | None,
    known: dict[str, Layout | None],
    inside: tuple[str, ...],
) -> bool:
    return not any(isinstance(s, Rule) for s in layout.statements) and all(
        find is not None and _recipe(s, find, known, inside) is not None
        for s in layout.statements
        if isinstance(s, Use)
    )


def _with_recipes(
    layout: Layout,
    find: Callable[[Use], Layout],
    known: dict[str, Layout | None],
    inside: tuple[str, ...],
) -> Layout:
    statements: list[Statement] = []
    more = 0
    for statement in layout.statements:
        used = _recipe(statement, find, known, inside) if isinstance(statement, Use) else None
        if used is None:
            statements.append(statement)
            continue
        statements += used.statements
        # A recipe may be empty: each use counts as well.
        more += 1 + len(used.statements)
        if more > _MAX_MORE:
            raise UsageError(
                f"layout {layout.name} has more than {_MAX_MORE} uses and statements by recipes",
                kind="lay-rule",
            )
    return replace(layout, statements=tuple(statements))


def _recipe(
    use: Use,
    find: Callable[[Use], Layout],
    known: dict[str, Layout | None],
    inside: tuple[str, ...],
) -> Layout | None:
    """Return the recipe that a ``use`` names, whole; None if it names a layout with tensors.

    A layout that uses itself is no recipe.
    """
    if use.name in inside:
        return None
    # Recipes that several others use are looked up once: each of them may use another one twice.
    if use.name not in known:
        if len(inside) == _MAX_DEPTH:
            raise UsageError(f"layouts use each other {_MAX_DEPTH} deep", kind="lay-rule")
        layout, inner = find(use), (*inside, use.name)
        whole = _is_recipe(layout, find, known, inner)
        known[use.name] = _with_recipes(layout, find, known, inner) if whole else None
    return known[use.name]
