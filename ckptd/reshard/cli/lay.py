"""``ckptd lay check``, ``fmt``, ``show``: options, prints, comparison with stored shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import App, Parameter

from ckptd.cli.options import Section
from ckptd.cli.output import Document, Json, Reply, counted, flag, note, option
from ckptd.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from ckptd.lay.check import Observation
    from ckptd.lay.resolve import Bound, Resolved
    from ckptd.reshard.layouts import LayoutProgram

lay = App(
    name="lay",
    help="Check, format and draw layout programs (Lay).",
    help_format="plaintext",
    default_parameter=Parameter(negative=()),
)

Program = Annotated[str, Parameter(help="FILE.lay, FILE.lay:LAYOUT, or a shipped layout.")]
Against = Annotated[
    str | None,
    option("ROOT, ROOT@STEP or a foreign checkpoint to compare with."),
]
Rules = Annotated[
    list[str] | None,
    option("A Lay statement, put before those of the layout. May be repeated.", "-e", "--rule"),
]


class CheckDocument(Document, frozen=True, kw_only=True, tag="lay check"):
    """The document that ``ckptd lay check --json`` prints.

    Attributes
    ----------
    program, layouts
        What was checked.
    findings
        severity (``error`` or ``warning``), code, file, line, column, rule, message, notes.
    hint
        The layout and the sizes that foreign files hint at; empty for none.
    """

    program: str
    layouts: tuple[str, ...]
    findings: tuple[dict[str, Any], ...]
    hint: str = ""


class FmtDocument(Document, frozen=True, kw_only=True, tag="lay fmt"):
    """The document that ``ckptd lay fmt --json`` prints.

    Attributes
    ----------
    files
        The files.
    changed
        Those that were not in normal form.
    """

    files: tuple[str, ...]
    changed: tuple[str, ...]


class ShowDocument(Document, frozen=True, kw_only=True, tag="lay show"):
    """The document that ``ckptd lay show --json`` prints.

    Attributes
    ----------
    program, layout, tensor, rule
        What is shown.
    shape
        Of the stored tensor.
    cells
        offset and shape of each cell, the ranks that hold it, the lowest of which writes it, and
        what it holds, as text; with `flat`, its parts as start, end and rank.
    """

    program: str
    layout: str
    tensor: str
    rule: str
    shape: tuple[int, ...]
    cells: tuple[dict[str, Any], ...]


@lay.command
def check(
    program: Program,
    /,
    *,
    against: Against = None,
    section: Section = None,
    rule: Rules = None,
    json: Json = False,
) -> Reply:
    """Check a program, alone or against a checkpoint.

    The exit code is 1 when there are errors; warnings alone are fine.
    """
    from ckptd.lay.check import check_program
    from ckptd.lay.resolve import render

    read, names = _programs(program, rule or ())
    found = {} if against is None else _observed(against, section, read, names)
    findings = []
    for name in names:
        seen = found.get(name)
        if seen is None:
            findings += check_program([read.file], name)
        else:
            findings += check_program([read.file], name, observed=seen.shapes, sizes=seen.sizes)
    findings = list(dict.fromkeys(findings))
    errors = sum(1 for f in findings if f.severity == "error")

    def show_findings(document: CheckDocument) -> None:
        layouts = ", ".join(document.layouts)
        if document.hint:
            note(f"the files hint at {document.hint}")
        if not findings:
            print(f"{layouts}: good")
            return
        print(render(findings))
        warnings = len(findings) - errors
        print(f"{layouts}: {counted(errors, 'error')}, {counted(warnings, 'warning')}")

    document = CheckDocument(
        program=program,
        layouts=tuple(names),
        findings=tuple(f.to_dict() for f in findings),
        hint=next((seen.hint for seen in found.values()), ""),
    )
    return Reply(document, show_findings, 1 if errors else 0)


def _programs(spec: str, rules: list[str] | tuple[()]) -> tuple[LayoutProgram, list[str]]:
    """Return a program, and the layouts of it that are meant: all, unless one is named."""
    from ckptd.reshard.layouts import layout_names, read_file

    read, named = read_file(spec)
    names = [named] if named else layout_names(read.file) or [read.layout]
    if rules:
        if len(names) > 1:
            raise UsageError("-e needs one layout", where=spec, wanted=f"{spec}:LAYOUT")
        read = type(read)(read.file, names[0]).with_rules(list(rules))
    return read, names


class _Observed(NamedTuple):
    """Shapes of stored tensors, or of ranks', sizes besides, and what foreign files hint at."""

    shapes: Observation
    sizes: Mapping[str, int]
    hint: str


def _observed(
    against: str, section: str | None, read: LayoutProgram, names: Sequence[str]
) -> dict[str, _Observed]:
    """Read the shapes that layouts are compared with, by the layouts' names.

    Files of ranks are a checkpoint for those layouts alone that say which is whose.
    """
    from ckptd.checkpoint.format.words import hint_text
    from ckptd.reshard.cli.resharding import open_stock, shapes_of_ranks

    layouts = {name: _resolved(read, name) for name in names}
    out = {}
    for name, layout in layouts.items():
        ranks = None
        if layout is not None and layout.files and section is None:
            ranks = shapes_of_ranks(against, layout)
        if ranks is not None:
            out[name] = _Observed(ranks.of_rank, ranks.sizes, "")
    if out:
        return out
    with open_stock(against, 0, section=section) as stock:
        hint, shapes = hint_text(stock.lay if stock.hinted else "", stock.sizes), dict(stock.shapes)
        for name, layout in layouts.items():
            own = layout.sizes if layout is not None else {}
            sizes = {axis: n for axis, n in stock.sizes.items() if axis not in own}
            out[name] = _Observed(shapes, sizes, hint)
    return out


def _resolved(read: LayoutProgram, layout: str) -> Resolved | None:
    """Return a layout of a program; None where the check says what is wrong with it."""
    from ckptd.lay.resolve import resolve_all

    try:
        return resolve_all([read.file], layout)[0]
    except UsageError:
        return None


@lay.command
def fmt(
    *files: Annotated[Path, Parameter(help="Lay programs (.lay files).")],
    check: Annotated[bool, flag("Change nothing; exit with 1 if a file would change.")] = False,
    json: Json = False,
) -> Reply:
    """Put programs in normal form; comments stay."""
    from ckptd.lay.syntax import format_text

    changed = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise NotFoundError("the program does not exist", where=str(path)) from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError("a program cannot be read", where=str(path), found=error) from None
        new = format_text(text, str(path))
        if new == text:
            continue
        changed.append(str(path))
        if not check:
            path.write_text(new, encoding="utf-8")
    did = "would change" if check else "changed"
    return Reply(
        FmtDocument(files=tuple(map(str, files)), changed=tuple(changed)),
        lambda d: print("".join(f"{did} {name}\n" for name in d.changed), end=""),
        1 if check and changed else 0,
    )


def _bound(resolved: Resolved, against: str, section: str | None) -> Bound:
    """Return a layout bound to a checkpoint's shapes."""
    from ckptd.lay.bind import bind_ranks, bind_stored
    from ckptd.reshard.cli.resharding import open_stock, shapes_of_ranks

    if resolved.files is not None and section is None:
        found = shapes_of_ranks(against, resolved)
        if found is not None:
            return bind_ranks(resolved, found.of_rank, found.sizes)
    with open_stock(against, 0, section=section) as stock:
        sizes = {axis: n for axis, n in stock.sizes.items() if axis not in resolved.sizes}
        return bind_stored(resolved, stock.shapes, sizes)


@lay.command
def show(
    program: Program,
    tensor: Annotated[str, Parameter(help="Name of a stored tensor or optimizer state.")],
    /,
    *,
    against: Against = None,
    section: Section = None,
    rule: Rules = None,
    svg: Annotated[Path | None, option("Write a drawing to this file.")] = None,
    json: Json = False,
) -> Reply:
    """Draw which rank holds which part of a tensor.

    Sizes come from --against, or from 'let' statements in the program or with -e.
    """
    from ckptd.lay.bind import bind_sizes
    from ckptd.lay.stored import StoredForm
    from ckptd.reshard.cli.picture import drawing, picture, text_of
    from ckptd.reshard.layouts import read_program

    read = read_program(program, "PROGRAM", lambda run: run.target).with_rules(rule or ())
    resolved = read.resolve()
    bound = bind_sizes(resolved, {}) if against is None else _bound(resolved, against, section)
    found = picture(StoredForm(bound), tensor)
    if svg is not None:
        svg.write_text(drawing(found), encoding="utf-8")
        note(f"drawn to {svg}")
    document = ShowDocument(
        program=program,
        layout=read.layout,
        tensor=tensor,
        rule=found.rule,
        shape=found.shape,
        cells=tuple(c.to_dict() for c in found.cells),
    )
    return Reply(document, lambda _: print(text_of(found)))
