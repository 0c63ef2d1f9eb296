"""Export to Hugging Face safetensors and index: sections, renames, casts, file sizes.

In it: which names are optimizer state; which types can be cast; refusal of weights that would be
left out.

Memory stays within a few slabs, whatever the size of a tensor. Files get their names when all of
them are complete and the index comes last, so that a folder that was left halfway is not taken
for a model.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ckptd.base.runtime.pool import batches
from ckptd.checkpoint.format.container import build_header
from ckptd.checkpoint.format.names import unescape_fqn
from ckptd.checkpoint.format.words import unread_tensors
from ckptd.checkpoint.load.source import Array, CheckpointReader
from ckptd.errors import (
    CkptdError,
    CorruptError,
    MismatchError,
    NotFoundError,
    RefusedError,
    UsageError,
    first_few,
)
from ckptd.lay.matching import NameTemplates
from ckptd.lay.resolve import Resolved
from ckptd.reshard.dequantized import DEQUANTIZE, PlainTensor, plain_tensors
from ckptd.reshard.layouts import read_text
from ckptd.reshard.writers.hf import INDEX, index_of, is_model_file, model_file, tied_metadata
from ckptd.store.local import LocalStore
from ckptd.store.osio import writing
from ckptd.types import DTYPES, DType

EVERYTHING = "."
"""The section that is the whole checkpoint."""

_DEFAULT_SECTION = "model"
_STATES = ("optim.", "optimizer.")
_CAST = ("float64", "float32", "bfloat16", "float16")
_MOST_NAMED = 8

Rename = tuple[str, str]
"""A regular expression, and what each match of it becomes."""


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of the export.

    Attributes
    ----------
    name, aliases
        What it is called there; `aliases` are names of tied tensors that are not written again.
    tensor
        Its name in the checkpoint.
    dtype, shape
        As written.
    plain
        Of a wrapped tensor that is dequantized: what it represents; `tensor` holds its numbers.
    """

    name: str
    aliases: tuple[str, ...]
    tensor: str
    dtype: DType
    shape: tuple[int, ...]
    plain: PlainTensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes as written."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The files, in order, each with its tensors in file order, and what is in none of them.

    Attributes
    ----------
    files
        Name and tensors of each.
    left_out
        Names of tensors that are not exported: those of other sections, and optimizer state.
    objects
        Names of values, which are not exported.
    """

    files: tuple[tuple[str, tuple[Item, ...]], ...]
    left_out: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as written."""
        return sum(item.nbytes for _, items in self.files for item in items)


def plan_export(
    reader: CheckpointReader,
    *,
    section: str | None = None,
    rename: Sequence[Rename] = (),
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    untie: bool = True,
    dequantize: bool = False,
) -> ExportPlan:
    """Decide what is written where; reads nothing.

    Parameters
    ----------
    section
        Only names that begin with it and a dot, which is taken away; ``.`` is everything. None is
        the weights: what the checkpoint's program calls parameters, else ``model``; all of them
        have to be there.
    rename
        Applied one after the other to what is left of a name.
    dtype
        Cast float64, float32, bfloat16 and float16 to it; other types stay.
    max_shard_bytes
        A file ends before it would hold more; a larger tensor has a file of its own.
    untie
        Write a tied tensor under each of its names, as readers of the files may ask for any.
    dequantize
        Write the plain tensors that wrapped ones represent, where that is known.

    Raises
    ------
    NotFoundError
        Lists those that there are. There is nothing to write.
    RefusedError
        No section was asked for, and there are weights outside of the default. Kind
        ``unreadable-format``: what is asked for has tensors of kinds that are not read.
    UsageError
        What is there breaks a rule of the format.
    MismatchError
        The checkpoint leaves out parts of these tensors.
    """
    prefix, is_state = _prefix(reader, section), _states(reader)

    def is_asked(name: str) -> bool:
        return name.startswith(prefix) and not (section is None and is_state(name))

    reader.refuse_unread(is_asked)
    plain = plain_tensors(reader) if dequantize else {}
    reader.refuse_wrapped(lambda name: is_asked(name) and name not in plain, DEQUANTIZE)
    first = {p.parts[0]: p for p in plain.values()}
    further = {n for p in plain.values() for n in p.parts[1:]}
    if reader.is_foreign and section != EVERYTHING:
        _refuse_arrays(reader, prefix)
    renamed = _renamer(rename)
    items: list[Item] = []
    left_out: list[str] = []
    weights_out: list[str] = []
    for tensor in reader.names:
        if tensor in further:
            continue
        wrapper = first.get(tensor)
        known = [wrapper.name] if wrapper else [tensor, *reader.info(tensor).aliases]
        if section is None and is_state(known[0]):
            left_out += known
            continue
        inside = [n for n in known if n.startswith(prefix)]
        outside = [n for n in known if not n.startswith(prefix)]
        left_out += outside
        weights_out += [n for n in outside if not is_state(n)]
        names = [renamed(_plain(n.removeprefix(prefix))) for n in inside]
        if names:
            items += _items(reader, tensor, names, dtype, untie=untie, plain=wrapper)
    if section is None:
        weights_out += [n for n in reader.unread if not n.startswith(prefix) and not is_state(n)]
    left_out += reader.unread
    if section is None and weights_out:
        raise _left_out(reader, prefix, weights_out)
    if not items:
        raise NotFoundError(
            "no tensor to export",
            where=f"{reader.url}, {reader.title}",
            hint=f"--section {EVERYTHING} for everything",
        )
    _check(reader, items)
    shards = list(batches(items, lambda item: item.nbytes, max_shard_bytes))
    return ExportPlan(
        tuple(
            # Item sizes falling: every tensor is then aligned to its own.
            (model_file(i, len(shards)), tuple(sorted(s, key=lambda x: -x.dtype.itemsize)))
            for i, s in enumerate(shards)
        ),
        tuple(left_out),
        tuple(o.name for o in reader.entries if o.name not in plain),
    )


def _refuse_arrays(reader: CheckpointReader, prefix: str) -> None:
    """Refuse arrays of numpy among the weights: they are values, which an export does not have."""
    arrays = [
        o.name
        for o in reader.entries
        if o.name.startswith(prefix) and isinstance(o.value, dict)
        if o.value.get("$") == "array"
    ]
    if arrays:
        hint = f"; or --section {EVERYTHING} exports all tensors, and no arrays"
        raise unread_tensors(dict.fromkeys(arrays, "an array of numpy"), reader.url, hint)


def _states(reader: CheckpointReader) -> Callable[[str], bool]:
    """Return what tells the names of optimizer state from those of weights."""
    groups = [o.name for o in reader.entries if o.kind == "groups"]
    prefixes = tuple({*_STATES, *(n.removesuffix("groups") for n in groups if n != "groups")})
    layout = _layout(reader)
    templates = None if layout is None else NameTemplates(layout)

    def is_state(name: str) -> bool:
        found = templates.take(name) if templates is not None else None
        if found is not None and (found.state or found.scalar):
            return True
        return name.startswith(prefixes)

    return is_state


def _layout(reader: CheckpointReader) -> Resolved | None:
    """Return the layout that the checkpoint keeps; None if it has none that can be understood."""
    if not reader.program:
        return None
    try:
        return read_text(reader.program, "the kept program").resolve()
    except CkptdError:
        return None


def _left_out(reader: CheckpointReader, prefix: str, names: Sequence[str]) -> RefusedError:
    return RefusedError(
        f"weights outside of the section {prefix[:-1]} would be left out",
        where=f"{reader.url}, {reader.title}",
        found=f"{len(names)}: {first_few(names, _MOST_NAMED)}",
        hint=f"--section {prefix[:-1]} for that section alone, --section {EVERYTHING} for"
        " everything, under the names that it has here",
    )


def _prefix(reader: CheckpointReader, section: str | None) -> str:
    if section == EVERYTHING or (section is None and not reader.has_sections):
        return ""
    prefix = f"{section or _DEFAULT_SECTION}."
    layout = _layout(reader) if section is None else None
    if layout is not None:
        prefix, _, end = layout.params.partition("{name}")
        if not prefix and not end:
            return ""
        if end or not prefix.endswith("."):
            prefix = f"{_DEFAULT_SECTION}."
    every = [n for t in reader.names for n in (t, *reader.info(t).aliases)] + [*reader.unread]
    if any(n.startswith(prefix) for n in every):
        return prefix
    sections = sorted({n.partition(".")[0] for n in every if "." in n})
    raise NotFoundError(
        f"the checkpoint has no section {prefix[:-1]!r}",
        where=f"{reader.url}, {reader.title}",
        found=f"sections {', '.join(sections[:_MOST_NAMED])}" if sections else "no section",
        hint=f"--section NAME, or --section {EVERYTHING} for everything",
    )


def _plain(name: str) -> str:
    try:
        return unescape_fqn(name)
    except CorruptError:
        return name


def _renamer(rules: Sequence[Rename]) -> Callable[[str], str]:
    try:
        compiled = [(re.compile(old), new) for old, new in rules]
    except re.error as error:
        raise UsageError("invalid regular expression", found=error) from None

    def apply(name: str) -> str:
        for old, new in compiled:
            try:
                name = old.sub(new, name)
            except (re.error, IndexError) as error:
                raise UsageError("invalid replacement", where=new, found=error) from None
        return name

    return apply


def _items(
    reader: CheckpointReader,
    tensor: str,
    names: list[str],
    cast: str | None,
    *,
    untie: bool,
    plain: PlainTensor | None,
) -> Iterator[Item]:
    info = plain or reader.info(tensor)
    dtype = info.dtype
    if cast is not None and dtype.name in _CAST:
        dtype = DTYPES[cast]
    if untie:
        yield from (Item(name, (), tensor, dtype, info.shape, plain) for name in names)
    else:
        yield Item(names[0], tuple(names[1:]), tensor, dtype, info.shape, plain)


def _check(reader: CheckpointReader, items: list[Item]) -> None:
    seen: set[str] = set()
    for name in (n for item in items for n in (item.name, *item.aliases)):
        if not name or name in seen:
            raise UsageError("two tensors would have one name", where=repr(name))
        seen.add(name)
    odd = [f"{i.name} ({i.dtype.name})" for i in items if i.dtype.safetensors is None]
    if odd:
        raise UsageError("safetensors has no such type", where=", ".join(odd[:_MOST_NAMED]))
    absent = [i.tensor for i in items if reader.absent_elements(i.tensor)]
    if absent:
        raise MismatchError(
            "the checkpoint leaves out parts of what is to be exported",
            where=", ".join(absent[:_MOST_NAMED]),
            found=f"{len(absent)} tensors with absent chunks",
        )


_PARTIAL = ".partial"
_SLAB_BYTES = 32 << 20


class ExportedFile(msgspec.Struct, frozen=True):
    """One file that was written: its name, the number of its tensors, and their bytes."""

    name: str
    tensors: int
    bytes: int


def run_export(
    reader: CheckpointReader,
    plan: ExportPlan,
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[ExportedFile]:
    """Write the files and the index; durable on return.

    Parameters
    ----------
    reader
        The checkpoint; hold a lease on it.
    folder
        A local folder, made when it is missing. Other files there stay.
    force
        Replace an earlier export.
    progress
        Called with ``(bytes done, bytes in all)``.

    Raises
    ------
    RefusedError
        Kind ``exists``: the folder already holds a model. Nothing was changed.
    UsageError
        A value does not fit the type it is cast to; nothing was replaced.
    CorruptError, StoreError
        Reading or writing failed; nothing was replaced.
    """
    folder = Path(folder)
    old = sorted(n for n in _names(folder) if is_model_file(n))
    if old and not force:
        raise RefusedError(
            "the folder already holds a model",
            kind="exists",
            where=str(folder / old[0]),
            hint="name another folder, or replace it with --force",
        )
    meter = _Meter(plan.nbytes, progress)
    with LocalStore(folder) as store:
        try:
            for name, items in plan.files:
                _write_file(reader, store, name + _PARTIAL, items, meter)
        except BaseException:
            store.delete([name + _PARTIAL for name, _ in plan.files])
            raise
        # The index goes first and comes back last: a folder without it is no complete export.
        store.delete([INDEX] if INDEX in old else [])
        store.delete([n for n in old if n != INDEX])
        for name, _ in plan.files:
            with writing(str(folder / name)):
                os.replace(folder / (name + _PARTIAL), folder / name)
        store.sync("")
        weights = {item.name: name for name, items in plan.files for item in items}
        store.put(INDEX, index_of(weights, plan.nbytes))
    return [ExportedFile(n, len(items), sum(i.nbytes for i in items)) for n, items in plan.files]


def _names(folder: Path) -> list[str]:
    with writing(str(folder)):
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []


class _Meter:
    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _write_file(
    reader: CheckpointReader, store: LocalStore, key: str, items: Sequence[Item], meter: _Meter
) -> None:
    tied = {alias: item.name for item in items for alias in item.aliases}
    header, data_bytes = build_header(
        [(item.name, item.dtype, item.shape) for item in items], tied_metadata(tied)
    )
    with store.writer(key, len(header) + data_bytes) as writer:
        writer.write(memoryview(header))
        for item, values in _values(reader, items):
            cast = _cast(values, item)
            writer.write(cast.reshape(-1).view(np.uint8).data)
            meter.add(cast.nbytes)
        writer.commit()


def _values(reader: CheckpointReader, items: Sequence[Item]) -> Iterator[tuple[Item, Array]]:
    """Yield the values of each tensor in order, large ones in several parts."""

    def size(item: Item) -> int:
        return reader.info(item.tensor).nbytes

    for batch in batches(items, size, _SLAB_BYTES):
        if size(batch[0]) > _SLAB_BYTES:
            first = 0
            for _, values in reader.slabs(batch[0].tensor, _SLAB_BYTES):
                yield batch[0], _plain_values(batch[0], values, first)
                first += values.size
        else:
            found = reader.tensors({item.tensor for item in batch})
            for item in batch:
                yield item, _plain_values(item, found[item.tensor], 0)


def _plain_values(item: Item, values: Array, first: int) -> Array:
    return values if item.plain is None else item.plain.values(values, first)


def _cast(values: Array, item: Item) -> Array:
    if values.dtype == item.dtype.numpy:
        return np.ascontiguousarray(values)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(item.dtype.numpy)
    if np.any(np.isinf(cast) & ~np.isinf(values)):
        raise UsageError(
            "a value does not fit the type it is cast to",
            where=item.name,
            wanted=f"values of {item.dtype.name}",
            found=f"up to {np.nanmax(np.abs(values[np.isfinite(values)].astype(np.float64))):.6g}",
            hint="--dtype bfloat16 has the range of float32",
        )
    return cast
