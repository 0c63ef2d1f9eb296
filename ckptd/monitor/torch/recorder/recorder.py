"""`Recorder`: attaches, chooses a source, steps and phases, forks, generations, stepping aside.

In it: ``attach`` and ``detach``, hints where the rank is unknown; which folder rings lie in.

Nothing here changes what the watched program computes, in which order, or which errors it sees.
What fails in the recorder itself makes it step aside, with one line in the log and a word in the
ring; the program goes on unwatched.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptd.base.runtime.agentlink import run_folder
from ckptd.base.runtime.host import node_name
from ckptd.errors import StoreError, UsageError
from ckptd.events import bus
from ckptd.monitor.injection import attach_now as attach_now
from ckptd.monitor.job import Phase
from ckptd.monitor.ring import RecorderState, RingIdentity, RingWriter, text_hash
from ckptd.monitor.samples import SampleKind, SampleWriter, samples_path
from ckptd.monitor.torch.recorder.cost import call_cost
from ckptd.monitor.torch.recorder.counters import CounterSource
from ckptd.monitor.torch.recorder.finite import FiniteCheck
from ckptd.monitor.torch.recorder.finite import wanted as finite_wanted
from ckptd.monitor.torch.recorder.hook import no_call_under_way
from ckptd.monitor.torch.recorder.joining import attach_when_joined
from ckptd.monitor.torch.recorder.making import Making
from ckptd.monitor.torch.recorder.native import NativeSource
from ckptd.monitor.torch.recorder.pulse import RingPulse
from ckptd.monitor.torch.recorder.python import PythonSource
from ckptd.monitor.torch.recorder.sources import MakeSource, Source, wanted

_log = logging.getLogger("ckptd.monitor")


_SOURCES: dict[str, MakeSource] = {
    "native": NativeSource,
    "python": PythonSource,
    "counters": CounterSource,
}


class Recorder:
    """Records the calls of this process into `ring`.

    Attributes
    ----------
    ring
        Where it writes.
    """

    def __init__(self, ring: RingWriter) -> None:
        self.ring = ring
        self._samples: SampleWriter | None = None
        self._on = False
        self._source: Source | None = None
        self._pulse = RingPulse(ring, self._beat, self.aside)
        self._making = Making(ring, self.aside)
        self._finite = FiniteCheck(ring) if finite_wanted() else None
        self._aside = False
        self._by_hand = False
        self._settled = self._told_only = False
        """Whether a checkpointer has told a step; and whether only its numbers count since."""
        self._optimizer: weakref.ref[Any] | None = None
        self._optimizer_hook: Any = None

    @property
    def on(self) -> bool:
        """Whether it records; false once it has stepped aside or ended."""
        return self._on

    @property
    def source(self) -> str:
        """How it hears of calls: ``native``, ``python``, ``counters``, or nothing."""
        return "" if self._source is None else self._source.name

    def samples(self) -> SampleWriter:
        """Return where samples of this rank go, made with the first; StoreError: no room."""
        if self._samples is None:
            self._samples = SampleWriter(samples_path(self.ring.path), self.ring.identity)
        return self._samples

    # --- life -----------------------------------------------------------------------------------

    def start(self, names: Sequence[str] = tuple(_SOURCES)) -> None:
        """Use the first source whose self-test says that it works here, else step aside."""
        failed: Exception | None = None
        try:
            failed = self._choose(names)
            self._optimizer_hook = register_optimizer_step_post_hook(self._optimizer_stepped)
            self._pulse.start()
            self._making.install()
        except Exception as error:  # noqa: BLE001 - a PyTorch that is too different, in whatever way
            failed = error
        if self._source is None or self._optimizer_hook is None:
            self.aside(failed or RuntimeError("no way to record collectives works here"))
            self._unhook()
            return
        self._on = True
        self.ring.state(self._source.state)

    def _choose(self, names: Sequence[str]) -> Exception | None:
        failed: Exception | None = None
        for name in names:
            try:
                cost = call_cost(_SOURCES[name], self.ring)
                source = _SOURCES[name](self.ring, self.aside)
                source.start()
                if self._finite is not None:
                    source.look(self._finite)
            except Exception as error:  # noqa: BLE001 - the next one may work
                failed = error
                _log.info("collectives are not recorded by way of %s: %r", name, error)
            else:
                self._source = source
                self.ring.cost(cost)
                return None
        return failed

    def _beat(self) -> None:
        if self._source is not None and self._on:
            self._source.beat()

    def stop(self) -> None:
        """End recording and take all hooks away; the ring stays and says so. Harmless again."""
        was_on, self._on = self._on, False
        self._unhook()
        if was_on:
            self.ring.phase = Phase.EXIT
            self.ring.state(RecorderState.OFF)

    def silence(self) -> None:
        """Write nothing any more; hooks stay, and let everything through."""
        self._on = self._making.on = False
        if self._source is not None:
            self._source.silence()

    def leave_alone(self) -> None:
        """Stop recording in a forked child: the ring is its parent's."""
        self.silence()
        self._pulse.forget()

    def aside(self, error: BaseException) -> None:
        """Record nothing any more, and say so once."""
        self.silence()
        if self._aside:
            return
        self._aside = True
        self.ring.state(RecorderState.ASIDE)
        _log.warning("collectives are not recorded any more: %r", error, exc_info=error)

    def _let_go(self) -> None:
        """Take the hooks in Python of a recorder that stepped aside away, once it is safe.

        They cost each call something as they let it through; the others' hooks do not.
        """
        source = self._source
        if not isinstance(source, PythonSource) or not no_call_under_way(self._pulse.threads):
            return
        self._source = None
        try:
            source.stop()
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            _log.warning("hooks could not be removed: %r", error, exc_info=error)

    def _unhook(self) -> None:
        self._pulse.stop()
        self._making.remove()
        if self._source is not None:
            self._source.stop()
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
            self._optimizer_hook = None

    def regroup(self, generation: int, rank: int, world: int) -> Recorder | None:
        """Begin a new ring, as this process goes on as a rank of another generation.

        To be called between the generations, when the process groups of the old one are destroyed
        and those of the new one are not made. The old ring is removed: its calls are over, and
        a reader takes the new ring for another life of the job. What fails in the recorder
        makes it step aside, as everywhere.

        Parameters
        ----------
        generation, rank, world
            What this process is from now on; a rank below `world`.

        Returns
        -------
        Recorder or None
            The new recorder; None where there is no room for another ring: the program then goes
            on unwatched, and the log says so.
        """
        detach()
        old = self.ring.path
        # A reader must never find both: one process is one rank.
        with suppress(OSError):
            old.unlink()
        identity = replace(self.ring.identity, generation=generation, rank=rank, world=world)
        try:
            new = _begin(old.parent, identity, wanted())
        except StoreError as error:
            _log.warning("collectives are not recorded any more: %s", error)
            return None
        new._by_hand = self._by_hand
        new._settled, new._told_only = self._settled, self._told_only
        return new

    # --- steps and phases -----------------------------------------------------------------------

    def step(self, number: int) -> None:
        """Say that step `number` begins. Steps of an optimizer do not count by themselves then."""
        if not self._by_hand:
            self._by_hand = True
            self.ring.counted(False)
        if self._on:
            self._step(number)
        elif self._aside:
            self._let_go()

    def at_step(self, number: int) -> None:
        """Say that step `number` was loaded or is saved: steps of an optimizer count from there.

        Where the program counts otherwise than its optimizer does (epochs, say), only the numbers
        given here count from then on.
        """
        if self._by_hand or not self._on:
            return
        try:
            before = self.ring.current_step
            self._told_only |= self._settled and number < before
            if self._finite is not None and number < before and self._finite.forget():
                self.samples().add(SampleKind.NOT_FINITE, 0, 0, number, 0)
            self._settled = True
            if number != before:
                self.ring.step(number)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self.aside(error)

    def _step(self, number: int) -> None:
        if self.ring.phase is Phase.INIT:
            self.ring.phase = Phase.TRAIN
        self.ring.step(number)

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the steps of the first optimizer, for programs that do not say."""
        if self._aside:
            self._let_go()
        if not self._on:
            return
        try:
            self._check(optimizer)
            if self._by_hand or self._told_only:
                return
            if self._optimizer is None or self._optimizer() is None:
                self._optimizer = weakref.ref(optimizer)
            if self._optimizer() is optimizer:
                self.ring.counted(True)
                self._step(self.ring.current_step + 1)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self.aside(error)

    def _check(self, optimizer: Any) -> None:
        """Write down the first call with a NaN, if this step has spoiled the model with it."""
        finite = self._finite
        if finite is None:
            return
        finite.ahead = not self._by_hand and not self._told_only
        first = finite.stepped(optimizer)
        if first is not None:
            seq = first.seq & 0xFFFFFFFF
            value = seq << 32 | self.ring.text(first.what)
            self.samples().add(SampleKind.NOT_FINITE, first.group, 0, first.step, value)

    @contextmanager
    def phase(self, phase: Phase | str) -> Iterator[None]:
        """Be in `phase` within the block, then again in the one before."""
        phase = _named(phase)
        before = self.ring.phase
        if self._on:
            self.ring.phase = phase
        try:
            yield
        finally:
            if self._on:
                self.ring.phase = before


_current: Recorder | None = None
_told_of_forks = False


def recorder() -> Recorder | None:
    """Return the recorder of this process, if it has one."""
    return _current


def attach(folder: str | os.PathLike[str] | None = None, *, job: str | None = None) -> Recorder:
    """Begin to record the collectives of this rank; return the recorder, the same if called again.

    Best called before `init_process_group`. Groups that have made calls already are
    counted from here on: ranks that call it at another point of the program than the rest are not
    compared with those in such groups. ``CKPTD_RECORDER`` chooses how calls are recorded:
    ``auto``, ``native``, ``python``, ``counters``, or ``off``.

    Parameters
    ----------
    folder
        Where the ring lies. By default ``CKPTD_RINGS``, or ``rings`` in the folder for sockets.
    job
        Name of the job; by default ``CKPTD_JOB``.

    Raises
    ------
    UsageError
        There is no process group yet, and ``RANK`` and ``WORLD_SIZE`` do not name this rank. Or
        ``CKPTD_RECORDER`` says what there is not.
    StoreError
        kind ``no-space``: no room for the ring.
    """
    if _current is not None:
        return _current
    sources = wanted()
    identity = _identity(os.environ.get("CKPTD_JOB", "") if job is None else job)
    return _begin(_folder(folder), identity, sources)


def _begin(folder: Path, identity: RingIdentity, sources: Sequence[str]) -> Recorder:
    global _current, _told_of_forks
    name = f"{text_hash(identity.job):08x}-{identity.rank}-{os.getpid()}.ring"
    _current = new = Recorder(RingWriter(folder / name, identity))
    if sources:
        new.start(sources)
    atexit.register(detach)
    bus.listen(new)
    if not _told_of_forks:
        _told_of_forks = True
        os.register_at_fork(after_in_child=_leave_alone)
    return new


def _leave_alone() -> None:
    if _current is not None:
        _current.leave_alone()


def attach_when_known() -> None:
    """Attach now if the environment says which rank this is, else once a group has been joined.

    Not at all with ``CKPTD_RECORDER=off``. Raises `UsageError` if that says something else.
    """
    if not wanted():
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        attach()
        return
    attach_when_joined()


def detach() -> None:
    """End recording; harmless without a recorder. The ring stays for its readers."""
    global _current
    current, _current = _current, None
    if current is not None:
        atexit.unregister(detach)
        bus.listen(None)
        current.stop()


def step(number: int) -> None:
    """Say that training step `number` begins; does nothing where nothing is recorded."""
    if _current is not None:
        _current.step(number)


@contextmanager
def phase(phase: Phase | str) -> Iterator[None]:
    """Say what the rank is about within the block; does nothing where nothing is recorded.

    Parameters
    ----------
    phase
        A `Phase` or its name: ``"init"``, ``"compile"``, ``"train"``, ``"eval"``, ``"ckpt"``,
        ``"exit"``.

    Raises
    ------
    UsageError
        There is no such phase.
    """
    phase = _named(phase)
    if _current is None:
        yield
        return
    with _current.phase(phase):
        yield


def _named(name: Phase | str) -> Phase:
    if isinstance(name, Phase):
        return name
    if name.upper() not in Phase.__members__:
        raise UsageError(
            "unknown phase",
            wanted=", ".join(p.lower() for p in Phase.__members__),
            found=name,
        )
    return Phase[name.upper()]


def _identity(job: str) -> RingIdentity:
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        said = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
        if not all(re.fullmatch(r"\d{1,8}", text) for text in said) or int(said[0]) >= int(said[1]):
            raise UsageError(
                "the rank of this process is unknown",
                wanted="a process group, or RANK and WORLD_SIZE",
                found=f"RANK={said[0]!r}, WORLD_SIZE={said[1]!r}",
                hint="call attach() after init_process_group(), or start it with torchrun",
            )
        rank, world = int(said[0]), int(said[1])
    life = os.environ.get("CKPTD_GENERATION") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RingIdentity(
        rank=rank,
        world=world,
        job=job,
        node=node_name(),
        generation=int(life) if re.fullmatch(r"\d{1,9}", life) else 0,
    )


def _folder(folder: str | os.PathLike[str] | None) -> Path:
    chosen = folder or os.environ.get("CKPTD_RINGS")
    path = Path(chosen) if chosen else run_folder() / "rings"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
