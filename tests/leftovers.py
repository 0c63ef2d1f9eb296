"""A run's own folder for temporary files, which is empty when the run ends.

What a test, or a process that it started, leaves behind there fails the run. ``tmp_path`` and what
else pytest makes lies beside it, where the newest runs are kept.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

from tests.processes import until

_folder = pytest.StashKey[Path]()
_names = pytest.StashKey[list[str]]()
_OTHERS = ("pymp-", "torchinductor_")
"""What multiprocessing removes at the very end, and PyTorch keeps for all runs of a user."""
_PATIENCE_S = 60.0
"""A process that ends after its test removes what it has made."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the folder in the process that leads the run; its workers inherit the variable."""
    if not leads(config):
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # Short: paths of sockets, which have 107 bytes, begin with it.
    config.stash[_folder] = folder = Path(tempfile.mkdtemp(prefix="ck"))
    # After multiprocessing's own folder, which it removes with priority -100.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


@pytest.hookimpl(wrapper=True, trylast=True)  # innermost: the summary is yet to come
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail a run that leaves files behind."""
    yield
    folder = session.config.stash.get(_folder, None)
    if folder is None:
        return
    left = _left(folder)
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    session.config.stash[_names] = left


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name what was left."""
    if left := config.stash.get(_names, []):
        terminalreporter.section("left behind in the folder for temporary files", red=True)
        for name in left:
            terminalreporter.write_line(name)


def leads(config: pytest.Config) -> bool:
    """Tell whether this process leads the run: it is no worker of another."""
    return not hasattr(config, "workerinput")


def _left(folder: Path) -> list[str]:
    """Return what stays in a folder, with the first names in each."""

    def left() -> list[Path]:
        return [path for path in sorted(folder.iterdir()) if not path.name.startswith(_OTHERS)]

    with suppress(TimeoutError):
        until(lambda: not left(), within_s=_PATIENCE_S)
    return [_shown(path) for path in left()]


def _shown(path: Path) -> str:
    inside = sorted(os.listdir(path))[:5] if path.is_dir() and not path.is_symlink() else []
    return f"{path.name}: {', '.join(inside)}" if inside else path.name
