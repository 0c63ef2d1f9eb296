"""Layout programs as a user names them: files, shipped ones, rules from the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from ckptd.errors import NotFoundError, UsageError
from ckptd.layout.lay import library
from ckptd.layout.lay.closed import found_sizes
from ckptd.layout.lay.dims import Number, Operation, Size
from ckptd.layout.lay.equation import Bound, Resolved
from ckptd.layout.lay.parser import parse, parse_statement
from ckptd.layout.lay.printer import show
from ckptd.layout.lay.program import (
    File,
    Files,
    Flat,
    Layout,
    Let,
    Mesh,
    Object,
    Pipe,
    Reshard,
    Space,
    Statement,
    Use,
)
from ckptd.layout.lay.recipe import is_recipe
from ckptd.layout.lay.resolve import resolve
from ckptd.layout.lay.toml import read_toml

__all__ = [
    "Program",
    "layout_names",
    "other_sizes",
    "read_file",
    "read_program",
    "read_text",
    "wrapped",
]

Item: TypeAlias = Mesh | Let | Space | Layout | Reshard | Use

MAX_BYTES = 1 << 20
_TITLE = re.compile(r"# layout (\S+)\n")
_ENDS = (".lay", ".toml")
_GIVEN = "given"


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

    def closed(self, bound: Bound) -> Program:
        """Return the program with every size that was found for it: so it is kept."""
        return replace(self, file=File((*found_sizes(bound), *self.file.items)))

    @property
    def is_recipe(self) -> bool:
        """Whether the layout says how things are cut and names no tensor."""
        return is_recipe(self._layout())

    def _layout(self) -> Layout:
        found = _named(self.file, self.layout)
        return found or _shipped_layout(self.layout)

    def with_sizes(self, rules: Sequence[str]) -> Program:
        """Return the program with those of some statements that fix a size."""
        return self.with_rules([r for r in rules if _fixes_size(r)])

    def with_rules(self, rules: Sequence[str]) -> Program:
        """Return the program with further statements.

        A mesh, space or ``let`` is put beside the layout, and replaces one of the same name (a
        size does not replace a refinement); other statements go into the layout, before its own;
        rules override those of one name.

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
        kept: list[Item] = [i for i in self.file.items if not _replaced(i, items)]
        items += kept
        if not statements:
            return replace(self, file=File(tuple(items)))
        old = self._layout()
        if old not in items:
            items += _companions(self.layout, items)
        items = [i for i in items if i is not old and i != old]
        return replace(self, file=File((*items, *_overridden(old, statements))))


def _overridden(old: Layout, statements: Sequence[Statement]) -> tuple[Layout, ...]:
    """Return a layout with further statements, which go before its own.

    Rules override those of a layout that is used, so the old rules move to a layout of their own.
    """
    if is_recipe(old):
        return (replace(old, statements=(*statements, *old.statements)),)
    inner = replace(old, name=f"{old.name}.{_GIVEN}")
    # What a layout says besides its rules is not taken over by those that use it.
    besides = [s for s in old.statements if isinstance(s, Flat | Pipe | Object | Files)]
    return inner, replace(old, statements=(*statements, Use(inner.name), *besides))


def _replaced(item: object, by: Iterable[object]) -> bool:
    kinds = (Mesh, Let, Space)
    return any(
        isinstance(item, kind) and isinstance(b, kind) and item.name == b.name
        for b in by
        for kind in kinds
        if _is_size(item) == _is_size(b)
    )


def _is_size(item: object) -> bool:
    """Tell a size from a refinement: ``let hd = 128`` and ``let hd = (two half)`` are both true."""
    return isinstance(item, Let) and isinstance(item.value, Number | Operation | Size)


def _fixes_size(rule: str) -> bool:
    return rule.startswith("let ") and any(map(_is_size, parse(rule, rule).items))


def other_sizes(kept: Program, used: Program) -> list[str]:
    """Return what a program says of sizes in place of another one, for people.

    Parameters
    ----------
    kept
        A program.
    used
        The same with statements put in.
    """
    mine = {i.name: i for i in used.file.items if isinstance(i, Let) and _is_size(i)}
    old = [i for i in kept.file.items if isinstance(i, Let) and _is_size(i)]
    return [
        f"{show(mine[let.name])} in place of the kept {show(let)}"
        for let in old
        if let.name in mine and mine[let.name].value != let.value
    ]


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
    """Return a layout with the tensors of `base`, which is on no mesh, cut as a recipe says.

    It keeps what it needs of both: meshes of the recipe, layouts and spaces of the base.
    """
    old = recipe._layout()
    new = Layout(
        f"{recipe.layout}.{base.layout}", "", old.meshes, (Use(base.layout), *old.statements)
    )
    needed = _reachable(base.file, base.layout)
    items: list[Item] = [i for i in recipe.file.items if not isinstance(i, Layout | Reshard)]
    items += _own_companions(recipe, items)
    for item in base.file.items:
        is_other = isinstance(item, Layout) and item.name not in needed
        if is_other or isinstance(item, Mesh | Reshard) or _replaced(item, items):
            continue
        items.append(item)
    return Program(File((*items, new)), new.name)


def _reachable(file: File, layout: str) -> set[str]:
    """Return the names of a layout and of all that it uses."""
    found: set[str] = set()
    todo = [layout]
    while todo:
        name = todo.pop()
        known = _named(file, name)
        if name not in found and known is not None:
            found.add(name)
            todo += [s.name for s in known.statements if isinstance(s, Use)]
    return found


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
