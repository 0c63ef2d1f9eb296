"""`Prepared`: from a source and two programs to everything a reshard does; costs and proof.

In it: which program the source is read with (given, kept, inferred), and hints where it does not
fit; refusals of names that are not recognised, and of a reshard in which values change or are lost;
no option and no file: those are of `cli/resharding.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from ckptd.base.digest import BLOCK_BYTES
from ckptd.base.grids.runs import count
from ckptd.base.grouping import by_key
from ckptd.checkpoint.format.container import ChunkRef
from ckptd.checkpoint.format.manifest import UNORDERED
from ckptd.checkpoint.format.words import hint_text
from ckptd.checkpoint.load.files import check_size
from ckptd.checkpoint.load.plan import BlockLine
from ckptd.errors import CkptdError, MismatchError, RefusedError, first_few
from ckptd.lay.copies import TargetPlan
from ckptd.lay.promise import PROMISES
from ckptd.lay.proving import prove
from ckptd.lay.resolve import Bound, Resolved
from ckptd.lay.syntax import library, show
from ckptd.lay.syntax.tree import File, Let, Stored
from ckptd.reshard.compose import (
    Composed,
    TensorLink,
    apart_of,
    bind_to,
    compose_layouts,
    refuse_unread,
)
from ckptd.reshard.execute import Budget, Executor
from ckptd.reshard.layouts import (
    LayoutProgram,
    compare,
    infer,
    moment,
    other_sizes,
    read_text,
    wrapped,
)
from ckptd.reshard.plan import Target
from ckptd.reshard.reading import BlockCache, bytes_wanted
from ckptd.reshard.reports import Costs, Proved, RuleReport, SourceProgram
from ckptd.reshard.source import SourceTensors, in_section
from ckptd.reshard.target import Assembled, assemble_target
from ckptd.reshard.verify import Expected, expect


@dataclass(frozen=True, eq=False)
class Prepared:
    """A reshard, ready to be explained, proved or done.

    Attributes
    ----------
    stock
        The source.
    source, target
        The programs as they are used.
    assembled
        What is to be written.
    read_with
        Which program the source is read with, and what its own says of that.
    """

    stock: SourceTensors
    source: LayoutProgram
    target: LayoutProgram
    assembled: Assembled
    read_with: SourceProgram

    @cached_property
    def expected(self) -> Mapping[int, Expected]:
        """Values of the source's witness, by target tensor."""
        return expect(self.assembled.composed)

    @property
    def identity(self) -> str:
        """Text that is the same for all processes of this reshard, and for no others."""
        return f"{self.stock.identity}\n{self.source.text}\n{self.target.text}"


def source_program(stock: SourceTensors, given: LayoutProgram | None) -> LayoutProgram:
    """Return the source's program: the one given, the one it keeps, or one made from its names.

    What a reader of foreign files made of hints counts as kept.
    """
    if given is not None:
        return given
    return _kept(stock) if stock.lay else inferred(stock)


def inferred(stock: SourceTensors, *, has_sections: bool = True) -> LayoutProgram:
    """Return the program that the names of a source make.

    Parameters
    ----------
    has_sections
        Whether names may begin with a section, if those of the source do at all.
    """
    sections = has_sections and stock.has_sections
    return infer(stock.shapes, has_sections=sections, objects=stock.objects)


def section_of(stock: SourceTensors, section: str) -> SourceTensors:
    """Return what a source has below a name, without it; raises as `in_section`.

    Its program is kept where that speaks of parameters below the name.
    """
    lay, above = "", f"{section}."
    if stock.lay and not stock.hinted:
        kept = _kept(stock)
        resolved = kept.resolve()
        if resolved.params.startswith(above):
            said = Stored(
                resolved.params.removeprefix(above), resolved.state_names.removeprefix(above)
            )
            lay = kept.with_rules([show(said)]).text
    return in_section(stock, section, lay)


def apart_from(stock: SourceTensors, source: LayoutProgram) -> SourceTensors:
    """Return a source that holds what its own program does not speak of as it is.

    What a user, or a hint, says is meant to be of everything.
    """
    if not source.own or stock.locate is not None:
        return stock
    return replace(stock, apart=stock.apart | apart_of(source.resolve(), stock))


def _kept(stock: SourceTensors) -> LayoutProgram:
    return _read_kept(stock.lay, stock.step, stock.world, own=not stock.hinted)


@lru_cache(1)
def _read_kept(text: str, step: int, world: int, *, own: bool) -> LayoutProgram:
    """Read the program that a source keeps; several look at it, and a large one takes a while."""
    program = replace(read_text(text, f"the program of step {step}"), own=own)
    mesh = program.resolve().mesh
    if mesh is not None and mesh.world > world:
        # Its writer was one of these ranks; more of them are only work to count.
        raise MismatchError(
            "the kept program is for more ranks than wrote the checkpoint",
            kind="lay-fit",
            where=f"the program of step {step}",
            wanted=f"at most {world} ranks",
            found=f"{mesh.world}",
            hint="give the layout: --from LAYOUT",
        )
    return program


def prepare(
    stock: SourceTensors,
    source: LayoutProgram,
    target: LayoutProgram,
    *,
    rules: Sequence[str] = (),
    allow_lossy: bool = False,
    allow_layout: bool = False,
    trust: bool = False,
) -> Prepared:
    """Combine everything. Reads nothing but small tensors and objects.

    Parameters
    ----------
    stock
        The source.
    source, target
        Their programs. A recipe as target is applied to the source's layout, or to its stored
        tensors when that has a mesh of its own.
    rules
        Statements that the user gave for the source: sizes among them go before kept ones.
    allow_lossy
        Values may change.
    allow_layout
        The source's program may contradict the one that the source keeps.
    trust
        Tensors lie in buffers of the source in the order that its program says: the target is not
        marked as one of which that is not verified.

    Raises
    ------
    UsageError, MismatchError
        A program is wrong, does not fit the source, or the two do not fit each other.
    MismatchError
        kind ``lay-fit``: the source's program contradicts the one that the source keeps.
    RefusedError
        Values would change, or something would be left out. Kind ``unreadable-format``: the source
        has tensors of kinds that are not read, and its layout does not drop them.
    """
    if trust:
        known = {k: v for k, v in stock.metadata.items() if k != UNORDERED}
        stock = replace(stock, metadata=known)
    refuse_unread(source.resolve(), stock)
    hint = _fitting_hint(stock, source, rules, is_recipe=target.is_recipe)
    source = source if hint is None or not hint.note else inferred(stock)
    resolved = source.resolve()
    given = source
    stock = apart_from(stock, source)
    is_recut = target.is_recipe
    live = _live(stock, source, target) if is_recut else None
    if live is not None:
        target, is_recut = wrapped(target, live), False
    elif is_recut:
        if resolved.mesh is not None:
            # Its rules are cut over other axes than the recipe's.
            # Names that a program calls the weights' own begin with no section.
            source = inferred(stock, has_sections=resolved.params != "{name}").with_drops(rules)
            resolved = source.resolve()
            stock = apart_from(stock, source)
        target = wrapped(target, source)
    wanted = target.resolve()
    composed = compose_layouts(resolved, wanted, stock, is_recut=is_recut)
    if is_recut:
        _check_recognised(stock, resolved, wanted, composed.dropped)
    used = composed.composition.source.bound
    if hint is not None:
        read_with = hint
    elif source is not given:
        read_with = SourceProgram(kept="unused")
    else:
        read_with = _checked(stock, source, used, rules, allowed=allow_layout)
    if composed.promise == "lossy" and not allow_lossy:
        raise _lossy(composed, [k for k in composed.links if k.promise == "lossy"])
    closed = target.closed(composed.composition.target.bound)
    assembled = assemble_target(composed, closed.text)
    return Prepared(stock, source, target, assembled, read_with)


def _live(
    stock: SourceTensors, source: LayoutProgram, target: LayoutProgram
) -> LayoutProgram | None:
    """Return how a job holds a model that files have otherwise, as their ``config.json`` says.

    None where the recipe gives no names of a job's state: then files' own names stay.
    """
    name = source.layout.replace("hf.", LIVE, 1)
    if not (stock.hinted and name.startswith(LIVE) and name in library.names()):
        return None
    if wrapped(target, source).resolve().params == "{name}":
        return None
    sizes = tuple(i for i in source.file.items if isinstance(i, Let))
    return LayoutProgram(File(sizes), name)


LIVE = "live."
"""Begins the names of shipped layouts of models as transformers 5 holds them."""


def _check_recognised(
    stock: SourceTensors, source: Resolved, target: Resolved, dropped: Sequence[str]
) -> None:
    """Refuse to rename states as though they were parameters; none matters that is dropped.

    Raises
    ------
    MismatchError
        kind ``lay-fit``: names of the source do not say what is a parameter and what follows it.
    """
    left = set(dropped)
    first = None if source.states else moment(n for n in stock.shapes if n not in left)
    same = (source.params, source.state_names) == (target.params, target.state_names)
    if first is None or same:
        return
    groups = [o.name for o in stock.objects if o.kind == "groups"]
    section = _section_of(first, stock)
    raise MismatchError(
        "the source's names do not distinguish parameters from optimizer states",
        kind="lay-fit",
        where=first,
        wanted="one model and one optimizer, states named by their parameters",
        found=f"groups of {len(groups)} optimizers: {', '.join(groups[:4])}" if groups else None,
        hint=f"--section {section}, which strips that prefix"
        if section
        else "leave states out, for example -e 'from: optimizer.** = drop' --allow lossy, keep the"
        " names (a recipe without names.*), or say with --from LAYOUT how they are"
        ' called: stored "model.{name}" states "optim.{name}.{state}"',
    )


def _section_of(state: str, stock: SourceTensors) -> str:
    """Return the section in which names tell whose a state is; "" for none."""
    *above, _ = state.split(".")
    for depth in range(1, len(above) + 1):
        top = ".".join(above[:depth])
        inside = {
            n.removeprefix(f"{top}."): s for n, s in stock.shapes.items() if n.startswith(f"{top}.")
        }
        if infer(inside).resolve().states:
            return top
    return ""


def _fitting_hint(
    stock: SourceTensors, source: LayoutProgram, rules: Sequence[str], *, is_recipe: bool
) -> SourceProgram | None:
    """Say how the program that a reader made of hints fits; None where another one is used.

    A recipe cuts whatever is there, so it needs no program that fits.

    Raises
    ------
    MismatchError
        kind ``lay-fit``: the hint does not fit the files.
    """
    if not (stock.lay and stock.hinted):
        return None
    kept = _kept(stock)
    if source.text != kept.with_rules(rules).text:
        return None
    stated = source.resolve().sizes
    sizes = {n: size for n, size in stock.sizes.items() if n not in stated}
    said = hint_text(stock.lay, sizes)
    try:
        bound = bind_to(source.resolve(), stock)
    except CkptdError as error:
        if is_recipe and not rules:
            note = f"{said}, does not fit: {error.message}"
            return SourceProgram(kept="hint", hinted=True, note=note)
        raise MismatchError(
            "the layout that the source's files suggest does not fit them",
            kind="lay-fit",
            where=error.where,
            wanted=f"{said}, as the files hint",
            found=error.message,
            hint="correct it: -e 'let ...', -e 'from: ...'; or another layout: --from LAYOUT",
        ) from error
    known = tuple(f"{a}={bound.sizes[a]}" for a in stock.sizes if a in bound.sizes)
    return SourceProgram(kept="hint", hinted=True, known=known)


def _checked(
    stock: SourceTensors, source: LayoutProgram, used: Bound, rules: Sequence[str], *, allowed: bool
) -> SourceProgram:
    """Compare the source's program with the one that the source keeps."""
    if not stock.lay:
        return SourceProgram(kept="none")
    try:
        kept = _kept(stock)
        changed = kept.with_sizes(rules)
        other = tuple(other_sizes(kept, changed))
        if changed.text == source.text:
            return SourceProgram(kept="same", sizes=other)
        bound = _fitting(stock, changed, kept)
    except CkptdError as error:
        # A user who gives a program for a checkpoint may well do so because of that.
        return SourceProgram(kept="unreadable", hinted=stock.hinted, note=error.message)
    found = compare(bound, used, stock.shapes, "omit --from; or give --allow layout")
    wrong = found.difference
    # Hints are a guess: the user's word goes before them.
    if wrong is not None and not allowed and not stock.hinted:
        raise wrong
    alike: Literal["agrees", "unlike"] = "agrees" if found.compared else "unlike"
    return SourceProgram(
        hinted=stock.hinted,
        kept=alike if wrong is None else "differs",
        compared=found.compared,
        tensors=found.tensors,
        sizes=other,
        note="" if wrong is None else str(wrong.where),
    )


def _fitting(stock: SourceTensors, changed: LayoutProgram, kept: LayoutProgram) -> Bound:
    """Bind the kept program, with the user's sizes where they fit the source."""
    try:
        return bind_to(changed.resolve(), stock)
    except CkptdError:
        return bind_to(kept.resolve(), stock)


def _lossy(composed: Composed, links: Sequence[TensorLink]) -> RefusedError:
    names = [link.tensor.name for link in links] + [f"{n} (dropped)" for n in composed.dropped]
    names += [f"{n} (no place in the target)" for n in composed.lost]
    return RefusedError(
        "values would change or be dropped",
        where=first_few(names, 4),
        wanted="a reshard that can be undone",
        found="casts to narrower types, averages, scales or drops",
        hint="--allow lossy",
    )


def rules_of(composed: Composed) -> list[RuleReport]:
    """Return what each rule of the target gets, in its layout's order."""
    by_rule = by_key((link.key[0], link) for link in composed.links)
    out = []
    for number in sorted(by_rule):
        links = by_rule[number]
        equation = composed.composition.target.rules[number].equation
        rules = composed.composition.source.rules
        sources = dict.fromkeys(key[0] for link in links for key in link.sources)
        texts = [rules[s].equation.text or show(rules[s].equation.name) for s in sources]
        size = sum(math.prod(link.held.shape) * link.dtype.itemsize for link in links)
        out.append(
            RuleReport(
                rule=equation.text or show(equation.name),
                at=f"{equation.at.file}:{equation.at.line}",
                tensors=len(links),
                bytes=size,
                sources=tuple(dict.fromkeys(texts)),
                promise=max((link.promise for link in links), key=PROMISES.index),
            )
        )
    return out


def costs_of(prepared: Prepared, target: Target, files: Sequence[int], budget: Budget) -> Costs:
    """Plan all rounds of a share and count; reads nothing but headers.

    Raises
    ------
    CorruptError
        kind ``truncated`` among others: the source's files are not as large as it claims. To plan
        costs time in proportion to them.
    """
    source = prepared.stock.source
    for entry in source.files:
        check_size(source.store, entry)
    executor = Executor(source, target, budget, {})
    line = BlockLine([f.data_bytes for f in source.files])
    cache, read = BlockCache(budget.cache), 0
    needed = rounds = copies = staged = before = 0
    touched: set[int] = set()
    for plan in executor.rounds(files):
        size = sum(s.hi - s.lo for s in plan.stretches)
        staged, before = max(staged, size + before), size
        needed += plan.bytes_needed
        rounds += 1
        copies += sum(len(moves) for moves, _ in plan.turns)
        touched.update(f for _, runs in plan.turns for f in line.files_of(runs))
        for moves, runs in plan.turns:
            blocks, ranges = bytes_wanted(source, line, moves, runs)
            read += cache.bytes_missing(line, blocks) + sum(map(count, ranges.values()))
    windows = budget.readers * budget.window_blocks * BLOCK_BYTES
    return Costs(
        files=len(files),
        bytes_written=sum(target.sizes[f] for f in files),
        bytes_needed=needed,
        bytes_read=read,
        read_amplification=read / needed if needed else 1.0,
        peak_bytes=staged + windows + cache.most * BLOCK_BYTES,
        rounds=rounds,
        copies=copies,
        source_files=len(touched),
    )


def prove_target(composed: Composed, target: Target, files: Sequence[int]) -> Proved:
    """Prove chunk by chunk that each element of a share is written exactly once.

    That the files hold each element of each tensor once needs no proof: a grid and an owner map
    say it.

    Raises
    ------
    UsageError
        An element is written twice, or never.
    """
    chunks = elements = copies = 0
    known: set[object] = set()
    for file in files:
        for chunk in target.filemap.chunks(file):
            chunks += 1
            elements += chunk.piece.numel
            plan = _plan_of(composed, target, chunk) if chunk.piece.numel else None
            if plan is None:
                continue
            # Layers and states have the same blocks: one proof does for all of them.
            shape = (plan.numel, tuple(c.blocks for c in plan.copies), plan.fills)
            copies += sum(len(c.blocks) for c in plan.copies)
            if shape not in known:
                prove(plan)
                known.add(shape)
    return Proved(chunks=chunks, elements=elements, copies=copies)


def _plan_of(composed: Composed, target: Target, chunk: ChunkRef) -> TargetPlan | None:
    """Return how a chunk is filled; None for what follows from no layout."""
    if target.plan is not None:
        return target.plan(chunk.tensor, chunk.piece.index)
    number = chunk.tensor if target.links is None else target.links.get(chunk.tensor)
    if number is None or number >= len(composed.links):
        return None
    return composed.composition.piece(composed.links[number].key, chunk.piece.index)
