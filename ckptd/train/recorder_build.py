"""Builds the native recorder for the PyTorch and the Python that run here.

    python -m ckptd.train.recorder_build

What is built belongs to one version of PyTorch and one source, so both are in its name; a PyTorch
that was updated finds nothing and takes the recorder in Python until this is run again.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from ckptd.crashes import report_crashes
from ckptd.errors import UsageError

__all__ = ["build", "built", "load", "main"]

_NAME = "ckptd_recorder"
_SOURCE = Path(__file__).with_name("native") / "recorder.cpp"
_TIMEOUT_S = 900.0


def folder() -> Path:
    """Return where builds lie: ``CKPTD_BUILDS``, or ``ckptd`` in the user's cache folder."""
    chosen = os.environ.get("CKPTD_BUILDS")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "ckptd" / "recorder"


def _wanted() -> str:
    """Return what a build must be of to be used here."""
    source = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    abi = sysconfig.get_config_var("SOABI")
    return f"{_NAME}-torch{torch.__version__}-{abi}-{source}"


def built() -> Path | None:
    """Return the newest build that fits, or None. What others may write is never taken."""
    place = folder()
    if not place.is_dir() or not _is_ours(place):
        return None
    found = [p for p in place.glob(f"{_wanted()}-*.so") if _is_ours(p)]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


def _is_ours(path: Path) -> bool:
    info = path.lstat()
    return info.st_uid == os.geteuid() and not stat.S_IMODE(info.st_mode) & 0o022


def load(path: Path) -> ModuleType:
    """Import a build; raises what an extension that does not fit raises."""
    known = sys.modules.get(_NAME)
    if known is not None:
        return known
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_NAME] = module
    return module


def build() -> Path:
    """Compile, unless it is there; return the file. Appears whole or not at all.

    Raises
    ------
    UsageError
        kind ``no-compiler``: there is no C++ compiler. kind ``build``: it failed.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise UsageError(
            "the native recorder needs a C++ compiler",
            kind="no-compiler",
            wanted=os.environ.get("CXX", "c++"),
            found="nothing of that name",
            hint="install g++ or clang, or set CXX; without it the recorder in Python is used",
        )
    version = _run([compiler, "--version"]).splitlines()[0]
    place = folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    tag = hashlib.sha256(version.encode()).hexdigest()[:8]
    path = place / f"{_wanted()}-{tag}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=place) as temporary:
            output = Path(temporary) / path.name
            _run(_command(compiler, output))
            output.chmod(0o700)
            output.rename(path)
    return path


def _command(compiler: str, output: Path) -> list[str]:
    from torch.utils.cpp_extension import include_paths  # brings setuptools along

    libraries = Path(torch.__file__).parent / "lib"
    return [
        compiler,
        *("-O2", "-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={_NAME}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in (*include_paths(), sysconfig.get_path("include"))),
        str(_SOURCE),
        *("-o", str(output), f"-L{libraries}"),
        *("-lc10", "-ltorch_cpu", "-ltorch_python", "-ltorch"),
    ]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise _failed(command, f"no end after {_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        lines = [x for x in error.stderr.splitlines() if "error" in x] or [error.stderr]
        raise _failed(command, "\n".join(lines[:5])[:2000]) from error
    return done.stdout


def _failed(command: list[str], found: str) -> UsageError:
    return UsageError(
        "the native recorder could not be built",
        kind="build",
        where=" ".join(command),
        wanted=f"headers of PyTorch {torch.__version__} that this compiler takes",
        found=found,
        hint="the recorder in Python is used until then",
    )


def main() -> None:
    """Build, and print the file."""
    report_crashes()
    try:
        sys.stdout.write(f"{build()}\n")
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
