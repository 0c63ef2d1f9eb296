"""Copying checkpoints between roots, with every digest checked on the way.

The copy is a checkpoint of the target like any other: data first, then witness and manifest, and
the commit record last, so that a copy that is killed is absent, never partial. It is written under
a generation that continues the target's line. The next copy takes up where a killed one stopped:
it works in the same generation and folder, and a file whose digest index is there is complete.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ckptd.engine.catalogue import Catalogue
from ckptd.engine.filecopy import FileCopy, Original
from ckptd.engine.places import check_headers
from ckptd.engine.working import Working, refuse_behind
from ckptd.errors import UsageError
from ckptd.format.invariants import check_files, check_manifest
from ckptd.format.manifest import Manifest
from ckptd.format.names import ROOT_MARKER, CommitName
from ckptd.format.records import Commit
from ckptd.store.base import Store

__all__ = ["REASON", "Copied", "Transfer"]

REASON = "cp"
"""Reason of the generations that copies claim."""


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one checkpoint.

    Attributes
    ----------
    step, source_generation
        The original.
    generation
        Of the copy.
    state
        ``copied``; ``present``: the target has it already, and nothing was done.
    bytes, files
        Bytes of data, and data files.
    reused_files
        Files that an earlier copy, which was killed, had finished.
    """

    step: int
    source_generation: int
    generation: int
    state: str
    bytes: int
    files: int
    reused_files: int = 0


class Transfer:
    """Copies checkpoints of one root into another.

    Parameters
    ----------
    source, target
        The roots; the target is made when it is none yet.
    progress
        Called with ``(bytes done, bytes in all)`` of the checkpoint under way.
    bulk
        See `ckptd.engine.filecopy.FileCopy`; the target's own store when left out.

    Raises
    ------
    UsageError
        Kind ``same-root``.
    RefusedError
        Kind ``no-create-only``: the target cannot keep checkpoints.
    """

    def __init__(
        self,
        source: Catalogue,
        target: Catalogue,
        progress: Callable[[int, int], None] | None = None,
        *,
        bulk: Store | None = None,
    ) -> None:
        self._bulk = bulk or target.store
        self._source = source
        self._target = target
        self._progress = progress
        self._working: Working | None = None
        if source.open().root_id == target.create_or_open().root_id:
            raise UsageError(
                "source and target are one root",
                kind="same-root",
                where=source.store.url,
                hint="ckptd rollback goes back to an older step; ckptd pin keeps one",
            )
        self._bulk.anchor(ROOT_MARKER)  # a store of its own, which has opened no root

    def copy(self, commit: Commit) -> Copied:
        """Copy one checkpoint; durable on return. The caller holds a lease on it.

        Raises
        ------
        CorruptError
            The original is damaged: names tensor, chunk, file and rank. The target is unchanged.
        RefusedError
            Kind ``behind``: the target has that step, or a later one, and it is another one.
        ConflictError
            Kind ``at-work``: another copy into this root is at work. Kind ``superseded``: a job
            claimed a generation of the target meanwhile.
        """
        original = self._read(commit)
        present = self._present(original)
        if present is not None:
            return self._report(original, present.generation, "present", 0)
        if self._working is None:
            self._working = Working.begin(self._target, REASON)
        work = FileCopy(
            self._source, self._target, original, self._bulk, self._working, self._progress
        )
        return self._report(original, self._working.generation, "copied", work.run())

    def close(self) -> None:
        """Tell others that this copy is no longer at work. Idempotent."""
        if self._working is not None:
            self._working.end()
            self._working = None

    def _read(self, commit: Commit) -> Original:
        manifest = self._source.manifest_of(commit)
        where = commit.folder + commit.manifest
        filemap = check_manifest(manifest, where, commit.manifest_bytes)
        check_headers(self._source.store, manifest, filemap)
        check_files(manifest, filemap, where)
        return Original(commit, manifest, filemap)

    def _present(self, original: Original) -> CommitName | None:
        """Return the copy that the target's line has already, if it has one."""
        line = self._target.line()
        step = original.commit.step
        for name in line:
            if name.step == step:
                if _content(self._target.manifest(name)) == _content(original.manifest):
                    return name
                break
        refuse_behind(self._target, line, step)
        return None

    def _report(self, original: Original, generation: int, state: str, reused: int) -> Copied:
        return Copied(
            step=original.commit.step,
            source_generation=original.commit.generation,
            generation=generation,
            state=state,
            bytes=sum(f.data_bytes for f in original.manifest.files),
            files=sum(1 for f in original.manifest.files if f.data_start),
            reused_files=reused,
        )


def _content(manifest: Manifest) -> Manifest:
    """Return what two copies have in common: everything but where they lie."""
    files = tuple(msgspec.structs.replace(f, path="") for f in manifest.files)
    return msgspec.structs.replace(manifest, generation=0, attempt="", files=files)
