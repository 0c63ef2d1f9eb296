from __future__ import annotations

import pytest

from ckptd.base.grids.grid import Axis
from ckptd.errors import MismatchError
from ckptd.lay.scales import scale_tensor
from ckptd.lay.stored import StoredForm
from tests.lay.world import bound

PROGRAM = """
mesh M = pp:2 tp:3
space s { L{l}.g[f h] L{l}.n[h] }
layout q of s on M {
  w.{#l@pp} = L{l}.g[f@tp:ceil/4 h] q(float8_e4m3fn, [4 8], scale={name}_scale_inv)
  n.{#l@pp} = L{l}.n[h]
}
"""


def test_scales_are_cut_like_the_tensor() -> None:
    form = StoredForm(bound(PROGRAM, "q", l=2, f=22, h=20))
    found = scale_tensor(form, 0, (1,))
    assert found is not None
    # 22 rows are 6 blocks, two for each rank; the last one is short.
    assert (found.name, found.shape) == ("w.1_scale_inv", (6, 3))
    assert found.grid.axes == (Axis(((2, 3),)), Axis(((3, 1),)))
    assert [found.owners.owner(i, found.base) for i in range(3)] == [3, 4, 5]
    assert scale_tensor(form, 1, (0,)) is None


def test_a_block_on_two_ranks_belongs_to_the_first() -> None:
    form = StoredForm(bound(PROGRAM.replace("/4", ""), "q", l=2, f=12, h=4))
    found = scale_tensor(form, 0, (0,))
    assert found is not None
    assert found.shape == (3, 1)
    assert [found.owners.owner(i, found.base) for i in range(3)] == [0, 1, 2]
    form = StoredForm(bound(PROGRAM.replace("/4", ""), "q", l=2, f=6, h=4))
    found = scale_tensor(form, 0, (0,))
    assert found is not None
    assert found.grid.npieces == found.owners.npieces == 2
    assert [found.owners.owner(i, found.base) for i in range(2)] == [0, 2]


def test_blocks_of_another_number_of_dimensions() -> None:
    form = StoredForm(bound(PROGRAM.replace("[4 8]", "[4]"), "q", l=2, f=12, h=4))
    with pytest.raises(MismatchError, match="blocks"):
        scale_tensor(form, 0, (0,))


def test_empty_tensor() -> None:
    form = StoredForm(bound(PROGRAM, "q", l=2, f=0, h=4))
    found = scale_tensor(form, 0, (0,))
    assert found is not None
    assert (found.shape, found.owners.npieces) == ((0, 1), 1)
