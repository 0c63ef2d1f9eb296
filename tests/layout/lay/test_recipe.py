"""A recipe's statements stand where it is used."""

from __future__ import annotations

from ckptd.layout.lay import library
from ckptd.layout.lay.parser import parse
from ckptd.layout.lay.printer import show
from ckptd.layout.lay.program import Layout, Use
from ckptd.layout.lay.recipe import is_recipe, with_recipes


def find(use: Use) -> Layout:
    return next(i for i in library.load(use.name).items if isinstance(i, Layout))


def layout(text: str) -> Layout:
    found = parse(text).items[0]
    assert isinstance(found, Layout)
    return found


def test_recipes_are_spliced_and_layouts_stay_used() -> None:
    mine = layout("layout x on M { a = E[h]; use hf.llama; use fsdp; use zero3; b = E[h] }")
    assert [show(s) for s in with_recipes(mine, find).statements] == [
        "a = E[h]",
        "use hf.llama",
        "default [_@dp:ceil ...]",
        "flat each @dp:ceil of *",
        "b = E[h]",
    ]
    assert with_recipes(mine, find).meshes == mine.meshes


def test_which_of_the_shipped_layouts_are_recipes() -> None:
    layouts = [i for n in library.names() for i in library.load(n).items if isinstance(i, Layout)]
    recipes = {found.name for found in layouts if is_recipe(found)}
    assert recipes == {"ddp", "fsdp", "zero1", "zero2", "zero3"}
