"""The command line of ``ckptd run``: torchrun's way of writing it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence

from ckptd.errors import UsageError

__all__ = ["SWITCHES", "cpu_count", "gpu_count", "ranks_filter", "separated", "slots_of"]

SWITCHES = frozenset(
    {
        "--standalone",
        "--module",
        "-m",
        "--no-python",
        "--run-path",
        "--no-watch",
        "--json",
        "--help",
        "-h",
        "--version",
    }
)
"""Options without a value: what follows any other is its value."""
_FROM_ENVIRONMENT = (
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "standalone",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "role",
    "module",
    "no-python",
    "run-path",
    "log-dir",
    "redirects",
    "tee",
    "local-ranks-filter",
    "node-rank",
    "master-addr",
    "master-port",
    "local-addr",
)
"""torchrun takes these from variables ``PET_...`` as well."""
_TRUE = ("1", "true", "yes")
_DEVICE = re.compile(r"\d+$|(GPU|MIG)-")


def separated(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return arguments with ``--`` before the script: all behind it is the script's.

    Underscores in names become hyphens, and torchrun's variables are added where their option is
    not given.
    """
    own, rest = _split(arguments)
    given = {word.partition("=")[0] for word in own}
    short = {"module": "-m", "redirects": "-r", "tee": "-t"}
    for name in _FROM_ENVIRONMENT:
        value = environ.get(f"PET_{name.replace('-', '_').upper()}")
        if value is None or f"--{name}" in given or short.get(name) in given:
            continue
        if f"--{name}" not in SWITCHES:
            own.append(f"--{name}={value}")
        elif value.lower() in _TRUE:
            own.append(f"--{name}")
    return [*own, "--", *rest]


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    own: list[str] = []
    words = list(arguments)
    while words:
        if words[0] == "--":
            return own, words[1:]
        if not words[0].startswith("-") or words[0] == "-":
            break
        name, equals, value = words.pop(0).partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        own.append(name + equals + value)
        if not equals and name not in SWITCHES and words and not _holds_value(name):
            own.append(words.pop(0))
    return own, words


def _holds_value(name: str) -> bool:
    """Whether a short option has its value in the same word, such as ``-r3``."""
    return not name.startswith("--") and len(name) > 2


def slots_of(text: str) -> int:
    """Return what ``--nproc-per-node`` says: a number, or auto, cpu, gpu.

    Raises
    ------
    UsageError
        kind ``bad-argument``.
    """
    found = 0
    if text.isascii() and text.isdecimal():
        found = int(text)
    elif text == "cpu":
        found = cpu_count()
    elif text == "gpu":
        found = gpu_count()
    elif text == "auto":
        found = gpu_count() or cpu_count()
    if found < 1:
        raise UsageError(
            "there is no such number of ranks",
            kind="bad-argument",
            where="--nproc-per-node",
            wanted="1 or more, auto, cpu, or gpu where there is one",
            found=text[:100],
        )
    return found


def cpu_count() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_count() -> int:
    """Return the GPUs that ranks would see, without asking a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
    if visible is not None:
        # What is no device hides all behind it: "-1", or Slurm's "NoDevFiles".
        words = (word.strip() for word in visible.split(","))
        return len(list(itertools.takewhile(_DEVICE.match, words)))
    try:
        names = os.listdir("/dev")
    except OSError:
        return 0
    nvidia = sum(name.startswith("nvidia") and name[6:].isdecimal() for name in names)
    if nvidia or not os.path.isdir("/dev/dri"):
        return nvidia
    render = sum(name.startswith("renderD") for name in os.listdir("/dev/dri"))
    return render if os.path.exists("/dev/kfd") else 0


def ranks_filter(text: str) -> frozenset[int]:
    """Return the local ranks that ``--local-ranks-filter`` names.

    Raises
    ------
    UsageError
        kind ``bad-argument``.
    """
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise UsageError(
            "these are no local ranks",
            kind="bad-argument",
            where="--local-ranks-filter",
            wanted="numbers with commas between them",
            found=text[:100],
        )
    return frozenset(int(word) for word in words)
