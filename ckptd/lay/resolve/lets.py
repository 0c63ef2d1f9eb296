"""``let``: names, dimensions and sizes put in where they are used; limits of growth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ckptd.errors import UsageError
from ckptd.lay.syntax import tree

_MAX_DEPTH = 16
_MAX_LEVEL = 64
_MAX_NODES = 1_000_000
_MAX_PARTS = 256

H = TypeVar("H", bound=tree.How)


@dataclass
class Lets:
    """Definitions of names by ``let``.

    Attributes
    ----------
    names
        Beginnings of names.
    dims
        Dimensions: refined atoms, and parts of rules that several rules share.
    values
        Sizes.
    """

    names: dict[str, tree.Let] = field(default_factory=dict)
    dims: dict[str, tree.Let] = field(default_factory=dict)
    values: dict[str, tree.Let] = field(default_factory=dict)
    _left: int = _MAX_NODES

    @classmethod
    def of(cls, *groups: Iterable[tree.Let]) -> Lets:
        """Sort lets; what an earlier group says goes before what a later one says.

        Raises
        ------
        UsageError
            ``lay-rule``: one group says two things of one name.
        """
        out = cls()
        for group in groups:
            found = cls()
            for let in group:
                found._add(let)
            for kind in ("names", "dims", "values"):
                merged = getattr(found, kind) | getattr(out, kind)
                setattr(out, kind, merged)
        return out

    def _add(self, let: tree.Let) -> None:
        kind = self.values
        if isinstance(let.value, tree.Name):
            kind = self.names
        elif not isinstance(let.value, tree.Number | tree.Arithmetic | tree.Size):
            kind = self.dims
        before = kind.setdefault(let.name, let)
        # Each file has its own beginnings of names; all files share atoms and sizes.
        apart = kind is self.names and before.at.file != let.at.file
        if before.value != let.value and not apart:
            place = f"{before.at.file}:{before.at.line}"
            raise _wrong(f"{let.name} has another value in {place}", let.at)

    def name(self, name: tree.Name, depth: int = 0) -> tree.Name:
        """Return a name with the let that it begins with put in."""
        first = name.parts[0] if name.parts else None
        if not isinstance(first, tree.Text):
            return name
        head, dot, rest = first.text.partition(".")
        let = self.names.get(head)
        if let is None or not isinstance(let.value, tree.Name) or not (dot or len(name.parts) == 1):
            return name
        out = tree.Name(
            tree.join((*let.value.parts, tree.Text(dot + rest), *name.parts[1:])), at=name.at
        )
        if depth == _MAX_DEPTH or len(out.parts) > _MAX_PARTS:
            raise _wrong(f"{head} goes in circles", let.at)
        return self.name(out, depth + 1)

    def dim(self, dim: tree.Dim, depth: int = 0, level: int = 0) -> tree.Dim:
        """Return a dimension with all lets put in, those of its grains and multiples as well."""
        self._count(dim.at, depth, level)
        match dim:
            case tree.Atom() if dim.name in self.dims:
                let = self.dims[dim.name]
                if depth == _MAX_DEPTH:
                    raise _wrong(f"{dim.name} goes in circles", let.at)
                return self.dim(let.value, depth + 1, level + 1)  # type: ignore[arg-type]
            case tree.Split():
                inner = self.dim(dim.inner, depth, level + 1)
                return replace(dim, inner=inner, how=self.how(dim.how))
            case tree.Product():
                parts = [self.dim(p, depth, level + 1) for p in dim.parts]
                return replace(dim, parts=tuple(parts))
            case tree.Sum():
                found = [replace(b, dim=self.dim(b.dim, depth, level + 1)) for b in dim.branches]
                return replace(dim, branches=tuple(found))
            case tree.Pad():
                inner = self.dim(dim.inner, depth, level + 1)
                return replace(dim, inner=inner, multiple=self.value(dim.multiple))
        return dim

    def how(self, how: H) -> H:
        """Return a split's rule with lets put into its grain."""
        return replace(how, grain=self.value(how.grain)) if isinstance(how, tree.Even) else how

    def value(self, value: tree.Value, depth: int = 0, level: int = 0) -> tree.Value:
        """Return a value with lets put in."""
        self._count(value.at, depth, level)
        if isinstance(value, tree.Arithmetic):
            left = self.value(value.left, depth, level + 1)
            return replace(value, left=left, right=self.value(value.right, depth, level + 1))
        if isinstance(value, tree.Number) or value.name not in self.values:
            return value
        let = self.values[value.name]
        if depth == _MAX_DEPTH:
            raise _wrong(f"{value.name} goes in circles", let.at)
        return self.value(let.value, depth + 1, level + 1)  # type: ignore[arg-type]

    def index(self, index: tree.NameIndex) -> tree.NameIndex:
        """Return an index of a name with lets put into its splits."""
        return replace(index, splits=tuple((a, self.how(h)) for a, h in index.splits))

    def _count(self, at: tree.Position, depth: int, level: int) -> None:
        """Refuse what lets make too deep, or too much: each may use another one twice."""
        self._left -= depth > 0
        if level > _MAX_LEVEL or self._left < 0:
            raise _wrong("lets make this too large, or nest too deeply", at)


def atoms_of(dim: tree.Dim) -> tuple[str, ...] | None:
    """Return the atoms of a product of products; None if there is anything else in it."""
    if isinstance(dim, tree.Atom):
        return (dim.name,)
    if not isinstance(dim, tree.Product):
        return None
    out: list[str] = []
    for part in dim.parts:
        found = atoms_of(part)
        if found is None:
            return None
        out += found
    return tuple(out)


def _wrong(message: str, at: tree.Position) -> UsageError:
    where = f"{at.file}:{at.line}" if at.line else None
    return UsageError(message, kind="lay-rule", where=where)
