"""Layout programs as a user names them: files, shipped ones, rules from the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from ckptd.errors import NotFoundError, UsageError
from ckptd.layout.lay import library
from ckptd.layout.lay.equation import Resolved
from ckptd.layout.lay.parser import parse, parse_statement
from ckptd.layout.lay.printer import show
from ckptd.layout.lay.program import (
    File,
    Layout,
    Let,
    Mesh,
    Reshard,
    Space,
    Statement,
    Use,
)
from ckptd.layout.lay.recipe import is_recipe
from ckptd.layout.lay.resolve import resolve
from ckptd.layout.lay.toml import read_toml

__all__ = ["Program", "layout_names", "read_file", "read_program", "read_text", "wrapped"]

Item: TypeAlias = Mesh | Let | Space | Layout | Reshard | Use

MAX_BYTES = 1 << 20
_TITLE = re.compile(r"# layout (\S+)\n")
_ENDS = (".lay", ".toml")


@dataclass(frozen=True)
class Program:
    """A program and the layout in it that is meant.

    Attributes
    ----------
    file
        The program; empty for a shipped layout.
    layout
        Name of the layout.
    """

    file: File
    layout: str

    def resolve(self) -> Resolved:
        """Look the layout up; raises as `ckptd.layout.lay.resolve.resolve`."""
        return resolve([self.file], self.layout)

    @property
    def text(self) -> str:
        """The program as a checkpoint keeps it; `read_text` gives it back."""
        return f"# layout {self.layout}\n{show(self.file)}"

    @property
    def is_recipe(self) -> bool:
        """Whether the layout says how things are cut and names no tensor."""
        return is_recipe(self._layout())

    def _layout(self) -> Layout:
        found = _named(self.file, self.layout)
        return found or _shipped_layout(self.layout)

    def with_rules(self, rules: Sequence[str]) -> Program:
        """Return the program with further statements.

        A mesh, space or ``let`` is put beside the layout, and replaces one of the same name; other
        statements go into the layout, before its own.

        Raises
        ------
        UsageError
            ``lay-syntax``: one of them is not Lay.
        """
        items: list[Item] = []
        statements: list[Statement] = []
        for number, text in enumerate(rules, 1):
            where = f"-e #{number}"
            if re.match(r"\s*(mesh|space|let)\b", text):
                items += parse(text, where).items
            else:
                statements.append(parse_statement(text, where))
        kept = [i for i in self.file.items if not _replaced(i, items)]
        out = [*items, *kept]
        if statements:
            old = self._layout()
            new = replace(old, statements=(*statements, *old.statements))
            out = [new if i is old else i for i in out]
            if new not in out:
                out = [*out, *_companions(self.layout, out), new]
        return replace(self, file=File(tuple(out)))


def _replaced(item: object, by: Iterable[object]) -> bool:
    kinds = (Mesh, Let, Space)
    return any(
        isinstance(item, kind) and isinstance(b, kind) and item.name == b.name
        for b in by
        for kind in kinds
    )


def _companions(layout: str, have: Sequence[object]) -> list[Mesh | Let | Space | Use]:
    """Return what a shipped layout has beside it, where the program does not have it."""
    found = [i for i in library.load(layout).items if isinstance(i, Mesh | Let | Space | Use)]
    return [i for i in found if i not in have and not _replaced(i, have)]


def _named(file: File, name: str) -> Layout | None:
    return next((i for i in file.items if isinstance(i, Layout) and i.name == name), None)


def _shipped_layout(name: str) -> Layout:
    layouts = [i for i in library.load(name).items if isinstance(i, Layout)]
    return next((i for i in layouts if i.name == name), layouts[0])


def wrapped(recipe: Program, base: Program) -> Program:
    """Return a layout with the tensors of `base`, cut as a recipe says.

    Both keep their meshes, spaces and lets; the layout is called like the recipe.
    """
    name, old = f"{recipe.layout}.{base.layout}", recipe._layout()
    new = Layout(name, "", old.meshes, (Use(base.layout), *old.statements))
    items = list(dict.fromkeys([*recipe.file.items, *base.file.items]))
    items += _own_companions(recipe, items)
    return Program(File((*items, new)), name)


def _own_companions(program: Program, have: Sequence[object]) -> list[Mesh | Let | Space | Use]:
    if _named(program.file, program.layout) is not None:
        return []
    return _companions(program.layout, have)


def read_program(spec: str, side: str, choose: Callable[[Reshard], str]) -> Program:
    """Read what a user names.

    Parameters
    ----------
    spec
        A ``.lay`` or ``.toml`` file, perhaps with ``:layout``, or the name of a shipped layout.
    side
        The option, for errors.
    choose
        Which side of a ``reshard`` statement is meant.

    Raises
    ------
    NotFoundError
        Kind ``not-found``: no such file.
    UsageError
        ``lay-syntax``, ``lay-rule``: not a program, no such layout, or several.
    """
    program, named = read_file(spec)
    if named or not program.file.items:
        return program
    return Program(program.file, _the_layout(program.file, spec, side, choose))


def read_file(spec: str) -> tuple[Program, str]:
    """Read what a user names; return the program, and the layout if it is named.

    Raises
    ------
    NotFoundError, UsageError
        As `read_program`.
    """
    path, colon, name = spec.rpartition(":")
    if not (colon and path.endswith(_ENDS)):
        path, name = spec, ""
    if not path.endswith(_ENDS):
        library.load(spec)
        return Program(File(()), spec), spec
    return Program(_parse(path), name), name


def layout_names(file: File) -> list[str]:
    """Return the names of all layouts of a program, in order."""
    return [i.name for i in file.items if isinstance(i, Layout)]


def _parse(path: str) -> File:
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise NotFoundError(
            "there is no such program",
            where=path,
            hint="a .lay or .toml file, or a shipped layout: " + ", ".join(library.names()),
        ) from None
    except OSError as error:
        raise UsageError("a program cannot be read", where=path, found=error.strerror) from None
    if len(raw) > MAX_BYTES:
        raise UsageError("a program is too long", where=path, wanted=MAX_BYTES, found=len(raw))
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError("a program is not UTF-8", where=path, found=str(error)) from None
    return read_toml(text, path) if path.endswith(".toml") else parse(text, path)


def _the_layout(file: File, path: str, side: str, choose: Callable[[Reshard], str]) -> str:
    """Return the layout that a program is about."""
    layouts = [i for i in file.items if isinstance(i, Layout)]
    runs = {choose(i) for i in file.items if isinstance(i, Reshard)}
    if len(runs) == 1:
        return runs.pop()
    used = {s.name for i in layouts for s in i.statements if isinstance(s, Use)}
    names = [i.name for i in layouts if i.name not in used] or [i.name for i in layouts]
    if len(names) != 1:
        raise UsageError(
            "say which layout is meant",
            kind="lay-rule",
            where=f"{side} {path}",
            wanted=" or ".join(f"{path}:{n}" for n in names) or "a layout in it",
        )
    return names[0]


def read_text(text: str, where: str) -> Program:
    """Read a program that `Program.text` made.

    Raises
    ------
    UsageError
        ``lay-syntax``, ``lay-rule``: it is something else.
    """
    title = _TITLE.match(text)
    file = parse(text, where)
    if title is not None:
        return Program(file, title[1])
    return Program(file, _the_layout(file, where, "lay", lambda run: run.target))
