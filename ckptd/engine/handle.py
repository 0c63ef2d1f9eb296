"""The caller's view of one save."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from ckptd import events
from ckptd.errors import CkptdError, DeadlineError

__all__ = ["SaveHandle", "SaveProgress"]


_ORDER = ("staging", "writing", "committing", "durable", "failed")


@dataclass(frozen=True, slots=True)
class SaveProgress:
    """How far this rank's part of a save is.

    Attributes
    ----------
    phase
        ``staging``, ``writing``, ``committing``, ``durable`` or ``failed``.
    done_bytes, total_bytes
        Bytes written, and to write, by this rank.
    """

    phase: str
    done_bytes: int
    total_bytes: int


class SaveHandle:
    """One save on its way from memory to a commit. Thread-safe.

    `staged` and `durable` wait and raise what failed. Nobody has to wait: a failure is also
    raised by the next call on the checkpointer.

    Attributes
    ----------
    step
        The step being saved.
    generation, attempt
        Which life of the job writes it, and which try of that life.
    """

    def __init__(self, step: int, generation: int, attempt: str, total_bytes: int) -> None:
        self.step = step
        self.generation = generation
        self.attempt = attempt
        self._total = total_bytes
        self._done = 0
        self._phase = "staging"
        self._error: CkptdError | None = None
        self._error_seen = False
        self._changed = threading.Condition()
        self._scope = events.current()
        self._began = time.monotonic()
        self._ended: float | None = None

    def __repr__(self) -> str:
        return f"<SaveHandle step {self.step} {self._phase}>"

    @property
    def progress(self) -> SaveProgress:
        """How far this rank's part is."""
        with self._changed:
            return SaveProgress(self._phase, self._done, self._total)

    @property
    def error(self) -> CkptdError | None:
        """What failed, or None."""
        with self._changed:
            self._error_seen = self._error_seen or self._error is not None
            return self._error

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or badly."""
        with self._changed:
            return self._phase in ("durable", "failed")

    @property
    def seconds(self) -> float | None:
        """Seconds from the call to the end, well or badly; None while the save is under way."""
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
        self._wait(("writing", "committing", "durable"), timeout)

    def durable(self, timeout: float | None = None) -> None:
        """Return when the checkpoint exists, every byte of it on the store. See `staged`."""
        self._wait(("durable",), timeout)

    def _wait(self, phases: tuple[str, ...], timeout: float | None) -> None:
        with self._changed:
            wanted = (*phases, "failed")
            if not self._changed.wait_for(lambda: self._phase in wanted, timeout):
                raise DeadlineError(
                    f"step {self.step} is still {self._phase}",
                    kind="timeout",
                    wanted=f"{phases[-1]} within {timeout} s",
                    found=f"{self._done} of {self._total} bytes written",
                )
            if self._error is not None:
                self._error_seen = True
                raise self._error

    # What follows is for the checkpointer.

    def _settled(self, timeout: float) -> bool:
        """Wait until the save has ended, and tell; looks at no error."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended is not None, timeout)

    def _progress(self, done: int) -> None:
        """So many bytes are written; some may be before all are copied."""
        with self._changed:
            self._done = max(self._done, done)

    def _advance(self, phase: str, done: int | None = None) -> None:
        with self._changed:
            if _ORDER.index(phase) <= _ORDER.index(self._phase):
                return  # threads that tell of earlier phases may come late
            self._phase = phase
            self._done = self._done if done is None else done
            if phase == "durable":
                self._ended = time.monotonic()
            self._changed.notify_all()
        if phase == "durable":
            self._emit(events.SaveDurable, tier=self._scope.tier, bytes=self._total)

    def _fail(self, error: CkptdError) -> None:
        with self._changed:
            if self._phase in ("durable", "failed"):
                return
            self._phase, self._error = "failed", error
            self._ended = time.monotonic()
            self._changed.notify_all()
        message = error.message[: events.MOST_TEXT]
        self._emit(events.SaveFailed, tier=self._scope.tier, kind=error.kind, message=message)

    def _sealed(self) -> None:
        """Every byte is copied."""
        self._advance("writing")
        self._emit(events.SaveStaged, bytes=self._total)

    def _emit(
        self,
        what: type[events.SaveStaged | events.SaveDurable | events.SaveFailed],
        **fields: Any,
    ) -> None:
        """Tell what happened, if the save was begun where somebody said whose it is."""
        if self._scope.save is not None:
            events.emit(what(**self._scope.save.fields(), at_ns=events.now_ns(), **fields))

    @property
    def _looked_at(self) -> bool:
        return self._error is None or self._error_seen

    def _take_unseen_error(self) -> CkptdError | None:
        with self._changed:
            if self._error is None or self._error_seen:
                return None
            self._error_seen = True
            return self._error
