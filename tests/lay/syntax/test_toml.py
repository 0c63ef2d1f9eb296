"""TOML holds the same trees, whatever their order, and refuses what is no program."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings

from ckptd.errors import UsageError
from ckptd.lay.syntax import File, parse, read_toml, toml, write_toml
from ckptd.lay.syntax.plain import from_plain, to_plain
from tests.lay.syntax import trees

PROGRAMS = sorted((Path(__file__).parents[1] / "programs").glob("*.lay"))

TABLES = """\
use = "hf.llama"
reshard = "mg -> fs via disk budget 4GiB"

[mesh]
M = "pp:2 tp:4"
F = "dp:8"

[let]
kv = "8"
D = "decoder.layers.{#l@pp}"

[space.tiny]
follow = ["m=exp_avg", "s"]
scalars = ["step(param)"]
let = { hd = "(two half)" }

[space.tiny.tensors]
E = "v h"
"L{l}.q" = "kv hd h"

[layout.mg]
of = "tiny"
on = "M"
flat = "bucket 40e6 @pp of m,s end/lcm(pp, 128)"
files = '"mp_{tp}.safetensors"'

[layout.mg.rules]
"embed.weight" = "E[pad(v, 128*tp)@tp h] on pp=0"
"D.q.weight" = "L{l}.q[(kv@tp hd) h] same"
"**.extra" = "drop"

[layout."fs.2"]
on = ["F"]
use = ["mg"]
default = ["[_@dp:ceil ...]"]
"""

TEXT = """\
mesh M = pp:2 tp:4
mesh F = dp:8
let kv = 8
let D = decoder.layers.{#l@pp}
use hf.llama
space tiny { E[v h]; L{l}.q[kv hd h]; follow m=exp_avg,s; scalar step; let hd = (two half) }
layout mg of tiny on M {
  embed.weight = E[pad(v,128*tp)@tp h] on pp=0
  D.q.weight = L{l}.q[(kv@tp hd) h] same
  **.extra = drop
  flat bucket 40e6 @pp of m,s end/lcm(pp,128)
  files "mp_{tp}.safetensors"
}
layout fs.2 on F { use mg; default [_@dp:ceil ...] }
reshard mg -> fs via disk budget 4GiB
"""


def test_tables_and_text_are_the_same_program() -> None:
    assert read_toml(TABLES) == parse(TEXT)
    assert read_toml(write_toml(parse(TEXT))) == parse(TEXT)


@given(trees.FILES)
@settings(max_examples=60)
def test_programs_read_back(tree: File) -> None:
    assert read_toml(write_toml(tree)) == tree


@given(trees.FILES)
@settings(max_examples=30)
def test_plain_data_is_what_toml_holds(tree: File) -> None:
    assert tomllib.loads(write_toml(tree)) == to_plain(tree)
    assert from_plain(to_plain(tree)) == tree


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.name)
def test_the_ten_programs_read_back(path: Path) -> None:
    tree = parse(path.read_text())
    assert read_toml(write_toml(tree)) == tree


def test_what_fits_into_one_table_has_no_parts() -> None:
    assert "part" not in write_toml(parse(TEXT))


def test_order_and_repeated_names_are_kept_in_parts() -> None:
    tree = parse(
        "layout a on none { x = E[h]\n default [_]\n x = E[v]\n use b }\nmesh M = a:1\nmesh M = a:2"
    )
    text = write_toml(tree)
    assert "[[part]]" in text
    assert "[[part.layout.a.part]]" in text
    assert read_toml(text) == tree


@pytest.mark.parametrize(
    ("text", "where", "wanted"),
    [
        ("mesh = 3", "t.toml.mesh", "a table"),
        ("meshes = {}", "t.toml", "mesh or let"),
        ("[mesh]\nM = 3", "t.toml.mesh", "a text"),
        ("[mesh]\n'a b' = 'pp:2'", "t.toml.mesh", "a name"),
        ("[mesh]\nM = 'pp:2\\nmesh N = a:1'", "t.toml.mesh:1:14", "nothing more"),
        ("[mesh]\nM = '''pp:2\nmesh N = a:1'''", "t.toml.mesh:2:1", "nothing more"),
        ("use = [3]", "t.toml.use", "a text"),
        ("part = 3", "t.toml.part", "a list of tables"),
        ("[[part]]\npart = []", "t.toml.part[0]", "mesh or let"),
        ("[layout.x]\nrule = {}", "t.toml.layout.x", "rules or use"),
        ("[layout.x]\non = ['a b']", "t.toml.layout.x.on", "a name"),
        ("[layout.'x y']", "t.toml.layout.x y", "a name"),
        ("[layout.x.rules]\na = 'E h'", "t.toml.layout.x.rules:1:7", "'['"),
        ("[layout.x.rules]\n'a b' = 'E[h]'", "t.toml.layout.x.rules:1:3", "nothing more"),
        ("[layout.x]\nflat = 'each of m'", "t.toml.layout.x.flat:1:11", "one mesh axis"),
        ("[space.x]\nfollow = {}", "t.toml.space.x.follow", "a text or a list"),
        ("[space.x.tensors]\n'.k' = 'h'", "t.toml.space.x.tensors:1:1", "the whole name"),
        ("a = = 1", "t.toml", "TOML"),
        ("a = " + "[" * 100_000, "t.toml", "TOML"),
        ("a = " + "1" * 10_000, "t.toml", "TOML"),
    ],
)
def test_errors(text: str, where: str, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_toml(text, "t.toml")
    error = caught.value
    assert error.kind == "lay-syntax"
    assert error.where == where
    assert wanted in str(error.wanted)


def test_a_text_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toml, "MAX_TEXT", 10)
    with pytest.raises(UsageError, match="at most 10 characters"):
        read_toml("a = '12345678'")
