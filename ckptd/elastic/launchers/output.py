"""Output of workers: log files and folders, console with prefixes, torch's error files.

In it: options ``-r`` and ``-t``; how often files are looked at; longest line shown.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import msgspec

from ckptd.decoding import ANYTHING
from ckptd.errors import UsageError

_OUT, _ERR = 1, 2
_LOOK_S = 0.1
_MOST_BYTES = 1 << 20
_MOST_LINE = 1 << 16
"""Characters that are shown at a time of a line that does not end."""


class Streams(msgspec.Struct, frozen=True):
    """Output files of a worker: its streams, empty for the console, and its error file."""

    stdout: str
    stderr: str
    error_file: str


def parse_streams(text: str, flag: str) -> dict[int, int] | int:
    """Return what ``-r`` or ``-t`` says: bits, or bits by local rank (1 out, 2 err).

    Raises
    ------
    UsageError
        A duration, size or rule on the command line cannot be read, or a plugin is called in a way
        that it does not serve.
    """
    try:
        if text.isdecimal() and int(text) <= _OUT | _ERR:
            return int(text)
        pairs = (part.split(":") for part in text.split(","))
        ranks = {int(rank): int(bits) for rank, bits in pairs}
        if all(0 <= bits <= _OUT | _ERR for bits in ranks.values()):
            return ranks
    except ValueError:
        pass
    raise UsageError(
        "invalid value for the streams of workers",
        where=flag,
        wanted="0 to 3, or RANK:BITS,... with 1 for standard output and 2 for standard error",
        found=text[:200],
    )


class Output:
    """Files of the workers of a node.

    Parameters
    ----------
    folder
        Where they are made, in one new folder; None: below `private`, and gone with it.
    private
        A folder of this launcher.
    name, role
        Of the folder, and before each line that is shown.
    redirects, tee
        As `parse_streams` returns them.
    shown
        Local ranks that may write to the console; empty: all.

    Raises
    ------
    UsageError
        No folder can be made there.
    """

    def __init__(
        self,
        folder: Path | None,
        private: Path,
        name: str,
        role: str,
        redirects: dict[int, int] | int = 0,
        tee: dict[int, int] | int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        base = private / "logs" if folder is None else folder
        try:
            base.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix=f"{name.replace('/', '-')}_", dir=base))
        except OSError as error:
            raise UsageError(
                "cannot create output files of workers",
                where=str(base),
                wanted="a writable folder, as --log-dir",
                found=error.strerror or str(error),
            ) from error
        self._role, self._shown = role, shown
        self._redirects, self._tee = redirects, tee
        self._tails: list[_Tail] = []

    def streams(self, attempt: int, local_rank: int) -> Streams:
        """Make the folder of a worker, and return its files; what is to be shown is followed.

        Raises
        ------
        OSError
            They cannot be made: the disk is full, say.
        """
        folder = self.folder / f"attempt_{attempt}" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        error_file = str(folder / "error.json")
        self._tails = [tail for tail in self._tails if tail.runs]
        teed = _bits(self._tee, local_rank)
        to_file = _bits(self._redirects, local_rank) | teed
        silent = bool(self._shown) and local_rank not in self._shown
        files = []
        for bit, name, ours in ((_OUT, "stdout", sys.stdout), (_ERR, "stderr", sys.stderr)):
            # What a worker prints is shown as it is, colours and progress bars included.
            console = getattr(ours, "unfiltered", ours)
            path = str(folder / f"{name}.log") if to_file & bit else ""
            if teed & bit and not silent:
                Path(path).touch()
                prefix = f"[{self._role}{local_rank}]:"
                self._tails.append(_Tail(error_file, Path(path), prefix, console))
            files.append(path or ("/dev/null" if silent else ""))
        return Streams(files[0], files[1], error_file)

    def ended(self, error_file: str) -> None:
        """Follow the streams of a worker no further than they are now: it is dead."""
        for tail in self._tails:
            if tail.whose == error_file:
                tail.end()

    def finish(self) -> None:
        """Show what is still to be shown of workers that are dead. Idempotent."""
        tails, self._tails = self._tails, []
        for tail in tails:
            tail.finish()


def error_of(path: str) -> str:
    """Return what a worker has left in its error file; empty if nothing can be read there."""
    with suppress(OSError, msgspec.MsgspecError, KeyError, TypeError):
        with open(path, "rb") as file:
            said: Mapping[str, Mapping[str, str]] = ANYTHING.decode(file.read(_MOST_BYTES))
        return str(said["message"]["message"])
    return ""


def _bits(said: dict[int, int] | int, local_rank: int) -> int:
    return said if isinstance(said, int) else said.get(local_rank, 0)


class _Tail:
    """Shows the lines of a file as they come, in a thread."""

    def __init__(self, whose: str, path: Path, prefix: str, console: TextIO) -> None:
        self.whose = whose
        self._path, self._prefix, self._console = path, prefix, console
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ckptd-tail", daemon=True)
        self._thread.start()

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        self._ended.set()

    def finish(self) -> None:
        self.end()
        self._thread.join(_LOOK_S * 50)

    def _follow(self) -> None:
        # Where the console's reader is gone, the files still have all of it.
        with suppress(OSError, ValueError), open(self._path, errors="replace") as file:
            begun = ""
            while True:
                ended = self._ended.is_set()
                while line := file.readline(_MOST_LINE):
                    # A worker writes its lines piece by piece, and others write as well.
                    begun += line
                    if begun.endswith("\n") or len(begun) >= _MOST_LINE:
                        self._show(begun)
                        begun = ""
                if ended and begun:
                    self._show(f"{begun}\n")
                self._console.flush()
                if ended:
                    return
                self._ended.wait(_LOOK_S)

    def _show(self, line: str) -> None:
        text = self._prefix + line
        try:
            self._console.write(text)
        except UnicodeEncodeError:
            coding = self._console.encoding
            self._console.write(text.encode(coding, "replace").decode(coding))
