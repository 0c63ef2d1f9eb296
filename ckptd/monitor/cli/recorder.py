"""``ckptd recorder build``: compiles the native recorder, within a time limit."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from cyclopts import App, Parameter

from ckptd.base.runtime.copier import COPIER
from ckptd.cli.output import Document, Json, Reply
from ckptd.errors import CkptdError, DeadlineError, UsageError

_TIMEOUT_S = 1000.0

recorder = App(
    name="recorder",
    help="Build the native recorder of collectives.",
    help_format="plaintext",
    default_parameter=Parameter(negative=()),
)


class RecorderBuildDocument(Document, frozen=True, kw_only=True, tag="recorder build"):
    """The document of ``ckptd recorder build --json``: the files that trainers will load."""

    path: str
    copier: str


@recorder.command
def build(*, json: Json = False) -> Reply:
    """Build the native recorder for the PyTorch that is installed here.

    It needs a C++ compiler and takes about 20 s; repeat it after an update of PyTorch. Ranks
    that start later find it by themselves. Without it collectives are recorded by Python.
    It also builds the fast copy of large loads, in a second; without it loads copy by numpy.
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "the recorder needs PyTorch, which is not installed",
            kind="missing-package",
            hint="pip install 'ckptd[train]'",
        )
    command = [sys.executable, "-m", "ckptd.monitor.torch.recorder.native"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError("the build did not finish in time", where=" ".join(command)) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise CkptdError(
            "the native recorder could not be built",
            where=" ".join(command),
            found="\n".join(lines[-12:])[-2000:],
            hint="the recorder in Python is used until then",
        )
    document = RecorderBuildDocument(path=done.stdout.strip(), copier=str(COPIER.build()))
    return Reply(document, lambda d: print(d.path, d.copier, sep="\n"))
