"""The catalogue of a root: which checkpoints exist, which count, and how a new one comes to count.

Everything is decided by three kinds of small create-only records (``ckptd.json``, generations,
commits) and computed from their names where names are enough. Records never change, so nothing
here needs a lock, and two processes that disagree are told apart by who created a name first.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from ckptd.engine.clock import stamp
from ckptd.errors import ConflictError, CorruptError, NotFoundError, RefusedError, StoreError
from ckptd.format.digest import digest_hex
from ckptd.format.lineage import line, newest_on_line
from ckptd.format.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from ckptd.format.names import (
    COMMITS,
    GENERATIONS,
    MAX_GENERATION,
    PINS,
    ROOT_MARKER,
    CommitName,
    check_step,
    commit_key,
    data_folder,
    generation_key,
    parse_commit_name,
    parse_data_folder,
    parse_generation_name,
    pin_key,
)
from ckptd.format.records import (
    Commit,
    Generation,
    Parent,
    Pin,
    RootMarker,
    decode_record,
    encode_record,
)
from ckptd.store.base import Store

__all__ = ["Catalogue"]

MAX_TRIES = 64
"""Bound of each loop that starts again because somebody else was faster."""
MANIFEST_NAMES = ("manifest.json", "manifest.json.zst")


class Catalogue:
    """Checkpoints of one root.

    Parameters
    ----------
    store
        The root. Methods that create something need ``capabilities.create_only`` and raise
        `RefusedError` (kind ``no-create-only``) without it.

    Notes
    -----
    Thread-safe. Every method may raise the store's own errors; a record that cannot be read is a
    `CorruptError` that names its file.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._generations: dict[int, Generation] = {}
        self._records: dict[CommitName, Commit] = {}
        self._known: set[CommitName] = set()

    def where(self, key: str) -> str:
        """Return the full name of an object of this root, for messages."""
        return f"{self.store.url.rstrip('/')}/{key}"

    # -- the root ------------------------------------------------------------------------------

    def create_or_open(self) -> RootMarker:
        """Make this folder a root unless it is one; durable on return.

        Raises
        ------
        RefusedError
            Kind ``no-marker``: commits or generations lie here without ``ckptd.json``. Kind
            ``no-create-only``.
        CorruptError
            Kind ``version``: a newer ckptd made this root.
        """
        try:
            return self._marker()
        except NotFoundError:
            self._refuse_headless()
        marker = RootMarker(root_id=uuid.uuid4().hex, created=stamp())
        self._create(ROOT_MARKER, encode_record(marker))
        return self._marker()

    def open(self) -> RootMarker:
        """Return the marker of an existing root; creates nothing.

        Raises
        ------
        NotFoundError
            Kind ``no-root``: nothing is here. Kind ``not-a-root``: other things are.
        CorruptError
            Kind ``version``: a newer ckptd made this root.
        """
        try:
            return self._marker()
        except NotFoundError:
            names = self.store.children("")
        if not names:
            raise NotFoundError(
                "nothing is stored here",
                kind="no-root",
                where=self.store.url,
                wanted=ROOT_MARKER,
                hint="check the path; the first save creates the root",
            )
        raise NotFoundError(
            "not a checkpoint root of ckptd",
            kind="not-a-root",
            where=self.store.url,
            wanted=ROOT_MARKER,
            found=", ".join(names[:6]) + (" ..." if len(names) > 6 else ""),
            hint=f"name the folder that holds {ROOT_MARKER}",
        )

    def _marker(self) -> RootMarker:
        raw = self.store.get(ROOT_MARKER)
        return decode_record(raw, RootMarker, self.where(ROOT_MARKER))

    def _refuse_headless(self) -> None:
        """A root that lost its marker is not ours to continue: its version is unknown."""
        for folder in (COMMITS, GENERATIONS):
            if self.store.children(folder):
                raise RefusedError(
                    f"this folder has {folder} but no {ROOT_MARKER}",
                    kind="no-marker",
                    where=self.store.url,
                    hint=f"give another folder, or put {ROOT_MARKER} back",
                )

    def _create(self, key: str, raw: bytes) -> bool:
        """Create an object and tell whether it is ours, also where the reply was lost."""
        if not self.store.capabilities.create_only:
            raise RefusedError(
                "this store cannot decide who creates an object first",
                kind="no-create-only",
                where=self.store.url,
                hint=f"ckptd doctor {self.store.url}",
            )
        try:
            self.store.put(key, raw, create_only=True)
        except ConflictError:
            return self.store.get(key) == raw
        except StoreError:
            # The reply may be lost and the object there: saying "failed" would make the caller
            # write the same checkpoint again and lose against itself.
            if self._holds(key, raw):
                return True
            raise
        return True

    def _holds(self, key: str, raw: bytes) -> bool:
        try:
            return self.store.get(key) == raw
        except (NotFoundError, StoreError):
            return False

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
            record = decode_record(self.store.get(key), Generation, self.where(key))
            if record.generation != number:
                raise self._misnamed(key, f"generation {record.generation}")
            self._generations[number] = record
        return self._generations[number]

    def _ancestor(self, number: int) -> Generation:
        try:
            return self.generation(number)
        except NotFoundError:
            raise CorruptError(
                "the line leads through a generation that is gone",
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
        return sorted(found)

    def line(self) -> list[CommitName]:
        """Return the commits that count, oldest first."""
        newest, names = self.survey()
        return line(newest, names, self._ancestor) if newest else []

    def latest(self) -> CommitName | None:
        """Return the newest commit that counts, or None. Reads no record beyond what it needs."""
        newest, names = self.survey()
        return newest_on_line(newest, names, self._ancestor) if newest else None

    def survey(self) -> tuple[int, list[CommitName]]:
        """Return the newest generation and all commits, as they were at one moment.

        The two folders are listed one after the other. A generation claimed in between would let
        a zombie's commit pass for one of the line, so the survey starts again when there is one.
        """
        for _ in range(MAX_TRIES):
            newest = self.newest_generation()
            names = self.commits()
            if not self.store.exists(generation_key(newest + 1)):
                return newest, self._with_parent(newest, names)
        raise ConflictError(
            "generations are claimed faster than they can be listed",
            kind="busy",
            where=self.where(GENERATIONS),
        )

    def _with_parent(self, newest: int, names: list[CommitName]) -> list[CommitName]:
        """Add the commit that a lagging listing hides although the newest generation names it."""
        if self.store.capabilities.consistent_list or not newest:
            return names
        parent = self.generation(newest).parent
        if parent and parent.name not in names and self.store.exists(commit_key(parent.name)):
            return sorted([*names, parent.name])
        return names

    def find(self, step: int, all: bool = False, generation: int | None = None) -> CommitName:
        """Return the commit of `step` on the line.

        Parameters
        ----------
        step
            The step.
        all
            Look at abandoned lines too; the line itself goes first, then newer generations.
        generation
            Only this generation's commit.

        Raises
        ------
        NotFoundError
            Kind ``no-step``: names the steps nearest to it, and says where else it exists.
        """
        check_step(step)
        newest, names = self.survey()
        counted = line(newest, names, self._ancestor) if newest else []
        for candidates in (counted, names[::-1] if all else []):
            for name in candidates:
                if name.step == step and generation in (None, name.generation):
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
            kind="no-step",
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
            Kind ``no-commit``.
        CorruptError
            The record is damaged, or names anything outside its own root.
        """
        key = commit_key(name)
        try:
            raw = self.store.get(key)
        except NotFoundError:
            raise NotFoundError(
                f"{name} is not committed",
                kind="no-commit",
                where=self.where(key),
                hint=f"ckptd ls {self.store.url} --all",
            ) from None
        record = decode_record(raw, Commit, self.where(key))
        self._check_commit(record, name)
        self._known.add(name)
        return record

    def records(self, names: Iterable[CommitName]) -> dict[CommitName, Commit]:
        """Return the records of commits that a listing just showed, each read once in its life.

        A commit that was deleted since the listing is left out.
        """
        wanted = list(names)
        missing = [n for n in wanted if n not in self._records]
        with ThreadPoolExecutor(max(1, min(len(missing), self.store.capabilities.parallel))) as p:
            for name, record in zip(missing, p.map(self._commit_or_none, missing), strict=True):
                if record is not None:
                    self._records[name] = record
        return {n: self._records[n] for n in wanted if n in self._records}

    def _commit_or_none(self, name: CommitName) -> Commit | None:
        try:
            return self.commit(name)
        except NotFoundError:
            return None

    def _check_commit(self, record: Commit, name: CommitName) -> None:
        key = commit_key(name)
        if record.name != name:
            raise self._misnamed(key, str(record.name))
        folders = [parse_data_folder(f.removeprefix("data/")) for f in record.folders]
        good = (
            record.folder == data_folder(name, record.attempt)
            and record.folder in record.folders
            and all(f.startswith("data/") and f.endswith("/") for f in record.folders)
            and None not in folders
            and record.manifest in MANIFEST_NAMES
            and 0 < record.manifest_bytes <= MAX_MANIFEST_BYTES
            and record.data_bytes >= 0
        )
        if not good:
            raise CorruptError(
                "commit record breaks a rule",
                kind="bad-record",
                where=self.where(key),
                wanted=f"folders below data/, a manifest below {data_folder(name, '...')}",
                found=f"{record.folder[:120]}{record.manifest[:40]}, {record.manifest_bytes} bytes",
            )

    def _misnamed(self, key: str, found: str) -> CorruptError:
        return CorruptError(
            "the record is another one's", kind="bad-record", where=self.where(key), found=found
        )

    def manifest(self, name: CommitName) -> Manifest:
        """Return a checkpoint's manifest; size and digest are checked before it is decoded."""
        return self.manifest_of(self.commit(name))

    def manifest_of(self, commit: Commit) -> Manifest:
        """Return the manifest of a commit whose record is at hand; as `manifest`."""
        key = commit.folder + commit.manifest
        where = self.where(key)
        try:
            size = self.store.stat(key).size
            # The size is compared first: nobody's terabyte is read to find that out.
            raw = self.store.get(key) if size == commit.manifest_bytes else b""
        except NotFoundError:
            raise CorruptError(
                f"the manifest of {commit.name} is gone", kind="missing-file", where=where
            ) from None
        if size != commit.manifest_bytes or digest_hex(raw) != commit.manifest_digest:
            raise CorruptError(
                "the manifest is not what was committed",
                kind="digest",
                where=where,
                wanted=f"{commit.manifest_bytes} bytes, {commit.manifest_digest}",
                found=f"{size} bytes" + (f", {digest_hex(raw)}" if raw else ""),
                hint=f"ckptd verify {self.store.url} --step {commit.step}",
            )
        manifest = decode_manifest(raw, where)
        said = (manifest.step, manifest.generation, manifest.attempt)
        if said != (commit.step, commit.generation, commit.attempt):
            raise CorruptError(
                "the manifest is another checkpoint's",
                kind="bad-manifest",
                where=where,
                wanted=f"{commit.name}, attempt {commit.attempt}",
                found=f"step {said[0]} of generation {said[1]}, attempt {said[2]}",
            )
        return manifest

    # -- generations ---------------------------------------------------------------------------

    def claim(self, parent: CommitName | None, world_size: int, reason: str = "") -> Generation:
        """Begin a new life of the job that continues from `parent`; durable on return.

        From now on only commits up to `parent` and those of the new generation count.

        Parameters
        ----------
        parent
            The commit that was loaded; None begins a fresh line, older commits no longer count.
        world_size
            Number of ranks; 0 when no job is behind the claim.
        reason
            For people: ``start``, ``resume``, ``rollback``.

        Raises
        ------
        NotFoundError
            Kind ``no-commit``: the parent does not exist.
        ConflictError
            Kind ``busy``: others claimed every number that was tried.
        """
        if parent is not None:
            self.commit(parent)
        claim_id = uuid.uuid4().hex
        number = self.newest_generation() + 1
        for _ in range(MAX_TRIES):
            record = Generation(
                generation=min(number, MAX_GENERATION),
                claim_id=claim_id,
                parent=Parent(parent.step, parent.generation) if parent else None,
                created=stamp(),
                world_size=world_size,
                reason=reason,
            )
            if self._create(generation_key(record.generation), encode_record(record)):
                self._generations[record.generation] = record
                return record
            number = max(number, self.newest_generation()) + 1
        raise ConflictError(
            "others claimed every generation that was tried",
            kind="busy",
            where=self.where(GENERATIONS),
            found=f"{MAX_TRIES} tries, up to generation {number - 1}",
        )

    def continue_line(self, step: int) -> CommitName | None:
        """Return the parent for a job that saves `step` first and has loaded nothing.

        That is the newest commit that counts, or None in an empty root.

        Raises
        ------
        RefusedError
            Kind ``behind``: the newest commit is not older than `step`, so going on from it
            would hide checkpoints of another run, or overwrite its history.
        """
        check_step(step)
        latest = self.latest()
        if latest is None or step > latest.step:
            return latest
        raise RefusedError(
            f"step {step} is not later than the newest checkpoint here",
            kind="behind",
            where=self.store.url,
            wanted=f"a step after {latest.step}",
            found=f"step {step}",
            hint="load() first to continue that run, or say that this is a fresh line"
            " (its older checkpoints then no longer count)",
        )

    def rollback(self, step: int, all: bool = False, generation: int | None = None) -> Generation:
        """Make `step` the newest checkpoint that counts; moves and deletes nothing.

        Parameters
        ----------
        step, all, generation
            As for `find`: with `all` a commit of an abandoned line may be taken up again.

        Raises
        ------
        NotFoundError
            No such step.
        CorruptError
            Its manifest is gone or damaged.
        """
        from ckptd.engine.leases import hold

        # The lease keeps gc, which may be at work elsewhere, from deleting it before the claim.
        with hold(self, self.find(step, all, generation), holder="rollback") as held:
            self.manifest_of(held.commit)
            return self.claim(held.commit.name, world_size=0, reason="rollback")

    def superseded(self, generation: int) -> ConflictError | None:
        """Return the error for a job whose generation is no longer the newest, else None."""
        newest = self.newest_generation()
        if newest <= generation:
            return None
        winner = self.generation(newest)
        return ConflictError(
            f"generation {generation} is superseded by generation {newest}",
            kind="superseded",
            where=self.where(generation_key(newest)),
            found=f"claimed {winner.created} by {winner.world_size} ranks"
            f" ({winner.reason or 'no reason given'})",
            hint="this process belongs to an older life of the job: stop it",
        )

    # -- commits -------------------------------------------------------------------------------

    def publish(self, commit: Commit) -> None:
        """Make a checkpoint exist: create its commit record, durable on return.

        Everything the record refers to must be durable already. Other checkpoints' folders in
        ``commit.folders`` stay only while the caller holds a lease on a commit that refers to
        them (`ckptd.engine.leases.hold`).

        Raises
        ------
        ConflictError
            Kind ``superseded``: a newer generation was claimed, before or meanwhile; in the second
            case the commit exists, and counts only if that generation continues from it. Kind
            ``committed``: another writer committed this step in this generation; names it.
        RefusedError
            Kind ``behind``: the step is not later than the one the generation began from.
        CorruptError
            Kind ``missing-file``: the manifest or a folder it refers to is not there.
        """
        self._check_publishable(commit)
        key = commit_key(commit.name)
        if not self._create(key, encode_record(commit)):
            won = self.commit(commit.name)
            if won.write_id != commit.write_id:
                raise ConflictError(
                    f"{commit.name} was committed by another writer",
                    kind="committed",
                    where=self.where(key),
                    wanted=f"attempt {commit.attempt}, write id {commit.write_id}",
                    found=f"attempt {won.attempt}, write id {won.write_id}, at {won.created}",
                )
        self.store.sync(COMMITS)
        self._known.add(commit.name)
        self._raise_superseded(commit.generation)

    def _check_publishable(self, commit: Commit) -> None:
        self._check_commit(commit, commit.name)
        self._raise_superseded(commit.generation)
        parent = self.generation(commit.generation).parent
        if parent is not None and commit.step <= parent.step:
            raise RefusedError(
                f"{commit.name} is not later than the step this generation began from",
                kind="behind",
                where=self.where(commit_key(commit.name)),
                wanted=f"a step after {parent.step}",
                hint="roll back to an earlier step first",
            )
        for folder in commit.folders:
            own = folder == commit.folder
            there = (
                self._size(folder + commit.manifest) == commit.manifest_bytes
                if own
                else bool(self.store.children(folder))
            )
            if not there:
                raise CorruptError(
                    f"{commit.name} refers to something that is not there",
                    kind="missing-file",
                    where=self.where(folder + (commit.manifest if own else "")),
                )

    def _size(self, key: str) -> int | None:
        try:
            return self.store.stat(key).size
        except NotFoundError:
            return None

    def _raise_superseded(self, generation: int) -> None:
        error = self.superseded(generation)
        if error is not None:
            raise error

    # -- pins ----------------------------------------------------------------------------------

    def pins(self) -> set[CommitName]:
        """Return the commits that are never to be deleted; a listing only."""
        names = self.store.children(PINS)
        return {c for c in map(parse_commit_name, names) if c is not None}

    def pin(self, name: CommitName, reason: str = "") -> None:
        """Keep a checkpoint for ever; durable on return. Pinning twice is no error.

        Raises
        ------
        NotFoundError
            Kind ``no-commit``; also when it was deleted at this very moment.
        """
        record = Pin(name.step, name.generation, created=stamp(), reason=reason)
        self.commit(name)
        self._create(pin_key(name), encode_record(record))
        # gc deletes the commit, then looks at the pins again: one of the two sees the other.
        try:
            self.commit(name)
        except NotFoundError:
            self.store.delete([pin_key(name)])
            raise

    def unpin(self, name: CommitName) -> bool:
        """Remove a pin; tell whether there was one."""
        there = self.store.exists(pin_key(name))
        self.store.delete([pin_key(name)])
        return there
