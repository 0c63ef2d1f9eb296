"""`Checkpointer`: save, load, wait, close, tags; its arguments and their checks.

In it: before_mutation, stop_requested, what ``close`` waits for.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, cast, get_args

import msgspec
import torch

from ckptd import events
from ckptd.base.runtime import launched
from ckptd.base.runtime.launched import whole
from ckptd.base.runtime.ownership import OfOneProcess, not_at_exit, not_within, one_at_a_time
from ckptd.base.runtime.pauses import no_collection
from ckptd.base.torch.ranks import Agreement, JobBoard, board_of, global_ranks
from ckptd.checkpoint.format.codec import checked_metadata
from ckptd.checkpoint.format.names import ROOT_MARKER, CommitName, check_step
from ckptd.checkpoint.root.auto import Auto, IntervalChoice, recent
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.index import Index, root_tier, saving
from ckptd.checkpoint.root.opening import Trust, is_trusting, root_spec, signing_key, trusting
from ckptd.checkpoint.root.policy import Every, Keep
from ckptd.checkpoint.save.handle import SaveHandle, SaveTracker
from ckptd.checkpoint.save.tiers import Tier, tier_specs
from ckptd.checkpoint.torch.job import Lineage, job_of
from ckptd.checkpoint.torch.options import (
    CopyOptions,
    Preemption,
    Storage,
    given,
    one_of,
    preemption_of,
)
from ckptd.checkpoint.torch.schedule import Admission, Cadence, WhenFailed, lost, rule_of
from ckptd.errors import CkptdError, UsageError
from ckptd.events.bus import phase
from ckptd.events.metrics import Metrics

if TYPE_CHECKING:
    from ckptd.checkpoint.save.client import WriterClient
    from ckptd.checkpoint.torch.layouts import LayoutSpec, NoLayout
    from ckptd.checkpoint.torch.loader import Loader, LoadReport
    from ckptd.checkpoint.torch.nearby import Nearby

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function`, and what it calls, as it is; the graph around it breaks at the call."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return cast(R, disabled[0](*args, **kwargs))

    # What torch.compiler.disable puts there: the caller's graph breaks before this is looked into.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    with suppress(
        AttributeError, KeyError, TypeError
    ):  # private: without it this frame is compiled once
        skip: Callable[[object], None] = vars(torch._C._dynamo.eval_frame)["skip_code"]
        skip(vars(types.FunctionType)["__code__"].__get__(call))
    return call


_log = logging.getLogger("ckptd")
_END_S = 5.0
"""For a writing process that has nothing to write any more, in seconds."""
_COPY_S = 0.3
"""For a copy within this machine that is under way; longer, and the snapshot is not sealed."""


class Checkpointer(OfOneProcess):
    """Saves and loads a training state at one root.

    Every rank of the process group makes one, with the same arguments, and makes the same calls
    in the same order. Without ``torch.distributed`` it serves a job of one rank.

    Parameters
    ----------
    url
        The root: a path, ``s3://bucket/prefix``, ``memory://name``, or any fsspec URL.
    every
        When a save is due; an int means steps. The handle that `save` returns is false when it is
        not. None: always.
        `Auto` chooses. See ``docs/guide/cadence.md``.
    tiers
        Nearer places for snapshots: ``[ckptd.Memory(), ckptd.Peer(), ckptd.Local("/nvme/run")]``,
        each with a rule of its own (``ckptd.Memory(every=1)``), else that of the root. They are
        kept by the node's agent, a process that outlives the trainers. See
        ``docs/guide/tiers.md``.
    when_failed
        ``"raise"``: a save that failed on the root is raised by the next call. ``"warn"``: it is
        logged, counted and shown by its handle, training goes on, and `close` raises it only where
        it was the last one to the root. Near tiers never raise.
    keep
        What to keep; an int means the newest so many. None keeps everything.
    process_group
        The ranks that share the state; the default group when None. Jobs that are several (actor,
        critic, rollout) make one checkpointer a group.
    new_run
        What a first save without a load does at a root that has a checkpoint. None refuses it (kind
        ``not-loaded``): the load was forgotten, or the root is another run's. True begins a new
        line; what is there stays, beside the line, and no `keep` deletes it. False continues the
        newest line though nothing was loaded, and `keep` counts what is on it.
    timeout_s
        For one save, from the call to the commit, and for ranks to wait for one another, seconds.
    store_options
        For the store: endpoint, keys, region.
    layout
        What rank-local tensors of the state are parts of, in Lay: a file (``job.lay:mg``), the
        name of a shipped layout, or a program as text. Without one plain tensors are the same on
        all ranks that have them. See ``docs/guide/layouts.md``.
    storage
        How the root stores: `Storage(throttle=, compress=, dedup=)`.
    copy
        How state is copied, late or at once: `CopyOptions(lazy=, slots=, when_full=, debug=)`.
    preemption
        Signals that ask for a save, and the time that is left then: `Preemption(signals=,
        grace_s=)`. True is SIGTERM and 30 s. None: no handler is touched.
    sign
        File of a private key (PEM, mode 0600), on every node: each commit to the root is signed by
        it. Such a save refers to no older checkpoint. See ``docs/guide/signatures.md``.
    trust
        Files of public keys (PEM). Nothing is loaded but what one of them has signed. None: those
        that ``CKPTD_TRUST`` names, if any.

    Examples
    --------
    >>> with ckptd.Checkpointer("ckpts", every=100, keep=3) as ck:
    ...     start = ck.load(state) if ck.latest() is not None else 0
    ...     for step in range(start + 1, 1001):
    ...         train_one_step()
    ...         ck.save(step, state)
    """

    inert = frozenset({"close", "abandon", "before_mutation", "__exit__"})

    @no_collection()  # of all that torch is, which what is imported here would set off
    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        every: int | Every | Auto | None = None,
        tiers: Sequence[Tier] = (),
        when_failed: WhenFailed = "raise",
        keep: int | Keep | None = None,
        process_group: Any = None,
        new_run: bool | None = None,
        timeout_s: float = 1800.0,
        store_options: Mapping[str, Any] | None = None,
        layout: LayoutSpec | None = None,
        storage: Storage | None = None,
        copy: CopyOptions | None = None,
        preemption: Preemption | bool | None = None,
        sign: str | os.PathLike[str] | None = None,
        trust: Trust | None = None,
    ) -> None:
        self._closed = self._ended = True  # until all of it is there
        storage = given("storage", storage, Storage)
        copy = given("copy", copy, CopyOptions)
        stopping = preemption_of(preemption)
        rule = rule_of(every)
        self._spec = root_spec(url, store_options, storage.throttle, storage.compress)
        self._sign = "" if sign is None else signing_key(sign)
        self._trust = trust
        trusted = trusting(self._spec, trust)
        if tiers and is_trusting(trusted):
            raise UsageError(
                "snapshots of near tiers are not signed: none could be loaded",
                where="tiers",
                wanted="no tiers where only signed checkpoints are loaded",
            )
        self._store = trusted.open()
        self._keep = Keep.of(keep) if keep is not None else None
        self._board = board_of(process_group, timeout_s)
        self._timeout_s = timeout_s
        agreement = self._agreement = Agreement(self._board, timeout_s)
        skips = copy.when_full == "skip"
        self._admission = Admission(self._board, timeout_s) if skips else None
        catalogue = self._catalogue = Catalogue(self._store)
        self._tier = root_tier(self._store, [t.name for t in tier_specs(tiers)])
        self._metrics = Metrics()
        self._lineage = Lineage(catalogue, agreement, new_run=new_run)
        self._last_on_root: int | None = None
        self._ranks = global_ranks(process_group)
        laid: NoLayout | None = None
        self._nearby: Nearby | None = None
        if layout is not None:
            from ckptd.checkpoint.torch.layouts import layout_of

            laid = layout_of(layout, agreement)
        if tiers:
            from ckptd.checkpoint.torch.nearby import near_tiers

            self._nearby = near_tiers(tiers, self._store, agreement)
        self._slots = copy.slots
        self._client: WriterClient | None = None
        self._handles: list[SaveTracker] = []
        self._logged: list[SaveTracker] = []
        self._newest: SaveTracker | None = None
        self._poisoned: CkptdError | None = None
        self._metadata_seen: tuple[tuple[str, type], ...] | None = None
        one_of("when_failed", when_failed, get_args(WhenFailed))
        self._when_failed = when_failed
        self._grace_s = stopping.grace_s
        self._job = job_of(self, self._board, stopping.signals, new_run=new_run is True)
        self._watch = self._job.watch
        self._cadence = Cadence(
            rule, agreement, self._watch, lambda: recent(catalogue), near=bool(tiers)
        )
        # Starting the writing process now hides its start-up behind what this one has to import,
        # and behind the first training steps. Where there is a root, a load may come, which it
        # would keep from the processor: then it starts behind that.
        begun = not tiers and os.path.exists(os.path.join(self._store.url, ROOT_MARKER))
        client = None if begun else self._start_client()
        try:
            from ckptd.checkpoint.load import opening  # noqa: F401 - of the first claim
            from ckptd.checkpoint.torch.layouts import NoLayout
            from ckptd.checkpoint.torch.saver import Saver

            self._layout = laid or NoLayout()
            self._saver = Saver(
                agreement,
                self._ranks,
                timeout_s,
                self._layout,
                copy=copy,
                refer=storage.dedup and not self._sign,
            )
        except BaseException:  # an interrupt
            if client is not None:
                client.leave()
            raise
        self._closed = self._ended = False

    # -- saving ----------------------------------------------------------------------------------

    @uncompiled
    @one_at_a_time
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> SaveHandle:
        """Save `state` as `step`, if it is due.

        Returns once copies are begun (see `CopyOptions`): optimizers may step at once, and wait by
        themselves. Call `before_mutation` before changing parameters or optimizer state in any
        other way. Writing and committing go on in another process. Waits while no slot is free.

        Parameters
        ----------
        step
            Completed steps; later than the last one saved or loaded. An earlier one is refused,
            also where nothing is due: count on through epochs.
        state
            Any nesting of dicts and lists of tensors, DTensors, modules, optimizers, schedulers,
            loaders, `ckptd.PerRank`, `ckptd.Rng` and plain values.
        metadata
            JSON values kept in the commit record: metrics for ``keep``, tags; 256 KiB at most.
            A tensor or an array of one number is that number. Rank 0's count; what cannot be kept
            is refused where nothing is due as well.
        force
            Save even if `every` says that nothing is due (on every rank alike).

        Returns
        -------
        SaveHandle
            False (``if handle:``) when nothing was due, or it was skipped: its phase is then the
            reason, and its `durable` returns at once.

        Raises
        ------
        CkptdError
            This save cannot begin; or an earlier one failed, and was not raised or looked at yet.
        UsageError
            Kind ``under-way``: it is called within another call, in a signal handler, a destructor
            or another thread. Kind ``forked``: in a child of the process that made this.
        """
        begun_ns = time.monotonic_ns()
        step = check_step(step)
        not_at_exit("save")
        self._check_open()
        self._lineage.follow(step)
        began = time.monotonic()
        # First, so that ranks count alike also where an earlier failure is raised on one of them.
        root = self._cadence.due(step, self._last_on_root)
        forced = force or self._cadence.urgent
        near = () if self._nearby is None else self._nearby.rules.due(step, root, forced=forced)
        self._raise_unseen()
        root = root or forced
        if not root and not near:
            # What this loop gives at the save that is due would be found hours from now.
            self._check_metadata(metadata)
            return SaveHandle.unsaved(step, self._lineage.generation, "not-due")
        admission = None if forced else self._admission
        if admission is not None and not admission.grants(step, self._start_client().busy):
            skipped = events.SaveId(step, self._lineage.generation, "", self._board.rank)
            events.emit(
                events.SaveSkipped(
                    **skipped.fields(), at_ns=events.now_ns(), reason="no slot is free"
                )
            )
            return SaveHandle.unsaved(step, self._lineage.generation, "skipped")
        self._lineage.claim_for_save(step)
        attempt = self._lineage.next_attempt()
        name = CommitName(step, self._lineage.generation)
        with self._saving(name, attempt, begun_ns):
            from ckptd.checkpoint.save.messages import SaveRequest

            client = self._connect()
            wanted = SaveRequest(
                step,
                name.generation,
                attempt,
                client.next_job(),
                keep=self._keep,
                timeout_s=self._timeout_s,
                near=near,
                root=root,
                root_id=self._lineage.root_id,
                claim_id=self._lineage.claim_id,
                sign=self._sign,
            )
            goes_on = self._when_failed == "warn" or not root
            handle = self._saver.save(client, state, wanted, metadata or {}, goes_on=goes_on)
        self._lineage.last_step = step
        self._job.saving(handle)
        if self._nearby is not None:
            self._nearby.rules.saved(step, near)
        if root:
            self._last_on_root, self._newest = step, handle
            self._cadence.saved(handle, time.monotonic() - began)
        self._handles = [h for h in self._handles if not (h.done and not h.error_unseen)]
        self._handles.append(handle)
        return handle

    @contextmanager
    def _saving(self, name: CommitName, attempt: str, since_ns: int) -> Iterator[None]:
        """Name the save that the code within makes; the call began at `since_ns` (monotonic)."""
        with (
            events.about(tier=self._tier),
            saving(self._store, name, attempt, self._board.rank),
            events.span("call", since_ns=since_ns),
        ):
            save = events.SaveId(name.step, name.generation, attempt, self._board.rank)
            at_ns = events.now_ns() - (time.monotonic_ns() - since_ns)
            events.emit(events.SaveBegun(**save.fields(), at_ns=at_ns))
            yield

    @uncompiled
    @one_at_a_time
    def change_layout(self, layout: LayoutSpec) -> None:
        """Save and load by another layout from now on; every rank calls it between the same saves.

        Checkpoints that were saved before keep the program that they were saved by.
        `ckptd.ExpertMove` calls it for the checkpointer that it is given.

        Raises
        ------
        UsageError
            kind ``lay-use``: this checkpointer was made without a layout, or the program is for
            another number of ranks; ``lay-syntax``, ``lay-rule``: it is no program.
        """
        self._layout.change(layout)

    def refuse_saves(self, error: CkptdError) -> None:
        """Have each save raise `error` until a load: the state is that of no step.

        `ckptd.ExpertMove` calls it where a move breaks off.
        """
        self._poisoned = error

    @uncompiled
    def before_mutation(self) -> None:
        """Return when everything of the last save is copied, and may change.

        Optimizers of the saved state call it before they step. Call it before anything else that
        changes their parameters: pruning, resets, averaging into the model, a replayed CUDA graph.

        Copies from a CUDA device are waited for by its current stream, not by the host: call it
        under the stream that makes the change.

        Raises
        ------
        UsageError
            Kind ``under-way``: it is called within `save`, in a signal handler or another thread.
        """
        not_within(self, "save", "before_mutation")
        self._saver.gate.wait()

    # -- loading ---------------------------------------------------------------------------------

    @functools.cached_property
    @no_collection()
    def _loader(self) -> Loader:
        from ckptd.checkpoint.torch.loader import Loader  # a third of all that this one imports

        return Loader(
            self._catalogue,
            self._agreement,
            self._ranks,
            self._timeout_s,
            self._layout,
            None if self._nearby is None else self._nearby.sources,
            self._snapshot,
            self._saver.is_locked,
        )

    @uncompiled
    @one_at_a_time
    def latest(self) -> int | None:
        """Return the newest step of the line, or None; the same on every rank.

        A snapshot that near tiers hold whole counts as a checkpoint does.
        """
        self._check_open()
        if self._nearby is not None:
            self._connect()
            step = self._loader.newest()
        else:
            step = getattr(self._lineage.newest(), "step", None)
        if step is None:
            self._job.begins(self._store)
        return step

    @uncompiled
    @one_at_a_time
    def load(
        self,
        state: Mapping[str, Any],
        step: int | str | None = None,
        *,
        strict: bool = True,
        only: str | Iterable[str] | Callable[[str], bool] | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        weights_only: bool = False,
        device: Any = None,
        progress: Callable[[int, int], None] | None = None,
        source: str | os.PathLike[str] | None = None,
        source_layout: LayoutSpec | None = None,
        allow: Literal["layout"] | None = None,
    ) -> int:
        """Load a checkpoint into `state`, in place, from any layout to any layout.

        Tensors are filled by copy, plain values are replaced in their containers, optimizers that
        have not stepped get their state, modules on the meta device get memory. Every digest is
        verified on every rank before anything is written. Afterwards this job continues from that
        checkpoint: a new generation is claimed, and later commits of others leave the line. After
        `weights_only` or `only` that waits for the first save: a program that evaluates beside a
        job that trains takes nothing from it.

        Parameters
        ----------
        step
            Which step, or the name that `tag` gave one; None takes the newest, and falls back
            to older ones where it is corrupt.
        strict
            False: what is missing on either side is reported, and the rest is loaded.
        only
            Names to load (shell patterns, or a function of the name); the rest of `state` stays.
        rename
            Live name to saved name: a table or a function.
        weights_only
            Load parameters and buffers of modules, nothing else.
        device
            Where modules on the meta device get their memory.
        progress
            Called with ``(bytes done, bytes in all)``.
        source
            Read this instead of the root: another root, or a folder or file of any format that
            `ckptd inspect` reads. It is only read, and this job's line does not continue from it.
            Where it has names of weights alone, they are those of the one module they fit.
        source_layout, allow
            The layout of a checkpoint that was saved without one; needs a checkpointer with one.
            With ``allow="layout"`` it may contradict the program that the checkpoint keeps.

        Returns
        -------
        int
            The step. `last_load` tells the rest.

        Raises
        ------
        NotFoundError
            There is no checkpoint, or not this one.
        MismatchError
            Names, shapes or dtypes differ: one error lists all of them. Or kind ``lay-fit``.
        CorruptError
            Verification failed; `state` is untouched unless the error says otherwise.
        """
        step = step if step is None or isinstance(step, str) else check_step(step)
        not_at_exit("load")
        self._check_open()
        self._wait(None)
        if self._nearby is not None:
            self._connect()
        self._loader.writing = False
        try:
            with nullcontext() if source is None else self._elsewhere(source, step) as elsewhere:
                report = self._loader.load(
                    state,
                    step,
                    strict=strict,
                    only=only,
                    rename=rename,
                    weights_only=weights_only,
                    device=device,
                    progress=progress,
                    source_layout=source_layout,
                    allow=allow,
                    elsewhere=elsewhere,
                )
            self._poisoned = None
            self._last_load = report
            if source is None:
                self._loaded(report, partly=weights_only or only is not None)
        except CkptdError as error:
            if error.state_corrupted:
                self._poisoned = error
            raise
        except BaseException as error:  # an interrupt
            if self._loader.writing:
                message = f"a load was left: {error!r}"[:500]
                self._poisoned = CkptdError(message, kind="crashed")
            raise
        return report.step

    @contextmanager
    def _elsewhere(
        self, source: str | os.PathLike[str], step: int | str | None
    ) -> Iterator[Catalogue]:
        """Give another root, or a foreign checkpoint as one, on every rank for the block."""
        from ckptd.checkpoint.load.opening import opened

        with ExitStack() as stack:
            number = step if isinstance(step, int) else 0
            there = opened(os.fspath(source), number, like=self._spec, trust=self._trust)
            yield self._agreement.on_every_rank(lambda: stack.enter_context(there))

    def _snapshot(self, step: int, generation: int, attempt: str) -> memoryview | None:
        client = self._client
        return None if client is None else client.snapshot(step, generation, attempt)

    def _loaded(self, report: LoadReport, *, partly: bool) -> None:
        """Go on from what was loaded."""
        loaded = CommitName(report.step, report.generation)
        unclaimed = self._lineage.claim_for_load(
            loaded, committed=not report.snapshot, at_once=not partly
        )
        if unclaimed:
            report = msgspec.structs.replace(report, warnings=(*report.warnings, unclaimed))
        self._cadence.loaded(report.step)
        if self._nearby is not None:
            self._nearby.rules.loaded(report.step)
        self._last_on_root = report.step
        self._last_load = report
        self._job.loaded(report.step)
        if not partly:
            # A job that goes on from here saves as much, and its first save waits for no memory.
            with suppress(OSError):  # that save tries again to start a process
                self._start_client().prepare(self._loader.share_bytes)

    @property
    def last_load(self) -> LoadReport | None:
        """The report of the last load that succeeded."""
        return getattr(self, "_last_load", None)

    # -- the rest --------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The claimed generation; 0 before the first save or load."""
        return self._lineage.generation

    @property
    def stop_requested(self) -> bool:
        """Whether to end the loop: a signal to stop came, and `save` has answered it.

        Changes only in `save`, at the same call on every rank.
        """
        return self._cadence.stop_requested

    @property
    def cadence(self) -> IntervalChoice | None:
        """The interval that `Auto` chose, and why; ``str()`` is a sentence.

        None before the first save is durable, with other rules, and on ranks that do not decide.
        """
        return self._cadence.choice

    @property
    def skipped(self) -> int:
        """Saves that were due and skipped, with ``CopyOptions(when_full="skip")``."""
        return 0 if self._admission is None else self._admission.skipped

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writing process (this process for in-process stores)."""
        return self._client.pid if self._client and self._client.pid > 0 else None

    def metrics_text(self) -> str:
        """Return this process's counters of saves and loads, in Prometheus's text format.

        The names are in ``docs/reference/metrics.md``.

        Raises
        ------
        UsageError
            kind ``missing-package``: the extra ``metrics`` is not installed.
        """
        return self._metrics.text()

    @one_at_a_time
    def annotate(self, step: int | str, metadata: Mapping[str, Any]) -> None:
        """Add to the metadata of a checkpoint, as an evaluation does; rank 0 does it.

        Values are those of `save`. A key that is there gets the new value; nothing else of the
        checkpoint changes. Any process may do so at any time, also while the job trains; ``keep``
        takes the newest value. Durable on return.

        Raises
        ------
        NotFoundError
            The step is not committed (yet: wait for its handle), or is just being deleted.
        """
        self._at_root(lambda c: c.annotate(c.find(step), metadata))

    @one_at_a_time
    def tag(self, step: int | str, name: str) -> None:
        """Give a checkpoint a name, by which `load` takes it; rank 0 does it.

        A name that another checkpoint has moves to this one, at one moment. What has a name is
        never deleted. Durable on return.

        Raises
        ------
        NotFoundError
            The step is not committed (yet: wait for its handle), or is just being deleted.
        UsageError
            It is no name: a letter, then at most 63 letters, digits, dots, ``-`` and ``_``.
        """
        self._at_root(lambda c: c.tag(c.find(step), name))

    @one_at_a_time
    def untag(self, name: str) -> None:
        """Take a name away that `tag` gave."""
        self._at_root(lambda c: c.untag(name))

    @one_at_a_time
    def pin(self, step: int | str, reason: str = "") -> None:
        """Keep a checkpoint for ever; rank 0 does it."""
        self._at_root(lambda c: c.pin(c.find(step), reason))

    @one_at_a_time
    def unpin(self, step: int | str) -> None:
        """Undo `pin`."""
        self._at_root(lambda c: c.unpin(c.find(step)))

    def _at_root(self, act: Callable[[Catalogue], Any]) -> None:
        """Have rank 0 do something at the root; an error is raised on every rank."""
        self._check_open()

        def run() -> None:
            self._catalogue.open()
            act(self._catalogue)

        self._agreement.on_rank_zero("catalogue", run)

    @uncompiled
    @one_at_a_time
    def wait(self, timeout: float | None = None) -> None:
        """Return when every save so far is durable.

        Raises
        ------
        DeadlineError
            `timeout` seconds passed.
        CkptdError
            The first save that failed, unless it was raised or looked at already; with
            ``when_failed="warn"`` the newest one to the root, if that failed.
        """
        self._wait(timeout)

    @phase("ckpt")
    def _wait(self, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        failed: list[SaveTracker] = []
        for handle in self._handles:
            left = None if end is None else max(0.0, end - time.monotonic())
            new = handle.failure is None or handle.error_unseen
            try:
                handle._wait(("durable",), left)
            except CkptdError:
                if not handle.done:
                    raise
                failed += [handle] if new else []
        self._handles = []
        self._saver.gate.wait()  # a save that failed may still be copied
        if self._when_failed == "warn":
            for handle in failed:
                self._log_failed(handle)
            # A root that recovered has what the failed ones would have given it.
            failed = [h for h in failed if h is self._newest]
        if failed and (error := failed[0].failure) is not None:
            error.add_note(f"the save of step {failed[0].step}")
            raise error

    @uncompiled
    @one_at_a_time
    @phase("ckpt")
    def close(self) -> None:
        """Wait for every save, end the writing process, raise what failed unseen. Idempotent.

        After a signal to stop it waits no longer than the scheduler does.

        Raises
        ------
        DeadlineError
            Kind ``grace``: that was not enough. The writing process goes on, if it may live.
        CkptdError
            The first save that failed, unless it was raised or looked at already.
        """
        if self._closed or self._job.is_interrupted():
            return self._abandon()
        end = time.monotonic() + self._timeout_s
        late = False
        try:
            late = not self._settle(end) and self._watch.stop_at is not None
            if late:
                raise lost(self._handles, self._cadence.durable_step(), self._grace_s)
            self._wait(max(0.0, end - time.monotonic()))
        finally:
            try:
                if not self._job.is_interrupted():
                    self._closed = True
                    self._finish(None if late else max(_END_S, self._time_left(end)))
                    self._job.closed(self)
            finally:
                self._abandon()  # what an interrupt left out

    def _finish(self, wait_s: float | None) -> None:
        """Close everything; wait for the writing process, or with None let it end by itself."""
        self._watch.close()
        self._saver.close()
        if self._nearby is not None:
            self._nearby.close()
        if self._client is not None and wait_s is not None:
            self._client.close(wait_s)
        self._store.close()
        self._metrics.close()
        self._ended = True

    @one_at_a_time
    def abandon(self) -> None:
        """Release everything without a wait for other ranks, as a process that dies does.

        What near tiers have complete stays there; saves under way end as they may. Agents that keep
        snapshots take this life of the job to be over, and await the next one. Idempotent.
        """
        self._abandon()

    @whole
    def _abandon(self) -> None:
        if self._ended:
            return
        self._closed = True
        self._watch.close()
        self._saver.leave(_COPY_S)
        if self._client is not None:
            self._client.leave()
        if self._nearby is not None:
            self._nearby.close()
        self._store.close()
        self._metrics.close()
        self._handles = []
        self._ended = True
        self._job.closed(self)

    def _settle(self, end: float) -> bool:
        """Wait until every save has ended; a signal to stop may shorten the time meanwhile."""
        for handle in self._handles:
            while (left := self._time_left(end)) > 0.0 and not handle.wait_done(min(left, 1.0)):
                pass
        return all(h.done for h in self._handles)

    def _time_left(self, end: float) -> float:
        stop_at = self._watch.stop_at
        end = end if stop_at is None else min(end, stop_at + self._grace_s)
        return max(0.0, end - time.monotonic())

    def __repr__(self) -> str:
        at = f"generation {self.generation}, step {self._lineage.last_step}"
        state = "closed" if self._closed else at if self.generation else "nothing saved or loaded"
        board = self._board
        where = f"{self._store.url!r}, rank {board.rank} of {board.world}"
        return f"<ckptd.Checkpointer {where}: {state}>"

    def _repr_html_(self) -> str:
        """Show a notebook what the root has; asks no other rank."""
        from ckptd.checkpoint.torch.notebook import shown

        return shown(repr(self), None if self._closed else Index(self._store))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return self.close()
        if launched.current is not None:  # the program goes on in this process
            return self.abandon()  # the saves may wait for ranks that have left
        try:
            self.close()
        except CkptdError as second:
            # The body's own error is the one to see; this one must not be lost either.
            error.add_note(f"besides, a save failed: {second.message}")

    def _check_metadata(self, metadata: Any) -> None:
        """Refuse what could not be kept, once for each kind of values; on rank 0, whose count."""
        if self._board.rank or not metadata:
            return
        kinds = None
        if isinstance(metadata, Mapping):
            kinds = tuple((key, type(value)) for key, value in metadata.items())
        if kinds is None or kinds != self._metadata_seen:
            checked_metadata(metadata, numbers=False)
            self._metadata_seen = kinds

    def _start_client(self) -> WriterClient:
        if self._client is not None and self._client.dead is None:
            return self._client
        if self._client is not None:
            self._client.close(1.0)
        from ckptd.checkpoint.save.client import WriterClient

        in_process = None if self._store.capabilities.shared else self._spec.open()
        board = self._board.clone() if isinstance(self._board, JobBoard) else self._board
        with self._watch.held():
            agent = None if self._nearby is None else self._nearby.agent
            self._client = WriterClient(self._spec, board, in_process, self._slots, agent)
        return self._client

    def _connect(self) -> WriterClient:
        """Return the client of a writing process; its agent has the address of its peer."""
        client = self._start_client()
        if self._nearby is not None:
            self._nearby.exchange(client)
        return client

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this checkpointer is closed", kind="closed")

    def _raise_unseen(self) -> None:
        if (broken := self._poisoned) is not None:
            raise type(broken)(
                "an earlier call failed, so the state is inconsistent",
                kind=broken.kind,
                where=broken.where,
                found=broken.message,
                hint="load again, then save",
            ) from broken
        for handle in self._handles:
            if handle.error_unseen and self._when_failed == "warn":
                self._log_failed(handle)
            elif (failed := handle.take_unseen_error()) is not None:
                raise failed

    def _log_failed(self, handle: SaveTracker) -> None:
        """Log once that a save failed while training goes on."""
        if handle not in self._logged:
            self._logged.append(handle)
            _log.error("step %d was not saved: %s", handle.step, handle.failure)
