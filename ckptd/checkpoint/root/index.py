"""`Index`: reads a root: marker, generations, line, records; marks of deletions; tier names.

In it: how long a clean-up under way is awaited; when a mark is void; tries of a loop.

A root is the folder with ``ckptd.json`` in it. Its records are created exactly once.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from ckptd import events
from ckptd.base.digest import digest_hex
from ckptd.checkpoint.format.lineage import line, newest_on_line
from ckptd.checkpoint.format.manifest import Manifest, decode_manifest
from ckptd.checkpoint.format.names import (
    ANNOTATIONS,
    COMMITS,
    DATA,
    GENERATIONS,
    LEASES,
    MARKS,
    PINS,
    ROOT_MARKER,
    CommitName,
    annotation_key,
    check_step,
    commit_key,
    generation_key,
    parse_annotation_name,
    parse_commit_name,
    parse_data_folder,
    parse_generation_name,
    parse_tag_name,
    tag_key,
)
from ckptd.checkpoint.format.records import (
    MAX_RECORD_BYTES,
    Annotation,
    Commit,
    Generation,
    Pin,
    R,
    RootMarker,
    decode_record,
    encode_record,
)
from ckptd.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    RefusedError,
    StoreError,
    first_few,
)
from ckptd.store.base import Store, innermost, root_gone

if TYPE_CHECKING:
    from ckptd.checkpoint.format.container import FileMap


def stamp(seconds: float | None = None) -> str:
    """Return a time (seconds since 1970; default: now) as a record's ``created`` field."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(text: str, where: str) -> float:
    """Return a record's time in seconds since 1970; `CorruptError` when it is none.

    A time without a zone is UTC.
    """
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise CorruptError(
            "invalid time", where=where, wanted="ISO 8601", found=repr(text[:80])
        ) from None


WAIT_S = 5.0
"""How long to wait for a clean-up to make up its mind, in seconds."""
VOID_S = 3600.0
"""Age at which a mark is that of a clean-up which died before it deleted anything, in seconds."""
_POLL_S = 0.05
_COMMIT = "commit-"
"""How the name of a mark on a commit begins."""


def put_mark(store: Store, folder: str, *, commit: bool = False) -> str:
    """Mark a data folder, or only the `commit` that it was written for; return the mark's key."""
    key = f"{folder}{MARKS}{_COMMIT if commit else ''}{uuid.uuid4().hex}"
    store.put(key, b"")
    return key


def commit_marks(store: Store, folder: str) -> list[str]:
    """Return the keys of the marks on the commit that a data folder was written for."""
    names = store.children(folder + MARKS)
    return [f"{folder}{MARKS}{name}" for name in names if name.startswith(_COMMIT)]


def unmarked(store: Store, folders: Iterable[str], own: str = "") -> bool:
    """Return whether no clean-up is about to delete any of the folders; waits while that is open.

    Parameters
    ----------
    own
        The folder of the commit that is relied on: nothing is about to delete that commit either.
    """
    folders = list(folders)
    end = time.monotonic() + WAIT_S
    while any(_is_marked(store, folder, folder == own) for folder in folders):
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


def _is_marked(store: Store, folder: str, own: bool) -> bool:
    marks = [m for m in store.children(folder + MARKS) if own or not m.startswith(_COMMIT)]
    return any(_is_young(store, f"{folder}{MARKS}{mark}") for mark in marks)


def _is_young(store: Store, mark: str) -> bool:
    try:
        return store.stat(mark).modified + VOID_S > time.time()
    except NotFoundError:
        return False  # taken away since the listing


MAX_TRIES = 64
"""Bound of each loop that starts again because another process was faster."""
_THREAD_S = 0.001
"""A read that takes longer is waited for with others, in threads of their own."""


def attempts(store: Store) -> Iterator[tuple[str, CommitName, str]]:
    """Yield the data folders of a root, each with its checkpoint and the name of its attempt."""
    for child in store.children(DATA):
        if child.endswith("/") and (parsed := parse_data_folder(child)) is not None:
            yield DATA + child, *parsed


class Index:
    """The reading half of a catalogue. Thread-safe: records never change once they exist.

    Parameters
    ----------
    store
        Where the root is, or will be.

    Attributes
    ----------
    root_id
        Of the root that was opened here; empty before. What is written from then on is for that
        root and for no other at the same place.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        store.fleeting(LEASES)
        self.root_id = ""
        self._generations: dict[int, Generation] = {}
        self._records: dict[CommitName, Commit] = {}
        self._annotations: dict[CommitName, dict[int, Annotation | None]] = {}
        self._known: set[CommitName] = set()
        # Those that were looked at last: most checkpoints of a root have the same.
        self._tables: tuple[Manifest, FileMap] | None = None

    def _forget(self) -> None:
        self._generations.clear()
        self._records.clear()
        self._annotations.clear()
        self._known.clear()

    # -- the root itself -----------------------------------------------------------------------

    def expect(self, root_id: str) -> None:
        """Take in which root this is; `check_root` tells whether it still is."""
        if root_id != self.root_id:
            self._forget()
            self.root_id = root_id
        # A folder that is no root any more (renamed, unmounted, deleted) must not fill with files.
        self.store.anchor(ROOT_MARKER)

    def check_root(self, root_id: str = "") -> None:
        """Raise unless the root that was opened is still there; before anything is opened, don't.

        Parameters
        ----------
        root_id
            What it must be, whatever was opened (see `expect`); empty where that is not known.

        Raises
        ------
        StoreError
            Kind ``root-gone``: the folder is no root any more.
        ConflictError
            Kind ``other-root``: another root was made at the same place.
        """
        if root_id:
            self.expect(root_id)
        if not self.root_id:
            return
        try:
            found = self._marker().root_id
        except NotFoundError:
            raise root_gone(self.where(ROOT_MARKER)) from None
        if found != self.root_id:
            raise ConflictError(
                "another root was created at this URL",
                kind="other-root",
                where=self.where(ROOT_MARKER),
                wanted=f"root {self.root_id}",
                found=f"root {found}",
                hint="this job belongs to the root that was here before: restore that root, or "
                "restart this job",
            )

    def where(self, key: str) -> str:
        """Return the full name of an object of this root, for messages."""
        return f"{self.store.url.rstrip('/')}/{key}"

    def read(self, key: str, kind: type[R]) -> R:
        """Return a record; what claims to be one and is huge is not even fetched.

        Raises
        ------
        NotFoundError
            There is no such object.
        CorruptError
            It is not such a record; names it.
        """
        if self.store.stat(key).size > MAX_RECORD_BYTES:
            raise CorruptError("record too large", where=self.where(key))
        return decode_record(self.store.get(key), kind, self.where(key))

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes, None when it is not there."""
        try:
            return self.store.stat(key).size
        except NotFoundError:
            return None

    def create_or_open(self) -> RootMarker:
        """Make this folder a root unless it is one; durable on return.

        Raises
        ------
        RefusedError
            Commits or generations lie here without ``ckptd.json``. Kind ``no-create-only``.
        CorruptError
            Kind ``version``: a newer ckptd made this root.
        """
        try:
            return self._opened()
        except NotFoundError:
            self._refuse_headless()
        marker = RootMarker(root_id=uuid.uuid4().hex, created=stamp())
        self._create(ROOT_MARKER, encode_record(marker))
        return self._opened()

    def open(self) -> RootMarker:
        """Return the marker of an existing root; creates nothing.

        Raises
        ------
        NotFoundError
            Kind ``no-root``: nothing is here, or other things are.
        CorruptError
            Kind ``version``: a newer ckptd made this root.
        """
        try:
            return self._opened()
        except NotFoundError:
            names = self.store.children("")
        raise NotFoundError(
            "not a checkpoint root of ckptd" if names else "nothing is stored here",
            kind="no-root",
            where=self.store.url,
            wanted=ROOT_MARKER,
            found=first_few(names, 6) or None,
            hint=f"name the folder that holds {ROOT_MARKER}"
            if names
            else "check the path; the first save creates the root",
        )

    def _opened(self) -> RootMarker:
        marker = self._marker()
        self.expect(marker.root_id)
        return marker

    def _marker(self) -> RootMarker:
        return self.read(ROOT_MARKER, RootMarker)

    def _refuse_headless(self) -> None:
        """A root that lost its marker is not ours to continue: its version is unknown."""
        for folder in (COMMITS, GENERATIONS):
            if self.store.children(folder):
                raise RefusedError(
                    f"this folder has {folder} but not {ROOT_MARKER}",
                    where=self.store.url,
                    hint=f"give another folder, or put {ROOT_MARKER} back",
                )

    def _create(self, key: str, raw: bytes) -> bool:
        """Create an object and tell whether it is ours, also where the reply was lost."""
        if not self.store.capabilities.create_only:
            raise RefusedError(
                "this store lacks atomic create-if-absent",
                kind="no-create-only",
                where=self.store.url,
                hint=f"ckptd doctor {self.store.url}",
            )
        try:
            self.store.put(key, raw, create_only=True)
            return True
        except ConflictError:
            ours = self.store.get(key) == raw
        except StoreError:
            # The reply may be lost and the object there: saying "failed" would make the caller
            # write the same checkpoint again and lose against itself.
            ours = False
            with suppress(NotFoundError, StoreError):
                ours = self.store.get(key) == raw
            if not ours:
                raise
        self.store.sync(key[: key.find("/") + 1])  # its maker may not have synced it yet
        return ours

    # -- listing -------------------------------------------------------------------------------

    def generations(self) -> list[int]:
        """Return the numbers of all claimed generations, ascending."""
        names = self.store.children(GENERATIONS)
        return sorted(g for g in map(parse_generation_name, names) if g is not None)

    def newest_generation(self) -> int:
        """Return the number of the newest generation, 0 when there is none."""
        newest = max(self.generations(), default=0)
        if not self.store.capabilities.consistent_list:
            # Numbers are claimed one after the other: the next name tells what a listing hides.
            while self.store.exists(generation_key(newest + 1)):
                newest += 1
        return newest

    def generation(self, number: int) -> Generation:
        """Return a generation's record; `NotFoundError` when it was never claimed."""
        if number not in self._generations:
            key = generation_key(number)
            record = self.read(key, Generation)
            if record.generation != number:
                raise self._misnamed(key, f"generation {record.generation}")
            self._generations[number] = record
        return self._generations[number]

    def ancestor(self, number: int) -> Generation:
        """Return the record of a generation that another names as parent: it must be there."""
        try:
            return self.generation(number)
        except NotFoundError:
            raise CorruptError(
                "the record of a generation on the line is missing",
                kind="missing-record",
                where=self.where(generation_key(number)),
            ) from None

    def commits(self) -> list[CommitName]:
        """Return every commit of the root, abandoned lines included, by step; a listing only.

        On a store whose listing lags, commits that this object published or read are looked for
        by name as well.
        """
        names = self.store.children(COMMITS)
        found = {c for c in map(parse_commit_name, names) if c is not None}
        if not self.store.capabilities.consistent_list:
            hidden = self._known - found
            found |= {c for c in hidden if self.store.exists(commit_key(c))}
        else:
            self._known &= found  # or they become as many as there ever were
        for gone in (self._records.keys() | self._annotations.keys()) - found:
            self._records.pop(gone, None)  # the name may come back with another attempt
            self._annotations.pop(gone, None)
        return sorted(found)

    def line(self) -> list[CommitName]:
        """Return the commits that count, oldest first."""
        newest, names = self.survey()
        return line(newest, names, self.ancestor) if newest else []

    def latest(self) -> CommitName | None:
        """Return the newest commit that counts, or None. Reads no record beyond what it needs."""
        newest, names = self.survey()
        if newest:
            self.ancestor(newest)  # a damaged record must not pass where commits came after it
        while newest:
            name = newest_on_line(newest, names, self.ancestor)
            if name is None or self.counts(name):
                return name
            names = [n for n in names if n != name]
        return None

    def newest(self) -> CommitName | None:
        """Return `latest`, or None where there is no root yet."""
        try:
            self.open()
        except NotFoundError:
            return None
        return self.latest()

    def survey(self, *, suspect: bool = False) -> tuple[int, list[CommitName]]:
        """Return the newest generation and all commits, as they were at one moment.

        The two folders are listed one after the other. A generation claimed in between would let
        a zombie's commit pass for one of the line, so the survey starts again when there is one.

        Parameters
        ----------
        suspect
            Also return commits that `suspect` has a reason against.

        Raises
        ------
        CorruptError
            Kind ``missing-record``: what `suspect` returns.
        """
        for _ in range(MAX_TRIES):
            newest = self.newest_generation()
            names = self.commits()
            if not self.store.exists(generation_key(newest + 1)):
                error = None if suspect else self._suspect(newest, names)
                if error is not None:
                    raise error
                return newest, self._with_parent(newest, names)
        raise self.busy("could not list generations: new ones kept appearing", GENERATIONS)

    def busy(self, message: str, key: str = "") -> ConflictError:
        """Return the error of what others were faster at `MAX_TRIES` times."""
        tries = f"{MAX_TRIES} tries"
        return ConflictError(
            message, kind="busy", where=self.where(key), found=tries, hint="try again"
        )

    def suspect(self) -> CorruptError | None:
        """Return why it is unknown what counts here: the record of a generation is gone.

        A commit is made after the record of its generation. Where there is a commit of a generation
        that is newer than every record, records were lost, or are not copied yet; one of them may
        say that the line goes on from an older step.
        """
        return self._suspect(*self.survey(suspect=True))

    def _suspect(self, newest: int, names: Iterable[CommitName]) -> CorruptError | None:
        later = max((n for n in names if n.generation > newest), default=None)
        if later is None:
            return None
        return CorruptError(
            "the record of a generation with commits is missing: the newest checkpoint is unknown",
            kind="missing-record",
            where=self.where(generation_key(later.generation)),
            wanted=f"the record of generation {later.generation}, which made step {later.step}",
            found=f"generation {newest} is the newest" if newest else "no generation at all",
            hint=f"bring {GENERATIONS} back (a copy under way may bring it last); or choose a "
            f"checkpoint: ckptd rollback {self.store.url}@STEP-gGENERATION",
        )

    def _with_parent(self, newest: int, names: list[CommitName]) -> list[CommitName]:
        """Add the commit that a lagging listing hides although the newest generation names it."""
        if self.store.capabilities.consistent_list or not newest:
            return names
        parent = self.generation(newest).parent
        if parent and parent.name not in names and self.store.exists(commit_key(parent.name)):
            return sorted([*names, parent.name])
        return names

    def find(self, step: int | str, all: bool = False, generation: int | None = None) -> CommitName:
        """Return the commit of `step` on the line, or the one that a tag names, wherever it is.

        Parameters
        ----------
        step
            The step, or a tag.
        all
            Look at abandoned lines too; the line itself goes first, then newer generations.
        generation
            Only this generation's commit.

        Raises
        ------
        NotFoundError
            Names the steps nearest to it, and says where else it exists.
        """
        if isinstance(step, str):
            name = self.tagged(step)
            return self.find(name.step, True, name.generation)
        check_step(step)
        # A caller that names the generation too asks for one commit, whatever counts: also in a
        # root of which that is unknown, because this is the way out of it.
        named = all and generation is not None
        newest, names = self.survey(suspect=named)
        if generation is not None and named and CommitName(step, generation) in names:
            return CommitName(step, generation)
        counted = line(newest, names, self.ancestor) if newest else []
        for candidates in (counted, names[::-1] if all else []):
            for name in candidates:
                meant = name.step == step and generation in (None, name.generation)
                if meant and (generation is not None or self.counts(name)):
                    return name
        raise self._no_step(step, counted, [c for c in names if c.step == step])

    def _no_step(
        self, step: int, counted: list[CommitName], elsewhere: list[CommitName]
    ) -> NotFoundError:
        near = sorted(sorted(c.step for c in counted), key=lambda s: abs(s - step))[:5]
        hint = f"ckptd ls {self.store.url}"
        if elsewhere:
            hint = f"it exists on an abandoned line ({elsewhere[-1]}): {hint} --all"
        return NotFoundError(
            f"no checkpoint of step {step}",
            where=self.store.url,
            found=f"steps {', '.join(map(str, sorted(near)))}" if near else "no checkpoint",
            hint=hint,
        )

    # -- reading -------------------------------------------------------------------------------

    def commit(self, name: CommitName) -> Commit:
        """Return a commit's record.

        Raises
        ------
        NotFoundError
            No commit of this step and generation.
        CorruptError
            The record is damaged, or names anything outside its own root. See `foreign`.
        """
        record = self._read_commit(name)
        foreign = self.foreign(record)
        if foreign is not None:
            raise CorruptError(
                f"{name} was written by another life of the job, and does not count",
                where=self.where(commit_key(name)),
                wanted="a commit of this root and of the claim of its generation",
                found=foreign,
            )
        return record

    def foreign(self, record: Commit) -> str | None:
        """Say of which root or claim a commit is that came here from another life; else None.

        A root may be made again at the place of another, whose job still writes: what it commits
        between its last look at the root and the end of the call must never count.
        """
        if record.root and self.root_id and record.root != self.root_id:
            return f"a commit of root {record.root}"
        if record.claim:
            with suppress(NotFoundError):
                if self.generation(record.generation).claim_id != record.claim:
                    return f"a commit under the claim {record.claim}"
        return None

    def counts(self, name: CommitName) -> bool:
        """Tell whether a commit of the line is of this root and its generation, by its record.

        One that cannot be read counts: the caller that takes it finds that out.
        """
        try:
            return self.foreign(self._records.get(name) or self._read_commit(name)) is None
        except (CorruptError, NotFoundError):
            return True

    def _read_commit(self, name: CommitName) -> Commit:
        key = commit_key(name)
        try:
            record = self.read(key, Commit)
        except NotFoundError:
            raise NotFoundError(
                f"{name} is not committed",
                where=self.where(key),
                hint=f"ckptd ls {self.store.url} --all",
            ) from None
        if record.name != name:
            raise self._misnamed(key, str(record.name))
        self._known.add(name)
        return record

    def records(self, names: Iterable[CommitName]) -> dict[CommitName, Commit]:
        """Return the records of commits that a listing just showed, each read once in its life.

        A commit that was deleted since the listing is left out; one of another life is not (see
        `foreign`).
        """
        wanted = list(names)
        found = {n: self._records.get(n) for n in wanted}
        missing = [n for n, r in found.items() if r is None]
        found.update(zip(missing, self._read_all(missing), strict=True))
        records = {n: r for n, r in found.items() if r is not None}
        self._records.update(records)
        return records

    def _read_all(self, names: Sequence[CommitName]) -> list[Commit | None]:
        """Read records, in threads where they are waited for: a file is there before a thread."""
        started = time.monotonic()
        found = [self._commit_or_none(n) for n in names[:1]]
        rest = names[1:]
        if time.monotonic() - started < _THREAD_S:
            return found + [self._commit_or_none(n) for n in rest]
        with ThreadPoolExecutor(max(1, min(len(rest), self.store.capabilities.parallel))) as pool:
            return [*found, *pool.map(self._commit_or_none, rest)]

    def _commit_or_none(self, name: CommitName) -> Commit | None:
        try:
            return self._read_commit(name)
        except NotFoundError:
            return None

    def annotations(self, names: Iterable[CommitName] = ()) -> dict[CommitName, tuple[int, ...]]:
        """Return the numbers of the annotations of each checkpoint that has some, rising.

        A listing only; where it lags, those of `names` are looked for by name as well.
        """
        found: dict[CommitName, set[int]] = {}
        for parsed in map(parse_annotation_name, self.store.children(ANNOTATIONS)):
            if parsed is not None:
                found.setdefault(parsed[0], set()).add(parsed[1])
        for name in () if self.store.capabilities.consistent_list else names:
            newest = max(found.get(name, {0}))
            while self.store.exists(annotation_key(name, newest := newest + 1)):
                found.setdefault(name, set()).add(newest)
        return {name: tuple(sorted(numbers)) for name, numbers in found.items()}

    def annotated(
        self,
        records: Mapping[CommitName, Commit],
        numbers: Mapping[CommitName, Sequence[int]] | None = None,
    ) -> dict[CommitName, Commit]:
        """Return the records with the metadata that was added since: of each key the newest value.

        Parameters
        ----------
        numbers
            What `annotations` returned.

        Raises
        ------
        CorruptError
            An annotation cannot be read: which value is the newest is then not known.
        """
        out = dict(records)
        for name, those in (self.annotations(records) if numbers is None else numbers).items():
            if (record := records.get(name)) is None:
                continue
            known = self._annotations.setdefault(name, {})
            known |= {n: self._annotation(name, n) for n in those if n not in known}
            digest = record.manifest_digest
            ours = [a for _, a in sorted(known.items()) if a and a.manifest_digest == digest]
            metadata = {key: value for a in ours for key, value in a.metadata.items()}
            out[name] = msgspec.structs.replace(record, metadata=record.metadata | metadata)
        return out

    def _annotation(self, name: CommitName, number: int) -> Annotation | None:
        key = annotation_key(name, number)
        try:
            record = self.read(key, Annotation)
        except NotFoundError:
            return None  # deleted with its checkpoint
        if record.name != name:
            raise self._misnamed(key, str(record.name))
        return record

    def _misnamed(self, key: str, found: str) -> CorruptError:
        return CorruptError("a record names another object", where=self.where(key), found=found)

    def manifest(self, name: CommitName) -> Manifest:
        """Return a checkpoint's manifest; size and digest are checked before it is decoded."""
        return self.manifest_of(self.commit(name))

    def manifest_of(self, commit: Commit) -> Manifest:
        """Return the manifest of a commit whose record is at hand; as `manifest`."""
        key = commit.folder + commit.manifest
        where = self.where(key)
        try:
            size = self.store.stat(key).size
            # The size is compared first: no terabyte is read to find that out.
            raw = self.store.get(key) if size == commit.manifest_bytes else b""
        except NotFoundError:
            raise CorruptError(f"the manifest of {commit.name} is missing", where=where) from None
        if size != commit.manifest_bytes or digest_hex(raw) != commit.manifest_digest:
            raise CorruptError(
                "the manifest is corrupt: size or digest mismatch",
                kind="digest",
                where=where,
                wanted=f"{commit.manifest_bytes} bytes, {commit.manifest_digest}",
                found=f"{size} bytes" + (f", {digest_hex(raw)}" if raw else ""),
                hint=f"ckptd verify {self.store.url}@{commit.step}-g{commit.generation}",
            )
        manifest = decode_manifest(raw, where, self._tables and self._tables[0])
        found = (manifest.step, manifest.generation, manifest.attempt)
        if found != (commit.step, commit.generation, commit.attempt):
            raise CorruptError(
                "the manifest belongs to another checkpoint",
                where=where,
                wanted=f"{commit.name}, attempt {commit.attempt}",
                found=f"step {found[0]} of generation {found[1]}, attempt {found[2]}",
            )
        return manifest

    def tables_of(self, commit: Commit) -> tuple[Manifest, FileMap]:
        """Return the manifest of a commit when all that it says of itself holds, and its tables."""
        manifest = self.manifest_of(commit)
        where = self.where(commit.folder + commit.manifest)
        return manifest, self.checked(manifest, where, commit.manifest_bytes)

    def checked(self, manifest: Manifest, where: str, manifest_bytes: int) -> FileMap:
        """Check all that a manifest says of itself and return its tables, by `check_manifest`."""
        from ckptd.checkpoint.format.invariants import check_manifest

        filemap = check_manifest(manifest, where, manifest_bytes, self._tables)
        self._tables = manifest, filemap
        return filemap

    def pins(self) -> set[CommitName]:
        """Return the commits that are never to be deleted; a listing only."""
        return {c for c in map(parse_commit_name, self.store.children(PINS)) if c is not None}

    def tagged(self, tag: str) -> CommitName:
        """Return the commit that a tag names, which need not exist any more.

        Raises
        ------
        NotFoundError
            There is no such tag; names those that there are.
        """
        try:
            return self.read(tag_key(tag), Pin).name
        except NotFoundError:
            raise NotFoundError(
                f"no checkpoint is tagged {tag}",
                where=self.store.url,
                found=", ".join(self.tags()) or "no tags",
                hint=f"ckptd tag {self.store.url}@STEP {tag}",
            ) from None

    def tags(self) -> dict[str, CommitName]:
        """Return what each tag names. Commits that have one are not deleted."""
        out = {}
        for tag in filter(None, map(parse_tag_name, self.store.children(PINS))):
            with suppress(NotFoundError):  # taken away since the listing
                out[tag] = self.read(tag_key(tag), Pin).name
        return out


def tier_of(store: Store) -> str:
    """Return the tier that a checkpointer's root is: ``local``, ``remote``, or ``memory``."""
    if not store.capabilities.shared:
        return "memory"
    # Of the store itself: one that packs gives no local files, wherever it is.
    return "local" if innermost(store).capabilities.local_files else "remote"


def root_tier(store: Store, near: Iterable[str]) -> str:
    """Return the tier that a root is beside near tiers: ``local`` is then a folder a node."""
    return "remote" if "local" in near else tier_of(store)


def saving(store: Store, name: CommitName, attempt: str, rank: int) -> AbstractContextManager[None]:
    """Say whose share of which save is worked on; a tier that was named already stays."""
    save = events.SaveId(name.step, name.generation, attempt, rank)
    return events.about(save, tier=events.current().tier or tier_of(store))
