"""`Catalogue`: claims generations, publishes commits, rolls back, pins, tags, annotates.

In it: refusals of a save that is behind, superseded or incomplete.

Everything is decided by three kinds of small create-only records (``ckptd.json``, generations,
commits) and computed from their names where names are enough. Records never change, so nothing
here needs a lock, and of two processes that disagree, the one that created a name first has it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ckptd import events
from ckptd.base.digest import digest_hex
from ckptd.checkpoint.format.codec import checked_metadata
from ckptd.checkpoint.format.lineage import newest_on_line
from ckptd.checkpoint.format.manifest import Manifest, WitnessEntry, encode_manifest
from ckptd.checkpoint.format.names import (
    ANNOTATIONS,
    GENERATIONS,
    MAX_GENERATION,
    PARTS,
    WITNESS,
    CommitName,
    annotation_key,
    check_step,
    commit_key,
    generation_key,
    parse_annotation_name,
    pin_key,
    tag_key,
)
from ckptd.checkpoint.format.records import (
    Annotation,
    Commit,
    Generation,
    Parent,
    Pin,
    check_record,
    encode_record,
)
from ckptd.checkpoint.root.index import MAX_TRIES, Index, stamp, unmarked
from ckptd.checkpoint.root.leases import hold, relied_on
from ckptd.errors import (
    CkptdError,
    ConflictError,
    CorruptError,
    NotFoundError,
    RefusedError,
    StoreError,
)
from ckptd.store.base import Store

if TYPE_CHECKING:
    from ckptd.checkpoint.format.witness import WitnessPlan
    from ckptd.checkpoint.root.signing import CommitSigner


_TAKEN = "could not claim a generation: other jobs claimed each one first"


class Catalogue(Index):
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

    # -- generations ---------------------------------------------------------------------------

    def claim(
        self,
        parent: CommitName | None,
        world_size: int,
        reason: str = "",
        *,
        committed: bool = True,
    ) -> Generation:
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
        committed
            False for a parent that was loaded from a snapshot, and need not have a commit: the
            line then has the commits up to it, none of which is deleted before the claim.

        Raises
        ------
        NotFoundError
            The parent does not exist, or its generation was never claimed.
        RefusedError
            Kind ``behind``: a parent whose step is not later than its generation's own parent.
        ConflictError
            Kind ``busy``: others claimed every number that was tried.
        """
        self.check_root()
        if parent is None:
            return self._claim(None, world_size, reason)
        # The lease keeps gc, which may be at work elsewhere, from deleting it before the claim.
        with hold(self, parent, holder="claim") if committed else self._hold_upto(parent):
            self.ancestor(parent.generation)  # without it the line cannot be followed
            return self._claim(Parent(parent.step, parent.generation), world_size, reason)

    def _hold_upto(self, parent: CommitName) -> AbstractContextManager[object]:
        """Hold the newest commit of the line that ends with `parent`, if there is any."""
        self._check_parent(parent)
        gone: set[CommitName] = set()
        for _ in range(MAX_TRIES):
            upto = [
                n
                for n in self.commits()
                if n not in gone and (n.generation != parent.generation or n.step <= parent.step)
            ]
            newest = newest_on_line(parent.generation, upto, self.ancestor)
            if newest is None:
                return nullcontext()
            try:
                return hold(self, newest, holder="claim")
            except NotFoundError:  # deleted since the listing, or just being deleted
                gone.add(newest)
        raise self.busy("could not lease a checkpoint: each candidate was deleted first")

    def _check_parent(self, parent: CommitName) -> None:
        """Check that a commit of this name could be: the line must not skip, or end in nothing."""
        try:
            floor = self.generation(parent.generation).parent
        except NotFoundError:
            raise NotFoundError(
                f"{parent} cannot be continued: its generation was never claimed here",
                where=self.where(generation_key(parent.generation)),
            ) from None
        if floor is not None and parent.step <= floor.step:
            raise RefusedError(
                f"{parent} cannot be continued: its generation began at a later step",
                kind="behind",
                where=self.where(generation_key(parent.generation)),
                wanted=f"a step after {floor.step}",
            )

    def join(self, reason: str) -> Generation:
        """Return the newest generation if it was claimed for `reason`, else claim one for it.

        For processes that work at one task and never speak to each other: the first one claims,
        continuing the line, and the others find it. Durable on return.

        Raises
        ------
        ConflictError
            Kind ``busy``: others claimed every number that was tried.
        """
        for _ in range(MAX_TRIES):
            newest = self.newest_generation()
            record = self.generation(newest) if newest else None
            if record is not None and record.reason == reason:
                return record
            latest = self.latest()
            with hold(self, latest, holder="claim") if latest else nullcontext():
                parent = Parent(latest.step, latest.generation) if latest else None
                # This number and no other: a faster process may be one of us.
                found = self._try_claim(newest + 1, uuid.uuid4().hex, parent, 0, reason)
            if found is not None:
                return found
        raise self.busy(_TAKEN, GENERATIONS)

    def _claim(self, parent: Parent | None, world_size: int, reason: str) -> Generation:
        claim_id = uuid.uuid4().hex
        # After every commit too: in a root that lost records, this one decides the line again.
        number = max([self.newest_generation(), *(n.generation for n in self.commits())]) + 1
        for _ in range(MAX_TRIES):
            found = self._try_claim(number, claim_id, parent, world_size, reason)
            if found is not None:
                return found
            number = max(number, self.newest_generation()) + 1
        raise self.busy(_TAKEN, GENERATIONS)

    def _try_claim(
        self, number: int, claim_id: str, parent: Parent | None, world_size: int, reason: str
    ) -> Generation | None:
        record = Generation(
            generation=min(number, MAX_GENERATION),
            claim_id=claim_id,
            parent=parent,
            created=stamp(),
            world_size=world_size,
            reason=reason,
            root=self.root_id,
        )
        key, raw = generation_key(record.generation), encode_record(record)
        if not self._create(key, raw):
            return None
        with self._taken_back(key, raw):
            self.check_root()
        self._generations[record.generation] = record
        return record

    @contextmanager
    def _taken_back(self, key: str, raw: bytes) -> Iterator[None]:
        """Take back the record that was just created when the root is another one by now."""
        try:
            yield
        except (ConflictError, StoreError):
            with suppress(CkptdError):  # the caller gets the cause
                if self.store.get(key) == raw:  # and not what the other root has under this name
                    self.store.delete([key])
            raise

    def check_claim(self, generation: int, claim_id: str) -> None:
        """Raise unless a generation is still claimed under this id, here and at this moment.

        Raises
        ------
        ConflictError
            Its record is gone, or is another life's.
        """
        key = generation_key(generation)
        found = "nothing"
        with suppress(NotFoundError):
            found = self.read(key, Generation).claim_id
        if found != claim_id:
            raise ConflictError(
                f"generation {generation} no longer belongs to this job",
                where=self.where(key),
                wanted=f"claim {claim_id}",
                found=found,
                hint="the root was deleted and created again, or restored from an older copy: "
                "restart this job",
            )

    def continue_line(self, step: int, new_run: bool | None = False) -> CommitName | None:
        """Return the parent for a job that saves `step` first and has loaded nothing.

        That is the newest commit that counts, or None in an empty root and for a fresh line.

        Parameters
        ----------
        new_run
            True: begin a line of its own. False: go on from a checkpoint that was not loaded. None:
            neither was asked for.

        Raises
        ------
        RefusedError
            Kind ``behind``: the newest commit is not older than `step`, so going on from it
            would hide checkpoints of another run, or overwrite its history. Kind ``not-loaded``:
            there is one, and the caller did not ask for that.
        """
        check_step(step)
        latest = None if new_run else self.latest()
        if latest is None or (step > latest.step and new_run is False):
            return latest
        if step > latest.step:
            raise RefusedError(
                f"{latest} is here, and this job saves step {step} without having loaded it",
                kind="not-loaded",
                where=self.store.url,
                wanted="a load() before the first save, or a root of its own",
                found="a run that began from nothing, or loaded something else",
                hint="start = ck.load(state) if ck.latest() is not None else 0. On purpose:"
                " new_run=True (of the Checkpointer or a framework's writer) starts a separate "
                "line and keeps this one; new_run=False continues this one",
            )
        raise RefusedError(
            f"step {step} is not later than the newest checkpoint here",
            kind="behind",
            where=self.store.url,
            wanted=f"a step after {latest.step}",
            found=f"step {step}",
            hint="load() first to continue that run, or pass new_run=True (its older checkpoints "
            "then no longer count)",
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
        with hold(self, self.find(step, all, generation), holder="rollback") as held:
            self.manifest_of(held.commit)
            return self.claim(held.commit.name, world_size=0, reason="rollback")

    def check_not_superseded(self, generation: int) -> None:
        """Raise where a job's generation is no longer the newest.

        Raises
        ------
        ConflictError
            Kind ``superseded``.
        """
        newest = self.newest_generation()
        if newest > generation:
            winner = self.generation(newest)
            raise ConflictError(
                f"generation {generation} is superseded by generation {newest}",
                kind="superseded",
                where=self.where(generation_key(newest)),
                found=f"claimed {winner.created} by {winner.world_size} ranks"
                f" ({winner.reason or 'no reason given'})",
                hint="this process belongs to an older life of the job: stop it. If the newer one"
                " only evaluates, let it load with weights_only=True",
            )

    # -- commits -------------------------------------------------------------------------------

    def publish(self, commit: Commit) -> None:
        """Make a checkpoint exist: create its commit record, durable on return.

        Two committers of one attempt make the same manifest: both succeed.

        Everything the record refers to must be durable already. Other checkpoints' folders in
        ``commit.folders`` stay only while the caller holds a lease on a commit that refers to
        them (`ckptd.checkpoint.root.leases.hold`).

        Raises
        ------
        ConflictError
            Kind ``superseded``: a newer generation was claimed, before or meanwhile; in the second
            case the commit exists, and counts only if that generation continues from it. Another
            attempt committed this step in this generation; names it.
        RefusedError
            Kind ``behind``: the step is not later than the one the generation began from.
        CorruptError
            The manifest or a folder it refers to is not there.
        StoreError, ConflictError
            Kinds ``root-gone`` or ``other-root``: this is not the root, or not the claim, that the
            commit names.
        """
        self._check_publishable(commit)
        key, raw = commit_key(commit.name), encode_record(commit)
        ours = self._create(key, raw)
        # Once more: the root may have become another one since. What a death leaves between the
        # two does not count, by the identities in the record.
        with self._taken_back(key, raw) if ours else nullcontext():
            self._check_here(commit)
        if not ours:
            won = self.commit(commit.name)
            same = (won.attempt, won.manifest_digest) == (commit.attempt, commit.manifest_digest)
            if won.write_id != commit.write_id and not same:
                # A generation has one run, so it was this one, or what is left of it.
                raise ConflictError(
                    f"{commit.name} was committed by this run already, in an earlier save",
                    where=self.where(key),
                    wanted=f"attempt {commit.attempt}, write id {commit.write_id}",
                    found=f"attempt {won.attempt}, write id {won.write_id}, at {won.created}",
                    hint="the first save stays; give the next save a later step, or load() first "
                    "to continue from there",
                )
        self._known.add(commit.name)
        self._records.pop(commit.name, None)
        self._check_whole(commit, ours)
        self.check_not_superseded(commit.generation)
        with self._taken_back(key, raw) if ours else nullcontext():
            self.check_root()  # the last thing before the caller is promised it

    def _check_here(self, commit: Commit) -> None:
        """Raise unless this is the root, and its generation the claim, that wrote a commit."""
        self.check_root(commit.root)
        if commit.claim:
            self.check_claim(commit.generation, commit.claim)

    def _check_publishable(self, commit: Commit) -> None:
        check_record(commit, self.where(commit_key(commit.name)))
        self._check_here(commit)
        parent = self.generation(commit.generation).parent
        if parent is not None and commit.step <= parent.step:
            raise RefusedError(
                f"{commit.name} is not later than the step this generation began from",
                kind="behind",
                where=self.where(commit_key(commit.name)),
                wanted=f"a step after {parent.step}",
                hint="run ckptd rollback to an earlier step first",
            )
        manifest = commit.folder + commit.manifest
        if self.size(manifest) != commit.manifest_bytes:
            raise self._missing(commit, manifest)
        for folder in commit.folders:
            if not self.store.children(folder):
                raise self._missing(commit, folder)
        self.check_not_superseded(commit.generation)

    def _check_whole(self, commit: Commit, ours: bool) -> None:
        """Take the record back when gc took the attempt for a leftover at this very moment.

        A record of another committer stays while the manifest does: its caller may
        rely on it.
        """
        free = unmarked(self.store, [commit.folder])
        there = self.size(commit.folder + commit.manifest) is not None
        if free and there:
            return
        if ours or not there:
            self.store.delete([commit_key(commit.name)])
        raise self._missing(commit, commit.folder + commit.manifest)

    def _missing(self, commit: Commit, key: str) -> CorruptError:
        return CorruptError(
            f"{commit.name} refers to a missing file",
            where=self.where(key),
            hint="perhaps ckptd gc deleted it: as an older generation's, or as it took too long",
        )

    # -- what is added to a checkpoint later -----------------------------------------------------

    def annotate(self, name: CommitName, metadata: Mapping[str, Any]) -> None:
        """Add to the metadata of a checkpoint, whose own files stay as they are; durable on return.

        Of several processes that annotate one checkpoint, each adds its keys; where two give one
        key, that of the later record is the newest.

        Raises
        ------
        NotFoundError
            No commit of this step and generation; also when it is just being deleted.
        UsageError
            A value is no JSON, or the metadata would be too large with it.
        CorruptError
            An annotation that is there cannot be read.
        ConflictError
            Kind ``busy``: others took every number that was tried.
        """
        added = checked_metadata(metadata)
        self.check_root()
        record = self.commit(name)
        for _ in range(MAX_TRIES):
            numbers = self.annotations([name])
            before = self.annotated({name: record}, numbers)[name].metadata
            after = checked_metadata(before | added)
            if msgspec.json.encode(after) == msgspec.json.encode(before):
                return
            made = Annotation(name.step, name.generation, record.manifest_digest, stamp(), added)
            key = annotation_key(name, max(numbers.get(name, (0,))) + 1)
            if parse_annotation_name(key.rpartition("/")[2]) is None:
                raise self.busy("could not annotate: the last number is taken", ANNOTATIONS)
            if self._create(key, encode_record(made)):
                # Retention marks what it deletes, then looks for annotations that it has not seen.
                relied_on(self, name)
                self.check_root()
                return
        raise self.busy("could not annotate: others took each number first", ANNOTATIONS)

    # -- pins ----------------------------------------------------------------------------------

    def pin(self, name: CommitName, reason: str = "") -> None:
        """Keep a checkpoint for ever; durable on return. Pinning twice is no error.

        Raises
        ------
        NotFoundError
            No commit of this step and generation; also when it was deleted at this very moment.
        """
        record = Pin(name.step, name.generation, created=stamp(), reason=reason)
        self.check_root()
        self.commit(name)
        self._create(pin_key(name), encode_record(record))
        # gc marks the commit, then looks at the pins: one of the two sees the other.
        try:
            relied_on(self, name)
            self.check_root()
        except (NotFoundError, ConflictError):
            self.store.delete([pin_key(name)])
            raise

    def tag(self, name: CommitName, tag: str) -> None:
        """Set `tag` to name this checkpoint, and no other any more; durable on return.

        It keeps the checkpoint as a pin does. The one that it named before may be deleted.

        Raises
        ------
        NotFoundError
            No commit of this step and generation; also when it is just being deleted.
        UsageError
            It is no name for a checkpoint.
        """
        key, record = tag_key(tag), Pin(name.step, name.generation, stamp())
        self.check_root()
        # Retention looks at leases first and at tags second: it sees one of the two.
        with hold(self, name, holder="tag"):
            self.store.put(key, encode_record(record))
            self.check_root()

    def untag(self, tag: str) -> None:
        """Remove a tag; `NotFoundError` where there is none."""
        self.check_root()
        self.tagged(tag)
        self.store.delete([tag_key(tag)])

    def unpin(self, name: CommitName) -> bool:
        """Remove a pin; tell whether there was one."""
        self.check_root()
        there = self.store.exists(pin_key(name))
        self.store.delete([pin_key(name)])
        return there


def write_witness(
    store: Store, folder: str, plan: WitnessPlan, parts: Sequence[Any], where: Callable[[Any], str]
) -> WitnessEntry | None:
    """Write the witness of a checkpoint into its data folder; None when it has no values.

    Parameters
    ----------
    parts
        Each with `slots`, as little-endian uint32, and `values`, 8 bytes for each of them.
    where
        Names a part in errors.

    Raises
    ------
    CorruptError
        A part is not what the plan asks for.
    """
    if not plan.total:
        return None
    slots = b"".join([p.slots for p in parts])
    numbers = np.frombuffer(slots[: len(slots) & ~3], dtype="<u4").astype(np.int64)
    strange = (numbers >= plan.total).any()
    for p in parts:
        bad = len(p.slots) % 4 or len(p.values) != 2 * len(p.slots)
        if bad or (strange and max(np.frombuffer(p.slots, dtype="<u4"), default=0) >= plan.total):
            raise CorruptError("the checksums of a rank's part are malformed", where=where(p))
    from ckptd.checkpoint.format.witness import SAMPLE, Witness

    witness = Witness.empty(plan)
    values = b"".join([p.values for p in parts])
    witness.put(numbers, np.frombuffer(values, dtype=np.uint8).reshape(-1, 8))
    raw = witness.encode()
    store.put(folder + WITNESS, raw)
    return WitnessEntry(SAMPLE, digest_hex(raw))


def write_manifest(
    store: Store, manifest: Manifest, index: Index, beside: Mapping[str, bytes] | None = None
) -> tuple[str, bytes]:
    """Write a manifest into its data folder; return its name there and what was written.

    Parameters
    ----------
    index
        Checks it, and knows the tables of the manifest before.
    beside
        Small files of the same folder that are written with it, by key.

    Raises
    ------
    CorruptError
        The manifest breaks a rule of the format.
    """
    name, raw = encode_manifest(manifest)
    where = manifest.folder + name
    from ckptd.checkpoint.format.invariants import check_files

    check_files(manifest, index.checked(manifest, where, len(raw)))
    if beside:
        with events.span("sync"):
            store.put_together({**beside, where: raw})
    else:
        store.put(where, raw)
    return name, raw


def publish_manifest(
    catalogue: Catalogue,
    manifest: Manifest,
    *,
    write_id: str = "",
    created: str = "",
    root: str = "",
    claim: str = "",
    beside: Mapping[str, bytes] | None = None,
    signer: CommitSigner | None = None,
) -> Commit:
    """Write a manifest, and the commit record by which the checkpoint begins to exist.

    All other files but those `beside` it (`write_manifest`), and their names, are durable already.

    Parameters
    ----------
    write_id, created
        As in the record; a new id, and now, when empty.
    root, claim
        As in the record: its root, and its generation's claim. When empty, the root that was
        opened, and the claim of the generation as the catalogue knows it.
    signer
        Signs the commit before it exists.

    Raises
    ------
    CorruptError
        The manifest breaks a rule of the format.
    ConflictError
        See `ckptd.checkpoint.root.catalogue.Catalogue.publish`.
    """
    folder, store = manifest.folder, signer or catalogue.store
    name, raw = write_manifest(store, manifest, catalogue, beside)
    folders = {f.folder for f in manifest.files if f.data_start}
    commit = Commit(
        step=manifest.step,
        generation=manifest.generation,
        attempt=manifest.attempt,
        folder=folder,
        folders=tuple(sorted(folders | {folder})),
        manifest=name,
        manifest_digest=digest_hex(raw),
        manifest_bytes=len(raw),
        write_id=write_id or uuid.uuid4().hex,
        created=created or stamp(),
        world_size=manifest.world_size,
        data_bytes=sum(f.data_bytes for f in manifest.files),
        metadata=manifest.metadata,
        root=root or catalogue.root_id,
        claim=claim or catalogue.generation(manifest.generation).claim_id,
    )
    # Another committer of the attempt may have been here, and have died: its signature stays.
    if signer is not None and not catalogue.store.exists(commit_key(commit.name)):
        signer.sign(commit, encode_record(commit), manifest)
    catalogue.publish(commit)
    return commit


def remove_parts(store: Store, folder: str) -> None:
    """Remove what the ranks reported; `ckptd.checkpoint.root.gc` takes what an error leaves."""
    store.delete([info.key for info in store.list(folder + PARTS)])
