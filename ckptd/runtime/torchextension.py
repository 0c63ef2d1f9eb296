"""Native code against the PyTorch that is installed, compiled where it is used.

PyTorch is not imported here: some of what is built must be loaded before it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptd.errors import UsageError

__all__ = ["TorchExtension"]

_TIMEOUT_S = 900.0
_ABI = "import torch; print(int(torch.compiled_with_cxx11_abi()))"


@dataclass(frozen=True, slots=True)
class TorchExtension:
    """One source file, and the builds of it that this user has.

    Attributes
    ----------
    name
        What the files of builds begin with.
    source
        The file.
    purpose
        What it is, in errors.
    libraries
        Of PyTorch.
    hint
        What is used until there is a build.
    """

    name: str
    source: Path
    purpose: str
    libraries: Sequence[str]
    hint: str

    @staticmethod
    def folder() -> Path:
        """Return where builds lie: ``CKPTD_BUILDS``, or ``ckptd`` in the user's cache folder."""
        chosen = os.environ.get("CKPTD_BUILDS")
        if chosen:
            return Path(chosen)
        cache = os.environ.get("XDG_CACHE_HOME")
        return (Path(cache) if cache else Path.home() / ".cache") / "ckptd" / "recorder"

    def _wanted(self) -> str:
        """Return what a build must be of to be used here."""
        # It looks for PyTorch's libraries where they lay, and not in another environment.
        lies = os.fsencode(_torch_folder())
        source = hashlib.sha256(self.source.read_bytes() + lies).hexdigest()[:16]
        abi = sysconfig.get_config_var("SOABI")
        return f"{self.name}-torch{_torch_version()}-{abi}-{source}"

    def built(self) -> Path | None:
        """Return the newest build that fits, or None. What others may write is never taken."""
        place = self.folder()
        if not place.is_dir() or not _is_ours(place):
            return None
        found = [p for p in place.glob(f"{self._wanted()}-*.so") if _is_ours(p)]
        return max(found, key=lambda p: p.stat().st_mtime, default=None)

    def compiler(self) -> str:
        """Return the C++ compiler.

        Raises
        ------
        UsageError
            kind ``no-compiler``: there is none.
        """
        wanted = os.environ.get("CXX", "c++")
        compiler = shutil.which(wanted)
        if compiler is None:
            raise UsageError(
                f"{self.purpose} needs a C++ compiler",
                kind="no-compiler",
                wanted=wanted,
                found="nothing of that name",
                hint=f"install g++ or clang, or set CXX; {self.hint}",
            )
        return compiler

    def build(self) -> Path:
        """Compile, unless it is there; return the file. Appears whole or not at all.

        Raises
        ------
        UsageError
            kind ``no-compiler``: there is no C++ compiler. kind ``build``: it failed.
        """
        compiler = self.compiler()
        version = self._run([compiler, "--version"]).splitlines()[0]
        place = self.folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        tag = hashlib.sha256(version.encode()).hexdigest()[:8]
        path = place / f"{self._wanted()}-{tag}.so"
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=place) as temporary:
                output = Path(temporary) / path.name
                self._run(self._command(compiler, output))
                output.chmod(0o700)
                output.rename(path)
        return path

    def _command(self, compiler: str, output: Path) -> list[str]:
        torch = _torch_folder()
        headers = (torch / "include", torch / "include/torch/csrc/api/include")
        abi = self._run([sys.executable, "-c", _ABI]).strip()
        return [
            compiler,
            *("-O2", "-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={self.name}"),
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            *(f"-isystem{path}" for path in (*headers, sysconfig.get_path("include"))),
            str(self.source),
            *("-o", str(output), f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"),
            *(f"-l{library}" for library in self.libraries),
        ]

    def _run(self, command: list[str]) -> str:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
            )
        except subprocess.TimeoutExpired as error:
            raise self._failed(command, f"no end after {_TIMEOUT_S:.0f} s") from error
        except subprocess.CalledProcessError as error:
            lines = [x for x in error.stderr.splitlines() if "error" in x] or [error.stderr]
            raise self._failed(command, "\n".join(lines[:5])[:2000]) from error
        return done.stdout

    def _failed(self, command: Sequence[str], found: str) -> UsageError:
        """Return the error of a build that failed."""
        return UsageError(
            f"{self.purpose} could not be built",
            kind="build",
            where=" ".join(command),
            wanted=f"headers of PyTorch {_torch_version()} that this compiler takes",
            found=found,
            hint=self.hint,
        )


def _torch_version() -> str:
    return importlib.metadata.version("torch")


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise UsageError("PyTorch is not installed", wanted="torch", hint="pip install torch")
    return Path(found.origin).parent


def _is_ours(path: Path) -> bool:
    info = path.lstat()
    return info.st_uid == os.geteuid() and not stat.S_IMODE(info.st_mode) & 0o022
