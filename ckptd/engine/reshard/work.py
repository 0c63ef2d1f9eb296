"""Writing the files of one share, whatever they become part of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptd.engine.reshard.execute import Executor
from ckptd.engine.reshard.finish import missing_files
from ckptd.engine.reshard.outputs import FileDraft
from ckptd.engine.reshard.parts import FilePart, save_part
from ckptd.engine.reshard.place import Place
from ckptd.engine.reshard.samples import FileSamples
from ckptd.engine.reshard.target import Target
from ckptd.errors import TransientStoreError
from ckptd.format.container import build_header
from ckptd.format.digest import DigestIndex, digest_hex
from ckptd.format.manifest import FileEntry
from ckptd.format.names import digests_key
from ckptd.store.base import Store
from ckptd.store.retry import Backoff
from ckptd.store.spec import RetrySpec

__all__ = ["Work"]


class Work:
    """The files of one share.

    Parameters
    ----------
    executor
        Fills them.
    target
        The target.
    place
        Where they go.
    store
        For digest indexes and parts.
    bulk
        For data files, without a `Retry` around it.
    files
        The share.
    progress
        Called with the bytes written, and those of all files.
    """

    def __init__(
        self,
        executor: Executor,
        target: Target,
        place: Place,
        store: Store,
        bulk: Store,
        files: Sequence[int],
        progress: Callable[[int, int], None],
    ) -> None:
        self._executor = executor
        self._target = target
        self._place = place
        self._store = store
        self._bulk = bulk
        self._files = files
        self._progress = progress
        self._total = self._bytes(files)
        self._written = 0
        self.checked = 0
        """Values of the source's witness that were found."""

    def run(self) -> int:
        """Write what is missing; return how many files were complete already."""
        todo = missing_files(self._store, self._place, self._files)
        reused = len(self._files) - len(todo)
        backoff = Backoff(RetrySpec())
        while todo:
            self._written = self._total - self._bytes(todo)
            drafts = {f: self._draft(f) for f in todo}
            try:
                self._executor.run(self._bulk, drafts, self._done, self._count)
                break
            except TransientStoreError as error:
                backoff.wait(error)
                todo = missing_files(self._store, self._place, todo)
        return reused

    def _bytes(self, files: Sequence[int]) -> int:
        return sum(self._target.sizes[f] for f in files)

    def _draft(self, number: int) -> FileDraft:
        filemap = self._target.filemap
        header, data_bytes = build_header(
            self._place.header_entries(filemap, number), self._place.header_metadata(number)
        )
        ends = [c.end for c in filemap.chunks(number)]
        return FileDraft(number, self._place.path(number), header, data_bytes, ends)

    def _done(self, draft: FileDraft, index: DigestIndex, samples: FileSamples) -> None:
        digest = ""
        if self._place.with_digests:
            raw = index.encode()
            digest = digest_hex(raw)
            self._store.put(digests_key(draft.key), raw)
        self._store.sync(draft.key.rpartition("/")[0] + "/" if "/" in draft.key else "")
        slots, values = samples.taken()
        entry = FileEntry(draft.key, draft.number, len(draft.header), draft.data_bytes, digest)
        # Last: whoever finds the part knows that the file is complete.
        part = FilePart(entry, slots, values)
        save_part(self._store, self._place.folder, draft.number, part)
        self.checked += samples.checked

    def _count(self, nbytes: int) -> None:
        self._written += nbytes
        self._progress(self._written, self._total)
