"""Recipes: layouts that say how things are cut and name no tensor: ``fsdp``, ``zero3``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckptd.errors import UsageError
from ckptd.layout.lay.syntax import Layout, Rule, Statement, Use

__all__ = ["is_recipe", "with_recipes"]

_MAX_MORE = 4096


def is_recipe(layout: Layout) -> bool:
    """Whether a layout names no tensors, neither by rules nor by layouts that it uses."""
    return not any(isinstance(s, Rule | Use) for s in layout.statements)


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
        if used is not None and is_recipe(used):
            statements += used.statements
        else:
            statements.append(statement)
        if len(statements) > len(layout.statements) + _MAX_MORE:
            raise UsageError(
                f"layout {layout.name} has more than {_MAX_MORE} statements by recipes",
                kind="lay-rule",
            )
    return replace(layout, statements=tuple(statements))
