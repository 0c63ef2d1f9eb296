"""Settings of NCCL that a session needs, and who has set others."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.elastic.launchers.environ import JobFacts, common
from ckptd.elastic.nccl import (
    SETTINGS,
    apply_settings,
    installed_version,
    too_old,
    wrong_settings,
)

FACTS = JobFacts(
    job="j",
    node="n",
    run_id="j",
    role="default",
    max_restarts=0,
    launcher=Path("launcher.sock"),
    lease=Path("lease"),
    interrupt_s=8.0,
)


@pytest.mark.parametrize("given", [{}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}])
def test_a_session_replaces_what_the_launcher_has_set_and_nothing_else(
    given: dict[str, str],
) -> None:
    environ = common(given, FACTS, slots=2)
    assert environ["CKPTD_INTERRUPT_S"] == "8"
    # Without a session the watchdog of PyTorch is what ends a process that waits for a lost one.
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == given.get(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
    )
    assert "TORCH_NCCL_RETHROW_CUDA_ERRORS" not in environ
    inner = common(environ, FACTS, slots=1)  # of a launcher in a rank, which runs no session
    assert [s.name for s in wrong_settings(inner)] == list(given)
    assert [s.name for s in wrong_settings(environ)] == list(given)
    apply_settings(environ)
    assert {s.name: environ[s.name] for s in SETTINGS} == {
        **{s.name: s.wanted for s in SETTINGS},
        **given,
    }
    assert environ["OMP_NUM_THREADS"] == "1"
    nested = common(environ, FACTS, slots=2)  # a rank that is a launcher itself
    assert nested["CKPTD_DEFAULTS"] == "OMP_NUM_THREADS"


def test_versions() -> None:
    assert too_old((2, 26, 2)) == too_old((2, 27)) == too_old((3, 0, 0)) == ""
    assert "NCCL 2.25.1 may hang" in too_old((2, 25, 1))
    assert too_old((2, 26))
    found = installed_version()
    assert found is None or len(found) == 3
