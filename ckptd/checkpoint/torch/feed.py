"""Schedule of copies into a slot: groups, lanes, how many are under way.

Without torch: a `CopyLane` carries copies out. A lane on the host copies in `push`; one of a GPU
enqueues there and is done later (`ckptd.checkpoint.torch.ondevice`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from ckptd.base.runtime.pool import batches
from ckptd.errors import SaveError
from ckptd.types import Box

_POLL_S = 0.0005


class StridedWindow(msgspec.Struct, frozen=True):
    """A strided part of a contiguous tensor, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


class CopyStep(msgspec.Struct, frozen=True):
    """A chunk, or a run of its bytes, and the part of a local tensor that is copied there.

    A step is known by its number among the steps of a snapshot, which are in file order.

    Attributes
    ----------
    name
        Of the tensor.
    part
        In the local tensor's own coordinates; None means all of it.
    start, end
        Bytes in the slot.
    """

    name: str
    part: Box | StridedWindow | None
    start: int
    end: int

    def cut(self, shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[CopyStep]:
        """Cut the step into steps of at most `limit` bytes that follow one another in the slot.

        Parameters
        ----------
        shape
            Of the part.
        itemsize
            Bytes of an element; one that is larger than `limit` is a step of its own.
        """
        at = self.start
        for box in Box.whole(shape).cut(itemsize, limit):
            end = at + math.prod(box.shape) * itemsize
            yield CopyStep(self.name, self._inner(box), at, end)
            at = end

    def _inner(self, box: Box) -> Box | StridedWindow:
        """Return a box of the part, in the coordinates of the local tensor."""
        part = self.part
        if isinstance(part, StridedWindow):
            skipped = sum(o * s for o, s in zip(box.offset, part.strides, strict=True))
            return StridedWindow(box.shape, part.strides, part.start + skipped)
        if part is None:
            return box
        return Box(tuple(map(sum, zip(part.offset, box.offset, strict=True))), box.shape)


class CopyMark(Protocol):
    """Tells when a group is in place."""

    def done(self) -> bool:
        """Return whether it is; raise what kept it from it. Never waits."""


class CopyLane(Protocol):
    """Carries groups out, in the order in which they are pushed."""

    @property
    def limit(self) -> int:
        """Groups that may be under way, so that others still get at the link."""

    @property
    def free(self) -> bool:
        """Whether `push` only enqueues.

        A caller in a hurry may then push from any thread and beyond `limit`.
        """

    def push(self, group: CopyGroup) -> CopyMark:
        """Begin to copy a group, then do its task."""


class CopyGroup(msgspec.Struct, frozen=True):
    """Numbers of steps that are pushed together; `task` comes after their copies, on their lane."""

    lane: CopyLane
    steps: Sequence[int] = ()
    task: Callable[[], None] | None = None


class _Line(msgspec.Struct):
    """A lane with its waiting copies, and those under way."""

    lane: CopyLane
    waiting: deque[CopyGroup] = msgspec.field(default_factory=deque)
    flying: deque[tuple[CopyGroup, CopyMark]] = msgspec.field(default_factory=deque)


class CopyFeed:
    """Hands groups to their lanes until everything is in place.

    One thread calls `run`; others may call `hurry` meanwhile.

    Parameters
    ----------
    steps
        Of the snapshot, in file order.
    groups
        In the order in which each lane gets them.
    report
        Called with the bytes that are in place from the front, whenever they grow.
    placed
        Numbers of steps that are in place already.
    """

    def __init__(
        self,
        steps: Sequence[CopyStep],
        groups: Iterable[CopyGroup],
        report: Callable[[int], None],
        placed: Iterable[int] = (),
    ) -> None:
        self._steps = steps
        self._report = report
        self._lines: dict[int, _Line] = {}
        for group in groups:
            self._lines.setdefault(id(group.lane), _Line(group.lane)).waiting.append(group)
        self._in_place = bytearray(len(steps))
        for number in placed:
            self._in_place[number] = 1
        self._front = 0
        self._change = threading.Condition()
        self._hurried = False
        self._pushing = 0
        self._error: BaseException | None = None

    # -- the thread that feeds -------------------------------------------------------------------

    def run(self, timeout_s: float) -> None:
        """Return when everything is in place.

        Raises
        ------
        SaveError
            Nothing came into place for `timeout_s`. What is under way may still arrive: `stuck`
            tells.
        Exception
            What a lane raised. Nothing is under way any more.
        """
        end = time.monotonic() + timeout_s
        self._advance()
        while True:
            pushed = self._push_some()
            settled = self._settle()
            with self._change:  # one that hurries has taken a group and not begun it yet
                if self._is_over() and not any(x.flying for x in self._lines.values()):
                    break
            if pushed or settled:
                end = time.monotonic() + timeout_s
            elif time.monotonic() > end:
                raise self._fail(
                    SaveError(
                        "the device does not finish copying",
                        wanted=f"a copy within {timeout_s:.0f} s",
                    )
                )
            else:
                time.sleep(_POLL_S)
        if self._error is not None:
            raise self._error

    def _is_over(self) -> bool:
        return self._error is not None or not any(x.waiting for x in self._lines.values())

    def _push_some(self) -> bool:
        pushed = False
        for line in self._lines.values():
            while self._error is None and line.waiting:
                if len(line.flying) >= line.lane.limit and not (self._hurried and line.lane.free):
                    break
                if line.lane.free:
                    with self._change:  # one that hurries must not overtake
                        self._push_next(line)
                else:
                    self._push_slow(line)
                pushed = True
        return pushed

    def _push_slow(self, line: _Line) -> None:
        with self._change:
            self._pushing += 1
            group = line.waiting.popleft()
        self._push(line, group)
        with self._change:
            self._pushing -= 1
            self._change.notify_all()

    def _push_next(self, line: _Line) -> None:
        if not line.waiting:
            return
        self._push(line, line.waiting.popleft())
        self._change.notify_all()

    def _push(self, line: _Line, group: CopyGroup) -> None:
        try:
            line.flying.append((group, line.lane.push(group)))
        except BaseException as error:  # noqa: BLE001 - raised when nothing is under way
            self._fail(error)

    def _settle(self) -> bool:
        """Take what is done off the lanes; return whether anything was."""
        before = sum(len(x.flying) for x in self._lines.values())
        for line in self._lines.values():
            while line.flying:
                group, mark = line.flying[0]
                try:
                    if not mark.done():
                        break
                except BaseException as error:  # noqa: BLE001 - as above
                    self._fail(error)
                line.flying.popleft()
                for number in group.steps:
                    self._in_place[number] = 1
        settled = before != sum(len(x.flying) for x in self._lines.values())
        if settled and self._error is None:
            self._advance()
        return settled

    def _advance(self) -> None:
        front = self._in_place.find(0, self._front)
        front = len(self._in_place) if front < 0 else front
        if front > self._front:
            self._front = front
            try:
                self._report(self._steps[front - 1].end)
            except BaseException as error:  # noqa: BLE001 - as above
                self._fail(error)

    def _fail(self, error: BaseException) -> BaseException:
        with self._change:
            self._error = self._error or error
            self._change.notify_all()
        return self._error

    # -- others ----------------------------------------------------------------------------------

    def hurry(self, timeout_s: float) -> bool:
        """Push all that can be pushed without waiting, and wait until all else is pushed.

        Returns
        -------
        bool
            False when that took longer than `timeout_s`. True also after a failure, which `run`
            raises: nothing is pushed any more.
        """
        if not self._change.acquire(timeout=timeout_s):
            return False
        try:
            self._hurried = True
            for line in self._lines.values():
                while line.lane.free and line.waiting and self._error is None:
                    self._push_next(line)
            if self._error is not None and not isinstance(self._error, Exception):
                raise self._error  # an interrupt is for the thread that it reached as well
            return self._change.wait_for(lambda: self._is_over() and not self._pushing, timeout_s)
        finally:
            self._change.release()

    @property
    def stuck(self) -> bool:
        """Whether something is still under way though `run` has given up."""
        marks = [mark for line in self._lines.values() for _, mark in list(line.flying)]
        return self._error is not None and not all(_is_done(mark) for mark in marks)


def _is_done(mark: CopyMark) -> bool:
    try:
        return mark.done()
    except Exception:  # noqa: BLE001 - `run` has raised already; all that counts is that it ended
        return True


def grouped(
    lane: CopyLane, steps: Sequence[CopyStep], numbers: Iterable[int], limit: int, most: int
) -> Iterator[CopyGroup]:
    """Put steps that follow one another into groups of at most `most`, and of `limit` bytes.

    A step that is larger is a group of its own.

    Parameters
    ----------
    steps, numbers
        All steps of the snapshot, and the numbers of those that are grouped.
    """

    def size(number: int) -> int:
        return steps[number].end - steps[number].start

    return (CopyGroup(lane, group) for group in batches(numbers, size, limit, most))
