"""A checkpoint of ckptd as the source of a reshard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from ckptd.format.witness import Witness, WitnessPlan
from ckptd.load.reader import CkptdReader
from ckptd.load.witnesses import read_witness
from ckptd.readers.reader import PerRankValues
from ckptd.readers.twin import about_foreign
from ckptd.reshard.source import Stock, StockTensor

__all__ = ["open_own"]


def open_own(reader: CkptdReader) -> Stock:
    """Describe a checkpoint; the caller holds a lease on it.

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
    witness, note = _witness(reader)
    about = about_foreign(manifest)
    return Stock(
        reader.places,
        identity=f"{manifest.step} {reader.commit.manifest_digest}",
        tensors=tensors,
        values=lambda names: _values(reader, names),
        step=manifest.step,
        world=manifest.world_size,
        metadata=manifest.metadata,
        objects=manifest.objects,
        per_rank=lambda name: _per_rank(reader, name),
        witness=witness,
        witness_note=note,
        lay=manifest.lay,
        sizes=_sizes(about.get("sizes")),
        unread=_names(about.get("unread")),
        has_sections=reader.has_sections,
    )


def _sizes(found: object) -> dict[str, int]:
    """Return sizes that a foreign checkpoint says; metadata is anybody's."""
    pairs = found.items() if isinstance(found, dict) else ()
    return {str(k): v for k, v in pairs if type(v) is int and v > 0}


def _names(found: object) -> list[str]:
    return [str(n) for n in found] if isinstance(found, list) else []


def _ranks(reader: CkptdReader, number: int) -> list[int]:
    """Return the rank that holds each piece."""
    entry = reader.manifest.tensors[number]
    files = reader.filemap.owners[entry.owners].array(entry.base).tolist()
    return [reader.manifest.files[f].rank if f >= 0 else -1 for f in files]


def _values(reader: CkptdReader, names: Sequence[str]) -> Mapping[str, NDArray[Any]]:
    return reader.tensors(dict.fromkeys(names))


def _per_rank(reader: CkptdReader, name: str) -> dict[int, bytes]:
    entry = next(o for o in reader.manifest.objects if o.name == name)
    found = reader.raw_object(entry)
    if not isinstance(found, PerRankValues):
        return {}
    return {rank: msgspec.json.encode(value) for rank, value in found.items()}


def _witness(reader: CkptdReader) -> tuple[tuple[WitnessPlan, Witness] | None, str]:
    """Return the witness if its values can be followed one by one, or why there is none."""
    plan = WitnessPlan.of(reader.manifest)
    found = read_witness(reader.store, reader.manifest, plan)
    if isinstance(found, Witness):
        return (plan, found), ""
    if found is None:
        return None, "the source has no witness"
    return None, "the source's witness is a sum, whose values cannot be followed one by one"
