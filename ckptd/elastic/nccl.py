"""NCCL for recovery in one process: variables that a session sets, least versions; doctor's rows.

A session (`ckptd.elastic.session`) sets variables that are unset; ``ckptd doctor`` checks others.
Programs without a session keep PyTorch's settings: there the watchdog that ends a process is what
ends a collective whose peer is gone.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import NamedTuple

DEFAULTS_VARIABLE = "CKPTD_DEFAULTS"
"""Names of variables that a launcher has set because the user had not."""
LEAST_VERSION = (2, 26, 2)
"""Earlier ones may hang in an abort (pytorch#149153)."""
LEAST_TORCH = "2.7"
"""The first PyTorch whose wheels have it."""
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


class NcclSetting(NamedTuple):
    """A variable of the environment.

    Attributes
    ----------
    name, wanted
        What it is to be.
    consequence
        What happens otherwise.
    """

    name: str
    wanted: str
    consequence: str


SETTINGS = (
    NcclSetting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "PyTorch's watchdog ends the process, or aborts its collectives and lets it go on with "
        "what they have left, before the session can leave its generation",
    ),
    NcclSetting(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "PyTorch's watchdog ends the process when a call of CUDA or NCCL fails, as calls do after "
        "the loss of a peer",
    ),
    NcclSetting(
        "NCCL_NVLS_ENABLE",
        "0",
        "NVLink SHARP is in use, of which NVIDIA's resiliency extension says that a restart in "
        "process must do without",
    ),
)


def apply_settings(environ: MutableMapping[str, str]) -> None:
    """Set what the user has not set, in place of what a launcher set as a default."""
    replaceable = defaults_in(environ)
    for setting in SETTINGS:
        if setting.name not in environ or setting.name in replaceable:
            environ[setting.name] = setting.wanted


def wrong_settings(environ: Mapping[str, str]) -> Iterator[NcclSetting]:
    """Yield the settings that the user has set to something else than a session wants."""
    replaceable = defaults_in(environ)
    for setting in SETTINGS:
        found = environ.get(setting.name, setting.wanted)
        if found != setting.wanted and setting.name not in replaceable:
            yield setting


def defaults_in(environ: Mapping[str, str]) -> Collection[str]:
    """Return names of variables that a launcher has set because they were unset."""
    return environ.get(DEFAULTS_VARIABLE, "").split(",")


def installed_version() -> tuple[int, ...] | None:
    """Return the version of the NCCL that PyTorch's wheels bring along; None: there is none."""
    for wheel in _WHEELS:
        try:
            words = importlib.metadata.version(wheel).split(".")
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(int(word) for word in words[:3] if word.isdecimal())
    return None


def too_old(version: tuple[int, ...]) -> str:
    """Return what is wrong with a version of NCCL; empty if nothing is."""
    if version[:3] >= LEAST_VERSION:
        return ""
    found, wanted = (".".join(map(str, v)) for v in (version, LEAST_VERSION))
    return f"NCCL {found} may hang when its communicators are aborted; {wanted} and later do not"


def recovery_rows(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Look at what a session wants of NCCL, as far as `environ` is that of a job.

    The part ``recovery``. Yields how grave each finding is (``ok``, ``info``, ``warn``), and words
    for people.
    """
    version = installed_version()
    if version is None:
        yield "info", "no NCCL from a wheel here: groups of gloo need no settings"
        return
    name, sound = ".".join(map(str, version)), True
    for setting in wrong_settings(environ):
        sound = False
        found = f"{setting.name}={environ[setting.name]}"
        yield "warn", f"{found}: {setting.consequence}; run: unset {setting.name}"
    if old := too_old(version):
        sound = False
        yield "warn", f"{old}; run: pip install --upgrade 'torch>={LEAST_TORCH}'"
    if sound:
        settings = " ".join(f"{s.name}={s.wanted}" for s in SETTINGS)
        yield "ok", f"NCCL {name}; a session sets {settings}"
