"""What a fork of the zygote does before it runs a program."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.elastic.torch.session import zygote
from tests.processes import PATIENCE_S

THREADS = """\
import ctypes, os, sys
from ckptd.elastic.torch.session.zygote_child import _set_blas_threads
ctypes.CDLL(sys.argv[1])
_set_blas_threads({"OMP_NUM_THREADS": "3"})
"""


def test_libraries_in_a_folder_with_spaces_are_found(tmp_path: Path) -> None:
    library = tmp_path / "a folder" / "libopenblas.so"
    library.parent.mkdir()
    with open("/proc/self/maps") as maps:
        libc = next(line.split()[-1] for line in maps if "/libc.so" in line)
    shutil.copy(libc.replace("libc.so", "libm.so"), library)
    done = subprocess.run(
        [sys.executable, "-c", THREADS, str(library)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_cannot_be_imported_for_any_reason_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ckptd_no_such_part.py").write_text("raise RuntimeError('built for another one')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(zygote, "PRELOADED", ("ckptd_no_such_part",))
    assert zygote._preload() == ("PyTorch cannot be imported: RuntimeError: built for another one")
