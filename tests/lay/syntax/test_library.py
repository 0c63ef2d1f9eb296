"""What is shipped: it parses, is in normal form and names what exists."""

from __future__ import annotations

import re

import pytest

from ckptd.errors import UsageError
from ckptd.lay.syntax import format_text, library, parse
from ckptd.lay.syntax.tree import Layout, Mesh, NameIndex, Rule, Space, Use

RECIPES = ["fsdp", "ddp", "zero1", "zero2", "zero3"]
NAMES = [f"names.{n}" for n in ("ckptd", "plain", "dcp", "titan", "megatron")]
SPACES = [
    "llama",
    "mixtral",
    "gpt2",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "neox",
    "gpt_oss",
    "glm4_moe",
]
MODELS = [*(f"hf.{n}" for n in SPACES), "megatron.gpt", "megatron.moe"]
MODELS += [f"live.{n}" for n in ("mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3")]
MODELS += [f"vllm.{n}" for n in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")]
MODELS += [f"megatron.{n}{k}" for n in ("", "moe.") for k in ("dist", "dist.layers", "dist.single")]
MODELS += [*(f"megatron.{n}.dist" for n in ("qwen2", "qwen3", "qwen3_moe")), "megatron.buckets"]


def test_all_promised_layouts_are_there() -> None:
    assert set(library.names()) == {*RECIPES, *NAMES, *MODELS, *SPACES}


@pytest.mark.parametrize("name", library.names())
def test_each_is_in_normal_form_and_explains_itself(name: str) -> None:
    assert format_text(library.text(name)) == library.text(name)
    assert library.text(name).startswith("# ")


@pytest.mark.parametrize("name", library.names())
def test_each_defines_what_it_is_named_after(name: str) -> None:
    file = library.load(name)
    assert file == parse(library.text(name))
    assert [i.name for i in file.items if isinstance(i, Layout | Space)] == [name]
    for item in file.items:
        if isinstance(item, Use):
            assert item.name in library.names()
        if isinstance(item, Layout):
            assert set(item.meshes) <= {i.name for i in file.items if isinstance(i, Mesh)}


def test_meshes_have_names_of_their_own() -> None:
    """Else two layouts could not be used in one program."""
    meshes = [i.name for n in library.names() for i in library.load(n).items if isinstance(i, Mesh)]
    assert len(set(meshes)) == len(meshes)


@pytest.mark.parametrize("name", MODELS)
def test_rules_name_indexes_that_their_space_has(name: str) -> None:
    layout = next(i for i in library.load(name).items if isinstance(i, Layout))
    space = next(i for i in library.load(layout.space).items if isinstance(i, Space))
    axes = {a for f in space.families for a in f.atoms}
    axes |= {p.axis for f in space.families for p in f.name.parts if isinstance(p, NameIndex)}
    rules = [s for s in layout.statements if isinstance(s, Rule)]
    assert len(rules) > 8 or any(isinstance(s, Use) for s in layout.statements)
    assert {p.axis for r in rules for p in r.name.parts if isinstance(p, NameIndex)} <= axes


@pytest.mark.parametrize(("wrong", "near"), [("hf.lama", "hf.llama"), ("../../errors", "define")])
def test_unknown_names(wrong: str, near: str) -> None:
    with pytest.raises(UsageError, match=re.escape(wrong)) as caught:
        library.load(wrong)
    assert caught.value.kind == "lay-rule"
    assert near in str(caught.value.hint)
