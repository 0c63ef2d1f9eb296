"""From what parts refer to, to a manifest's tables: pure functions.

Work grows with the parts and with the tensors that some part refers to a piece of. Tensors that
share a map and are referred to alike share one again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.engine.job import Part
from ckptd.engine.structure import SavePlan
from ckptd.engine.unchanged import MOST_FOLDERS, Refer, folder_of
from ckptd.errors import SaveError
from ckptd.format.filemap import is_home
from ckptd.format.manifest import FileEntry, Runs3, TensorEntry
from ckptd.format.names import is_data_path
from ckptd.layout.owners import ABSENT, Owners

__all__ = ["MOST_REFERS", "refer"]

MOST_REFERS = 1024
"""Files that one part may refer to."""

I64 = NDArray[np.int64]


def refer(
    plan: SavePlan,
    parts: Sequence[Part],
    folder: str,
    tensors: list[TensorEntry],
    owners: dict[Runs3, int],
) -> list[FileEntry]:
    """Enter what the parts refer to into `tensors` and `owners`; return the files it lies in.

    Their numbers come after those of the ranks' own files. Deterministic.

    Parameters
    ----------
    folder
        Of this attempt.
    tensors, owners
        The plan's tables, which are changed; owner maps with their numbers.

    Raises
    ------
    SaveError
        kind ``structure``: a part names chunks that the plan does not give to its rank, one of
        them twice, too many files, or files that are no older checkpoint's.
    """
    files = _files(parts, folder)
    numbers = {f.path: plan.world + i for i, f in enumerate(files)}
    moved = _moved(plan, parts, numbers)
    known: dict[tuple[int, int, bytes], tuple[int, int]] = {}
    bounds = np.flatnonzero(np.diff(moved[0], prepend=-1, append=-1))
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        number = int(moved[0][start])
        entry = tensors[number]
        where = Owners(plan.owners[entry.owners]).array(entry.base)
        where[moved[1][start:end]] = moved[2][start:end]
        key = (entry.owners, entry.base, where.tobytes())
        if key not in known:
            held = where != ABSENT
            base = int(where[held].min())
            runs = Owners.from_array(np.where(held, where - base, ABSENT)).runs
            known[key] = owners.setdefault(runs, len(owners)), base
        tensors[number] = msgspec.structs.replace(entry, owners=known[key][0], base=known[key][1])
    return files


def _files(parts: Sequence[Part], folder: str) -> list[FileEntry]:
    found: dict[str, FileEntry] = {}
    for part in parts:
        if len(part.refers) > MOST_REFERS:
            raise _bad(part, "too many files", len(part.refers))
        for file in (r.file for r in part.refers):
            if not is_data_path(file.path) or is_home(file.path, folder) or not file.data_start:
                raise _bad(part, "a file that is no older checkpoint's", file.path)
            if found.setdefault(file.path, file) != file:
                raise _bad(part, "another file of the same name", file.path)
    if len({folder_of(path) for path in found}) >= MOST_FOLDERS:
        raise SaveError("parts refer to too many folders", kind="structure", wanted=MOST_FOLDERS)
    return [found[path] for path in sorted(found)]


def _moved(plan: SavePlan, parts: Sequence[Part], numbers: dict[str, int]) -> tuple[I64, I64, I64]:
    """Return tensor, piece and new file of everything that is referred to, by tensor."""
    tensors: list[I64] = []
    pieces: list[I64] = []
    files: list[I64] = []
    for part in parts:
        if not part.refers:
            continue
        tensor, piece = plan.filemap.chunk_numbers(part.rank)
        seen = np.zeros(len(tensor), dtype=np.bool_)
        for refer in part.refers:
            numbered = _numbers(part, refer, len(tensor))
            if seen[numbered].any():
                raise _bad(part, "a chunk twice", refer.file.path)
            seen[numbered] = True
            tensors.append(tensor[numbered])
            pieces.append(piece[numbered])
            files.append(np.full(len(numbered), numbers[refer.file.path], dtype=np.int64))
    joined = np.concatenate(tensors), np.concatenate(pieces), np.concatenate(files)
    order = np.argsort(joined[0], kind="stable")
    return joined[0][order], joined[1][order], joined[2][order]


def _numbers(part: Part, refer: Refer, chunks: int) -> I64:
    """Return the chunk numbers of runs that are in range, and rise."""
    end = 0
    for first, count in refer.runs:
        if first < end or count < 1 or first + count > chunks:
            raise _bad(part, "chunks that it does not have, or one twice", (first, count))
        end = first + count
    runs = np.array(refer.runs, dtype=np.int64).reshape(-1, 2)
    counts = runs[:, 1]
    skipped = runs[:, 0] - (np.cumsum(counts) - counts)
    return np.repeat(skipped, counts) + np.arange(int(counts.sum()))


def _bad(part: Part, what: str, found: object) -> SaveError:
    return SaveError(
        f"a part refers to {what}",
        kind="structure",
        where=f"rank {part.rank}",
        found=str(found)[:200],
    )
