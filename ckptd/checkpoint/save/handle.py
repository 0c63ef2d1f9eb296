"""`SaveHandle`: progress, waits and errors of one save; when a step is safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from ckptd import events
from ckptd.base.runtime.ownership import OfOneProcess, not_below
from ckptd.errors import CkptdError, DeadlineError, ProcessError, UsageError

_UNSAVED = ("not-due", "skipped")
_ORDER = ("staging", "writing", "committing", "durable", "failed")


class SaveProgress(msgspec.Struct, frozen=True):
    """How far this rank's part of a save is.

    Attributes
    ----------
    phase
        ``staging``, ``writing``, ``committing``, ``durable`` or ``failed``; ``not-due`` or
        ``skipped`` where nothing was begun.
    done_bytes, total_bytes
        Bytes written, and to write, by this rank.
    """

    phase: str
    done_bytes: int
    total_bytes: int


class SaveHandle:
    """One save on its way from memory to a commit. Thread-safe.

    `staged` and `durable` wait and raise what failed. Waiting is not required: a failure is also
    raised by the next call on the checkpointer.

    Where nothing was due, or the save was skipped, there is nothing to wait for: the handle is
    false (``if handle:``), its phase is the reason, `staged` and `durable` return at once whatever
    checkpoints there are, and `done` is true.

    Attributes
    ----------
    step
        The step being saved.
    generation, attempt
        Which life of the job writes it, and which try of that life.
    near
        The near tiers that it goes to, nearest first.
    root
        Whether it goes to the root. Where no tier is named, the farthest one is meant.
    total_bytes
        Bytes that this rank writes; known once the save is planned.
    """

    def __init__(
        self,
        step: int,
        generation: int,
        attempt: str,
        total_bytes: int,
        *,
        near: Sequence[str] = (),
        root: bool = True,
    ) -> None:
        self.near = tuple(near)
        self.root = root
        self._tiers: dict[str, CkptdError | Literal["pending"] | None] = dict.fromkeys(
            self.near, "pending"
        )
        self.step = step
        self.generation = generation
        self.attempt = attempt
        self.total_bytes = total_bytes
        self.numbers: dict[str, float] = {}
        self._done = 0
        self._phase = "staging"
        self._error: CkptdError | None = None
        self._error_seen = False
        self._changed = threading.Condition()
        self._scope = events.current()
        self._began = time.monotonic()
        self._ended: float | None = None
        self._safe: Callable[[], None] | None = None

    @classmethod
    def unsaved(cls, step: int, generation: int, why: Literal["not-due", "skipped"]) -> SaveHandle:
        """Return the handle of a call that began no save."""
        handle = cls(step, generation, "", 0, root=False)
        handle._phase = why
        handle._ended = handle._began
        return handle

    def __bool__(self) -> bool:
        """Whether a save was begun."""
        return self._phase not in _UNSAVED

    def __repr__(self) -> str:
        return f"<SaveHandle step {self.step} {self._phase}>"

    @property
    def progress(self) -> SaveProgress:
        """How far this rank's part is."""
        with self._changed:
            return SaveProgress(self._phase, self._done, self.total_bytes)

    @property
    def error(self) -> CkptdError | None:
        """The failure, or None."""
        with self._changed:
            self._error_seen = self._error_seen or self._error is not None
            return self._error

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or badly, on every tier."""
        with self._changed:
            return self._phase in ("durable", "failed", *_UNSAVED) and not self._pending

    @property
    def _pending(self) -> list[str]:
        return [tier for tier, state in self._tiers.items() if state == "pending"]

    @property
    def tiers(self) -> dict[str, str]:
        """Each near tier's state: ``pending``, ``complete`` (on every rank) or ``failed``."""
        with self._changed:
            return {
                tier: "pending" if state == "pending" else "failed" if state else "complete"
                for tier, state in self._tiers.items()
            }

    @property
    def seconds(self) -> float | None:
        """Seconds from the call to the end, well or badly; None while the save is under way.

        0 where nothing was begun.
        """
        with self._changed:
            return None if self._ended is None else self._ended - self._began

    def staged(self, timeout: float | None = None) -> None:
        """Return when the state may change: every byte of it has been copied.

        Parameters
        ----------
        timeout
            Seconds; None waits as long as the save itself may take.

        Raises
        ------
        DeadlineError
            `timeout` passed.
        CkptdError
            What failed.
        """
        not_below("Checkpointer", "staged")
        if self:
            self._wait(("writing", "committing", "durable"), timeout)

    def durable(self, timeout: float | None = None, *, tier: str | None = None) -> None:
        """Return when the checkpoint exists, every byte of it on the store. See `staged`.

        Parameters
        ----------
        tier
            Return when every rank's share is on that near tier; None waits for the root, or for
            the farthest tier of a save that does not go there.

        Raises
        ------
        UsageError
            This save does not go there. Kind ``under-way``: a signal handler calls it within a
            call of a checkpointer.
        """
        not_below("Checkpointer", "durable")
        if not self:
            return
        if tier is None:
            self._wait(("durable",), timeout)
        else:
            self._wait_near(tier, timeout)

    def _wait_near(self, tier: str, timeout: float | None) -> None:
        if tier not in self._tiers:
            raise UsageError(
                f"step {self.step} does not go to the tier {tier!r}",
                wanted=", ".join(self._tiers) or "no near tier",
                found=tier,
            )
        with self._changed:
            if not self._changed.wait_for(lambda: self._tiers[tier] != "pending", timeout):
                raise DeadlineError(
                    f"step {self.step} is not yet complete on the tier {tier}",
                    wanted=f"within {timeout} s",
                )
            state = self._tiers[tier]
        if isinstance(state, CkptdError):
            raise state.without_frames()

    def _wait(self, phases: tuple[str, ...], timeout: float | None) -> None:
        with self._changed:
            wanted = (*phases, "failed")
            if not self._changed.wait_for(lambda: self._phase in wanted, timeout):
                raise DeadlineError(
                    f"step {self.step} is still {self._phase}",
                    wanted=f"{phases[-1]} within {timeout} s",
                    found=f"{self._done} of {self.total_bytes} bytes written",
                )
            if self._error is not None:
                self._error_seen = True
                raise self._error.without_frames()


class SaveTracker(OfOneProcess, SaveHandle):
    """The handle of a save as the checkpointer and its writer client move it on. Thread-safe."""

    def _leave_to_parent(self) -> None:
        super()._leave_to_parent()
        self._changed = threading.Condition()  # a thread that is not here may have held it

    def wrote(self, done: int) -> None:
        """Note that so many bytes are written; some may be before all are copied."""
        with self._changed:
            self._done = max(self._done, done)

    def copied(self) -> None:
        """Note that every byte is copied."""
        self.advance("writing")
        self._emit(events.SaveStaged, bytes=self.total_bytes, numbers=self.numbers)

    def advance(self, phase: str, done: int | None = None) -> None:
        """Enter a phase, unless the save is in a later one: threads report out of order."""
        with self._changed:
            if _ORDER.index(phase) <= _ORDER.index(self._phase):
                return
            self._phase = phase
            self._done = self._done if done is None else done
            if phase == "durable":
                self._ended = time.monotonic()
            self._changed.notify_all()
        if phase == "durable":
            self._emit(events.SaveDurable, tier=self._scope.tier, bytes=self.total_bytes)

    def fail(self, error: CkptdError) -> None:
        """End the save to the root with an error; near tiers are settled by themselves."""
        if self._end(error):
            self._emit_failed(self._scope.tier, error)

    def _end(self, error: CkptdError | None) -> bool:
        """End it for good and all; return whether that is news."""
        with self._changed:
            if self.root_ended:
                return False
            self._phase = "failed" if error else "durable"
            self._error = error and error.without_frames()
            self._ended = time.monotonic()
            self._changed.notify_all()
            return True

    def settle(self, tier: str, error: CkptdError | None = None) -> bool:
        """Note that a near tier is complete, or never will be; return whether that is news."""
        with self._changed:
            if self._tiers.get(tier) != "pending":
                return False
            self._tiers[tier] = error and error.without_frames()
            self._changed.notify_all()
        if error is None:
            self._emit(events.SaveDurable, tier=tier, bytes=self.total_bytes)
        else:
            self._emit_failed(tier, error)
        if not self.root and not self._pending:
            # It ends with its farthest tier. That failure was emitted and logged, and is not raised
            # by a later call: near tiers are kept for speed, and training goes on.
            with self._changed:
                farthest = self._tiers[self.near[-1]]
                if self._end(farthest if isinstance(farthest, CkptdError) else None):
                    self._error_seen, self._done = True, self.total_bytes
        return True

    @property
    def root_ended(self) -> bool:
        """Whether the save to the root has ended, well or badly."""
        with self._changed:
            return self._phase in ("durable", "failed")

    def wait_done(self, timeout: float) -> bool:
        """Wait until the save has ended on every tier; return whether it has. Raises no failure."""
        with self._changed:
            return self._changed.wait_for(lambda: self.done, timeout)

    # -- what failed -----------------------------------------------------------------------------

    @property
    def failure(self) -> CkptdError | None:
        """The failure, or None; reading it does not count as seen by the user."""
        with self._changed:
            return self._error

    @property
    def error_unseen(self) -> bool:
        """Whether the save failed and the caller has not seen it."""
        with self._changed:
            return self._error is not None and not self._error_seen

    def take_unseen_error(self) -> CkptdError | None:
        """Return what failed, once: None where nothing did or the caller has seen it."""
        with self._changed:
            if self._error is None or self._error_seen:
                return None
            self._error_seen = True
            return self._error.without_frames()

    # -- is the step kept ------------------------------------------------------------------------

    def when_safe(self, call: Callable[[], None]) -> None:
        """Call `call` once the checkpoint exists; it may be called more than once.

        It exists with the first tier that has all of it. Memory and the node's own folder are not
        enough while the copy on the peer is under way: that node may be lost next, and with it a
        step that was reported as kept. They are not enough either when the copy has failed, since a
        node may be lost already (see `peer_failed`), unless there is no other node.
        """
        self._safe = call
        self._check_safe()

    def _check_safe(self) -> None:
        with self._changed:
            peer = self._tiers.get("peer")
            alone = isinstance(peer, CkptdError) and peer.kind == "no-peer"
            near = None in self._tiers.values() and (peer is None or alone)
            safe = near or (self.root and self._phase == "durable")
        if safe and self._safe is not None:
            self._safe()

    @property
    def peer_failed(self) -> bool:
        """Whether all of it was near, and the peer's copy failed.

        False where the node's own writing process is gone: so is what that kept in memory.
        """
        with self._changed:
            peer = self._tiers.get("peer")
            failed = isinstance(peer, CkptdError) and not isinstance(peer, ProcessError)
            return failed and None in self._tiers.values()

    def _emit_failed(self, tier: str, error: CkptdError) -> None:
        message = error.message[: events.MOST_TEXT]
        self._emit(events.SaveFailed, tier=tier, kind=error.kind, message=message)

    def _emit(
        self, what: type[events.SaveStaged | events.SaveDurable | events.SaveFailed], **fields: Any
    ) -> None:
        """Emit an event, if the save was begun where `events.about` named it."""
        if what is not events.SaveStaged:
            self._check_safe()
        if self._scope.save is not None:
            events.emit(what(**self._scope.save.fields(), at_ns=events.now_ns(), **fields))
