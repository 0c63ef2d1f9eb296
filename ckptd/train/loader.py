"""Loading: from a checkpoint of any layout into the live state of this job."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptd import events
from ckptd.engine.candidates import Candidate
from ckptd.engine.catalogue import Catalogue
from ckptd.engine.read import HostGroup, InMemory, ReadReport, execute, read_plan
from ckptd.engine.wants import Want
from ckptd.engine.readahead import read_ahead
from ckptd.engine.telling import saving
from ckptd.engine.union import UnionStore
from ckptd.errors import CkptdError, CorruptError, NotFoundError, UsageError
from ckptd.format import codec
from ckptd.format.filemap import FileMap
from ckptd.format.manifest import FileEntry, Manifest
from ckptd.format.names import file_key
from ckptd.format.strictjson import parse_json
from ckptd.format.witness import Witness, WitnessPlan
from ckptd.layout.region import box_region
from ckptd.monitor.view import Phase
from ckptd.train.agree import Agreement
from ckptd.train.describe import Describer
from ckptd.train.filling import Filling
from ckptd.train.hosts import host_members
from ckptd.train.leaves import Leaves
from ckptd.train.matching import Matching, Saved, match, saved_names, selector
from ckptd.train.pauses import no_collection
from ckptd.train.perrank import Dropped
from ckptd.train.recorder import at_step, phase
from ckptd.train.restore import apply_objects, check_objects, prepare
from ckptd.train.sources import LoadSources, Near
from ckptd.train.witnessing import Place, check_witness, witness_places
from ckptd.types import Box

if TYPE_CHECKING:
    from ckptd.engine.reshard.layouts import Program
    from ckptd.train.laid import JobLayout, Laid
    from ckptd.train.laid_loading import LaidLoad
    from ckptd.train.laid_program import LayoutSpec

__all__ = ["LoadReport", "Loader"]

_log = logging.getLogger("ckptd")


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes
    ----------
    step, generation
        The checkpoint.
    missing
        Live names that the checkpoint has not; only with ``strict=False``.
    unexpected
        Names in the checkpoint that the live state has not.
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
        What could not be done besides: no lease, no claim of a generation, where nothing can be
        written.
    """

    step: int
    generation: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[tuple[int, str], ...]
    read: ReadReport
    snapshot: bool = False
    sources: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def tier(self) -> str:
        """The tier that gave this rank most of its bytes; empty when none did."""
        return max(self.sources, key=lambda tier: self.sources[tier], default="")


@dataclass(frozen=True)
class _Options:
    strict: bool
    wanted: Callable[[str], bool]
    to_saved: Callable[[str], str]
    to_live: Callable[[str], str]
    weights_only: bool
    device: Any
    progress: Callable[[int, int], None] | None
    filtered: bool
    job: JobLayout | None = None
    source: Program | None = None
    allow: str | None = None


class _SkipError(Exception):
    """A candidate cannot be loaded on any rank, for `reason`."""

    def __init__(self, reason: CkptdError) -> None:
        super().__init__(reason.message)
        self.reason = reason


class Loader:
    """Loads checkpoints for one checkpointer."""

    def __init__(
        self,
        catalogue: Catalogue,
        agreement: Agreement,
        ranks: Sequence[int],
        timeout_s: float,
        layout: Laid | None = None,
        near: Near | None = None,
        snapshot: Callable[[int, int, str], memoryview | None] = lambda *_: None,
    ) -> None:
        self._snapshot = snapshot
        self._layout = layout
        self._near = near
        self._catalogue = catalogue
        self._agreement = agreement
        self._describer = Describer(ranks)
        self._timeout_s = timeout_s
        self._host: tuple[int, ...] | None = None
        self._loads = 0

    @phase(Phase.CKPT)
    def load(
        self,
        state: Mapping[str, Any],
        step: int | None,
        *,
        strict: bool,
        only: str | Iterable[str] | Callable[[str], bool] | None,
        rename: Mapping[str, str] | Callable[[str], str] | None,
        weights_only: bool,
        device: Any,
        progress: Callable[[int, int], None] | None,
        source_layout: LayoutSpec | None = None,
        allow: str | None = None,
        without_root: bool = False,
    ) -> LoadReport:
        """See `ckptd.train.checkpointer.Checkpointer.load`.

        Parameters
        ----------
        without_root
            Go on with near tiers where the root cannot be read, on every rank alike.
        """
        inverse = {s: n for n, s in rename.items()} if isinstance(rename, Mapping) else None
        options = _Options(
            strict,
            selector(only),
            _renamer(rename),
            _renamer(inverse),
            weights_only,
            device,
            progress,
            weights_only or only is not None,
            *self._layouts(state, source_layout),
            allow,
        )
        begun = time.monotonic_ns()
        sources = LoadSources(self._catalogue, self._agreement, self._near)
        left = deque(sources.candidates(step, without_root=without_root))
        skipped: list[tuple[int, str]] = []
        while True:
            candidate = left.popleft()
            try:
                matching, read = self._load_somehow(state, candidate, options, sources)
            except _SkipError as skip:
                if not left:
                    raise skip.reason from skip.reason.__cause__
                skipped.append((candidate.step, skip.reason.message))
                what = "step %d is corrupt, trying another checkpoint: %s"
                _log.warning(what, candidate.step, skip.reason)
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
            if not weights_only and only is None:
                at_step(report.step)
            return report

    def newest(self) -> int | None:
        """Return the step that a load would try first, or None; the same on every rank."""
        try:
            sources = LoadSources(self._catalogue, self._agreement, self._near)
            return sources.candidates(None)[0].step
        except NotFoundError:
            return None

    def _load_somehow(
        self,
        state: Mapping[str, Any],
        candidate: Candidate,
        options: _Options,
        sources: LoadSources,
    ) -> tuple[Matching, ReadReport]:
        """Load a candidate, again where sources were wrong and others are left."""
        while True:
            try:
                return self._load_one(state, candidate, options, sources)
            except CkptdError as error:
                match sources.after(error, candidate):
                    case "raise":
                        raise
                    case "older":
                        raise _SkipError(error) from error

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

    def _layouts(
        self, state: Mapping[str, Any], source: LayoutSpec | None
    ) -> tuple[JobLayout | None, Program | None]:
        """Return the layout of the live state, and the one given for the checkpoint."""
        if self._layout is None:
            if source is not None:
                raise UsageError(
                    "a checkpoint's layout is of no use without one of the live state",
                    kind="lay-use",
                    hint="Checkpointer(..., layout=...) says the layout of the live state",
                )
            return None, None
        from ckptd.train.laid_loading import look  # with Lay: see Checkpointer
        from ckptd.train.laid_program import read_layout

        program = None if source is None else read_layout(source)
        return self._layout.bind(lambda: look(state)), program

    def _load_one(
        self,
        state: Mapping[str, Any],
        candidate: Candidate,
        options: _Options,
        sources: LoadSources,
    ) -> tuple[Matching, ReadReport]:
        rank, store = self._agreement.board.rank, self._catalogue.store
        with sources.held(candidate), saving(store, candidate.name, "", rank):
            return self._load_held(state, candidate, options, sources)

    def _load_held(
        self,
        state: Mapping[str, Any],
        candidate: Candidate,
        options: _Options,
        sources: LoadSources,
    ) -> tuple[Matching, ReadReport]:
        error: CkptdError | None = None
        store = sources.store
        try:
            with no_collection():
                manifest, filemap, values, witness = sources.manifest(candidate)
            with no_collection(), read_ahead(store, self._likely(manifest, options)):
                saved = Saved.of(manifest)
                matching, leaves, plan, filling, laid = self._plan(
                    state, saved, filemap, options, store
                )
            objects, per_rank = self._objects(manifest, filemap, matching, leaves, store)
            if laid is not None:
                objects = laid.objects(objects)
            check_objects(leaves, objects, per_rank)
        except CkptdError as caught:
            error = caught
        # A rank that fails here must not leave the others waiting inside the read.
        self._agreement.no_errors(error)
        # Where the witness's values lie is worked out while the disk is busy.
        with ThreadPoolExecutor(1, "ckptd-witness") as beside:
            places = beside.submit(witness_places, values, filling.wants)
            begun = time.monotonic_ns()
            read = execute(
                plan,
                store,
                in_memory=self._in_memory(manifest),
                host=self._host_group(),
                progress=options.progress,
            )
            _tell_read(read, begun)
        self._finish(filling, laid)
        if isinstance(witness, Witness):
            with events.span("verify"):
                self._check_witness(witness, places.result(), manifest, filling, laid)
        apply_objects(leaves, objects, per_rank, tensors=matching.tensors)
        _tell_followers(leaves, per_rank, candidate.step)
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
            # It is shorter than the snapshot where chunks that had not changed were left out.
            if data is not None and entry.path == own and entry.data_bytes == len(data):
                return InMemory(number, data)
        return None

    def _finish(self, filling: Filling, laid: LaidLoad | None) -> None:
        """Bring what was read to its last place; a layout may change values on the way."""
        if laid is not None:
            self._undamaged(laid.filling.finish)
        filling.finish()

    def _check_witness(
        self,
        witness: Witness,
        places: Sequence[Place],
        manifest: Manifest,
        filling: Filling,
        laid: LaidLoad | None,
    ) -> None:
        """Check what was filled; when one rank's is wrong, every rank's load has failed."""

        def check() -> None:
            check_witness(witness, places, manifest, filling.wants)
            if laid is not None:
                from ckptd.train.laid_witness import check_laid_witness

                check_laid_witness(laid, WitnessPlan.of(manifest), witness)

        self._undamaged(check)

    def _undamaged(self, function: Callable[[], None]) -> None:
        """Call a function that raises when the live state is wrong: then it is so on every rank."""
        try:
            self._agreement.on_every_rank(function)
        except CkptdError as failed:
            failed.poisoned = True
            raise

    def _plan(
        self,
        state: Mapping[str, Any],
        saved: Saved,
        filemap: FileMap,
        options: _Options,
        store: UnionStore,
    ) -> tuple[Matching, Any, Any, Filling, LaidLoad | None]:
        laid, to_saved, rest = None, options.to_saved, saved
        if options.job is not None:
            from ckptd.train.laid_loading import LaidLoad
            from ckptd.train.laid_source import LaidSource, source_program

            program = source_program(saved, options.source, options.job)
            source = LaidSource(options.job, program, saved, filemap)
            if options.source is not None and options.allow != "layout":
                source.check_kept()
            laid = LaidLoad(source, self._describer)
            to_saved, rest = laid.to_saved(to_saved), laid.source.rest
        names = saved_names(rest, options.to_live, options.wanted)
        names = names if laid is None else laid.names(names, options.wanted)
        leaves = prepare(state, names, device=options.device)
        wanted = options.wanted
        if options.weights_only:
            weights = {n for n, leaf in leaves.tensors.items() if leaf.kind in ("param", "buffer")}
            wanted = lambda n: n in weights and options.wanted(n)  # noqa: E731
        others = leaves if laid is None else laid.rest(leaves)
        matching = match(others, rest, wanted, to_saved, strict=options.strict)
        filling = Filling(self._describer)
        for name, number in matching.tensors.items():
            filling.add(name, leaves.tensors[name].tensor, number)
        if laid is not None:
            laid.match(leaves, wanted, filling, matching, strict=options.strict)
        plan = read_plan(
            saved.manifest,
            filemap,
            [*filling.wants, *(laid.wants if laid is not None else ())],
            store=store,
            allow_absent=not options.strict,
        )
        return matching, leaves, plan, filling, laid

    def _host_group(self) -> HostGroup | None:
        board = self._agreement.board
        if board.world == 1:
            return None
        if self._host is None:
            self._host = host_members(self._agreement)
        self._loads += 1
        return HostGroup(board, f"read/{self._loads}", board.rank, self._host)

    def _objects(
        self,
        manifest: Manifest,
        filemap: FileMap,
        matching: Matching,
        leaves: Any,
        store: UnionStore,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        values: dict[str, Any] = {}
        for name, number in matching.objects.items():
            entry = manifest.objects[number]
            raw = entry.value
            if entry.tensor:
                raw = self._read_encoded(manifest, filemap, entry.tensor, None, store)
            values[name] = codec.decode(raw, name)
        board = self._agreement.board
        chosen: dict[str, Any] = {}
        for name, number in matching.per_rank.items():
            tensor = manifest.objects[number].tensor
            read = lambda r, t=tensor, n=name: codec.decode(  # noqa: E731
                self._read_encoded(manifest, filemap, t, r, store), n
            )
            chosen[name] = leaves.per_rank[name].choose(
                read, saved_world=manifest.world_size, rank=board.rank, world=board.world
            )
        return values, chosen

    def _read_encoded(
        self,
        manifest: Manifest,
        filemap: FileMap,
        tensor: str,
        rank: int | None,
        store: UnionStore,
    ) -> Any:
        """Read and parse an encoded object: one rank's cell, or the whole tensor."""
        number = next(i for i, t in enumerate(manifest.tensors) if t.name == tensor)
        entry = manifest.tensors[number]
        grid = filemap.grid_of(number)
        box = Box((0,), entry.shape)
        if rank is not None:
            files = filemap.owners[entry.owners].array(entry.base)
            cells = [i for i, f in enumerate(files) if manifest.files[f].rank == rank]
            if not cells:
                raise NotFoundError(f"rank {rank} saved no value", kind="no-value", where=tensor)
            box = grid.piece(cells[0]).box
        target = np.empty(box.numel, dtype=np.uint8)
        plan = read_plan(
            manifest,
            filemap,
            [Want(number, (box_region(box),), target)],
            store=store,
        )
        execute(plan, store)
        try:
            return parse_json(target.tobytes())
        except (ValueError, RecursionError) as error:
            raise CorruptError(
                "an encoded object is not JSON", kind="bad-object", where=tensor, found=str(error)
            ) from None


def _renamer(rename: Mapping[str, str] | Callable[[str], str] | None) -> Callable[[str], str]:
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    return lambda name: rename.get(name, name)


def _by_tier(read: Mapping[str, int], memory: int) -> Mapping[str, int]:
    return {**read, "memory": read.get("memory", 0) + memory} if memory else read


def _tell_followers(leaves: Leaves, per_rank: Mapping[str, Any], step: int) -> None:
    """Tell the values that ask for it what was loaded."""
    put = [leaves.per_rank[n] for n, value in per_rank.items() if not isinstance(value, Dropped)]
    for leaf in put:
        if leaf.follower is not None:
            leaf.follower.loaded(step, streams=any(other.random for other in put))


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
