from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.data.schedule import share
from ckptd.elastic.treesum import TreeNode, TreeSum, cover
from ckptd.errors import UsageError


def _text(left: str, right: str) -> str:
    return f"({left}+{right})"


def _alone(leaves: int) -> str:
    tree = TreeSum(leaves, _text)
    for leaf in range(leaves):
        tree.put(TreeNode(0, leaf), str(leaf))
    return tree.total()


def test_the_tree_is_what_it_is() -> None:
    assert _alone(1) == "0"
    assert _alone(3) == "((0+1)+2)"
    assert _alone(6) == "(((0+1)+(2+3))+(4+5))"


@given(st.integers(1, 40), st.data())
def test_any_sharing_and_any_order_gives_the_same_tree(leaves: int, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, leaves))
    whole = TreeSum(leaves, _text)
    parts: list[tuple[TreeNode, str]] = []
    for rank in range(world):
        mine = TreeSum(leaves, _text)
        run = share(leaves, world, rank)
        for leaf in data.draw(st.permutations(run)):
            mine.put(TreeNode(0, leaf), str(leaf))
        assert set(mine.nodes) == set(cover(run, leaves))
        parts += mine.nodes.items()
    for node, value in data.draw(st.permutations(parts)):
        whole.put(node, value)
    assert whole.total() == _alone(leaves)


@given(st.integers(1, 2000), st.data())
def test_a_run_keeps_few_nodes(leaves: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, leaves - 1))
    run = range(begin, data.draw(st.integers(begin + 1, leaves)))
    nodes = cover(run, leaves)
    assert [k for node in nodes for k in node.leaves if k < leaves] == list(run)
    assert len(nodes) <= 2 * max(1, len(run).bit_length())


def test_floating_point_sums_are_bitwise_equal() -> None:
    values = np.random.default_rng(1).standard_normal((11, 1000)).astype(np.float32)
    sums = []
    for world in range(1, 12):
        whole = TreeSum(11, lambda a, b: a + b)
        for rank in reversed(range(world)):
            mine = TreeSum(11, lambda a, b: a + b)
            for leaf in share(11, world, rank):
                mine.put(TreeNode(0, leaf), values[leaf])
            for node, value in mine.nodes.items():
                whole.put(node, value)
        sums.append(whole.total().tobytes())
    assert len(set(sums)) == 1
    assert sums[0] != values.sum(0).tobytes()  # or this would show nothing


def test_what_does_not_fit_is_refused() -> None:
    tree = TreeSum(5, _text)
    for wrong in (TreeNode(0, 5), TreeNode(0, -1), TreeNode(4, 0)):
        with pytest.raises(UsageError, match="unknown leaf"):
            tree.put(wrong, "")
    tree.put(TreeNode(1, 0), "01")
    for wrong in (TreeNode(0, 0), TreeNode(1, 0), TreeNode(2, 0)):
        with pytest.raises(UsageError, match="added before"):
            tree.put(wrong, "")
    with pytest.raises(UsageError, match="leaves are missing"):
        tree.total()
