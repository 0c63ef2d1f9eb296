"""Two layouts and a source, combined: the target's tensors, and where each comes from.

In it: for each tensor of the target its link to those of the source; errors for tensors that no
rule takes or feeds; aliases and tied copies; quantized tensors and measured scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Block
from ckptd.base.grids.grid import Axis, Grid, Piece, whole
from ckptd.checkpoint.format.words import unread_tensors
from ckptd.checkpoint.load.plan import Change
from ckptd.errors import MismatchError, first_few
from ckptd.lay.bind import bind_sizes, bind_stored, from_stored
from ckptd.lay.check import check, check_bound
from ckptd.lay.copies import Composition, Copy, compose
from ckptd.lay.local import BoundTensor
from ckptd.lay.matching import Matcher, NameTemplates
from ckptd.lay.promise import PROMISES, Promise
from ckptd.lay.regions import box_parts
from ckptd.lay.resolve import Bound, Equation, Resolved, raise_first
from ckptd.lay.ruleform import RuleForm
from ckptd.lay.scales import HALF_BYTE, held_shape, overall_scale, quantized_as, scale_tensor
from ckptd.lay.stored import StoredForm, StoredTensor, TensorKey
from ckptd.lay.syntax.tree import Affine, Alias
from ckptd.lay.values import Values
from ckptd.reshard import changes
from ckptd.reshard.dequantized import DEQUANTIZE
from ckptd.reshard.plan import ChunkFeed, Feed, Take
from ckptd.reshard.reading import ValueReader
from ckptd.reshard.source import SourceTensors, StockTensor
from ckptd.types import Box, DType, dtype_of

_LOGICAL = "float32"


def _logical(composed: Composed, link: TensorLink, piece: int, only: int) -> ChunkFeed:
    """Return the logical values of a piece of a target tensor: a tensor with that piece only."""
    plan = composed.composition.piece(link.key, piece)
    takes = []
    for copy in plan.copies:
        source = composed.stock.by_name[copy.source.name]
        change = changes.change_of(source.dtype, dtype_of(_LOGICAL), None, link.tensor.name)
        takes.append(Take(source.number, copy.piece, copy.blocks, change))
    return ChunkFeed(tuple(takes), plan.fills)


def measured_scales(composed: Composed, link: TensorLink) -> changes.BlockScales:
    """Return the scales of a quantized target tensor.

    A block of zeros has scale 1. The result does not depend on how the tensor is cut.

    Raises
    ------
    UsageError
        A value is not finite, so its block has no scale.
    """
    source, grid = composed.stock.source, link.tensor.grid
    modifier = quantized_as(composed.composition.target, link.key[0])
    if modifier is None:
        raise ValueError(f"{link.tensor.name} is not quantized")
    block = modifier.block
    pieces = [
        (_LOGICAL, whole((grid.piece(n).numel,)), partial(_logical, composed, link, n))
        for n in range(grid.npieces)
    ]
    reader = ValueReader(source, pieces)
    maxima = np.zeros(changes.scale_shape(grid.shape, block), dtype=np.float32)
    for part in reader.parts():
        memory = np.zeros(part.hi - part.lo, dtype=np.uint8)
        reader.read(part, memory)
        values = memory.view(np.float32)
        for chunk in reader.chunks:
            first, last = max(part.lo, chunk.start), min(part.hi, chunk.end)
            if first < last:
                piece = grid.piece(chunk.tensor)
                begin = (piece.flat[0] if piece.flat else 0) + (first - chunk.start) // 4
                found = values[(first - part.lo) // 4 : (last - part.lo) // 4]
                changes.block_maxima(maxima, found, begin, piece.box, block)
    if not np.isfinite(maxima).all():
        raise changes.unfit_value(link.tensor.name)
    return changes.block_scales(maxima, modifier, link.tensor.name)


_MOST_NAMED = 6
_PAIRS = ("uint8", "float4_e2m1fn_x2")
"""Types that two elements of four bits are stored as."""


@dataclass(frozen=True, eq=False)
class Duplicate:
    """A tensor of the source that is a copy of another one.

    Attributes
    ----------
    tensor
        The copy.
    original
        Name of what it copies.
    grid
        Its pieces, as `feed` counts them.
    feed
        What each piece would be, made of the original.
    """

    tensor: StockTensor
    original: str
    grid: Grid
    feed: Feed


@dataclass(frozen=True, slots=True, eq=False)
class TensorLink:
    """A target tensor and where it comes from.

    Attributes
    ----------
    key
        Of the target tensor.
    tensor
        The target tensor.
    dtype
        Its type.
    sources
        Keys of the source tensors that feed it, and those tensors.
    promise
        Of its values.
    held
        The tensor's grid as it is written: of bytes, where it has two elements in one.
    """

    key: TensorKey
    tensor: StoredTensor
    dtype: DType
    sources: Mapping[TensorKey, StockTensor]
    promise: Promise
    held: Grid


@dataclass(frozen=True, eq=False)
class Composed:
    """Everything about the tensors of a reshard that follows from layouts and source.

    Attributes
    ----------
    stock
        The source.
    composition
        The two layouts.
    links
        The target's tensors, in the order of the source where that is possible.
    dropped
        Source tensors that a rule leaves out.
    left_out
        Rules of the target whose logical tensors the source does not have.
    lost
        What of the source has no place in the target: parts of tensors, and further names of
        tensors that no rule speaks of.
    merged
        Further names that the source's layout calls copies, and that the target has no name for.
    duplicates
        Tensors of the source that are copies of others, and not compared yet.
    aliases
        Further names of stored target parameters, by name.
    """

    stock: SourceTensors
    composition: Composition
    links: Sequence[TensorLink]
    dropped: Sequence[str] = ()
    left_out: Sequence[str] = ()
    lost: Sequence[str] = ()
    merged: Sequence[str] = ()
    duplicates: Sequence[Duplicate] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def promise(self) -> Promise:
        """The worst promise of all."""
        found: list[Promise] = [link.promise for link in self.links]
        if self.dropped or self.lost:
            found.append("lossy")
        return max(found, key=PROMISES.index, default="exact")

    @cached_property
    def by_parameter(self) -> Mapping[str, Sequence[TensorLink]]:
        """The parameters that are made of one of the source, by its name in the source's rules."""
        out: dict[str, list[TensorLink]] = {}
        for link in self.links:
            for rule, indexes, state in link.sources:
                if not state:
                    name = self.composition.source.rules[rule].global_name(indexes)
                    out.setdefault(name, []).append(link)
        return out

    def feed(self, number: int, piece: int) -> ChunkFeed:
        """Return what fills a piece of the target tensor of link `number`."""
        link = self.links[number]
        plan = self.composition.piece(link.key, piece)
        takes = []
        for copy in plan.copies:
            source = self.stock.by_name[copy.source.name]
            change = self._change(link, piece, source, copy)
            takes += _takes(self.stock, source, copy, change, link.dtype, link.tensor.name)
        if link.held is not link.tensor.grid and plan.fills:
            raise _no_pairs(link.tensor.name, "a tensor that is padded")
        return ChunkFeed(tuple(takes), plan.fills)

    def local_feed(self, rank: int, tensor: BoundTensor, dtype: DType) -> ChunkFeed:
        """Return what fills a tensor or buffer of a rank of the target.

        Raises
        ------
        MismatchError
            kind ``lay-fit``: it would be quantized on the way.
        """
        plan = self.composition.local_tensor(rank, tensor)
        takes = []
        for copy in plan.copies:
            source = self.stock.by_name[copy.source.name]
            if copy.values is not None and changes.quantized(copy.values.target) is not None:
                raise MismatchError(
                    "values of ranks cannot be quantized in this reshard",
                    kind="lay-fit",
                    where=tensor.name,
                    hint="reshard twice: first into a checkpoint of ckptd",
                )
            change = self._source_change(source, copy)
            change = change or changes.change_of(source.dtype, dtype, copy.values, tensor.name)
            takes += _takes(self.stock, source, copy, change, dtype, tensor.name)
        return ChunkFeed(tuple(takes), plan.fills)

    def _source_change(self, source: StockTensor, copy: Copy) -> Change | None:
        """Return the change from quantized values; None where they are none."""
        if source.plain is not None:
            return source.plain.change(source.grid.piece(copy.piece))
        if copy.values is None or changes.quantized(copy.values.source) is None:
            return None
        key = (copy.source.rule, copy.source.indexes, "")
        return self.dequantized(key, source, source.grid.piece(copy.piece))

    def _change(
        self, link: TensorLink, piece: int, source: StockTensor, copy: Copy
    ) -> Change | None:
        values = copy.values
        change = self._source_change(source, copy)
        if change is not None:
            return change
        if values is not None and changes.quantized(values.target) is not None:
            return self.quantized(link, link.tensor.grid.piece(piece))
        return changes.change_of(source.dtype, link.dtype, values, link.tensor.name)

    def dequantized(self, key: TensorKey, source: StockTensor, piece: Piece) -> changes.Scaled:
        """Return the change from a quantized source piece to logical values."""
        form = self.composition.source
        found = scale_tensor(form, key[0], key[1])
        modifier = changes.quantized(form.rules[key[0]].equation.modifiers)
        if found is None or modifier is None or found.name not in self.stock.by_name:
            raise MismatchError(
                "the source lacks the scales of a quantized tensor",
                kind="lay-cover",
                where=source.name,
                wanted=found.name if found else None,
            )
        above = overall_scale(form, key[0], key[1])
        names = [t.name for t in (found, above) if t is not None]
        return changes.Scaled(
            source.name,
            lambda: self._scales_of(names, changes.scale_type(modifier)),
            modifier.block,
            source.shape,
            piece.box,
            piece.flat,
            "source",
            half=0 if modifier.dtype == HALF_BYTE else None,
        )

    def _scales_of(self, names: Sequence[str], kind: np.dtype[Any]) -> NDArray[Any]:
        first = names[0]
        if first not in self._scales:
            scales, *above = (self.stock.values([n])[n] for n in names)
            scales = (scales.view(kind) if scales.dtype == np.uint8 else scales).astype(np.float32)
            self._scales[first] = scales * above[0].astype(np.float32) if above else scales
        return self._scales[first]

    @cached_property
    def _scales(self) -> dict[str, NDArray[Any]]:
        return {}

    @cached_property
    def _measured(self) -> dict[str, changes.BlockScales]:
        return {}

    def quantized(self, link: TensorLink, piece: Piece) -> changes.Scaled:
        """Return the change from logical values to a quantized target piece."""
        modifier = quantized_as(self.composition.target, link.key[0])
        if modifier is None:
            raise ValueError(f"{link.tensor.name} is not quantized")
        return changes.Scaled(
            link.tensor.name,
            lambda: self.target_scales(link).factors,
            modifier.block,
            link.tensor.shape,
            piece.box,
            piece.flat,
            "target",
            changes.limit_of(modifier, link.tensor.name),
            half=0 if modifier.dtype == HALF_BYTE else None,
        )

    def target_scales(self, link: TensorLink) -> changes.BlockScales:
        """Return the scales of a target tensor; its values are read for that."""
        name = link.tensor.name
        if name not in self._measured:
            self._measured[name] = measured_scales(self, link)
        return self._measured[name]


def bind_to(source: Resolved, stock: SourceTensors) -> Bound:
    """Bind a layout to the tensors of a source.

    Raises
    ------
    MismatchError
        ``lay-fit``: it does not fit them.
    """
    sizes = {a: n for a, n in stock.sizes.items() if a not in source.sizes}
    return bind_stored(source, _named_shapes(source, stock), sizes)


def compose_layouts(
    source: Resolved, target: Resolved, stock: SourceTensors, *, is_recut: bool = False
) -> Composed:
    """Combine two layouts over a source.

    Parameters
    ----------
    is_recut
        Whether the target is the source's layout, cut or spelled differently: then no tensor has
        further names that it has not in the source.

    Raises
    ------
    MismatchError
        ``lay-fit``: a layout does not fit the source, or the two do not fit each other.
        ``lay-cover``: the source lacks what the target needs, or holds what the target lacks.
    UsageError
        A layout is wrong by itself.
    """
    bound = bind_to(source, stock)
    held = {f.name for e in bound.layout.equations for f in e.families.values()}
    raise_first(check(source))
    raise_first(check(target))
    narrowed, left_out = _narrowed(target, held)
    other = bind_sizes(narrowed, _known_sizes(bound, narrowed))
    raise_first(check_bound(other))
    stock = _in_elements(source, stock)
    composition = compose(bound, other, lambda name: _grid(stock, name))
    dropped = _dropped(source, stock)
    links = _links(composition, stock)
    _check_quantized(composition, stock, links)
    duplicates = list(_duplicates(composition, stock))
    _check_all_fed(composition, stock, links, {*dropped, *(d.tensor.name for d in duplicates)})
    links.sort(key=lambda link: min((s.number for s in link.sources.values()), default=-1))
    aliases = alias_names(composition.target)
    if is_recut:
        aliases = _known_aliases(aliases, composition, stock)
    lost, merged = _further_names(composition, source, links, aliases, duplicates)
    return Composed(
        stock,
        composition,
        links,
        dropped,
        left_out,
        lost=[*_lost_parts(composition, links), *lost],
        merged=merged,
        duplicates=duplicates,
        aliases={k.tensor.name: _names_of(k, aliases) for k in links},
    )


def refuse_unread(source: Resolved, stock: SourceTensors) -> None:
    """Refuse a source with tensors of kinds that are not read, unless its layout drops them.

    Raises
    ------
    RefusedError
        kind ``unreadable-format``: names them, and says what each is.
    """
    if not stock.unread_tensors:
        return
    dropped = set(_dropped(source, stock))
    unread = {n: kind for n, kind in stock.unread_tensors.items() if n not in dropped}
    if unread:
        hint = "; or leave them out: -e 'from: NAME = drop' --allow lossy"
        raise unread_tensors(unread, "the source", hint + DEQUANTIZE)


def apart_of(source: Resolved, stock: SourceTensors) -> frozenset[str]:
    """Return the tensors that the program of a source does not speak of."""
    return frozenset(seen.name for seen in from_stored(source, stock.shapes).unmatched)


def _named_shapes(source: Resolved, stock: SourceTensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the source's tensors; further names that have a rule count as tensors.

    A program may name a tied weight by its other name only, or by both as if they were two.
    """
    matcher, templates = Matcher(source, stored=True), NameTemplates(source)
    out = dict(stock.shapes)
    for tensor in stock.tensors:
        for name in () if tensor.encoded else tensor.aliases:
            equation = _rule_of(source, matcher, templates, name)
            if equation is not None and not _is_copy(equation):
                out[name] = tensor.shape
    return out


def _rule_of(
    source: Resolved, matcher: Matcher, templates: NameTemplates, name: str
) -> Equation | None:
    """Return the rule of a stored name; None if there is none, or it leaves the name out."""
    undressed = templates.take(name)
    found = matcher.match(undressed.name) if undressed else None
    return source.equations[found.equation] if found and found.equation >= 0 else None


def _is_copy(equation: Equation) -> bool:
    return any(isinstance(m, Alias) for m in equation.modifiers)


def _takes(
    stock: SourceTensors,
    source: StockTensor,
    copy: Copy,
    change: Change | None,
    dtype: DType,
    where: str,
) -> list[Take]:
    """Return a copy as takes from where its source lies."""
    if stock.locate is None:
        if isinstance(change, changes.Scaled) and change.half is not None:
            return _of_halves(source.number, copy, change)
        return [Take(source.number, copy.piece, copy.blocks, change)]
    located = stock.locate(source.name, copy.piece, copy.blocks, dtype)
    return [_both(take, change, where) for take in located]


def _of_halves(number: int, copy: Copy, change: changes.Scaled) -> list[Take]:
    """Return takes of bytes, on the side that has two elements in each."""
    is_source = change.side == "source"
    found: dict[int, list[Block]] = {0: [], 1: []}
    for block in copy.blocks:
        for half, part in changes.halves(block if is_source else block.turned()):
            found[half].append(part if is_source else part.turned())
    return [
        Take(number, copy.piece, tuple(blocks), replace(change, half=half))
        for half, blocks in found.items()
    ]


def _both(take: Take, change: Change | None, where: str) -> Take:
    """Return a take with the change of the rules, unless replicas are combined on the way."""
    if change is None:
        return take
    if take.change is not None or isinstance(change, changes.Scaled):
        raise MismatchError(
            "values of ranks are combined or scaled, and cannot be changed in the same reshard",
            kind="lay-fit",
            where=where,
            hint="reshard twice: first into a layout that only gathers the ranks' values",
        )
    return replace(take, change=change)


def _grid(stock: SourceTensors, name: str) -> Grid:
    found = stock.by_name.get(name)
    if found is None:
        raise MismatchError(
            "the source lacks this tensor", kind="lay-cover", where=name, wanted=name
        )
    return found.grid


def _narrowed(target: Resolved, held: set[str]) -> tuple[Resolved, list[str]]:
    """Leave out rules for logical tensors that the source does not have at all."""
    kept, left_out, places = [], [], [0]
    for equation in target.equations:
        if any(f.name in held for f in equation.families.values()):
            kept.append(equation)
        else:
            left_out.append(equation.text or str(equation.at))
        places.append(len(kept))
    drop_places = tuple(places[p] for p in target.drop_places)
    return replace(target, equations=tuple(kept), drop_places=drop_places), left_out


def _known_sizes(bound: Bound, target: Resolved) -> dict[str, int]:
    """Return the source's sizes that the target's rules may ask for."""
    return {a: n for a, n in bound.sizes.items() if a not in target.sizes}


def _dropped(source: Resolved, stock: SourceTensors) -> list[str]:
    """Return the tensors that the source's layout leaves out on purpose."""
    if not source.drops:
        return []
    bare = replace(source, equations=(), drops=source.drops, drop_places=(0,) * len(source.drops))
    drops, rules = Matcher(bare, stored=True), Matcher(source, stored=True)
    templates = NameTemplates(source)
    out = []
    for name in (*stock.shapes, *stock.unread_tensors):
        undressed = templates.take(name)
        inner = undressed.name if undressed else name
        found = rules.match(inner)
        if found is not None and found.equation == -1 and drops.match(inner) is not None:
            out.append(name)
    return out


# --- what may not get lost ----------------------------------------------------------------------


def _templates(form: StoredForm) -> NameTemplates:
    """Return what takes the names of a stored form apart."""
    return NameTemplates(form.bound.layout)


def alias_names(form: StoredForm) -> dict[str, tuple[str, ...]]:
    """Return further names of stored parameters, by name."""
    out: dict[str, tuple[str, ...]] = {}
    for rule in form.rules:
        if not _is_alias(rule):
            continue
        families = rule.equation.families
        holder = next((r for r in form.stored_rules if r.equation.families == families), None)
        if holder is None or set(holder.indexes) != set(rule.indexes):
            continue
        for indexes in rule.tensors():
            numbers = dict(zip(rule.indexes, indexes, strict=True))
            at = tuple(numbers[a] for a in holder.indexes)
            if not holder.has(at):
                continue
            name = form.name(holder.global_name(at), "")
            further = form.name(rule.global_name(indexes), "")
            if further not in (name, *out.get(name, ())):  # other stages may have it under its name
                out[name] = (*out.get(name, ()), further)
    return out


def _known_aliases(
    aliases: Mapping[str, tuple[str, ...]], composition: Composition, stock: SourceTensors
) -> dict[str, tuple[str, ...]]:
    """Return the further names, by name, that the source has as well, however it spells them."""
    here, there = _templates(composition.source), _templates(composition.target)
    known = {taken.name for taken in map(here.take, stock.by_name) if taken}
    return {
        name: tuple(n for n in further if (taken := there.take(n)) and taken.name in known)
        for name, further in aliases.items()
    }


def _is_alias(rule: RuleForm) -> bool:
    return _is_copy(rule.equation)


def _names_of(link: TensorLink, aliases: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the further names of a target tensor: by its layout, and those that it keeps."""
    name = link.tensor.name
    kept: tuple[str, ...] = ()
    sources = list(link.sources.values())
    if len(sources) == 1 and sources[0].name == name:
        kept = sources[0].aliases
    by_layout = () if link.key[2] else aliases.get(name, ())
    return tuple(dict.fromkeys((*by_layout, *kept)))


def _duplicates(composition: Composition, stock: SourceTensors) -> Iterator[Duplicate]:
    """Yield the tensors that the source has of its own, and calls copies of others."""
    form = composition.source
    twice = _with_itself(composition)
    for rule in form.rules:
        if not _is_alias(rule):
            continue
        for indexes in rule.tensors():
            key = (rule.number, indexes, "")
            name = form.name(rule.global_name(indexes), "")
            tensor = stock.by_name.get(name)
            if tensor is None or tensor.name != name:
                continue
            if tensor.plain is not None:
                raise not_plain(name, "a copy of another tensor")
            names = [
                form.name(form.rules[r].global_name(at), "") for r, at, _ in source_keys(twice, key)
            ]
            missing = [n for n in names if n not in stock.by_name]
            if missing or not names:
                raise MismatchError(
                    "the source has a copy of a tensor, but not the tensor",
                    kind="lay-cover",
                    where=name,
                    wanted=", ".join(missing[:_MOST_NAMED]) or "a tensor that it is a copy of",
                    hint="give it a rule without alias in the source's layout: -e 'from: NAME = "
                    "...'",
                )
            grid = form.tensor(*key).grid
            if grid.shape != tensor.shape:
                raise MismatchError(
                    "a copy of a tensor has another shape than the layout says",
                    kind="lay-fit",
                    where=name,
                    wanted=grid.shape,
                    found=tensor.shape,
                )
            feed = partial(_copied, twice, stock, key, tensor)
            yield Duplicate(tensor, ", ".join(names[:_MOST_NAMED]), grid, feed)


def not_plain(where: str, found: str) -> MismatchError:
    """Return the error for a wrapped tensor that no rule takes, so that nothing dequantizes it."""
    return MismatchError(
        "a wrapped tensor can only be dequantized by a rule",
        kind="lay-fit",
        where=where,
        wanted="a rule of the source's layout that is not an alias",
        found=found,
        hint="leave it out: -e 'from: NAME = drop'",
    )


def _with_itself(composition: Composition) -> Composition:
    """Return the source combined with itself: what its copies are made of."""
    return Composition(composition.source, composition.source, composition.grids)


def _copied(
    composition: Composition, stock: SourceTensors, key: TensorKey, mine: StockTensor, piece: int
) -> ChunkFeed:
    """Return what a piece of a copy would be, out of what it copies."""
    takes = []
    for copy in composition.piece(key, piece).copies:
        source = stock.by_name[copy.source.name]
        change = changes.change_of(source.dtype, mine.dtype, copy.values, mine.name)
        takes += _takes(stock, source, copy, change, mine.dtype, mine.name)
    return ChunkFeed(tuple(takes))


def _further_names(
    composition: Composition,
    source: Resolved,
    links: Sequence[TensorLink],
    aliases: Mapping[str, tuple[str, ...]],
    duplicates: Sequence[Duplicate],
) -> tuple[list[str], list[str]]:
    """Return names that the target has not: those of no rule, and those of the source's aliases."""
    form = composition.source
    matcher, templates = Matcher(source, stored=True), _templates(form)
    again = {
        f.name
        for r in composition.target.rules
        if _is_alias(r)
        for f in r.equation.families.values()
    }
    kept = {name for link in links for name in _names_of(link, aliases)}
    kept |= {link.tensor.name for link in links}
    for link in links:
        kept |= {
            form.name(form.rules[rule].global_name(at), state) for rule, at, state in link.sources
        }
    lost: list[str] = []
    merged: list[str] = []

    tensors = {t.number: t for link in links for t in link.sources.values()}
    names = [a for t in tensors.values() for a in t.aliases] + [d.tensor.name for d in duplicates]
    for name in dict.fromkeys(names):
        if name in kept:
            continue
        equation = _rule_of(source, matcher, templates, name)
        if equation is None:
            lost.append(name)
        elif not {f.name for f in equation.families.values()} <= again:
            merged.append(name)
    return lost, merged


def _lost_parts(composition: Composition, links: Sequence[TensorLink]) -> list[str]:
    """Return the parts of source tensors that no tensor of the target has."""
    has = {
        f.name
        for link in links
        for f in composition.target.rules[link.key[0]].equation.families.values()
    }
    out = []
    seen = set()
    for link in links:
        for rule, indexes, _ in link.sources:
            if (rule, indexes) in seen:
                continue
            seen.add((rule, indexes))
            form = composition.source.rules[rule]
            gone = [f.name for f in form.equation.families.values() if f.name not in has]
            name = composition.source.name(form.global_name(indexes), "")
            out += [f"{family} in {name}" for family in gone]
    return out


# --- links --------------------------------------------------------------------------------------


def _links(composition: Composition, stock: SourceTensors) -> list[TensorLink]:
    keys = composition.target.keys()
    found = (link_of(composition, stock, key) for key in keys)
    return [link for link in found if link is not None]


def link_of(composition: Composition, stock: SourceTensors, key: TensorKey) -> TensorLink | None:
    """Return where a tensor of the target comes from; None when the source has nothing of it.

    Raises
    ------
    MismatchError
        The source lacks a part of it, or holds its parts in different types.
    """
    sources = _sources(composition, stock, key)
    return _link(composition, key, sources) if sources else None


def _sources(
    composition: Composition, stock: SourceTensors, key: TensorKey
) -> dict[TensorKey, StockTensor]:
    """Return the source tensors of a target tensor; none when the source has none of them."""
    found: dict[TensorKey, StockTensor] = {}
    missing = []
    for other in source_keys(composition, key):
        rule, indexes, state = other
        form = composition.source
        if state not in form.states:
            return {}
        name = form.name(form.rules[rule].global_name(indexes), state)
        tensor = stock.by_name.get(name)
        if tensor is None:
            missing.append(name)
        else:
            found[other] = tensor
    if found and missing:
        raise MismatchError(
            "the source lacks a part of a tensor",
            kind="lay-cover",
            where=composition.target.tensor(*key).name,
            wanted=", ".join(missing[:_MOST_NAMED]),
        )
    return found


def source_keys(composition: Composition, key: TensorKey) -> Iterator[TensorKey]:
    """Yield the keys of the source tensors that a target tensor needs."""
    number, indexes, state = key
    rule = composition.target.rules[number]
    whole = Box((0,) * len(rule.shape), rule.shape)
    parts = box_parts(rule.dims, whole)
    numbers = dict(zip(rule.indexes, indexes, strict=True))
    if not whole.numel:
        yield from _of_empty(composition, rule, numbers, state)
        return
    seen = set()
    for group in composition.meetings(rule, indexes, ("whole", number), parts):
        meeting = group[0]
        at = tuple(
            numbers[a] if n is None else n
            for a, n in zip(meeting.rule.indexes, meeting.indexes, strict=True)
        )
        found = (meeting.rule.number, at, state)
        if found not in seen:
            seen.add(found)
            yield found


def _of_empty(
    composition: Composition, rule: RuleForm, numbers: Mapping[str, int], state: str
) -> Iterator[TensorKey]:
    """Yield the sources of a tensor without elements: all tensors of its families."""
    seen = set()
    for family in rule.equation.families.values():
        for source, _ in composition.holders.get(family.name, ()):
            choices = [[numbers[a]] if a in numbers else source.numbers(a) for a in source.indexes]
            for at in product(*choices):
                if source.has(at) and (source.number, at) not in seen:
                    seen.add((source.number, at))
                    yield source.number, at, state


def _link(
    composition: Composition, key: TensorKey, sources: Mapping[TensorKey, StockTensor]
) -> TensorLink:
    rule = composition.target.rules[key[0]]
    tensor = composition.target.tensor(*key)
    found = []
    for other, stocked in sources.items():
        values = composition.values(composition.source.rules[other[0]], rule, key[2])
        plain = stocked.plain
        dtype = changes.changed_dtype(plain.dtype if plain else stocked.dtype, values, tensor.name)
        equation = composition.source.rules[other[0]].equation
        if _is_scaled(values, tensor.name, is_plain=plain is not None):
            found.append((dtype, PROMISES[-1]))
            continue
        change = changes.change_of(stocked.dtype, dtype, values, tensor.name)
        found.append(
            (dtype, changes.step_promise(equation, rule.equation, stocked.dtype, dtype, change))
        )
    dtypes = dict.fromkeys(d.name for d, _ in found)
    if len(dtypes) != 1:
        raise MismatchError(
            "tensors of different types become one",
            kind="lay-fit",
            where=tensor.name,
            wanted="one type",
            found=", ".join(dtypes),
            hint="say which: cast(float32) in the target's rule",
        )
    worst = max((p for _, p in found), key=PROMISES.index)
    modifier = None if key[2] else quantized_as(composition.target, key[0])
    packed = modifier is not None and modifier.dtype == HALF_BYTE
    held = _halved(tensor.grid, tensor.name) if packed else tensor.grid
    return TensorLink(key, tensor, found[0][0], sources, worst, held)


def _halved(grid: Grid, where: str) -> Grid:
    """Return the grid of bytes of a tensor that has two elements in each."""
    if not grid.axes or grid.flat or any(n % 2 for n, _ in grid.axes[-1].runs):
        raise _no_pairs(where, f"{grid.shape} cut along its last dimension into odd parts")
    last = Axis(tuple((n // 2, count) for n, count in grid.axes[-1].runs))
    return Grid((*grid.axes[:-1], last))


def _no_pairs(where: str, found: str) -> MismatchError:
    return MismatchError(
        "this cut would split a byte that holds two elements",
        kind="lay-fit",
        where=where,
        wanted="a last dimension whose parts are even, unpadded, and no flat buffer",
        found=found,
    )


def _in_elements(source: Resolved, stock: SourceTensors) -> SourceTensors:
    """Return a source as its layout counts it: tensors with two elements in a byte are longer."""
    matcher, templates = Matcher(source, stored=True), NameTemplates(source)
    tensors = []
    for tensor in stock.tensors:
        taken = templates.take(tensor.name)
        rule = None if taken is None or taken.state else matcher.match(taken.name)
        equation = source.equations[rule.equation] if rule and rule.equation >= 0 else None
        shape = tensor.shape if equation is None else held_shape(equation, tensor.shape)
        if shape != tensor.shape and not tensor.encoded:
            grid = tensor.grid
            if grid.flat:
                raise _no_pairs(tensor.name, "ranges of a flat buffer")
            last = Axis(tuple((2 * n, count) for n, count in grid.axes[-1].runs))
            tensor = replace(tensor, shape=shape, grid=Grid((*grid.axes[:-1], last)))
        tensors.append(tensor)
    return replace(stock, tensors=tensors)


def _is_scaled(values: Values | None, where: str, *, is_plain: bool) -> bool:
    """Tell whether values are quantized on one side; refuse what is not done in one go."""
    source, target = values or ((), ())
    sides = [changes.quantized(source), changes.quantized(target), is_plain or None]
    others = [m for m in (*source, *target) if isinstance(m, Affine)]
    if not any(sides):
        return False
    if sum(map(bool, sides)) > 1 or others:
        raise MismatchError(
            "quantized values cannot be both read and written, or shifted, in one reshard",
            kind="lay-fit",
            where=where,
            hint="reshard twice: first into a layout without q(...)",
        )
    return True


def _check_quantized(
    composition: Composition, stock: SourceTensors, links: Sequence[TensorLink]
) -> None:
    """Quantized values are of the type that the rule says, and their scales are numbers.

    Bytes of two values, or of exponents, would be taken for numbers else.
    """
    form = composition.source
    for link in links:
        for (rule, indexes, state), tensor in link.sources.items():
            modifier = None if state else changes.quantized(form.rules[rule].equation.modifiers)
            if modifier is None:
                continue
            half = modifier.dtype == HALF_BYTE
            if tensor.dtype.name not in (_PAIRS if half else (modifier.dtype,)):
                raise MismatchError(
                    "the dtype of quantized values differs from the rule's",
                    kind="lay-fit",
                    where=tensor.name,
                    wanted=" or ".join(_PAIRS) if half else modifier.dtype,
                    found=tensor.dtype.name,
                )
            changes.limit_of(modifier, tensor.name)
            named = scale_tensor(form, rule, indexes)
            scales = stock.by_name.get(named.name) if named else None
            if scales is None:
                continue
            fits = scales.dtype.name == modifier.kind if modifier.kind else None
            if fits is None:
                fits = "float" in scales.dtype.name
            if not fits:
                raise MismatchError(
                    "unsupported dtype of scales",
                    kind="lay-fit",
                    where=scales.name,
                    wanted=modifier.kind or "float32, bfloat16, float8_e8m0fnu, ...",
                    found=scales.dtype.name,
                    hint="declare them: scale=NAME as uint8 are exponents of two",
                )


def _check_all_fed(
    composition: Composition, stock: SourceTensors, links: Sequence[TensorLink], dropped: set[str]
) -> None:
    """Every tensor of the source goes somewhere, or is left out by a rule of its layout."""
    fed = {s.name for link in links for s in link.sources.values()} | dropped
    form = composition.source
    keys = {key for link in links for key in link.sources if not key[2]}
    counted = {form.rules[rule].global_name(indexes) for rule, indexes, _ in keys}
    templates = _templates(form)
    counted |= {u.name for name in dropped for u in [templates.take(name)] if u}
    found = [f(form, rule, at) for rule, at, _ in keys for f in (scale_tensor, overall_scale)]
    carried = stock.apart | {t.name for t in found if t is not None}
    lost = []
    for tensor in stock.tensors:
        if tensor.name in fed or tensor.encoded or tensor.name in carried:
            continue
        undressed = templates.take(tensor.name)
        if undressed is not None and undressed.scalar and undressed.name in counted:
            continue
        lost.append(tensor.name)
    if lost:
        raise MismatchError(
            "the target's layout has no place for this tensor",
            kind="lay-cover",
            where=first_few(lost, _MOST_NAMED),
            wanted="a rule of the target for everything that the source has",
            hint="to drop it, write in the source's layout: -e 'from: NAME = drop'",
        )
