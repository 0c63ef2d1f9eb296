"""`Loader`: tries checkpoints from nearest to oldest, plans, reads, applies; `LoadReport`; errors.

In it: when an older one is tried; how long former nodes are waited for; followers (`Follower`)
after a load.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd import events
from ckptd.base.grids.block import box_region
from ckptd.base.grids.owners import distinct
from ckptd.base.grouping import by_key
from ckptd.base.runtime.memory import HostBuffers
from ckptd.base.runtime.pauses import no_collection
from ckptd.base.runtime.ranks import Board
from ckptd.base.torch.device import is_capturing
from ckptd.base.torch.overlaps import Image, are_apart, overlapping
from ckptd.base.torch.ranks import Agreement, host_members
from ckptd.base.torch.tensors import bytes_at
from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.codec import parse_object
from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.manifest import FileEntry, Manifest, about_foreign
from ckptd.checkpoint.format.names import (
    DATA,
    WITNESS,
    digests_key,
    file_key,
    parse_data_folder,
    rank_of_file,
)
from ckptd.checkpoint.format.witness import Witness, WitnessPlan
from ckptd.checkpoint.load.files import PieceLocations, check_headers, read_ahead
from ckptd.checkpoint.load.hostgroup import HostGroup
from ckptd.checkpoint.load.plan import Moves, ReadPlan, Want, read_plan
from ckptd.checkpoint.load.read import InMemory, ReadReport, execute
from ckptd.checkpoint.load.union import UnionSource, UnionStore
from ckptd.checkpoint.load.witnesses import read_witness
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.index import saving, tier_of
from ckptd.checkpoint.root.leases import Unheld, hold_or_read, renewed
from ckptd.checkpoint.save.recover import LoadCandidate, find_candidates, finished_files, unpacked
from ckptd.checkpoint.torch.filling import Buffer, Filling
from ckptd.checkpoint.torch.layouts import LayoutLoad, LayoutSpec, LoadLayouts, NoLayout
from ckptd.checkpoint.torch.ondevice import captured
from ckptd.checkpoint.torch.state.describe import Describer
from ckptd.checkpoint.torch.state.leaves import Dropped, Leaves, RecalledLeaves
from ckptd.checkpoint.torch.state.restore import (
    Matching,
    PreparedState,
    SavedState,
    apply_objects,
    check_objects,
    look,
    match,
    prepare,
    refuse_misfit,
    saved_names,
    selector,
    unchanged,
    without_place,
)
from ckptd.checkpoint.torch.state.rng import RngStreams
from ckptd.decoding import converter, json_decoder
from ckptd.errors import (
    CkptdError,
    CorruptError,
    MismatchError,
    NotFoundError,
    SaveError,
    StoreError,
    first_few,
)
from ckptd.events.bus import at_step, phase
from ckptd.types import Box

if TYPE_CHECKING:
    from ckptd.store.base import Store

_texts = json_decoder(dict[str, str])

_candidates = converter(tuple[LoadCandidate, ...])

Near = Callable[[], "Sequence[Store | UnionSource]"]
"""Gives the near tiers as this rank reaches them, nearest first."""
WitnessPlans = dict[tuple[FileMap, frozenset[str]], WitnessPlan]
Next = Literal["again", "older", "raise"]
"""The choice after a failure: the same checkpoint from other sources, an older one, give up."""

_log = logging.getLogger("ckptd")
_NEXT: tuple[Next, ...] = ("raise", "again", "older")
_ASKING = 16
"""Nodes that rank 0 asks at a time what they hold."""
_ASKING_FORMER = 64
_FORMER_S = 10.0
"""Former nodes that are not asked by then are passed over, in seconds: most may be gone."""
_PIECE_CHARS = 4 << 20
"""Characters that rank 0 posts at a time; a board takes no value above 8 MB."""
_COMPARED_BYTES = 128 << 20
"""Bytes that are read at a time to compare the values of one tensor."""
_NO_AGREEMENT = frozenset({"board", "board-lost", "crashed", "rank-died"})
"""Failures of agreement itself: no other rank may be there to agree with."""


class LoadSources:
    """Sources of one load: the root and near tiers. Collective: all ranks call the same methods.

    Parameters
    ----------
    near
        None where there are no near tiers; on all ranks or on none.
    plans
        That of the witness of the checkpoint that was loaded last, by its tables.

    Attributes
    ----------
    catalogue
        Of the root.
    store
        All sources that this rank can read from, as one: on rank 0 all there are, on the others
        those that have something of the checkpoint that is tried.
    unheld
        Why the checkpoint that is tried is not leased; empty when it is, or need not be.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        agreement: Agreement,
        near: Near | None,
        plans: WitnessPlans | None = None,
    ) -> None:
        self.catalogue = catalogue
        self._agreement = agreement
        self._plans = {} if plans is None else plans
        self._near: list[UnionSource] = []
        if near is not None:
            found = agreement.on_every_rank(near)
            self._near = [
                s if isinstance(s, UnionSource) else UnionSource(s, tier_of(s)) for s in found
            ]
        self._has_near = near is not None
        self.unheld = ""
        self._unite()
        self._aimed: LoadCandidate | None = None

    def candidates(self, step: int | str | None) -> tuple[LoadCandidate, ...]:
        """Return what to try, newest first, the same on every rank.

        Raises
        ------
        NotFoundError
            There is nothing, or nothing of `step`.
        StoreError
            The root cannot be read.
        """

        def find() -> Any:
            return msgspec.to_builtins(self._find(step))

        found: tuple[LoadCandidate, ...]
        found = _candidates(self._agreement.on_rank_zero("candidates", find))
        if not found:
            raise NotFoundError(
                "no checkpoint on the line",
                where=self.catalogue.store.url,
                hint="latest() is None before the first commit; `ckptd ls --all` shows other lines",
            )
        return found

    @contextmanager
    def held(self, candidate: LoadCandidate) -> Iterator[None]:
        """Keep a commit from being deleted: rank 0 holds it for all. Snapshots may vanish.

        Where no lease can be written, the commit is read without: `unheld` is the reason.
        """
        with ExitStack() as held:

            def take() -> str:
                lease = hold_or_read(self.catalogue, candidate.name, holder="load")
                if isinstance(lease, Unheld):
                    return lease.text
                held.enter_context(renewed(lease, lambda text: _log.warning("%s", text)))
                return ""

            self.unheld = ""
            if candidate.snapshot is None:
                self.unheld = self._agreement.on_rank_zero("lease", take)
                if self.unheld:
                    _log.warning("%s", self.unheld)
            self._aim(candidate)
            yield

    def _aim(self, candidate: LoadCandidate) -> None:
        """Receive from rank 0 which node holds what of a checkpoint.

        A rank then asks no node that has nothing for it: thousands of ranks that each asked
        thousands of nodes would take hours.
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
        root = self.catalogue.store
        self.store = UnionStore([*self._near, UnionSource(root, tier_of(root))])

    # -- what there is, on rank 0 ------------------------------------------------------------------

    def _find(self, step: int | str | None) -> list[LoadCandidate]:
        """Ask the nodes of this life, and former ones where these may have something newer.

        Of a snapshot that is newer than all that is found, a node that this life left out may have
        the missing shares. It is not asked else: it may be gone, and that costs time to see.
        """

        def find() -> list[LoadCandidate]:
            self._unite()
            near = UnionStore(self._near) if self._near else None
            return find_candidates(self.catalogue, near, step=step)

        former = [s for s in self._near if s.former]
        there = self._asked([s for s in self._near if not s.former])
        self._near = [*there, *(s._replace(keys=frozenset()) for s in former)]
        first: list[LoadCandidate] | NotFoundError
        try:
            first = find()
        except NotFoundError as error:
            first = error
        if former and self._may_be_more(first, step):
            asked = self._asked(former)
            if any(s.keys for s in asked):
                self._near = [*there, *asked]
                return find()
        if isinstance(first, NotFoundError):
            raise first
        return first

    def _may_be_more(
        self, found: list[LoadCandidate] | NotFoundError, step: int | str | None
    ) -> bool:
        """Tell whether former nodes may have what is better than `found`.

        So it is where a newer attempt has left something among the nodes that are there; where
        they have nothing at all; and where the newest life has left nothing with them.
        """
        if isinstance(found, NotFoundError) or step is not None:
            return isinstance(found, NotFoundError)
        seen = _attempts(key for s in self._near for key in s.keys or ())
        best = max(((c.generation, c.step) for c in found), default=(0, -1))
        newest = max(seen, default=(0, -1))
        if not seen or newest > best:
            return True
        return self.catalogue.newest_generation() > best[0]

    def _asked(self, sources: Sequence[UnionSource]) -> list[UnionSource]:
        """Return sources with what they have; those that do not answer are not asked again."""
        end = time.monotonic() + _FORMER_S

        def look(source: UnionSource) -> UnionSource:
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

    def _holders(self, candidate: LoadCandidate) -> tuple[str, dict[str, list[int]]]:
        """Return a checkpoint's folder, and by source the ranks whose data files it has."""
        folder = (candidate.snapshot or self.catalogue.commit(candidate.name)).folder
        return folder, {
            s.name: [r for k in s.keys if (r := rank_of_file(k, folder)) is not None]
            for s in self._near
            if s.name and s.keys is not None
        }

    # -- metadata ----------------------------------------------------------------------------------

    def manifest(
        self, candidate: LoadCandidate
    ) -> tuple[Manifest, FileMap, WitnessPlan, Witness | None]:
        """Return manifest, tables and witness."""
        if candidate.snapshot is None:
            manifest, filemap = self.catalogue.tables_of(self.catalogue.commit(candidate.name))
            check_headers(self.store, manifest, filemap)
            return manifest, filemap, *self._witness(self.store, manifest, filemap)
        snapshot = candidate.snapshot
        # Once for all: finishing takes the parts of every rank, wherever they are.
        files = self._from_rank_zero(lambda: finished_files(self.store, snapshot))
        with unpacked(files) as (scratch, manifest, filemap):
            return manifest, filemap, *self._witness(scratch, manifest, filemap)

    def _from_rank_zero(self, make: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Return on every rank what rank 0 makes, posted in pieces that the board takes."""
        pieces: list[str] = []

        def cut() -> int:
            text = msgspec.json.encode(make()).decode()
            pieces.extend(text[i : i + _PIECE_CHARS] for i in range(0, len(text), _PIECE_CHARS))
            return len(pieces)

        count = self._agreement.on_rank_zero("finish", cut)
        post = self._agreement.on_rank_zero
        texts = [post("finish", partial(pieces.__getitem__, i)) for i in range(count)]
        return _texts.decode("".join(texts))

    def _witness(
        self, store: Store, manifest: Manifest, filemap: FileMap
    ) -> tuple[WitnessPlan, Witness | None]:
        key = filemap, frozenset(o.tensor for o in manifest.objects)
        if (plan := self._plans.get(key)) is None:
            self._plans.clear()
            plan = self._plans[key] = WitnessPlan.of(manifest)
        try:
            return plan, read_witness(store, manifest, plan, filemap)
        except CorruptError as error:
            error.key = error.key or manifest.folder + WITNESS
            raise

    # -- what next ---------------------------------------------------------------------------------

    def after(self, error: CkptdError, candidate: LoadCandidate) -> Next:
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

    def _next(self, error: CkptdError, candidate: LoadCandidate) -> Next:
        lost = candidate.snapshot is not None and isinstance(
            error, (StoreError, SaveError, NotFoundError)
        )
        if error.state_corrupted or not (lost or isinstance(error, (CorruptError, StoreError))):
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


@no_collection()
def check_witness(witness: Witness, plan: WitnessPlan, filemap: FileMap, filling: Filling) -> None:
    """Compare the filled targets with the witness, at no extra read of data.

    Digests prove that the bytes are those that were written; the witness proves that they came
    to the right place: a wrong layout of the right shape passes every digest.

    Raises
    ------
    CorruptError
        Names the tensors; the live state is wrong (`state_corrupted`).
    """
    words = witness.values.view(np.uint64).reshape(-1)
    buffers, targets = filling.filled
    itemsizes = np.array([filemap.dtypes[number].itemsize for number, _ in buffers], dtype=np.int64)
    values = filling.values(targets, itemsizes)
    bad, seen = np.zeros((2, len(buffers)), dtype=np.int64)
    for slots, elements, which in plan.select_all(buffers):
        found = values(which, elements).view(np.uint64).reshape(-1)
        wrong = (found != words.take(slots)) & (witness.present.take(slots) != 0)
        if wrong.any():
            bad += np.bincount(which[wrong], minlength=len(buffers))
    if bad.any():
        for _, _, which in plan.select_all(buffers):
            seen += np.bincount(which, minlength=len(buffers))
        named = [
            f"{filemap.tensors[buffers[n][0]].name} ({bad[n]} of {seen[n]} values)"
            for n in np.flatnonzero(bad).tolist()
        ]
        error = CorruptError(
            "values arrived at the wrong places",
            where=first_few(named),
            hint="the layout that wrote the checkpoint, or the plan, is wrong; please report this",
        )
        error.state_corrupted = True
        raise error


def share_bytes(manifest: Manifest, filemap: FileMap, board: Board) -> int:
    """Return what this rank writes of a checkpoint again; 0 where the tables do not say that."""
    if board.world == 1:
        return filemap.total_bytes
    # Where it refers to older files, the owners are those and no ranks.
    own = manifest.world_size == board.world == len(manifest.files)
    return filemap.data_bytes(board.rank) if own else 0


class LoadReport(msgspec.Struct, frozen=True):
    """Result of a load.

    Attributes
    ----------
    step, generation
        The checkpoint.
    missing
        Live names of this rank that the checkpoint has not; only with ``strict=False``.
    unexpected
        Names in the checkpoint that no rank's state has a place for; only with ``strict=False``.
    skipped
        Newer steps that were corrupt or lost, each with the reason. The step itself is among them
        where its snapshot was, and its commit was loaded.
    read
        Bytes and seconds of this rank.
    snapshot
        Whether it was a snapshot on near tiers, which need not have a commit.
    sources
        Bytes that this rank read from each tier: ``memory``, ``peer``, ``local``, ``remote``.
    warnings
        Side actions that failed: no lease, no claim of a generation, where nothing can be
        written.
    """

    step: int
    generation: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[tuple[int, str], ...]
    read: ReadReport
    snapshot: bool = False
    sources: Mapping[str, int] = msgspec.field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def tier(self) -> str:
        """The tier that gave this rank most of its bytes; empty when none did."""
        return max(self.sources, key=lambda tier: self.sources[tier], default="")


class _Options(msgspec.Struct, frozen=True, dict=True):
    strict: bool
    wanted: Callable[[str], bool]
    to_saved: Callable[[str], str]
    to_live: Callable[[str], str]
    renamed: bool
    weights_only: bool
    device: Any
    progress: Callable[[int, int], None] | None
    filtered: bool
    layouts: LoadLayouts


class _Planned(msgspec.Struct, frozen=True, eq=False):
    """Plan of a load that fills all of a state where it lies on the host, without its tensors.

    Attributes
    ----------
    key
        What it depends on: the leaves that were known, the tables and names of the checkpoint, and
        the options.
    matching
        Of a checkpoint and a state that fit.
    names, buffers, sizes
        Of each buffer the leaf, the tensor of the checkpoint with the regions, and its bytes.
    moves, files
        Copies out of files of the checkpoint's own, and these.
    """

    key: tuple[object, ...]
    matching: Matching
    names: Sequence[str]
    buffers: Sequence[Buffer]
    sizes: NDArray[np.int64]
    moves: Moves
    files: Sequence[int]

    def targets(self, leaves: RecalledLeaves) -> HostBuffers:
        """Return the buffers of leaves that are as they were."""
        locals = leaves.locals(self.names)
        starts = np.fromiter(map(methodcaller("data_ptr"), locals), np.int64, len(locals))
        first = int(starts.min(initial=1 << 62))
        memory = bytes_at(first, int((starts + self.sizes).max(initial=first)) - first, leaves)
        return HostBuffers(memory, first, np.stack((starts, self.sizes), axis=1))


class _Tried(msgspec.Struct, frozen=True, dict=True):
    """A checkpoint, and what of it goes where in this rank's state."""

    manifest: Manifest
    filemap: FileMap
    store: UnionStore
    matching: Matching
    leaves: Leaves
    laid: LayoutLoad

    @cached_property
    def _places(self) -> PieceLocations:
        return PieceLocations(self.manifest, self.filemap, self.store)

    def read(self, wants: Iterable[Want]) -> None:
        """Fill what is wanted besides the state."""
        execute(read_plan(self.manifest, self.filemap, wants, places=self._places), self.store)


class Loader:
    """Loads checkpoints for one checkpointer.

    Attributes
    ----------
    writing
        Whether a load has come to where it writes. Its caller sets it back.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        agreement: Agreement,
        ranks: Sequence[int],
        timeout_s: float,
        layout: NoLayout | None = None,
        near: Near | None = None,
        snapshot: Callable[[int, int, str], memoryview | None] = lambda *_: None,
        is_locked: Callable[[memoryview], bool] = lambda _: False,
    ) -> None:
        self._snapshot = snapshot
        self._is_locked = is_locked
        self._layout = layout or NoLayout()
        self._near = near
        self._catalogue = catalogue
        self._agreement = agreement
        self._describer = Describer(ranks)
        self._timeout_s = timeout_s
        self._host: tuple[int, ...] | None = None
        self._former = PreparedState()
        self._planned: _Planned | None = None
        self._plans: WitnessPlans = {}
        self._loads = 0
        self.writing = False
        self.share_bytes = 0
        """Bytes that this rank would write of the checkpoint loaded last; 0 if unknown."""

    @phase("ckpt")
    def load(
        self,
        state: Mapping[str, Any],
        step: int | str | None,
        *,
        strict: bool,
        only: str | Iterable[str] | Callable[[str], bool] | None,
        rename: Mapping[str, str] | Callable[[str], str] | None,
        weights_only: bool,
        device: Any,
        progress: Callable[[int, int], None] | None,
        source_layout: LayoutSpec | None = None,
        allow: str | None = None,
        elsewhere: Catalogue | None = None,
    ) -> LoadReport:
        """See `ckptd.checkpoint.torch.checkpointer.Checkpointer.load`.

        Parameters
        ----------
        elsewhere
            Read this instead of the root and near tiers.
        """
        if is_capturing():
            raise captured("load")
        inverse = {s: n for n, s in rename.items()} if isinstance(rename, Mapping) else None
        options = _Options(
            strict,
            selector(only),
            _renamer(rename),
            _renamer(inverse),
            rename is not None,
            weights_only,
            device,
            progress,
            weights_only or only is not None,
            self._layout.loading(lambda: look(state), source_layout, allow),
        )
        begun = time.monotonic_ns()
        near = self._near if elsewhere is None else None
        catalogue = elsewhere or self._catalogue
        sources = LoadSources(catalogue, self._agreement, near, self._plans)
        left = deque(sources.candidates(step))
        skipped: list[tuple[int, str]] = []
        while True:
            candidate = left[0]
            try:
                matching, read = self._load_one(state, candidate, options, sources)
            except CkptdError as error:
                after = sources.after(error, candidate)
                if after == "again":
                    continue
                left.popleft()
                if after == "raise" or not left:
                    raise
                skipped.append((candidate.step, error.message))
                what = "step %d is corrupt, trying another checkpoint: %s"
                _log.warning(what, candidate.step, error)
                continue
            report = LoadReport(
                candidate.step,
                candidate.generation,
                tuple(matching.missing),
                tuple(matching.unexpected),
                tuple(skipped),
                read,
                candidate.snapshot is not None,
                _by_tier(sources.store.read_bytes(), read.bytes_in_memory),
                (sources.unheld,) if sources.unheld else (),
            )
            self._tell(report, begun)
            self._log_left(report)
            if not weights_only and only is None and elsewhere is None:
                at_step(report.step)
            return report

    def newest(self) -> int | None:
        """Return the step that a load would try first, or None; the same on every rank."""
        try:
            sources = LoadSources(self._catalogue, self._agreement, self._near)
            return sources.candidates(None)[0].step
        except NotFoundError:
            return None

    def _tell(self, report: LoadReport, begun_ns: int) -> None:
        events.emit(
            events.LoadDone(
                step=report.step,
                generation=report.generation,
                rank=self._agreement.board.rank,
                at_ns=events.now_ns(),
                duration_ns=time.monotonic_ns() - begun_ns,
                bytes=report.read.bytes_copied,
                fetched=report.read.bytes_fetched,
                skipped=len(report.skipped),
                warnings=report.warnings,
            )
        )

    def _log_left(self, report: LoadReport) -> None:
        """Say in one line what a load that is not strict has left; rank 0 what all ranks left."""
        there = report.unexpected if self._agreement.board.rank == 0 else ()
        said = (
            (report.missing, "not in the checkpoint, or as another kind: the live values stay"),
            (there, "in the checkpoint, but not in the state of any rank"),
        )
        left = [f"{first_few(names, 4)} {what}" for names, what in said if names]
        if left:
            _log.warning("step %d is loaded in part: %s", report.step, "; ".join(left))

    def _load_one(
        self,
        state: Mapping[str, Any],
        candidate: LoadCandidate,
        options: _Options,
        sources: LoadSources,
    ) -> tuple[Matching, ReadReport]:
        """Load one checkpoint; all ranks call this, and it fails on all or on none."""
        rank, root = self._agreement.board.rank, sources.catalogue.store
        with sources.held(candidate), saving(root, candidate.name, "", rank):
            error: Exception | None = None
            saved, matching, store = None, Matching(), sources.store
            with ExitStack() as reading:
                try:
                    with no_collection():
                        manifest, filemap, values, witness = sources.manifest(candidate)
                        reading.enter_context(read_ahead(store, self._likely(manifest, options)))
                        named = SavedState.of(manifest)
                        if about_foreign(manifest) and not options.renamed:
                            options = _without_sections(options, state, named)
                            stacked = options.layouts.stacked(state, named)
                            options = msgspec.structs.replace(options, layouts=stacked)
                        matching, leaves, filling, laid = self._match(
                            state, named, filemap, options
                        )
                        tried = _Tried(manifest, filemap, store, matching, leaves, laid)
                        own = list(matching.unexpected)
                    saved = named
                except Exception as caught:  # noqa: BLE001 - no_errors raises it
                    error = caught
                # A rank that failed takes part: it must not leave the others waiting.
                unexpected = without_place(self._agreement, saved, matching.unexpected)
                try:
                    if saved is not None:
                        filling.add(
                            (name, leaves.tensors[name].tensor, matching.tensors[name])
                            for name in matching.keep_adopted(unexpected)
                        )
                        refuse_misfit(
                            matching, saved, leaves, strict=options.strict, hint=laid.hint
                        )
                        with no_collection():
                            plan = self._plan(tried, filling, options, own)
                            self._compare_copies(tried)
                            _compare_overlaps(tried)
                except Exception as caught:  # noqa: BLE001 - no_errors raises it
                    error = caught
            try:
                if error is None:
                    objects, per_rank = self._objects(tried)
                    objects = laid.objects(objects)
                    check_objects(leaves, objects, per_rank)
            except Exception as caught:  # noqa: BLE001 - no_errors raises it
                error = caught
            # Nor inside the read.
            self._agreement.no_errors(error)
            if not options.strict:
                self._refuse_nothing(matching, laid)
            self.writing = True
            with filling:
                begun = time.monotonic_ns()
                read = execute(
                    plan,
                    store,
                    in_memory=self._in_memory(manifest),
                    host=self._host_group(),
                    progress=options.progress,
                )
                _tell_read(read, begun)

                def complete() -> None:
                    """Bring what was read to its last place, and compare it with the witness.

                    A layout may change values on the way.
                    """
                    laid.finish(filling)
                    filling.finish()
                    if witness is not None:
                        with events.span("verify"):
                            check_witness(witness, values, filemap, filling)
                            laid.check_witness(filling, values, witness)

                self._undamaged(complete)
            try:
                apply_objects(
                    leaves,
                    objects,
                    per_rank,
                    tensors=matching.tensors,
                    required=matching.required,
                    strict=options.strict,
                )
                _tell_followers(leaves, per_rank, candidate.step)
            except CkptdError as error:
                error.state_corrupted = True
                raise
            self.share_bytes = share_bytes(manifest, filemap, self._agreement.board)
            return matching, read

    def _likely(self, manifest: Manifest, options: _Options) -> list[FileEntry]:
        """Return the files that this rank is about to need for certain, as far as one can tell."""
        board = self._agreement.board
        if options.filtered:
            return []
        if self._in_memory(manifest) is not None:
            return []
        if board.world == 1:
            return list(manifest.files)
        if board.world != manifest.world_size:
            return []
        return [f for f in manifest.files if f.rank == board.rank]

    def _in_memory(self, manifest: Manifest) -> InMemory | None:
        """Return this rank's file, where it has left the file's bytes in memory when it saved."""
        data = self._snapshot(manifest.step, manifest.generation, manifest.attempt)
        own = file_key(manifest.folder, self._agreement.board.rank)
        for number, entry in enumerate(manifest.files):
            # It is shorter than the snapshot where chunks that had not changed were left out, and a
            # rank without data wrote none.
            if data and entry.path == own and entry.data_bytes == len(data):
                return InMemory(number, data, self._is_locked(data))
        return None

    def _undamaged(self, function: Callable[[], None]) -> None:
        """Call a function that raises when the live state is wrong: then it is so on every rank."""

        def explained() -> None:
            try:
                function()
            except CkptdError:
                raise
            except Exception as error:
                # The state is half written: the checkpointer must know it, whatever was raised.
                raise CkptdError(
                    "values that were read could not be copied into the state",
                    kind="crashed",
                    found=repr(error)[:500],
                ) from error

        try:
            self._agreement.on_every_rank(explained)
        except CkptdError as failed:
            failed.state_corrupted = True
            raise

    def _match(
        self, state: Mapping[str, Any], saved: SavedState, filemap: FileMap, options: _Options
    ) -> tuple[Matching, Leaves, Filling, LayoutLoad]:
        """Find what of the checkpoint goes where in this rank's state."""
        laid = options.layouts.load(saved, filemap, self._describer)
        to_saved = laid.to_saved(options.to_saved)
        names = saved_names(laid.rest, options.to_live, options.wanted)
        names = laid.names(names, options.wanted)
        leaves = prepare(state, names, options.device, self._former)
        filling = Filling(self._describer)
        planned, held = self._planned, leaves.tensors
        if (
            planned is not None
            and isinstance(held, RecalledLeaves)
            and planned.key == self._key(saved, filemap, leaves, options, laid)
            and PieceLocations(saved.manifest, filemap).all_own(planned.files)
        ):
            filling.recalled = planned.buffers, planned.targets(held)
            return msgspec.structs.replace(planned.matching), leaves, filling, laid
        wanted = options.wanted
        if options.weights_only:
            kinds = ("param", "buffer")
            found = [(n, leaf) for n, leaf in leaves.tensors.items() if leaf.kind in kinds]
            weights = {name for n, leaf in found for name in (n, *leaf.aliases)}
            wanted = lambda n: n in weights and options.wanted(n)  # noqa: E731
        others = laid.others(leaves)
        matching = match(others, laid.rest, wanted, to_saved, strict=options.strict)
        later = set(matching.adopted.values())  # other ranks may have a place for it
        here = [name for name in matching.tensors if name not in later]
        forms = zip(here, leaves.forms(here), strict=True)
        filling.add([(n, tensor, matching.tensors[n]) for n, (tensor, _) in forms])
        laid.match(leaves, wanted, filling, matching)
        places = None if filling.host is None else filling.host.places
        if places is None or len(places) < len(matching.tensors) or not are_apart(places):
            matching.overlaps = overlapping([leaves.tensors[name] for name in matching.tensors])
        return matching, leaves, filling, laid

    @staticmethod
    def _key(
        saved: SavedState, filemap: FileMap, leaves: Leaves, options: _Options, laid: LayoutLoad
    ) -> tuple[object, ...] | None:
        """Return what a plan depends on that another load may use; None where none may."""
        plain = options.to_saved is options.to_live is unchanged and not options.filtered
        foreign, known = about_foreign(saved.manifest), leaves.known
        if not plain or foreign or type(laid) is not LayoutLoad or known is None:
            return None
        objects = [(o.name, o.kind, o.tensor, o.per_rank) for o in saved.manifest.objects]
        return known, filemap, objects, [*leaves.objects], [*leaves.per_rank], options.strict

    def _plan(
        self, tried: _Tried, filling: Filling, options: _Options, unexpected: Sequence[str]
    ) -> ReadPlan:
        """Return the plan of what is filled: that of an earlier load, or one for later ones.

        Parameters
        ----------
        unexpected
            The names that this rank had no place for, whatever others have.
        """
        manifest, filemap = tried.manifest, tried.filemap
        matching, leaves = tried.matching, tried.leaves
        places = PieceLocations(manifest, filemap, tried.store)
        if filling.recalled is not None and self._planned is not None:
            return ReadPlan(manifest, places, self._planned.moves, filling.recalled[1])
        wants = [*filling.wants, *tried.laid.wants]
        plan = read_plan(
            manifest,
            filemap,
            wants,
            allow_absent=not options.strict,
            places=places,
            buffers=filling.host if filling.host and len(filling.host) == len(wants) else None,
        )
        found = msgspec.structs.replace(matching, unexpected=[*unexpected])
        files = distinct(plan.moves.rows["file"]).tolist()
        key = self._key(SavedState.of(manifest), filemap, leaves, options, tried.laid)
        if (
            key is not None
            and found.is_plain
            and filling.is_in_place
            and places.all_own(files)
            and not any(leaf.fresh for leaf in leaves.made())
        ):
            sizes, buffers = plan.addresses[:, 1], tuple(filling.filled[0])
            self._planned = _Planned(key, found, filling.names, buffers, sizes, plan.moves, files)
        return plan

    def _refuse_nothing(self, matching: Matching, laid: LayoutLoad) -> None:
        """Refuse a checkpoint of which no rank's state has anything.

        Raises
        ------
        MismatchError
            kind ``mismatch``, on every rank.
        """
        some: object = matching.tensors or matching.objects or matching.per_rank or laid.wants
        # What has no names to look for misses nothing.
        own = b"found" if some or not matching.missing else b""
        if not self._agreement.all_reports("found", own, max):
            raise MismatchError(
                "the checkpoint and the state have no name in common",
                wanted=", ".join(matching.missing[:4]),
                found=", ".join(matching.unexpected[:4]),
                hint="rename= maps names",
            )

    def _compare_copies(self, tried: _Tried) -> None:
        """Compare what the checkpoint has under several names of one live tensor.

        It is read beside the state, which stays as it is where two of them differ, and a range of
        rows at a time: an embedding may have more bytes than a host has left.

        Raises
        ------
        MismatchError
            kind ``mismatch``: they do.
        """
        matching = tried.matching
        copies = by_key((name, (alias, n)) for alias, (name, n) in matching.copies.items())
        for name, others in copies.items():
            held = self._describer.held(name, tried.leaves.tensors[name].tensor)
            itemsize = held.local.element_size()
            numbers = [matching.tensors[name], *(number for _, number in others)]
            most = _COMPARED_BYTES // len(numbers)
            differ = [0] * len(others)
            for box in (b for r in held.regions if r.numel for b in r.box.cut(itemsize, most)):
                region = (box_region(box),)
                read = [np.empty(box.numel * itemsize, dtype=np.uint8) for _ in numbers]
                tried.read(Want(n, region, t) for n, t in zip(numbers, read, strict=True))
                for i, other in enumerate(read[1:]):
                    differ[i] += int(np.count_nonzero(other != read[0]))
            for (alias, _), count in zip(others, differ, strict=True):
                if count:
                    raise MismatchError(
                        "one tensor of the state has two values in the checkpoint",
                        where=f"{name}, {alias}",
                        wanted="equal values: these are names of one tensor",
                        found=f"{count} bytes of {held.local.numel() * itemsize} differ",
                        hint="only= selects one of them, such as"
                        f" only=lambda name: name != {alias!r}; or untie them",
                    )

    def _host_group(self) -> HostGroup | None:
        board = self._agreement.board
        if board.world == 1:
            return None
        if self._host is None:
            self._host = host_members(self._agreement)
        self._loads += 1
        return HostGroup(board, f"read/{self._loads}", board.rank, self._host)

    def _objects(self, tried: _Tried) -> tuple[dict[str, Any], dict[str, Any]]:
        manifest, matching = tried.manifest, tried.matching
        values: dict[str, Any] = {}
        for name, number in matching.objects.items():
            entry = manifest.objects[number]
            raw = entry.value
            if entry.tensor:
                raw = _read_encoded(tried, entry.tensor, None)
            values[name] = codec.decode(raw, name)
        board = self._agreement.board
        chosen: dict[str, Any] = {}
        for name, number in matching.per_rank.items():
            tensor = manifest.objects[number].tensor
            read = lambda r, t=tensor, n=name: codec.decode(_read_encoded(tried, t, r), n)  # noqa: E731
            chosen[name] = tried.leaves.per_rank[name].choose(
                read, saved_world=manifest.world_size, rank=board.rank, world=board.world
            )
        return values, chosen


def _read_encoded(tried: _Tried, tensor: str, rank: int | None) -> Any:
    """Read and parse an encoded object: one rank's cell, or the whole tensor."""
    manifest, filemap = tried.manifest, tried.filemap
    number = next(i for i, t in enumerate(manifest.tensors) if t.name == tensor)
    entry = manifest.tensors[number]
    grid = filemap.grid_of(number)
    box = Box((0,), entry.shape)
    if rank is not None:
        files = filemap.owners[entry.owners].array(entry.base)
        cells = [i for i, f in enumerate(files) if manifest.files[f].rank == rank]
        if not cells:
            raise NotFoundError(f"rank {rank} saved no value", where=tensor)
        box = grid.piece(cells[0]).box
    target = np.empty(box.numel, dtype=np.uint8)
    tried.read([Want(number, (box_region(box),), target)])
    return parse_object(target, tensor)


def _compare_overlaps(tried: _Tried) -> None:
    """Compare what the checkpoint has of live tensors that have some memory in common.

    Raises
    ------
    MismatchError
        kind ``mismatch``: one place in memory would have two values.
    """
    for group in tried.matching.overlaps:
        image = Image(group)
        for leaf in group:
            values = np.empty(leaf.local.nbytes, np.uint8)
            number = tried.matching.tensors[leaf.name]
            wants, finish = tried.laid.row_by_row(leaf, number, values)
            tried.read(wants)
            finish()
            _, differ = image.lay(leaf, values)
            if differ:
                raise MismatchError(
                    "tensors of the state share memory, but had separate memory when saved",
                    where=first_few([other.name for other in group]),
                    wanted="equal values where they share memory",
                    found=f"{differ} bytes of {leaf.name} differ from what another has there",
                    hint="give each tensor its own memory: tensor.clone()",
                )


def _renamer(rename: Mapping[str, str] | Callable[[str], str] | None) -> Callable[[str], str]:
    if rename is None:
        return unchanged
    return rename if callable(rename) else lambda name: rename.get(name, name)


def _without_sections(options: _Options, state: Mapping[str, Any], saved: SavedState) -> _Options:
    """Return options that leave the section out of a live name where the checkpoint has none.

    Files of weights alone have the names of a module's own parameters: there ``model.`` is a part
    of these, or nothing. A section is left out where that finds more of its names; where each finds
    some and neither all, a value could come to another parameter.

    Raises
    ------
    MismatchError
        kind ``mismatch``: the same tensors would fill two sections, or it is not known which
        names have a section.
    """
    there = saved.names()
    live = look(state)
    leaves = live.tensors
    bare: dict[str, str] = {}
    outer: dict[str, str] = {}
    for section in state:
        start = f"{section}."
        mine = [
            [n for n in (name, *leaf.aliases) if n.startswith(start) and options.wanted(n)]
            for name, leaf in leaves.items()
        ]
        mine = [names for names in mine if names]
        inner = [[n.removeprefix(start) for n in names] for names in mine]
        within, without = (
            sum(any(n in there for n in names) for names in found) for found in (mine, inner)
        )
        if within and without and max(within, without) < len(mine):
            raise _doubtful(section, mine, inner, there)
        if without <= within:
            continue
        every = (n for name, leaf in leaves.items() for n in (name, *leaf.aliases))
        names = (n for n in every if n.startswith(start) and n.removeprefix(start) in there)
        outer |= {n: n.removeprefix(start) for n in names}
        # What is no tensor here, or is known to the code of a module alone.
        values = [f"{start}{n}" for n in sorted(there - outer.keys() - set(chain(*inner)))]
        values = [n for n in values if n in live.objects or live.converts(n)]
        outer |= {n: n.removeprefix(start) for n in values}
        inner.append([n.removeprefix(start) for n in values])
        mine.append(values)
        for name, own in zip(chain(*inner), chain(*mine), strict=True):
            if name in there and bare.setdefault(name, own) != own:
                raise MismatchError(
                    "two parts of the state have the names of the checkpoint's tensors",
                    where=name,
                    found=f"{bare[name]} and {own}",
                    hint="only= selects one of them, rename= maps names explicitly",
                )
    return msgspec.structs.replace(
        options,
        to_saved=lambda name: outer.get(name, name),
        to_live=lambda name: bare.get(name, name),
    )


def _doubtful(
    section: str,
    mine: Sequence[Sequence[str]],
    inner: Sequence[Sequence[str]],
    there: Collection[str],
) -> MismatchError:
    """Return why it is not known whether the checkpoint has a section."""
    name = next(n for n in chain(*inner) if n in there)
    other = next(n for n in chain(*mine) if n in there)
    return MismatchError(
        "some names of the checkpoint fit the state with a section prefix, and some without",
        where=name,
        wanted="all names with the section, or all without",
        found=f"{section}.{name} without {section!r}; {other} with it",
        hint="rename= maps names explicitly",
    )


def _by_tier(read: Mapping[str, int], memory: int) -> Mapping[str, int]:
    return {**read, "memory": read.get("memory", 0) + memory} if memory else read


def _tell_followers(leaves: Leaves, per_rank: Mapping[str, Any], step: int) -> None:
    """Tell the values that ask for it what was loaded."""
    put = [leaves.per_rank[n] for n, value in per_rank.items() if not isinstance(value, Dropped)]
    streams = [RngStreams.now()] if any(leaf.random for leaf in put) else []
    for leaf in put:
        if leaf.follower is not None:
            leaf.follower.loaded(step, streams)


def _tell_read(read: ReadReport, begun_ns: int) -> None:
    """Emit both passes of a read; where they took turns, as though one had followed the other."""
    for name, seconds, nbytes in (
        ("fetch", read.fetch_s, read.bytes_fetched),
        ("fill", read.copy_s, read.bytes_copied),
    ):
        activity = events.Activity(name)
        ended_ns = begun_ns + int(seconds * 1e9)
        activity.add(begun_ns, ended_ns, nbytes)
        activity.emit()
        begun_ns = ended_ns
