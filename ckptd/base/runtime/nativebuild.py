"""Compiles native code where it is used: folder of builds (``CKPTD_BUILDS``), locks, time limit."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptd.errors import UsageError

_log = logging.getLogger("ckptd")

_TIMEOUT_S = 900.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class NativeBuild(ABC):
    """One source file, and the builds of it that this user has.

    Attributes
    ----------
    name
        What the files of builds begin with.
    source
        The file.
    purpose
        What it is, in errors.
    hint
        What is used until there is a build.
    """

    name: str
    source: Path
    purpose: str
    hint: str

    @staticmethod
    def folder() -> Path:
        """Return where builds lie: ``CKPTD_BUILDS``, or ``ckptd`` in the user's cache folder.

        Raises
        ------
        UsageError
            This user has no home folder.
        """
        chosen = os.environ.get("CKPTD_BUILDS")
        if chosen:
            return Path(chosen)
        cache = os.environ.get("XDG_CACHE_HOME")
        try:
            return (Path(cache) if cache else Path.home() / ".cache") / "ckptd" / "recorder"
        except RuntimeError as error:
            raise UsageError(
                "no folder for builds",
                wanted="CKPTD_BUILDS, XDG_CACHE_HOME or HOME in the environment",
                found=str(error),
                hint="set CKPTD_BUILDS to a folder that only this user may write",
            ) from error

    @abstractmethod
    def wanted(self) -> str:
        """Return what a build must be of to be used here: the start of its file's name."""

    @abstractmethod
    def command(self, compiler: str, output: Path) -> list[str]:
        """Return the call that compiles."""

    @property
    @abstractmethod
    def needs(self) -> str:
        """The compiler that is needed, in words for errors."""

    def built(self) -> Path | None:
        """Return the newest build that fits, or None. What others may write is never taken.

        None also where the folder cannot be looked into, as that of another user's ``HOME``.
        """
        try:
            place = self.folder()
            if not place.is_dir() or not _is_ours(place):
                return None
            found = [p for p in place.glob(f"{self.wanted()}-*.so") if _is_ours(p)]
            return max(found, key=lambda p: p.stat().st_mtime, default=None)
        except (OSError, UsageError) as error:
            _log.debug("not looking for a build of %s: %s", self.purpose, error)
            return None

    def compiler(self) -> str:
        """Return the C++ compiler.

        Raises
        ------
        UsageError
            There is none.
        """
        wanted = os.environ.get("CXX", "c++")
        compiler = shutil.which(wanted)
        if compiler is None:
            raise UsageError(
                f"{self.purpose} needs a C++ compiler",
                wanted=wanted,
                found="no program of that name",
                hint=f"install g++ or clang, or set CXX; {self.hint}",
            )
        return compiler

    def build(self) -> Path:
        """Compile, unless it is there; return the file. Appears whole or not at all.

        Of processes that want it at once, as the ranks of a job do, one compiles and the others
        wait for it.

        Raises
        ------
        UsageError
            There is no C++ compiler. It failed, or others may write into the folder, so that
            nothing is taken from there.
        """
        compiler = self.compiler()
        version = self.run([compiler, "--version"]).splitlines()[0]
        place = self._own_folder()
        tag = hashlib.sha256(version.encode()).hexdigest()[:8]
        path = place / f"{self.wanted()}-{tag}.so"
        if not _is_there(path):
            with _alone(path.with_suffix(".lock")):
                if not _is_there(path):  # another process has made it meanwhile
                    self._compile(compiler, path)
        return path

    def _compile(self, compiler: str, path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
            output = Path(temporary) / path.name
            self.run(self.command(compiler, output))
            output.chmod(0o700)
            output.rename(path)

    def _own_folder(self) -> Path:
        """Return where builds lie, made if need be; raises where `built` would take none of it."""
        place = self.folder()
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = None if _is_ours(place) else "others may write it, or it is a link"
        except OSError as error:
            found = str(error)
        if found is None:
            return place
        raise UsageError(
            f"{self.purpose} has no folder for its build",
            where=str(place),
            wanted="a folder that only this user may write",
            found=found,
            hint="set CKPTD_BUILDS to one, or remove write access for others (chmod go-w)",
        )

    def run(self, command: list[str]) -> str:
        """Return what a command of the build prints."""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
            )
        except subprocess.TimeoutExpired as error:
            raise self._failed(command, f"still running after {_TIMEOUT_S:.0f} s") from error
        except subprocess.CalledProcessError as error:
            lines = [x for x in error.stderr.splitlines() if "error" in x] or [error.stderr]
            raise self._failed(command, "\n".join(lines[:5])[:2000]) from error
        return done.stdout

    def _failed(self, command: Sequence[str], found: str) -> UsageError:
        """Return the error of a build that failed."""
        return UsageError(
            f"{self.purpose} could not be built",
            where=" ".join(command),
            wanted=self.needs,
            found=found,
            hint=self.hint,
        )


class PlainLibrary(NativeBuild):
    """A library that needs nothing but the compiler's own headers."""

    __slots__ = ()

    def wanted(self) -> str:
        """See `NativeBuild.wanted`."""
        source = hashlib.sha256(self.source.read_bytes()).hexdigest()[:16]
        return f"{self.name}-{platform.machine()}-{source}"

    def command(self, compiler: str, output: Path) -> list[str]:
        """See `NativeBuild.command`."""
        flags = ("-O2", "-std=c++20", "-fPIC", "-shared")
        return [compiler, *flags, str(self.source), "-o", str(output)]

    @property
    def needs(self) -> str:
        """See `NativeBuild.needs`."""
        return "a compiler of C++20"


def _is_ours(path: Path) -> bool:
    info = path.lstat()
    return info.st_uid == os.geteuid() and not stat.S_IMODE(info.st_mode) & 0o022


def _is_there(path: Path) -> bool:
    return path.exists() and _is_ours(path)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Keep other processes of this user out meanwhile; they wait for as long as a build may take.

    A process that waited in vain builds as well, as all do where the file system has no locks: a
    build replaces another one whole.
    """
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until = time.monotonic() + _TIMEOUT_S
        while not _locked(fd) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    """Lock a file; False while another process has it, True also where nothing can be locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.debug("builds are not locked: %s", error)
    return True
