"""Where names after ``use`` and ``of`` are looked up: the program, its files, shipped ones.

In it: how many files a program may use; names that are near.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TypeAlias, TypeVar

from ckptd.errors import CkptdError, UsageError
from ckptd.lay.resolve.recipe import is_recipe, with_recipes
from ckptd.lay.syntax.tree import File, Layout, Let, Mesh, Position, Space, SyntaxNode, Use

Loader: TypeAlias = Callable[[str], File]
"""Returns a shipped file by name; raises a `ckptd.errors.CkptdError` if there is none."""

_MAX_FILES = 256

_Item = TypeVar("_Item", bound=SyntaxNode)
_Named = TypeVar("_Named", Mesh, Space, Layout)


class ProgramSource:
    """Everything that a program can name.

    Parameters
    ----------
    files
        The program's own files. What they define goes before what is shipped.
    load
        Returns shipped files.

    Raises
    ------
    UsageError
        ``lay-rule``: a name is defined twice, and differently.
    """

    def __init__(self, files: Sequence[File], load: Loader) -> None:
        self._load = load
        self._own = list(files)
        self._shipped: dict[str, File] = {}
        self._first: dict[tuple[type, str], tuple[SyntaxNode, File]] = {}
        self._recipes: dict[str, Layout | None] = {}
        for own in files:
            for item in own.items:
                if isinstance(item, Mesh | Space | Layout):
                    self._first.setdefault((type(item), item.name), (item, own))
        self._check_twice(Mesh)
        self._check_twice(Space)
        self._check_twice(Layout)
        for file in files:
            for use in _items((file,), Use):
                self._fetch(use.name, use.at)

    def layout(self, name: str, at: Position) -> tuple[Layout, File]:
        """Return a layout and the file that it stands in; recipes that it uses are put in."""
        found, file = self._layout(name, at)
        whole = with_recipes(found, lambda u: self._layout(u.name, u.at)[0], self._recipes)
        return whole, file

    def _layout(self, name: str, at: Position) -> tuple[Layout, File]:
        found = self._find(Layout, name)
        if found is None:
            file = self._fetch(name, at, "layout")
            found = _chosen(file, name, at), file
        return found

    def space(self, layout: Layout, used: Sequence[str]) -> Space:
        """Return the space of a layout; it may be that of the layouts it uses, or the only one."""
        name = layout.space or next((u for u in used if u), "")
        if name:
            found = self._find(Space, name)
            if found is not None:
                return found[0]
            spaces = list(_items((self._fetch(name, layout.at, "space"),), Space))
        else:
            spaces = list(_items(self._own, Space)) or list(_items(self.files, Space))
        spaces = list(dict.fromkeys(spaces))
        if not spaces and is_recipe(layout):
            message = (
                f"layout {layout.name} has no rules: it only says how to cut the rules of others"
            )
            hint = f"layout x on M {{ use hf.llama; use {layout.name} }}"
            raise _wrong(message, layout.at, hint)
        exact = [s for s in spaces if s.name == name]
        if len(exact or spaces) != 1:
            raise _unknown("space", name or f"that layout {layout.name} is of", spaces, layout.at)
        return (exact or spaces)[0]

    def mesh(self, name: str, at: Position) -> Mesh:
        """Return a mesh."""
        found = self._find(Mesh, name)
        if found is None:
            raise _unknown("mesh", name, _items(self.files, Mesh), at)
        return found[0]

    @property
    def files(self) -> list[File]:
        """All files, the program's own first."""
        return [*self._own, *self._shipped.values()]

    def own_lets(self) -> list[Let]:
        """Return the lets of the program's own files."""
        return list(_items(self._own, Let))

    def shipped_lets(self) -> list[Let]:
        """Return the lets of the shipped files that were asked for so far."""
        return list(_items(self._shipped.values(), Let))

    def lets_of(self, file: File) -> list[Let]:
        """Return the lets of one file."""
        return list(_items((file,), Let))

    def _find(self, kind: type[_Named], name: str) -> tuple[_Named, File] | None:
        first = self._first.get((kind, name))
        if first is not None and isinstance(first[0], kind):
            return first[0], first[1]
        for file in self._shipped.values():
            for item in _items((file,), kind):
                if item.name == name:
                    return item, file
        return None

    def _fetch(self, name: str, at: Position, what: str = "layout or space") -> File:
        """Return a shipped file, and all that it uses itself."""
        if name in self._shipped:
            return self._shipped[name]
        if len(self._shipped) == _MAX_FILES:
            raise _wrong(f"more than {_MAX_FILES} files are used", at)
        try:
            file = self._load(name)
        except CkptdError as error:
            items: list[Layout | Space] = [*_items(self.files, Layout)]
            items += _items(self.files, Space)
            raise _unknown(what, name, items, at, error) from error
        self._shipped[name] = file
        for use in _items((file,), Use):
            self._fetch(use.name, use.at)
        return file

    def _check_twice(self, kind: type[_Named]) -> None:
        seen: dict[str, _Named] = {}
        for item in _items(self._own, kind):
            before = seen.setdefault(item.name, item)
            if before != item:
                word = kind.__name__.lower()
                place = f"{before.at.file}:{before.at.line}"
                raise _wrong(f"{word} {item.name} is defined in {place} already", item.at)


def _items(files: Iterable[File], kind: type[_Item]) -> Iterable[_Item]:
    return (item for file in files for item in file.items if isinstance(item, kind))


def _chosen(file: File, name: str, at: Position) -> Layout:
    """Return the layout that a shipped file is used for: of its name, or its only one."""
    layouts = list(_items((file,), Layout))
    for wanted in (name, name.rpartition(".")[2], name.partition(".")[0]):
        exact = [layout for layout in layouts if layout.name == wanted]
        if exact:
            return exact[0]
    if len(layouts) != 1:
        raise _unknown("layout", name, layouts, at)
    return layouts[0]


def _unknown(
    what: str,
    name: str,
    known: Iterable[Mesh | Space | Layout],
    at: Position,
    cause: CkptdError | None = None,
) -> UsageError:
    names = sorted({k.name for k in known})
    near = get_close_matches(name, names, n=1)
    shipped = f"; {cause.hint}" if cause is not None and cause.hint else ""
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names) or 'none'}{shipped}"
    return _wrong(f"unknown {what} {name}", at, hint)


def _wrong(message: str, at: Position, hint: str | None = None) -> UsageError:
    where = f"{at.file}:{at.line}" if at.line else None
    return UsageError(message, kind="lay-rule", where=where, hint=hint)
