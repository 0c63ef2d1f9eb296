"""Tensors as a tree of names, with layers that are alike drawn once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.cli.output import size_text

if TYPE_CHECKING:
    from ckptd.cli.contents import TensorRow

__all__ = ["tree_rows"]

Cells = tuple[str, ...]
_MOST_LEVELS = 64
"""A name may be 4,096 characters of "a.a.a."; recursion must not follow all of them."""


@dataclass
class _Node:
    """The names below one prefix; `count` and `nbytes` cover all of them."""

    leaf: TensorRow | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    count: int = 0
    nbytes: int = 0
    kind: int = 0


def tree_rows(tensors: Sequence[TensorRow], depth: int | None, *, full: bool) -> list[Cells]:
    """Return ``(name, dtype, shape, layout, ranks, size)`` of each line of the tree.

    Parameters
    ----------
    depth
        Levels to show; None shows all.
    full
        Draw layers that are alike one by one.
    """
    root = _Node()
    for tensor in tensors:
        _insert(root, tensor)
    if not full:
        _number_kinds(root, {})
    return list(_lines(root, None, depth, full=full))


def _insert(root: _Node, tensor: TensorRow) -> None:
    node = root
    for segment in tensor.name.split(".", _MOST_LEVELS):
        node = node.children.setdefault(segment, _Node())
        node.count += 1
        node.nbytes += tensor.bytes
    node.leaf = tensor


def _number_kinds(node: _Node, kinds: dict[Hashable, int]) -> None:
    """Give nodes that look alike (names below, dtypes, shapes, cuts) one number."""
    for child in node.children.values():
        _number_kinds(child, kinds)
    leaf = node.leaf
    own = None if leaf is None else (leaf.dtype, leaf.shape, leaf.layout.words, len(leaf.aliases))
    look = (own, tuple((name, child.kind) for name, child in node.children.items()))
    node.kind = kinds.setdefault(look, len(kinds) + 1)


def _lines(node: _Node, indent: str | None, depth: int | None, *, full: bool) -> Iterator[Cells]:
    """Yield what is below a node; `indent` is None at the top, where no branches are drawn."""
    groups = _groups(node, full=full)
    for i, (label, members) in enumerate(groups):
        shown, levels = members[0], 1
        while len(members) == 1 and shown.leaf is None and len(shown.children) == 1:
            name, shown = next(iter(shown.children.items()))
            members, label, levels = [shown], f"{label}.{name}", levels + 1
        last = i == len(groups) - 1
        branch = "" if indent is None else indent + ("└─ " if last else "├─ ")
        yield _line(branch + label, members)
        left = None if depth is None else depth - levels
        if left is None or left > 0:
            below = "" if indent is None else indent + ("   " if last else "│  ")
            yield from _lines(shown, below, left, full=full)


def _groups(node: _Node, *, full: bool) -> list[tuple[str, list[_Node]]]:
    """Return the children with their labels; neighbouring numbers that look alike are one."""
    out: list[tuple[list[str], list[_Node]]] = []
    for name, child in node.children.items():
        if not full and out and _continues(out[-1], name, child):
            out[-1][0].append(name)
            out[-1][1].append(child)
        else:
            out.append(([name], [child]))
    return [
        (names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}", nodes) for names, nodes in out
    ]


def _continues(group: tuple[list[str], list[_Node]], name: str, child: _Node) -> bool:
    before = group[0][-1]
    return (
        name.isdecimal()
        and before.isdecimal()
        and int(name) == int(before) + 1
        and group[1][0].kind == child.kind
    )


def _line(label: str, members: list[_Node]) -> Cells:
    first = members[0]
    size = size_text(first.nbytes)
    if len(members) > 1:
        label += f"  ({len(members)} alike)"
        size = f"{len(members)} x {size}"
    if first.leaf is None:
        count = f"{first.count} tensors" if first.count > 1 else "1 tensor"
        return (label, "", "", count, "", size)
    if first.leaf.aliases:
        label += f"  = {', '.join(first.leaf.aliases)}"
    layout = first.leaf.layout
    ranks = layout.ranks if len(members) == 1 else ""
    return (label, first.leaf.dtype, str(list(first.leaf.shape)), layout.words, ranks, size)
