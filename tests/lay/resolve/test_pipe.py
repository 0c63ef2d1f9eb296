"""Stage strings mean what Megatron-LM's documentation says."""

from __future__ import annotations

import re

import pytest

from ckptd.errors import UsageError
from ckptd.lay.resolve import stage_parts
from ckptd.lay.resolve.mesh import mesh_shape
from ckptd.lay.resolve.pipe import stages
from ckptd.lay.syntax.tree import Mesh, MeshAxis, Pipe


def unrolled(text: str) -> tuple[str, ...]:
    """As Megatron-LM's PipelineParallelLayerLayout unrolls it: two substitutions."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda m: m[1] * int(m[2]), text)
    return tuple(text.split("|"))


@pytest.mark.parametrize(
    "text",
    ["Et*3|(tt|)*29,m|L", "E||t|L", "Ettt|(tt|)*29,m|L", "Ett|(t*2|)*3,tL", "E|*3t|mL", "(|t)*2,L"],
)
def test_as_megatron_reads_it(text: str) -> None:
    assert stages(text) == unrolled(text)


def test_parentheses_nest() -> None:
    assert stages("E ((t|)*2 m|)*2 L") == ("Et", "t", "m", "t", "t", "m", "L")


def test_the_documented_map_of_61_layers() -> None:
    """The table of docs/user-guide/features/pipeline_parallel_layout.md."""
    mesh = mesh_shape([Mesh("M", (MeshAxis("pp", 16),), (MeshAxis("vpp", 2),))])
    parts = stage_parts(Pipe("l", ("vpp", "pp"), "Et*3|(tt|)*29,m|L"), mesh)
    table = {(v, p): parts[v * 16 + p] for v in range(2) for p in range(16)}
    assert table[0, 0] == (0, 3)
    assert all(table[v, p].size == 2 for v in range(2) for p in range(1, 14))
    assert [table[v, p].size for p in (14, 15) for v in (0, 1)] == [2, 0, 2, 0]
    assert table[1, 0] == (table[0, 15].start + 2, 2)
    assert sum(p.size for p in parts) == 61


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Ex|L", "'x' at position 2"),
        ("(t|*2", "not closed"),
        ("t)|L", "closes nothing"),
        ("t*|L", "without a number"),
        ("(((t*9999)*9999)*9999)*9999", "more than"),
        ("(" * 40 + ")" * 40, "deeper"),
        ("E|t|L", "3 stages over vpp=2 x pp=2"),
    ],
)
def test_what_is_no_stage_string(text: str, says: str) -> None:
    mesh = mesh_shape([Mesh("M", (MeshAxis("pp", 2),), (MeshAxis("vpp", 2),))])
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        stage_parts(Pipe("l", ("vpp", "pp"), text), mesh)
    assert caught.value.kind == "lay-rule"
