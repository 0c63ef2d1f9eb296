"""`SourceTensors`: the checkpoint that is read, described: ckptd's own or a foreign one.

In it: section of the weights; objects; how many names an error shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Block
from ckptd.base.grids.grid import Grid
from ckptd.checkpoint.format.manifest import (
    FOREIGN,
    SHARING,
    SUBCLASS,
    UNDIGESTED,
    ObjectEntry,
    about_foreign,
    foreign_sizes,
)
from ckptd.checkpoint.format.witness import Witness, WitnessPlan
from ckptd.checkpoint.load.files import PieceLocations
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.load.source import PerRankValues
from ckptd.checkpoint.load.witnesses import read_witness
from ckptd.errors import CorruptError, NotFoundError, UsageError
from ckptd.reshard.dequantized import PlainTensor, plain_tensors
from ckptd.reshard.plan import Take
from ckptd.types import DType


@dataclass(frozen=True, slots=True, eq=False)
class StockTensor:
    """A stored tensor of the source.

    Attributes
    ----------
    number
        Its number in the manifest of `SourceTensors.source`.
    encoded
        Whether it holds an encoded object.
    ranks
        Of a per-rank object: the rank that holds each piece.
    plain
        Of a wrapped tensor that is dequantized: what it represents. `dtype` is that of its numbers.
    """

    number: int
    name: str
    dtype: DType
    shape: tuple[int, ...]
    grid: Grid
    aliases: tuple[str, ...] = ()
    encoded: bool = False
    ranks: Sequence[int] | None = None
    plain: PlainTensor | None = None


@dataclass(frozen=True, eq=False)
class SourceTensors:
    """A source, described.

    Attributes
    ----------
    source
        Its files, and where its bytes are in them.
    identity
        Text that changes when its content does.
    step, world
        As in its manifest; a foreign source is of step 0 and one rank.
    requires
        What of its manifest's concerns objects.
    metadata
        As in its manifest, without what that says of a foreign checkpoint's files and names: the
        target has others.
    tensors
        All of them, by number.
    objects
        All of them.
    values
        Returns whole tensors by name: for numbers that follow a parameter, and scales.
    encoded
        Returns the values of an object that lies in files, by its name, by rank; one of all ranks
        is rank 0's.
    witness
        Its plan and values, where it has one that can be compared value by value.
    lay
        The program that it keeps, or empty.
    hinted
        Whether a reader of foreign files made that of what they say.
    sizes
        Sizes of axes that its shapes alone do not say; a program's own go before them.
    locate
        Where pieces are not files' own: returns the takes for copies out of a piece, by name of the
        tensor, number of the piece, blocks and type of the target.
    unread
        Files beside those of the source that look like weights and are not read.
    apart
        Names of tensors that its program does not speak of, and that the target has as they are.
    unread_tensors
        Tensors of kinds that are not read, by name: what each is. A program may drop them.
    left_out
        Of files of ranks: how many values are no tensors, and names of the first ones.
    has_sections
        Whether names begin with a section of a state, as a job of ckptd saves it: elsewhere
        ``model.`` is a part of the names of weights.
    outside
        Names of tensors and objects that are left out: they are not in the section that was asked
        for.
    """

    source: PieceLocations
    identity: str
    tensors: Sequence[StockTensor]
    values: Callable[[Sequence[str]], Mapping[str, NDArray[Any]]]
    step: int = 0
    world: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)
    objects: Sequence[ObjectEntry] = ()
    encoded: Callable[[str], Mapping[int, bytes]] = lambda name: {}
    witness: tuple[WitnessPlan, Witness] | None = None
    witness_note: str = ""
    lay: str = ""
    hinted: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    locate: Callable[[str, int, Sequence[Block], DType], Sequence[Take]] | None = None
    unread: Sequence[str] = ()
    apart: frozenset[str] = frozenset()
    unread_tensors: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[int, Sequence[str]] = (0, ())
    has_sections: bool = True
    outside: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, StockTensor]:
        """Tensors by name and by alias."""
        out = {a: t for t in self.tensors for a in t.aliases}
        return out | {t.name: t for t in self.tensors}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what a program has to speak of, by name: of no encoded objects."""
        return {t.name: t.shape for t in self.tensors if not t.encoded and t.name not in self.apart}

    def read_scalars(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of some small tensors."""
        found = self.values(names) if names else {}
        return {n: np.ascontiguousarray(found[n]).tobytes() for n in names}


def open_own(reader: CkptdReader, *, dequantize: bool = False) -> SourceTensors:
    """Describe a checkpoint; the caller holds a lease on it.

    Parameters
    ----------
    dequantize
        Take wrapped tensors for the plain ones that they represent, where that is known.

    Raises
    ------
    CorruptError
        Its manifest, or its witness, is damaged.
    """
    manifest, filemap = reader.manifest, reader.filemap
    encoded = {o.tensor: bool(o.per_rank) for o in manifest.objects if o.tensor}
    tensors = [
        StockTensor(
            number,
            t.name,
            filemap.dtypes[number],
            t.shape,
            filemap.grid_of(number),
            t.aliases,
            t.name in encoded,
            _ranks(reader, number) if encoded.get(t.name) else None,
        )
        for number, t in enumerate(manifest.tensors)
    ]
    plain = plain_tensors(reader) if dequantize else {}
    first = {p.parts[0]: p for p in plain.values()}
    further = {n for p in plain.values() for n in p.parts[1:]}
    tensors = [
        replace(t, name=p.name, shape=p.shape, grid=p.grid, plain=p)
        if (p := first.get(t.name)) is not None
        else t
        for t in tensors
        if t.name not in further
    ]
    witness, note = _witness(reader)
    about = about_foreign(manifest)
    return SourceTensors(
        reader.places,
        identity=f"{manifest.step} {reader.commit.manifest_digest}",
        tensors=tensors,
        values=lambda names: reader.tensors(dict.fromkeys(names)),
        step=manifest.step,
        world=manifest.world_size,
        metadata={k: v for k, v in reader.metadata.items() if k != FOREIGN},
        objects=[o for o in manifest.objects if o.kind != SUBCLASS],
        encoded=lambda name: _encoded(reader, name),
        witness=witness,
        witness_note=note,
        lay=manifest.lay,
        hinted=bool(about and manifest.lay),
        sizes=foreign_sizes(manifest),
        # Those files are beside the foreign checkpoint, not beside a copy of it.
        unread=_names(about.get("unread")) if UNDIGESTED in manifest.requires else (),
        unread_tensors=dict(reader.unread)
        | {n: kind for n, kind in reader.wrapped.items() if n not in plain},
        has_sections=reader.has_sections,
        requires=tuple(r for r in manifest.requires if r == SHARING),
    )


def in_section(stock: SourceTensors, section: str, lay: str) -> SourceTensors:
    """Return what a source has below a name, without it.

    Parameters
    ----------
    lay
        The program that it keeps, with the names that are left; or empty.

    Raises
    ------
    NotFoundError
        There is no such tensor.
    UsageError
        Pieces are in files of ranks, whose layout says names.
    """
    if stock.locate is not None:
        raise UsageError(
            "--section does not apply to files of ranks: their names come from the layout",
            where=f"--section {section}",
            hint="-e 'from: stored \"SECTION.{name}\"'",
        )
    above, said = f"{section}.", {t.name: (t.name, *t.aliases) for t in stock.tensors}
    inside = {
        t: [n.removeprefix(above) for n in names if n.startswith(above)]
        for t, names in said.items()
    }
    encoded = {o.tensor: o.name.startswith(above) for o in stock.objects if o.tensor}
    tensors, old = [], {}
    for tensor in stock.tensors:
        names = inside[tensor.name]
        if encoded.get(tensor.name, bool(names)):
            first, *others = names or [tensor.name]
            old[first] = tensor.name
            tensors.append(replace(tensor, name=first, aliases=tuple(others)))
    if not any(not t.encoded for t in tensors):
        tops = dict.fromkeys(n.partition(".")[0] for n in said if "." in n)
        raise NotFoundError(
            f"the source has no section {section!r}",
            found=f"sections {', '.join(list(tops)[:_MOST_NAMED])}" if tops else "no section",
        )
    new = {o: n for n, o in old.items()}
    objects = [
        msgspec.structs.replace(o, name=o.name.removeprefix(above), tensor=new.get(o.tensor, ""))
        for o in stock.objects
        if o.name.startswith(above)
    ]
    outside = [n for names in said.values() for n in names if not n.startswith(above)]
    outside = [n for n in outside if n not in encoded]
    outside += [o.name for o in stock.objects if not o.name.startswith(above)]
    outside += [n for n in stock.unread_tensors if not n.startswith(above)]
    unread = {n: kind for n, kind in stock.unread_tensors.items() if n.startswith(above)}
    return replace(
        stock,
        identity=f"{stock.identity}\nsection {section}",
        tensors=tensors,
        objects=objects,
        values=lambda names: {new[n]: v for n, v in stock.values([old[n] for n in names]).items()},
        encoded=lambda name: stock.encoded(above + name),
        lay=lay,
        hinted=False,
        has_sections=stock.has_sections and section.rpartition(".")[2] != _MODEL,
        outside=tuple(outside),
        unread_tensors={n.removeprefix(above): kind for n, kind in unread.items()},
    )


_MODEL = "model"
_MOST_NAMED = 8


def _names(found: object) -> list[str]:
    return [str(n) for n in found] if isinstance(found, list) else []


def _ranks(reader: CkptdReader, number: int) -> list[int]:
    """Return the rank that holds each piece."""
    entry = reader.manifest.tensors[number]
    files = reader.filemap.owners[entry.owners].array(entry.base).tolist()
    return [reader.manifest.files[f].rank if f >= 0 else -1 for f in files]


def _encoded(reader: CkptdReader, name: str) -> dict[int, bytes]:
    entry = next(o for o in reader.manifest.objects if o.name == name)
    found = reader.raw_object(entry)
    found = found if isinstance(found, PerRankValues) else {0: found}
    return {rank: msgspec.json.encode(value) for rank, value in found.items()}


def _witness(reader: CkptdReader) -> tuple[tuple[WitnessPlan, Witness] | None, str]:
    """Return the witness, or why there is none."""
    plan = WitnessPlan.of(reader.manifest)
    found = read_witness(reader.store, reader.manifest, plan)
    return (None, "the source has no witness") if found is None else ((plan, found), "")


def unequal_copy(copy: str, original: str, found: str) -> CorruptError:
    """Return the error for what the source's layout calls a copy, and has values of its own."""
    return CorruptError(
        "a copy of a tensor is not equal to it",
        kind="replicas-differ",
        where=copy,
        wanted=f"what {original} holds",
        found=found,
        hint="if it is a tensor of its own, give it a rule of its own in the source's layout, "
        "in place of the alias",
    )
