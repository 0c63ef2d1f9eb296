"""`TreeSum`: sums with the same rounding on any number of ranks, by one fixed binary tree.

Floating-point addition does not associate, so a sum over 4 ranks differs from that over 3 in its
last bits, and training on from there differs in all. Here leaf ``i`` is at a fixed place of a fixed
tree, whichever rank computed it: node ``(level, k)`` is the sum of leaves ``k << level`` up to
``(k + 1) << level``, always added as its left half plus its right half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from ckptd.errors import UsageError

T = TypeVar("T")


class TreeNode(NamedTuple):
    """A node of the tree; leaves are at level 0."""

    level: int
    place: int

    @property
    def leaves(self) -> range:
        """The leaves below it, also those beyond the last."""
        return range(self.place << self.level, (self.place + 1) << self.level)


class TreeSum(Generic[T]):
    """Adds leaves and sums, as soon as both halves of a node are there.

    Parameters
    ----------
    leaves
        Leaves of the whole tree; not all need ever be put here.
    add
        Returns the sum of a left and a right half; it may reuse the memory of either.

    Attributes
    ----------
    nodes
        What is there and has no other half yet. Put in order, the leaves of a run of n leaves keep
        at most about ``2 * log2(n)`` of them.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves = leaves
        self._add = add
        self.nodes: dict[TreeNode, T] = {}

    @property
    def root(self) -> TreeNode:
        """The node that is the sum of all leaves."""
        return TreeNode((self._leaves - 1).bit_length(), 0)

    def put(self, node: TreeNode, value: T) -> None:
        """Add a leaf, or a node that was added elsewhere.

        Raises
        ------
        UsageError
            There is no such node, or it has been put before.
        """
        if node.place < 0 or node.leaves.start >= self._leaves or node.level > self.root.level:
            raise self._refused("unknown leaf or node", node)
        if any(_overlap(node.leaves, known.leaves) for known in self.nodes):
            raise self._refused("this leaf or node has been added before", node)
        while node != self.root:
            level, place = node
            if (place ^ 1) << level < self._leaves:
                other = TreeNode(level, place ^ 1)
                if other not in self.nodes:
                    break
                half = self.nodes.pop(other)
                value = self._add(half, value) if place % 2 else self._add(value, half)
            node = TreeNode(level + 1, place // 2)
        self.nodes[node] = value

    def total(self) -> T:
        """Return the sum of all leaves.

        Raises
        ------
        UsageError
            Not all leaves were put.
        """
        if set(self.nodes) != {self.root}:
            raise self._refused("leaves are missing", *sorted(self.nodes))
        return self.nodes[self.root]

    def _refused(self, what: str, *nodes: TreeNode) -> UsageError:
        found = ", ".join(f"{n.leaves.start} to {n.leaves.stop - 1}" for n in nodes)
        return UsageError(
            what,
            wanted=f"each of {self._leaves} leaves once",
            found=f"leaves {found}" if found else "no leaf",
        )


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def cover(run: range, leaves: int) -> tuple[TreeNode, ...]:
    """Return the nodes that a `TreeSum` keeps of a run of leaves, in the order of their leaves."""
    tree: TreeSum[None] = TreeSum(leaves, lambda _a, _b: None)
    for leaf in run:
        tree.put(TreeNode(0, leaf), None)
    return tuple(sorted(tree.nodes, key=lambda node: node.leaves.start))
