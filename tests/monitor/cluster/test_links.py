"""Links between nodes: shaped and cut ones are named by the agent's probes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.monitor.cluster.mesh import Mesh, plant
from tests.monitor.cluster.namespaces import needs_namespaces


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    needs_namespaces()
    with Mesh(4) as mesh:
        yield mesh


LONG = [pytest.param(what, marks=pytest.mark.long) for what in ("point", "row", "column")]


@pytest.mark.parametrize("what", ["node", "partition", *LONG])
def test_what_was_planted_is_named_first(mesh: Mesh, what: str) -> None:
    wanted = plant(mesh, what)
    # On a busy machine other links may seem slow for a moment: the least of more probes does not.
    named: list[list[str]] = []
    for rounds in (2, 4, 8, 16):
        named.append(mesh.named(rounds))
        if named[-1][:1] == [wanted]:
            return
    raise AssertionError(f"{wanted} was not named first: {named}")


def test_nothing_is_named_where_all_is_well(mesh: Mesh) -> None:
    # On a busy machine a link may seem slow for a moment; probed often enough it does not.
    assert any(not mesh.named(rounds=3) for _ in range(20))
