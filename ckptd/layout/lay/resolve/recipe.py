"""Recipes: layouts that say how things are cut and name no tensor: ``fsdp``, ``zero3``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckptd.errors import UsageError
from ckptd.layout.lay.syntax import Layout, Rule, Statement, Use

__all__ = ["is_recipe", "with_recipes"]

_MAX_MORE = 4096


def is_recipe(
    layout: Layout, find: Callable[[Use], Layout] | None = None, inside: tuple[str, ...] = ()
) -> bool:
    """Whether a layout names no tensors, neither by rules nor by layouts that it uses.

    Parameters
    ----------
    layout
        Any layout.
    find
        Returns the layout that a ``use`` names; without it a layout that uses any is none.
    inside
        Layouts that use this one.
    """
    if any(isinstance(s, Rule) for s in layout.statements) or layout.name in inside:
        return False
    uses = [s for s in layout.statements if isinstance(s, Use)]
    inner = (*inside, layout.name)
    return not uses or (find is not None and all(is_recipe(find(u), find, inner) for u in uses))


def with_recipes(layout: Layout, find: Callable[[Use], Layout]) -> Layout:
    """Return a layout with the statements of each recipe in place of its ``use``.

    So ``use hf.llama; use fsdp`` means what ``use hf.llama; default [_@dp:ceil ...]`` means. The
    meshes and the space of a recipe do not count.

    Parameters
    ----------
    layout
        Any layout.
    find
        Returns the layout that a ``use`` names.
    """
    statements: list[Statement] = []
    for statement in layout.statements:
        used = find(statement) if isinstance(statement, Use) else None
        if used is not None and is_recipe(used, find):
            statements += with_recipes(used, find).statements
        else:
            statements.append(statement)
        if len(statements) > len(layout.statements) + _MAX_MORE:
            raise UsageError(
                f"layout {layout.name} has more than {_MAX_MORE} statements by recipes",
                kind="lay-rule",
            )
    return replace(layout, statements=tuple(statements))
