"""Writes down every collective of this rank in its ring, for others to judge its health.

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
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptd.engine.agentlink import run_folder
from ckptd.engine.hostinfo import host_id
from ckptd.errors import UsageError
from ckptd.monitor.ring import RingGroup, RingIdentity, RingWriter
from ckptd.monitor.ringlayout import RecorderState, text_hash
from ckptd.monitor.view import CallFlag, Phase
from ckptd.train.recorder_calls import CallKind, first_tensor, nbytes
from ckptd.train.recorder_ends import Ends
from ckptd.train.recorder_groups import Groups
from ckptd.train.recorder_hook import DispatcherHook, hook_works
from ckptd.train.recorder_pulse import Pulse
from ckptd.train.recorder_sites import Sites

__all__ = ["Recorder", "attach", "attach_when_known", "detach", "phase", "recorder", "step"]

_log = logging.getLogger("ckptd.monitor")

_Call = tuple[RingGroup, int, int]
# With whether its end can be learnt, a tensor that it writes, and whether the caller waits at once.
_Started = tuple[_Call, bool, Any, bool]


class Recorder:
    """Records the calls of this process into `ring`.

    Attributes
    ----------
    ring
        Where it writes.
    on
        Whether it records; false once it has stepped aside or ended.
    """

    def __init__(self, ring: RingWriter) -> None:
        self.ring = ring
        self.on = False
        self._groups = Groups(ring)
        self._sites = Sites(ring)
        self._ends = Ends(self.aside)
        self._hook = DispatcherHook(self)
        self._pulse = Pulse(ring, self.aside)
        self._codes: dict[object, int] = {}
        self._aside = False
        self._by_hand = False
        self._optimizer: weakref.ref[Any] | None = None
        self._optimizer_hook: Any = None

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Hook into PyTorch if a self-test says that this works here, else step aside."""
        try:
            self._hook.install()
            if not hook_works(self._hook):
                raise RuntimeError("the self-test of the dispatcher hook saw something else")
            self._ends.install()
            self._optimizer_hook = register_optimizer_step_post_hook(self._optimizer_stepped)
            self._pulse.start()
        except Exception as error:  # noqa: BLE001 - a PyTorch that is too different, in whatever way
            self.aside(error)
            self._unhook()
            return
        self.on = True
        self.ring.state(RecorderState.CALLS)

    def stop(self) -> None:
        """End recording and take all hooks away; the ring stays and says so. Harmless again."""
        was_on, self.on = self.on, False
        self._unhook()
        if was_on:
            self.ring.phase = Phase.EXIT
            self.ring.state(RecorderState.OFF)

    def leave_alone(self) -> None:
        """Stop recording in a forked child: the ring is its parent's."""
        self.on = False
        self._pulse.forget()

    def aside(self, error: BaseException) -> None:
        """Record nothing any more, and say so once."""
        self.on = False
        if self._aside:
            return
        self._aside = True
        self.ring.state(RecorderState.ASIDE)
        _log.warning("collectives are not recorded any more: %r", error, exc_info=error)

    def _unhook(self) -> None:
        self._hook.remove()
        self._ends.remove()
        self._pulse.stop()
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
            self._optimizer_hook = None

    # --- calls ----------------------------------------------------------------------------------

    def begin(self, kind: CallKind, args: tuple[Any, ...]) -> _Started | None:
        """See `HookTarget`."""
        try:
            group = self._group(kind, args)
            if group is None:
                self.ring.lost()
                return None
            tensors = args[max(kind.tensors, 0)]
            first = first_tensor(tensors)
            sized = first is not None and kind.tensors >= 0
            is_async = kind.is_async(args)
            flags = CallFlag.ASYNC.value if is_async else 0
            if kind.is_variable(args):
                flags |= CallFlag.VARIABLE.value
            number, seq = self.ring.enter(
                group,
                self._code(kind.name),
                nbytes(tensors) if sized else 0,
                self._code(first.dtype) if sized else 0,
                args[kind.root] if kind.root >= 0 else -1,
                flags,
                self._sites.here(),
            )
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self.aside(error)
            return None
        on_cpu = first is None or first.is_cpu
        waits = kind.async_op >= 0 and not is_async
        return (group, number, seq), on_cpu, first_tensor(args[0]), waits

    def launched(self, call: _Started | None, kind: CallKind, result: Any) -> None:
        """See `HookTarget`."""
        if call is None:
            return
        try:
            started, can_be_learnt, output, waits = call
            if result is None or not can_be_learnt:
                self._ended(started, failed=False)
                return
            work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)

            def ended(failed: bool) -> None:
                self._ended(started, failed=failed)

            self._ends.watch(work, kind.operator, output, ended, waits=waits)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self.aside(error)

    def failed(self, call: _Started | None) -> None:
        """See `HookTarget`."""
        if call is not None:
            self._ended(call[0], failed=True)

    def _ended(self, call: _Call, *, failed: bool) -> None:
        if not self.on:
            return
        try:
            self.ring.leave(*call, failed=failed)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self.aside(error)

    def _group(self, kind: CallKind, args: tuple[Any, ...]) -> RingGroup | None:
        group = dist.ProcessGroup.unbox(args[kind.group])
        if not kind.is_p2p:
            return self._groups.of(group)
        me, peer = group.rank(), args[kind.peer] if kind.peer >= 0 else -1
        sends = kind.operator == "send"
        return self._groups.channel(group, me if sends else peer, peer if sends else me)

    def _code(self, thing: object) -> int:
        code = self._codes.get(thing)
        if code is None:
            code = self._codes[thing] = self.ring.text(str(thing).removeprefix("torch."))
        return code

    # --- steps and phases -----------------------------------------------------------------------

    def step(self, number: int) -> None:
        """Say that step `number` begins. Steps of an optimizer do not count by themselves then."""
        self._by_hand = True
        if self.on:
            self._step(number)

    def _step(self, number: int) -> None:
        if self.ring.phase is Phase.INIT:
            self.ring.phase = Phase.TRAIN
        self.ring.step(number)

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the steps of the first optimizer, for programs that do not say."""
        if not self.on or self._by_hand:
            return
        try:
            if self._optimizer is None or self._optimizer() is None:
                self._optimizer = weakref.ref(optimizer)
            if self._optimizer() is optimizer:
                self._step(self.ring.current_step + 1)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self.aside(error)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Be in `phase` within the block, then again in the one before."""
        before = self.ring.phase
        if self.on:
            self.ring.phase = phase
        try:
            yield
        finally:
            if self.on:
                self.ring.phase = before


_current: Recorder | None = None


def recorder() -> Recorder | None:
    """Return the recorder of this process, if it has one."""
    return _current


def attach(folder: str | os.PathLike[str] | None = None, *, job: str | None = None) -> Recorder:
    """Begin to record the collectives of this rank; return the recorder, the same if called again.

    Best called before `init_process_group`; calls of groups that exist already
    are counted from here on, so all ranks must call it at the same point of the program.

    Parameters
    ----------
    folder
        Where the ring lies. By default ``CKPTD_RINGS``, or ``rings`` in the folder for sockets.
    job
        Name of the job; by default ``CKPTD_JOB``.

    Raises
    ------
    UsageError
        kind ``no-rank``: there is no process group yet, and ``RANK`` and ``WORLD_SIZE`` do not say
        who this is.
    StoreError
        kind ``no-space``: no room for the ring.
    """
    global _current
    if _current is None:
        identity = _identity(os.environ.get("CKPTD_JOB", "") if job is None else job)
        name = f"{text_hash(identity.job):08x}-{identity.rank}-{os.getpid()}.ring"
        _current = Recorder(RingWriter(_folder(folder) / name, identity))
        _current.start()
        atexit.register(detach)
        os.register_at_fork(after_in_child=_current.leave_alone)
    return _current


def attach_when_known() -> None:
    """Attach now if the environment says which rank this is, else once a group has been joined."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        attach()
        return
    join = distributed_c10d.init_process_group

    @wraps(join)
    def joined(*args: Any, **more: Any) -> None:
        join(*args, **more)
        try:
            attach()
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            _log.warning("collectives are not recorded: %r", error, exc_info=error)

    distributed_c10d.init_process_group = joined
    dist.init_process_group = joined


def detach() -> None:
    """End recording; harmless without a recorder. The ring stays for whoever reads it."""
    global _current
    current, _current = _current, None
    if current is not None:
        atexit.unregister(detach)
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
    if isinstance(phase, str):
        phase = _named(phase)
    if _current is None:
        yield
        return
    with _current.phase(phase):
        yield


def _named(name: str) -> Phase:
    if name.upper() not in Phase.__members__:
        raise UsageError(
            "there is no such phase",
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
                "nobody says which rank this is",
                kind="no-rank",
                wanted="a process group, or RANK and WORLD_SIZE",
                found=f"RANK={said[0]!r}, WORLD_SIZE={said[1]!r}",
                hint="call attach() after init_process_group(), or start it with torchrun",
            )
        rank, world = int(said[0]), int(said[1])
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RingIdentity(
        rank=rank,
        world=world,
        job=job,
        node=_short(host_id()),
        generation=int(life) if re.fullmatch(r"\d{1,9}", life) else 0,
    )


def _short(node: str) -> str:
    """Return a name that fits a ring, different for different nodes."""
    raw = node.encode()
    return node if len(raw) <= 64 else f"{raw[:55].decode(errors='ignore')}~{zlib.crc32(raw):08x}"


def _folder(folder: str | os.PathLike[str] | None) -> Path:
    chosen = folder or os.environ.get("CKPTD_RINGS")
    path = Path(chosen) if chosen else run_folder() / "rings"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
