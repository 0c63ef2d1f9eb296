"""Nothing is said of programs that have no fault."""

from __future__ import annotations

import pytest

from tests.monitor.corpus.run import names, run


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_a_program_without_a_fault_has_no_incident() -> None:
    outcomes = list(run(names(), seconds=3))
    assert [outcome.name for outcome in outcomes if not outcome.fine] == []
    assert [outcome.name for outcome in outcomes] == names()


def test_there_are_programs_enough() -> None:
    assert len(names()) >= 30
