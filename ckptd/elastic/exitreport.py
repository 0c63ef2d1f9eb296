"""`ExitReport`: why a worker's program ended (error, exit code), in a file for its launcher.

In it: how much text is kept; whether a step was made; which rank shows the error.

An exit code says little: Python's is 1 for every exception. So a worker leaves files beside its
launcher's socket, by its process id: that it has made a step, and where and with what it has ended.
They need no connection, no thread and no PyTorch: a program may fail before it has any of them.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from ckptd.base.runtime.launched import LAUNCHER_VARIABLE
from ckptd.decoding import json_decoder

FOLDER = "ends"
"""Beside the launcher's socket; made by a launcher that reads it."""
_MOST_TEXT = 500
_MOST_BYTES = 64 << 10


class ExitReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended, as it saw that itself.

    Attributes
    ----------
    code
        The exit code that it asked for.
    place
        Says where: the same for the same error, raised by the same lines.
    text
        The error in one line and where it was raised; empty if there was none.
    """

    code: int
    place: str = ""
    text: str = ""


_decoder = json_decoder(ExitReport)


def note_step() -> None:
    """Leave word that this process has made a step; of no effect without a launcher."""
    _leave(f"{os.getpid()}.stepped", b"")


def note_end(error: BaseException | None) -> None:
    """Leave word of how the program of this process ended; None: its last line was reached.

    Where other threads go on that keep the process alive, a program has not ended by that.
    """
    if error is None or (isinstance(error, SystemExit) and not _code_of(error)):
        if not any(_holds(thread) for thread in threading.enumerate()):
            _leave(f"{os.getpid()}.json", msgspec.json.encode(ExitReport(code=0)))
        return
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}:{frame.lineno}" for frame in frames]
    digest = hashlib.sha256("\n".join([type(error).__qualname__, *lines]).encode())
    shown = traceback.TracebackException.from_exception(error)
    shown.__notes__ = None  # they come last, and say less
    said = list(shown.format_exception_only())[-1].strip()[:_MOST_TEXT]
    at = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    words = ExitReport(code=_code_of(error), place=digest.hexdigest()[:16], text=said + at)
    _leave(f"{os.getpid()}.json", msgspec.json.encode(words))


def note_uncaught() -> None:
    """Write a report of an uncaught error, in a process that runs its program by itself."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note_end(error)
        before(kind, error, trace)

    sys.excepthook = hook


def first_to_say(text: str) -> bool:
    """Return whether a text is to be shown: no rank of this node has, or this one has stepped.

    What fails a program before its first step mostly fails it on all ranks, and once more after
    each restart.
    """
    folder = _folder()
    if folder is None or (folder / f"{os.getpid()}.stepped").exists():
        return True
    path = folder / f"said-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:32]}"
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return True
    return not path.exists()  # it cannot be made: better twice than never


def last_words_of(
    folder: Path, pid: int, *, forget: bool = False
) -> tuple[ExitReport | None, bool]:
    """Return what process `pid` has left in a launcher's folder, and whether it made a step.

    Parameters
    ----------
    forget
        Remove it: another process may have this id later.
    """
    words, said, stepped = None, folder / f"{pid}.json", folder / f"{pid}.stepped"
    with suppress(OSError, msgspec.MsgspecError):
        with said.open("rb") as file:
            words = _decoder.decode(file.read(_MOST_BYTES))
    has_stepped = stepped.exists()
    if forget:
        said.unlink(missing_ok=True)
        stepped.unlink(missing_ok=True)
    return words, has_stepped


def _folder() -> Path | None:
    socket = os.environ.get(LAUNCHER_VARIABLE)
    return Path(socket).parent / FOLDER if socket else None


def _leave(name: str, content: bytes) -> None:
    """Write a file whole, or not at all; a program must not fail by what it says of its end."""
    folder = _folder()
    if folder is None:
        return
    with suppress(OSError):
        draft = folder / f"{name}.part"
        draft.write_bytes(content)
        os.replace(draft, folder / name)


def _code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return -signal.SIGINT  # the interpreter ends by the signal
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    return 1


def _holds(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.current_thread()
