"""What a worker and the launcher of its node say to one another, over a Unix socket."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ckptd.decoding import msgpack_decoder

__all__ = [
    "LAUNCHER_VARIABLE",
    "LEASE_EXIT_CODE",
    "LEASE_VARIABLE",
    "MOST_BYTES",
    "Attach",
    "BrokenNow",
    "Committed",
    "Done",
    "FromWorker",
    "Go",
    "Interrupt",
    "Mark",
    "Out",
    "Quit",
    "SaveSoon",
    "SavedNow",
    "StateLoaded",
    "ToWorker",
    "Welcome",
]

LAUNCHER_VARIABLE = "CKPTD_LAUNCHER"
"""Path of the launcher's socket."""
LEASE_VARIABLE = "CKPTD_LEASE"
"""Path of the file that says until when workers may step."""
LEASE_EXIT_CODE = 86
"""With which a worker ends whose lease is over."""
MOST_BYTES = 1 << 18
"""Largest message; an environment is the largest there is."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Text = Annotated[str, msgspec.Meta(max_length=4000)]


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A worker is there: its first word, and again when it begins to hold a session.

    Attributes
    ----------
    pid
        Its process, as it sees it.
    rank, generation
        From its environment.
    session
        Whether it can leave a generation and go on in another one without being started anew.
    """

    pid: _Count
    rank: _Count
    generation: _Count
    session: bool = False


class Mark(msgspec.Struct, frozen=True, tag=True):
    """A worker has come so far in its start; told once a generation and name."""

    generation: _Count
    name: Literal["imported", "initialised", "loaded", "stepped"]


class StateLoaded(msgspec.Struct, frozen=True, tag=True):
    """A rank has the state of `step`, from which the generation goes on; 0 if from nothing."""

    generation: _Count
    step: _Count


class Committed(msgspec.Struct, frozen=True, tag=True):
    """`step` is, for every rank, where a restart would find it."""

    generation: _Count
    step: _Count


class SavedNow(msgspec.Struct, frozen=True, tag=True):
    """What `SaveSoon` asked for is done: `step` is where a restart would find it."""

    generation: _Count
    step: _Count


class Out(msgspec.Struct, frozen=True, tag=True):
    """A worker has left a generation, holds nothing of it, and waits for `Go`."""

    generation: _Count


class BrokenNow(msgspec.Struct, frozen=True, tag=True):
    """What a session called failed, and nobody had interrupted it; it waits for `Interrupt`."""

    generation: _Count
    reason: _Text


class Done(msgspec.Struct, frozen=True, tag=True):
    """A session has returned: this worker ends soon, in good order."""

    generation: _Count


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Attach`, and what a generation is told that goes on in the same process.

    Attributes
    ----------
    mttr_s, mtbf_s
        Seconds that a restart of this job has taken, and between failures; 0 if unknown.
    """

    generation: _Count
    mttr_s: float = 0.0
    mtbf_s: float = 0.0


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """Leave a generation, and every earlier one, and say `Out`."""

    generation: _Count


class Go(msgspec.Struct, frozen=True, tag=True):
    """Go on in a generation; what is not in `environ` stays as it is."""

    generation: _Count
    environ: dict[str, str]


class SaveSoon(msgspec.Struct, frozen=True, tag=True):
    """Save at the next occasion, whatever is due; then say `SavedNow`."""

    generation: _Count


class Quit(msgspec.Struct, frozen=True, tag=True):
    """The job is over: end."""


FromWorker = Attach | Mark | StateLoaded | Committed | SavedNow | Out | BrokenNow | Done
ToWorker = Welcome | Interrupt | Go | SaveSoon | Quit

# Now, and not by the first connection, in whichever thread that is opened.
msgpack_decoder(FromWorker)
msgpack_decoder(ToWorker)
