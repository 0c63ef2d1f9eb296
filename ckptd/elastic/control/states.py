"""States of a job; `ControllerSettings`, all deadlines and limits with defaults; exit codes.

In it: time until a silent node is lost, of a lease, a save, a fence, of gathering nodes; how many
restarts; after which exit codes a job is not restarted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from ckptd.errors import UsageError


class State(enum.StrEnum):
    """Where a job is."""

    RUNNING = "running"
    SUSPECT = "suspect"
    FENCE = "fence"
    PLAN = "plan"
    RESHARD = "reshard"
    RESUME = "resume"
    PARKED = "parked"
    DONE = "done"
    ABORTED = "aborted"


@dataclass(frozen=True)
class ControllerSettings:
    """Deadlines and limits; seconds.

    Attributes
    ----------
    silent_s
        A node of which nothing is heard for so long is gone.
    lease_s
        Workers that can reach neither controller nor log kill themselves within this time. Only if
        no node of the last generation answers is a new one made to wait for it.
    save_s
        How long a planned restart waits for the save before it.
    fence_s
        How long sessions may take to leave a generation before they are killed, and how long a node
        may take to kill before it is taken for gone.
    broken_s
        How long a collective that failed waits for a cause before it counts as a fault by itself.
    gather_s
        How long the first start waits for the planned world.
    patience_s
        How long a smaller layout is put off in a restart, for nodes that may be back at once.
    relaunch_s
        How long launchers that are restarted are waited for.
    nodes_s
        How long nothing may fit before the job is given up.
    resume_s
        From the start of a generation until all its ranks have loaded.
    steady_s
        A generation whose ranks have loaded, or of a job that never tells of loading or steps,
        counts as running after so long; in the latter job also as progress.
    settle_s
        How long a controller that was restarted waits to hear of running workers.
    grow_s
        How long a newcomer must be there before the job is restarted to take it in.
    levels
        The deepest level that there is a plug-in for: 1 starts workers again, 2 launchers, 3 ends
        the job to be submitted again. A restart goes one deeper for each generation before it that
        committed nothing new.
    cycles
        Generations in a row that committed nothing new at the deepest level before the job is given
        up.
    max_restarts
        Faults before the job is given up, whatever it commits between them; None for any number.
    no_restart_on
        What a program says by its exit code, see `ExitCodes`.
    flaps, flap_window_s, out_s
        A node that is at fault so often within the window is left out for `out_s`, and for twice
        as long each time that it comes back and is left out again. One whose place no other can
        take is left out only where the job would be given up with it, for a twelfth of that.
    """

    silent_s: float = 5.0
    lease_s: float = 120.0
    save_s: float = 30.0
    fence_s: float = 10.0
    broken_s: float = 2.0
    gather_s: float = 30.0
    patience_s: float = 0.0
    relaunch_s: float = 60.0
    nodes_s: float = 1800.0
    resume_s: float = 900.0
    steady_s: float = 30.0
    settle_s: float = 5.0
    grow_s: float = 10.0
    levels: int = 1
    cycles: int = 3
    max_restarts: int | None = None
    no_restart_on: str = "repeat"
    flaps: int = 2
    flap_window_s: float = 600.0
    out_s: float = 3600.0


class ExitCodes:
    """Exit codes after which a job is not restarted.

    Parameters
    ----------
    text
        Codes and ranges with commas between them, such as ``2,64-78``; a signal's is 128 and its
        number. ``repeat``: also a code that comes twice from the same place of a program before
        its first step; that is so unless ``none`` is among them.

    Attributes
    ----------
    repeat
        Whether ``repeat`` holds.

    Raises
    ------
    UsageError
        A duration, size or rule on the command line cannot be read, or a plugin is called in a way
        that it does not serve.
    """

    def __init__(self, text: str) -> None:
        words = [word.strip() for word in text.split(",") if word.strip()]
        self.repeat = "none" not in words
        self._ranges = [_codes(word, text) for word in words if word not in ("none", "repeat")]

    def __contains__(self, code: int) -> bool:
        """Whether it is named; a code below 0 is a signal's."""
        shown = 128 - code if code < 0 else code
        return any(low <= shown <= high for low, high in self._ranges)


def _codes(word: str, text: str) -> tuple[int, int]:
    low, dash, high = word.partition("-")
    last = high if dash else low
    numbers = all(part.isascii() and part.isdecimal() and len(part) < 4 for part in (low, last))
    if numbers and 1 <= int(low) <= int(last) <= 255:
        return int(low), int(last)
    raise UsageError(
        "invalid --no-restart-on",
        where="--no-restart-on",
        wanted="codes from 1 to 255 and ranges, such as 2,64-78; repeat; or none",
        found=text[:200],
    )


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One change of state.

    Attributes
    ----------
    at
        The moment, in seconds of the machine's clock.
    before, state
        From where to where; the same state again if a fault began the way again.
    generation
        The newest one.
    level
        Of the restart under way, or of the last.
    step
        The last committed step.
    reason
        Why.
    planned
        Whether the restart under way was ordered.
    detect_s
        At a fault: from the last sign that all was well until it was known; 0 if nothing tells.
    quiet_s
        Of ranks that tell of no step: since they were ordered to start, as they are taken for
        running, or have ended well.
    """

    at: float
    before: State
    state: State
    generation: int
    level: int
    step: int
    reason: str
    planned: bool = False
    detect_s: float = 0.0
    quiet_s: float = 0.0
