"""Where one load reads from: the root and the tiers nearer than it; what to try, and what next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ckptd.decoding import converter, json_decoder
from ckptd.engine.candidates import Candidate, Candidates, find_candidates
from ckptd.engine.catalogue import Catalogue
from ckptd.engine.leases import Unheld, hold_or_read
from ckptd.engine.places import check_headers
from ckptd.engine.snapshots import finished_files, unpacked
from ckptd.engine.telling import tier_of
from ckptd.engine.union import Source, UnionStore
from ckptd.engine.witnesses import read_witness
from ckptd.errors import CkptdError, CorruptError, NotFoundError, SaveError, StoreError
from ckptd.format.filemap import FileMap
from ckptd.format.invariants import check_manifest
from ckptd.format.manifest import Manifest
from ckptd.format.names import (
    DATA,
    WITNESS,
    digests_key,
    file_key,
    parse_data_folder,
    rank_of_file,
)
from ckptd.format.witness import Witness, WitnessPlan
from ckptd.format.witness_full import FullWitness
from ckptd.train.agree import Agreement

if TYPE_CHECKING:
    from ckptd.store.base import Store

__all__ = ["LoadSources", "Near", "Next"]

_texts = json_decoder(dict[str, str])

_candidates = converter(Candidates)

Near = Callable[[], "Sequence[Store | Source]"]
"""Gives the near tiers as this rank reaches them, nearest first."""
Next = Literal["again", "older", "raise"]
"""What to do after a failure: the same checkpoint from other sources, an older one, give up."""

_log = logging.getLogger("ckptd")
_NEXT: tuple[Next, ...] = ("raise", "again", "older")
_ASKING = 16
"""Nodes that rank 0 asks at a time what they hold."""
_ASKING_FORMER = 64
_FORMER_S = 10.0
"""Former nodes that are not asked by then are passed over, in seconds: most may be gone."""
_PIECE_CHARS = 4 << 20
"""Of what rank 0 tells the others at a time; a board takes no value above 8 MB."""
_NO_AGREEMENT = frozenset({"board", "board-lost", "crashed", "rank-died"})
"""Failures of agreement itself: nobody may be there to agree with."""


class LoadSources:
    """What one load reads from. Every rank makes one, and all call the same methods.

    Parameters
    ----------
    near
        None where there are no near tiers; on all ranks or on none.

    Attributes
    ----------
    store
        Everything that this rank can read from, as one: on rank 0 everything there is, on the
        others what has something of the checkpoint that is tried.
    unheld
        Why the checkpoint that is tried is not leased; empty when it is, or need not be.
    """

    def __init__(self, catalogue: Catalogue, agreement: Agreement, near: Near | None) -> None:
        self._catalogue = catalogue
        self._agreement = agreement
        self._near: list[Source] = []
        if near is not None:
            found = agreement.on_every_rank(near)
            self._near = [s if isinstance(s, Source) else Source(s, tier_of(s)) for s in found]
        self._has_near = near is not None
        self.unheld = ""
        self._rooted = True
        self._unite()
        self._aimed: Candidate | None = None

    def candidates(self, step: int | None, *, without_root: bool = False) -> tuple[Candidate, ...]:
        """Return what to try, newest first, the same on every rank.

        Raises
        ------
        NotFoundError
            There is nothing, or nothing of `step`.
        StoreError
            The root cannot be read, and this is not `without_root`, or the near tiers have nothing.
        """

        def find() -> Any:
            return msgspec.to_builtins(self._find(step, without_root))

        found = _candidates(self._agreement.on_rank_zero("candidates", find))
        if not found.items:
            raise NotFoundError(
                "there is no checkpoint on the line",
                kind="no-commit",
                where=self._catalogue.store.url,
                hint="latest() is None before the first commit; `ckptd ls --all` shows other lines",
            )
        if not found.rooted and self._near:
            self._rooted = False
            self._unite()
        return found.items

    @contextmanager
    def held(self, candidate: Candidate) -> Iterator[None]:
        """Keep a commit from being deleted: rank 0 holds it for all. Snapshots may vanish.

        Where no lease can be written, the commit is read without: `unheld` says so.
        """
        with ExitStack() as held:

            def take() -> str:
                lease = hold_or_read(self._catalogue, candidate.name, holder="load")
                if isinstance(lease, Unheld):
                    return lease.text
                held.enter_context(lease)
                return ""

            self.unheld = ""
            if candidate.snapshot is None:
                self.unheld = self._agreement.on_rank_zero("lease", take)
                if self.unheld:
                    _log.warning("%s", self.unheld)
            self._aim(candidate)
            yield

    def _aim(self, candidate: Candidate) -> None:
        """Learn from rank 0 which node holds what of a checkpoint.

        A rank then asks nobody who has nothing for it: thousands of ranks that each asked thousands
        of nodes would be at it for hours.
        """
        # Whether there are near tiers is the same on all ranks; what one reaches of them is not.
        if candidate == self._aimed or not self._has_near or self._agreement.board.world == 1:
            return
        folder, ranks = self._agreement.on_rank_zero("holders", lambda: self._holders(candidate))
        if self._agreement.board.rank != 0:
            keys = {name: frozenset(_keys_of(folder, of)) for name, of in ranks.items()}
            self._near = [s._replace(keys=keys.get(s.name)) for s in self._near]
        self._unite()
        self._aimed = candidate

    def _unite(self) -> None:
        root = [Source(self._catalogue.store, tier_of(self._catalogue.store))]
        self.store = UnionStore([*self._near, *(root if self._rooted or not self._near else ())])

    # -- what there is, on rank 0 ------------------------------------------------------------------

    def _find(self, step: int | None, without_root: bool) -> Candidates:
        """Ask the nodes of this life, and former ones where these may have something newer.

        Of a snapshot that is newer than all that is found, a node that this life left out may have
        the missing shares. It is not asked else: it may be gone, and that costs time to see.
        """

        def find() -> Candidates:
            self._unite()
            near = UnionStore(self._near) if self._near else None
            return find_candidates(self._catalogue, near, step=step, without_root=without_root)

        former = [s for s in self._near if s.former]
        there = self._asked([s for s in self._near if not s.former])
        self._near = [*there, *(s._replace(keys=frozenset()) for s in former)]
        first: Candidates | CkptdError
        try:
            first = find()
        except NotFoundError as error:
            first = error
        except StoreError as error:
            if not without_root:
                raise
            first = error
        if former and self._may_be_more(first, step):
            asked = self._asked(former)
            if any(s.keys for s in asked):
                self._near = [*there, *asked]
                return find()
        if isinstance(first, CkptdError):
            raise first
        return first

    def _may_be_more(self, found: Candidates | CkptdError, step: int | None) -> bool:
        """Tell whether former nodes may have what is better than `found`.

        So it is where a newer attempt has left something among the nodes that are there; where
        they have nothing at all; and where the newest life has left nothing with them.
        """
        if isinstance(found, CkptdError) or step is not None:
            return isinstance(found, CkptdError)
        seen = _attempts(key for s in self._near for key in s.keys or ())
        best = max(((c.generation, c.step) for c in found.items), default=(0, -1))
        newest = max(seen, default=(0, -1))
        if not seen or newest > best or not found.rooted:
            return True
        return self._catalogue.newest_generation() > best[0]

    def _asked(self, sources: Sequence[Source]) -> list[Source]:
        """Return sources with what they have; those that do not answer are not asked again."""
        end = time.monotonic() + _FORMER_S

        def look(source: Source) -> Source:
            if not source.name or source.keys is not None:
                return source
            if source.former and time.monotonic() > end:
                return source._replace(keys=frozenset())
            try:
                return source._replace(keys=frozenset(i.key for i in source.store.list(DATA)))
            except CkptdError as error:
                level = logging.INFO if source.former else logging.WARNING
                what = "the snapshots of %s cannot be read: %s"
                _log.log(level, what, source.name, error.message)
                return source._replace(keys=frozenset())

        if not sources:
            return []
        with ThreadPoolExecutor(_ASKING_FORMER if sources[0].former else _ASKING) as pool:
            return [*pool.map(look, sources)]

    def _holders(self, candidate: Candidate) -> tuple[str, dict[str, list[int]]]:
        """Return a checkpoint's folder, and by source the ranks whose data files it has."""
        snapshot = candidate.snapshot
        folder = (snapshot or self._catalogue.commit(candidate.name)).folder
        return folder, {
            s.name: [r for k in s.keys if (r := rank_of_file(k, folder)) is not None]
            for s in self._near
            if s.name and s.keys is not None
        }

    # -- metadata ----------------------------------------------------------------------------------

    def manifest(
        self, candidate: Candidate
    ) -> tuple[Manifest, FileMap, WitnessPlan, Witness | FullWitness | None]:
        """Return manifest, tables and witness."""
        if candidate.snapshot is None:
            commit = self._catalogue.commit(candidate.name)
            manifest = self._catalogue.manifest_of(commit)
            where = commit.folder + commit.manifest
            filemap = check_manifest(manifest, where, commit.manifest_bytes)
            check_headers(self.store, manifest, filemap)
            plan = WitnessPlan.of(manifest)
            return manifest, filemap, plan, self._witness(self.store, manifest, plan)
        snapshot = candidate.snapshot
        # Once for all: finishing takes the parts of every rank, wherever they are.
        files = self._told(lambda: finished_files(self.store, snapshot))
        with unpacked(files) as (scratch, manifest, filemap):
            plan = WitnessPlan.of(manifest)
            return manifest, filemap, plan, self._witness(scratch, manifest, plan)

    def _told(self, make: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Return on every rank what rank 0 makes, told in pieces that the board takes."""
        pieces: list[str] = []

        def cut() -> int:
            text = msgspec.json.encode(make()).decode()
            pieces.extend(text[i : i + _PIECE_CHARS] for i in range(0, len(text), _PIECE_CHARS))
            return len(pieces)

        count = self._agreement.on_rank_zero("finish", cut)
        tell = self._agreement.on_rank_zero
        told = [tell("finish", partial(pieces.__getitem__, i)) for i in range(count)]
        return _texts.decode("".join(told))

    @staticmethod
    def _witness(
        store: Store, manifest: Manifest, plan: WitnessPlan
    ) -> Witness | FullWitness | None:
        try:
            return read_witness(store, manifest, plan)
        except CorruptError as error:
            error.key = manifest.folder + WITNESS
            raise

    # -- what next ---------------------------------------------------------------------------------

    def after(self, error: CkptdError, candidate: Candidate) -> Next:
        """Agree what to do after a try that failed on every rank, on this one by `error`."""
        if error.kind in _NO_AGREEMENT:
            return "raise"
        own: Next = self._next(error, candidate)

        def decide(reports: list[bytes]) -> bytes:
            return min(reports, key=lambda r: _NEXT.index(_as_next(r)))

        agreed = _as_next(self._agreement.all_reports("next", own.encode(), decide))
        if agreed == "again":
            _log.warning("step %d is read again from other sources: %s", candidate.step, error)
        return agreed

    def _next(self, error: CkptdError, candidate: Candidate) -> Next:
        lost = candidate.snapshot is not None and isinstance(
            error, (StoreError, SaveError, NotFoundError)
        )
        if error.poisoned or not (lost or isinstance(error, (CorruptError, StoreError))):
            return "raise"
        if error.key is not None and self.store.distrust(error.key):
            return "again"
        return "older" if lost or isinstance(error, CorruptError) else "raise"


def _keys_of(folder: str, ranks: Sequence[int]) -> list[str]:
    """Return the keys of what ranks wrote, besides the parts."""
    files = [file_key(folder, rank) for rank in ranks]
    return [key for file in files for key in (file, digests_key(file))]


def _attempts(keys: Iterable[str]) -> set[tuple[int, int]]:
    """Return generation and step of all attempts of which there are keys."""
    folders = {key.removeprefix(DATA).partition("/")[0] for key in keys}
    parsed = map(parse_data_folder, folders)
    return {(found[0].generation, found[0].step) for found in parsed if found is not None}


def _as_next(raw: bytes) -> Next:
    return next(n for n in _NEXT if n.encode() == raw)
