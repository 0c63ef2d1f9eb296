"""Messages between launcher and zygote: fork, reap, ready, forked, exited."""

from __future__ import annotations

from typing import Literal

import msgspec

from ckptd.decoding import msgpack_decoder


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a process. A descriptor comes with it: its further input, or its output (``store``).

    Attributes
    ----------
    number
        The launcher's own name of the process.
    mode
        ``script``: `argv` is a program of Python and its arguments, run in the fork itself.
        ``module``: the same by the name of a module. ``exec``: `argv` is a command. ``store``: a
        job store, which listens at `argv[0]` and tells its port.
    argv
        What is run.
    environ
        Its environment, without the part that comes through the descriptor: a map in msgpack,
        ended by the end of the stream. Anything else in the stream ends the process.
    stdout, stderr
        Files, made again; empty: the zygote's own.
    """

    number: int
    mode: Literal["script", "module", "exec", "store"]
    argv: tuple[str, ...]
    environ: dict[str, str]
    stdout: str = ""
    stderr: str = ""


class Reap(msgspec.Struct, frozen=True, tag=True):
    """The launcher has no more use for the process id of a process that has exited."""

    number: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The zygote takes orders from now on.

    Attributes
    ----------
    unsafe
        Why it cannot be forked from, and runs commands instead; empty if it can.
    broken
        Why it is of no use at all: PyTorch, which serves the job store, cannot be imported.
    """

    unsafe: str = ""
    broken: str = ""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """A process is there. Its id stays its own until `Reap`."""

    number: int
    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """A process could not be started."""

    number: int
    reason: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A process has ended.

    Attributes
    ----------
    number
        Which.
    code
        Its exit code, or the signal that ended it as a negative number.
    """

    number: int
    code: int


ToZygote = Fork | Reap
FromZygote = Ready | Forked | NotForked | Exited

# Now, and not by the first connection, in whichever thread that is opened.
msgpack_decoder(ToZygote)
msgpack_decoder(FromZygote)
