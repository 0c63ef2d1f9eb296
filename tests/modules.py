"""All modules of tests, imported in the process that the workers of a run are forks of.

Each worker would import the same: 6 s of CPU. Ranks and programs, which are forks as well, find
what their test imports. A module that does not import here is imported by each worker, which says
why.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.config import _prepareconfig
from _pytest.pathlib import ImportMode, import_path

_MOST_S = 240
"""Seconds after which the kernel ends the process that helps, which is waited for."""


def _import(root: Path, paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                import_path(
                    path, mode=ImportMode.importlib, root=root, consider_namespace_packages=False
                )
        except (Exception, pytest.skip.Exception):  # noqa: BLE001 - the worker says it
            # pytest leaves half of it there, and would take it for the whole.
            sys.modules.pop(".".join(path.relative_to(root).with_suffix("").parts), None)


def _import_all(folder: Path) -> None:
    before = sys.path[:]
    config = _prepareconfig(["--capture=no", "--rootdir", str(folder.parent), str(folder)])
    config.pluginmanager.import_plugin("tests.reporting")  # as `conftest.py` does, or pytest warns
    try:
        paths = sorted({*folder.rglob("conftest.py"), *folder.rglob("test_*.py")})
        # Another core writes every second one's compiled form meanwhile, where there is none yet.
        if (pid := os.fork()) == 0:
            signal.alarm(_MOST_S)
            try:
                _import(config.rootpath, paths[1::2])
            except BaseException:  # noqa: BLE001 - nothing else of this process may run
                traceback.print_exc()
            os._exit(0)
        _import(config.rootpath, paths[::2])
        os.waitpid(pid, 0)
        _import(config.rootpath, paths[1::2])
    finally:
        config._ensure_unconfigure()  # the hook that rewrites assertions
        sys.path[:] = before


_import_all(Path(__file__).parent)
