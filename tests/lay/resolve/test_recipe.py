"""A recipe's statements stand where it is used."""

from __future__ import annotations

import pytest

from ckptd.lay.resolve import is_recipe, resolve, resolve_all
from ckptd.lay.resolve.recipe import with_recipes
from ckptd.lay.syntax import library, parse, show
from ckptd.lay.syntax.tree import Layout, Use


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
    assert {n for n in recipes if not n.startswith("names.")} == {
        *("ddp", "fsdp", "zero1", "zero2", "zero3")
    }
    assert sum(n.startswith("names.") for n in recipes) == 5


@pytest.mark.parametrize("used", ["use fsdp", "default [_@dp:ceil ...]"])
def test_a_layout_with_a_recipe_resolves_like_one_that_spells_it_out(used: str) -> None:
    program = parse(f"mesh M = dp:8\nlayout x on M {{ use hf.llama; {used} }}")
    found = resolve([program], "x")
    dims = {show(e.name): [show(d) for d in e.dims] for e in found.equations}
    assert dims["model.layers.{l}.mlp.down_proj.weight"] == ["h@dp:ceil", "f"]
    assert dims["model.norm.weight"] == ["h@dp:ceil"]


def test_flats_of_a_recipe_are_the_layouts_own() -> None:
    program = parse("mesh M = dp:8\nlayout x on M { use megatron.gpt; use zero1 }")
    found = resolve([program], "x")
    assert [show(f) for f in found.flats] == ["flat group(**) @dp of m,s,w end/2*dp"]


NAMED = [n for n in library.names() if "." in n and not n.startswith("names.")]


@pytest.mark.parametrize("name", NAMED)
def test_shipped_layouts_resolve_without_findings(name: str) -> None:
    assert resolve_all([library.load(name)], name)[1] == []


def test_recipes_of_recipes() -> None:
    mine = layout("layout x on M { use fsdp; use names.dcp }")
    assert not is_recipe(mine)
    assert is_recipe(mine, find)
    assert not is_recipe(layout("layout x on M { use fsdp; use hf.llama }"), find)
    itself = {"x": layout("layout x on M { use y }"), "y": layout("layout y on M { use x }")}
    assert not is_recipe(itself["x"], lambda use: itself[use.name])
    inner = {"r": layout("layout r on M { use fsdp }")}
    outer = layout("layout x on M { use hf.llama; use r }")
    found = with_recipes(outer, lambda use: inner.get(use.name) or find(use))
    assert [show(s) for s in found.statements] == ["use hf.llama", "default [_@dp:ceil ...]"]
