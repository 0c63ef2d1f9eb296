"""``ckptd ls``: lists checkpoints, generations, attempts; columns and widths."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from ckptd.base.grouping import by_key
from ckptd.checkpoint.cli.address import Root, opened
from ckptd.checkpoint.format.lineage import line
from ckptd.checkpoint.format.manifest import OfAttempt, OfCheckpoint
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.format.records import Commit, Parent
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import abandoned_by
from ckptd.checkpoint.root.index import attempts
from ckptd.checkpoint.root.leases import expired, leases
from ckptd.cli.output import Document, Json, Reply, flag, note, print_rows, shorten
from ckptd.cli.output import time_text as when
from ckptd.errors import CorruptError, NotFoundError, size_text


class CheckpointRow(OfCheckpoint, frozen=True, kw_only=True):
    """One commit.

    Attributes
    ----------
    step, generation, attempt
        Its identity, and which try of that generation won.
    created
        UTC, ISO 8601.
    world_size
        Number of ranks that wrote it.
    data_bytes
        Bytes of its tensors and large objects.
    folder
        Its data folder, relative to the root.
    metadata
        What the user attached, and what was added since.
    pinned
        Never to be deleted.
    tags
        Its names; what has one is not deleted.
    leases
        The processes that read it at this moment.
    abandoned_by
        The generation that went on without it; null when it counts.
    damaged
        Why its record cannot be read; null when it can. Fields from the record are then empty.
    """

    attempt: str = ""
    created: str = ""
    world_size: int = 0
    data_bytes: int = 0
    folder: str = ""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    pinned: bool = False
    tags: tuple[str, ...] = ()
    leases: tuple[str, ...] = ()
    abandoned_by: int | None = None
    damaged: str | None = None


def told(record: Commit) -> dict[str, Any]:
    """Return the fields of `CheckpointRow` that the record of a commit gives: its first ones."""
    fields = CheckpointRow.__struct_fields__
    return {f: getattr(record, f) for f in fields[: fields.index("pinned")]}


class GenerationRow(msgspec.Struct, frozen=True):
    """One life of the job: its number, what it continued from, when, how many ranks, and why."""

    generation: int
    parent: Parent | None
    created: str
    world_size: int
    reason: str


class AttemptRow(OfAttempt, frozen=True):
    """A data folder that no commit refers to.

    Attributes
    ----------
    bytes, objects, modified
        What lies there, and when it was last written (seconds since 1970).
    over
        A newer generation runs: nothing can come of it any more, and `ckptd gc` removes it.
    """

    bytes: int
    objects: int
    modified: float
    over: bool


class LsDocument(Document, frozen=True, kw_only=True, tag="ls"):
    """The document that ``ckptd ls --json`` prints.

    Attributes
    ----------
    root, root_id
        URL, and the id that tells this root from others of the same URL.
    newest
        The step that a load takes; null when there is none.
    generation
        The newest generation.
    checkpoints
        Those that count, oldest first.
    abandoned, generations, attempts
        With ``--all``: commits beside the line, all lives of the job, and what was never
        committed. Else null.
    """

    root: str
    root_id: str
    newest: int | None
    generation: int
    checkpoints: tuple[CheckpointRow, ...]
    abandoned: tuple[CheckpointRow, ...] | None = None
    generations: tuple[GenerationRow, ...] | None = None
    attempts: tuple[AttemptRow, ...] | None = None


def list_root(catalogue: Catalogue, *, everything: bool) -> LsDocument:
    """Return what a root holds; with `everything` what does not count too."""
    root_id = catalogue.open().root_id
    newest, names = catalogue.survey(suspect=True)
    try:
        counted = line(newest, names, catalogue.ancestor) if newest else []
    except CorruptError as error:  # what there is must be seen then more than ever
        note(f"{error.message} ({error.where}): no checkpoint counts until that is fixed")
        counted = []
    if catalogue.suspect() is not None:
        counted = []
    rows = _Rows(catalogue, names if everything else counted)
    counted = [n for n in counted if not rows.is_foreign(n)]
    document = LsDocument(
        root=catalogue.store.url,
        root_id=root_id,
        newest=counted[-1].step if counted else None,
        generation=newest,
        checkpoints=tuple(rows.row(n) for n in counted),
    )
    if not everything:
        return document
    claimed = catalogue.generations()
    beside = sorted(set(names) - set(counted))
    return msgspec.structs.replace(
        document,
        abandoned=tuple(
            rows.row(n, _abandoned_by(catalogue, n, claimed) or n.generation) for n in beside
        ),
        generations=tuple(g for n in claimed if (g := _generation(catalogue, n)) is not None),
        attempts=tuple(_attempts(catalogue, rows.folders, newest)),
    )


def _abandoned_by(catalogue: Catalogue, name: CommitName, claimed: list[int]) -> int | None:
    with suppress(CorruptError, NotFoundError):
        return abandoned_by(name, claimed, catalogue.generation)
    return None


class _Rows:
    """Records and marks of commits, each read once."""

    def __init__(self, catalogue: Catalogue, names: list[CommitName]) -> None:
        self._records, self._damage = _read(catalogue, names)
        self._tags: dict[CommitName, tuple[str, ...]] = {}
        try:
            self._records = catalogue.annotated(self._records)
            for tag, name in catalogue.tags().items():
                self._tags[name] = (*self._tags.get(name, ()), tag)
        except CorruptError as error:
            note(f"{error.message} ({error.where}): tags, or metadata that was added, are left out")
        self._foreign: set[CommitName] = set()
        for name, record in self._records.items():
            with suppress(CorruptError):  # said of its generation
                if (why := catalogue.foreign(record)) is not None:
                    self._foreign.add(name)
                    self._damage[name] = f"does not count: {why}"
        self._pins = catalogue.pins()
        held = [lease for lease in leases(catalogue).values() if not expired(lease, time.time())]
        self._leases = by_key((lease.name, lease.holder) for lease in held)

    def is_foreign(self, name: CommitName) -> bool:
        """Tell whether a commit is of another life of the job, and does not count."""
        return name in self._foreign

    @property
    def folders(self) -> set[str]:
        """Data folders that a commit refers to."""
        return {f for record in self._records.values() for f in record.folders}

    def row(self, name: CommitName, abandoned: int | None = None) -> CheckpointRow:
        """Return one commit as a row."""
        record = self._records.get(name)
        return CheckpointRow(
            **(told(record) if record else msgspec.structs.asdict(name)),
            pinned=name in self._pins,
            tags=self._tags.get(name, ()),
            leases=tuple(self._leases.get(name, ())),
            abandoned_by=abandoned,
            damaged=self._damage.get(name),
        )


def _read(
    catalogue: Catalogue, names: list[CommitName]
) -> tuple[dict[CommitName, Commit], dict[CommitName, str]]:
    """Return the records, and for those that cannot be read why: one must not hide the others."""
    try:
        return catalogue.records(names), {}
    except CorruptError:
        pass
    records: dict[CommitName, Commit] = {}
    damage: dict[CommitName, str] = {}
    for name in names:
        try:
            records[name] = catalogue.commit(name)
        except CorruptError as error:
            damage[name] = f"{error.message}: {error.where}"
        except NotFoundError:
            damage[name] = "deleted while this ran"
    return records, damage


def _generation(catalogue: Catalogue, number: int) -> GenerationRow | None:
    try:
        g = catalogue.generation(number)
    except CorruptError as error:
        note(f"generation {number}: {error.message} ({error.where})")
        return None
    return GenerationRow(g.generation, g.parent, g.created, g.world_size, g.reason)


def _attempts(catalogue: Catalogue, used: set[str], newest: int) -> list[AttemptRow]:
    rows = []
    for folder, name, attempt in attempts(catalogue.store):
        if folder in used:
            continue
        found = list(catalogue.store.list(folder))
        rows.append(
            AttemptRow(
                step=name.step,
                generation=name.generation,
                attempt=attempt,
                bytes=sum(o.size for o in found),
                objects=len(found),
                modified=max((o.modified for o in found), default=0.0),
                over=name.generation < newest,
            )
        )
    return rows


_METADATA_WIDTH = 60
_HOLDER_WIDTH = 30


def ls(
    root: Root,
    /,
    *,
    all: Annotated[
        bool, flag("Also list abandoned lines, generations and unfinished saves.")
    ] = False,
    json: Json = False,
) -> Reply:
    """List the checkpoints of a root, the newest last."""
    with opened(root) as catalogue:
        document = list_root(catalogue, everything=all)
    rows = (*document.checkpoints, *(document.abandoned or ()))
    damaged = any(r.damaged for r in rows)
    return Reply(document, _show, CorruptError.exit_code if damaged else 0)


# -- for people ------------------------------------------------------------------------------------


def _show(document: LsDocument) -> None:
    if document.checkpoints:
        print_rows(document.checkpoints, _CHECKPOINT)
    else:
        print("no checkpoint counts here")
    if document.abandoned:
        print("\nabandoned")
        print_rows(document.abandoned, _CHECKPOINT)
    if document.attempts:
        print("\nnot committed")
        print_rows(document.attempts, _ATTEMPT)
    if document.generations:
        print("\ngenerations")
        print_rows(document.generations, _GENERATION)


def _marks(row: CheckpointRow) -> str:
    marks = [f"tagged {tag}" for tag in row.tags] + ["pinned"] * row.pinned
    marks += [f"leased by {shorten(who or 'a reader', _HOLDER_WIDTH)}" for who in row.leases]
    if row.abandoned_by is not None:
        marks.append(f"abandoned by generation {row.abandoned_by}")
    return ", ".join(marks)


def _metadata(row: CheckpointRow) -> str:
    return (
        f"DAMAGED: {row.damaged}" if row.damaged else metadata_text(row.metadata, _METADATA_WIDTH)
    )


_CHECKPOINT: dict[str, Callable[[CheckpointRow], object]] = {
    ">STEP": lambda r: r.step,
    ">GEN": lambda r: r.generation,
    "CREATED": lambda r: None if r.damaged else when(r.created),
    ">SIZE": lambda r: None if r.damaged else size_text(r.data_bytes),
    ">RANKS": lambda r: None if r.damaged else r.world_size,
    "MARKS": _marks,
    "METADATA": _metadata,
}
_ATTEMPT: dict[str, Callable[[AttemptRow], object]] = {
    ">STEP": lambda r: r.step,
    ">GEN": lambda r: r.generation,
    "ATTEMPT": lambda r: r.attempt,
    "LAST WRITTEN": lambda r: when(r.modified),
    ">SIZE": lambda r: size_text(r.bytes),
    "STATE": lambda r: "given up: ckptd gc removes it" if r.over else "in flight, or died",
}
_GENERATION: dict[str, Callable[[GenerationRow], object]] = {
    ">GEN": lambda r: r.generation,
    "CLAIMED": lambda r: when(r.created),
    ">RANKS": lambda r: r.world_size,
    "CONTINUES": lambda r: r.parent.name if r.parent else "nothing",
    "REASON": lambda r: r.reason,
}


def metadata_text(metadata: dict[str, Any], width: int) -> str:
    """Return metadata as ``name=value`` pairs in at most `width` characters."""
    pairs = (
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={_plain(value)}"
        for key, value in metadata.items()
    )
    return shorten(" ".join(pairs), width)


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return ",".join(value)
    return msgspec.json.encode(value).decode()
