"""Writing an export: Hugging Face safetensors and their index.

Memory stays within a few slabs, whatever the size of a tensor. Files get their names when all of
them are complete and the index comes last, so that a folder that was left halfway is not taken
for a model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.engine.export_plan import ExportPlan, Item
from ckptd.engine.values import Reader
from ckptd.errors import RefusedError, UsageError
from ckptd.format.container import build_header
from ckptd.store.local import LocalStore
from ckptd.store.osio import writing

__all__ = ["INDEX", "ExportedFile", "run_export"]

INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?")
_PARTIAL = ".partial"
_SLAB_BYTES = 32 << 20


class ExportedFile(msgspec.Struct, frozen=True):
    """One file that was written: its name, the number of its tensors, and their bytes."""

    name: str
    tensors: int
    bytes: int


def run_export(
    reader: Reader,
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
        Kind ``exists``: a model is there already. Nothing was changed.
    UsageError
        Kind ``overflow``: a value does not fit the type it is cast to; nothing was replaced.
    CorruptError, StoreError
        Reading or writing failed; nothing was replaced.
    """
    folder = Path(folder)
    old = sorted(n for n in _names(folder) if _OURS.fullmatch(n))
    if old and not force:
        raise RefusedError(
            "a model is there already",
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
        store.put(INDEX, _index(plan))
    return [ExportedFile(n, len(items), sum(i.nbytes for i in items)) for n, items in plan.files]


def _names(folder: Path) -> list[str]:
    with writing(str(folder)):
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []


def _index(plan: ExportPlan) -> bytes:
    weights = {item.name: name for name, items in plan.files for item in items}
    document = {
        "metadata": {"total_size": plan.nbytes},
        "weight_map": dict(sorted(weights.items())),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


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
    reader: Reader, store: LocalStore, key: str, items: Sequence[Item], meter: _Meter
) -> None:
    # Names of tied tensors that are not written again, as safetensors.torch.save_model notes them.
    tied = {alias: item.name for item in items for alias in item.aliases}
    header, data_bytes = build_header(
        [(item.name, item.dtype, item.shape) for item in items], {**tied, "format": "pt"}
    )
    with store.writer(key, len(header) + data_bytes) as writer:
        writer.write(memoryview(header))
        for item, values in _values(reader, items):
            cast = _cast(values, item)
            writer.write(cast.reshape(-1).view(np.uint8).data)
            meter.add(cast.nbytes)
        writer.commit()


def _values(reader: Reader, items: Sequence[Item]) -> Iterator[tuple[Item, NDArray[Any]]]:
    """Yield the values of each tensor in order, large ones in several parts."""
    for batch in _batches(reader, items):
        if len(batch) == 1 and reader.byte_count(batch[0].tensor) > _SLAB_BYTES:
            for _, values in reader.slabs(batch[0].tensor, _SLAB_BYTES):
                yield batch[0], values
        else:
            found = reader.tensors({item.tensor for item in batch})
            for item in batch:
                yield item, found[item.tensor]


def _batches(reader: Reader, items: Sequence[Item]) -> Iterator[list[Item]]:
    """Group small neighbours, so that thousands of them do not cost a read each."""
    batch: list[Item] = []
    held = 0
    for item in items:
        size = reader.byte_count(item.tensor)
        if batch and held + size > _SLAB_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch


def _cast(values: NDArray[Any], item: Item) -> NDArray[Any]:
    if values.dtype == item.dtype.numpy:
        return np.ascontiguousarray(values)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(item.dtype.numpy)
    if np.any(np.isinf(cast) & ~np.isinf(values)):
        raise UsageError(
            "a value does not fit the type it is cast to",
            kind="overflow",
            where=item.name,
            wanted=f"values of {item.dtype.name}",
            found=f"up to {np.nanmax(np.abs(values[np.isfinite(values)].astype(np.float64))):.6g}",
            hint="--dtype bfloat16 has the range of float32",
        )
    return cast
